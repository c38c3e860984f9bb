//! What happened in one verified block, for tests and for finding out why a drafter drafts badly.

use std::sync::Arc;

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
