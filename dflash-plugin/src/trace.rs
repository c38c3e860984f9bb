//! What happened in one verified block, for tests and for finding out why a drafter drafts badly.

use std::sync::Arc;

use candle_core::Tensor;

/// One sequence's part of one verify step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// The host's id of the sequence.
    pub sequence: usize,
    /// Sequences verified in the same pass.
    pub batch: usize,
    /// Position of the anchor: rows in both KV caches before the step.
    pub position: usize,
    pub anchor: u32,
    /// Drafts that were verified.
    pub drafts: Vec<u32>,
    /// Accept length: how many of them the target chose.
    pub accepted: usize,
    /// The target's choices: the accepted drafts and the bonus token, unless the sequence ended.
    pub emitted: Vec<u32>,
}

/// Called after every round, from inside the engine's step.
pub type Observer = Arc<dyn Fn(&Round) + Send + Sync>;

/// Called with the tapped layer outputs of every forward pass whose rows become draft K/V, side by
/// side: `[batch, rows, taps * hidden]`.
pub type TapObserver = Arc<dyn Fn(&Tensor) + Send + Sync>;

/// Parts of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The draft model and the target's head on its rows.
    Draft,
    /// The target's forward pass over the blocks.
    Verify,
    /// Tapped features to draft K/V.
    Materialize,
    /// The target's choices, and everything that is done with an emitted token.
    Accept,
    /// A step without speculation, prompts included.
    Plain,
}

/// Gets the time of every part of every step. The device is waited for before and after each part, so
/// a step with it is slower than one without.
pub type PhaseObserver = Arc<dyn Fn(Phase, std::time::Duration) + Send + Sync>;
