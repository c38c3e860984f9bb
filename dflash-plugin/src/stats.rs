//! Counters of what speculation did, shared by everything that reports it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Why a step was decoded without speculation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fallback {
    /// The sequence has no draft KV for its whole context (a prefix-cache hit on an entry
    /// without any).
    NoDraftContext,
    /// Fewer than two rows fit before the end of the target's context.
    NoRoom,
    /// The host's paged KV cache has no free blocks for the rows of a block.
    NoBlocks,
    /// Another rank of a tensor-parallel target cannot speculate with this sequence.
    OtherRank,
    /// The draft model's positions end before the block's last one.
    DraftContextEnd,
    /// The draft model or the verify pass failed: an error or a panic.
    Error,
    /// Drafting is measured to be slower than plain decoding at the moment, or plain decoding is
    /// being measured.
    NotWorthwhile,
    /// The request turned speculation off.
    DisabledByRequest,
    /// The sequence has images, of a target that counts positions in another way behind them.
    Images,
    /// Target or draft KV did not have the length that invariant I2 asks for. A bug: it is
    /// repaired or the draft KV dropped, and tests fail on it.
    OutOfStep,
}

impl Fallback {
    /// As a metrics label.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoDraftContext => "no_draft_context",
            Self::NoRoom => "no_room",
            Self::NoBlocks => "no_blocks",
            Self::OtherRank => "other_rank",
            Self::DraftContextEnd => "draft_context_end",
            Self::Error => "error",
            Self::NotWorthwhile => "not_worthwhile",
            Self::DisabledByRequest => "disabled_by_request",
            Self::Images => "images",
            Self::OutOfStep => "out_of_step",
        }
    }

    /// What a user may want to know or change.
    fn meaning(self) -> &'static str {
        match self {
            Self::NoDraftContext => "the draft model has no context for a sequence",
            Self::NoRoom => "the target's context ends within the next block",
            Self::NoBlocks => {
                "the paged KV cache is full; give it more memory, or fewer sequences at once"
            }
            Self::OtherRank => {
                "another rank of the target has no draft KV or blocks for a sequence"
            }
            Self::DraftContextEnd => "the sequence is longer than the draft model's context",
            Self::Error => "drafting or verifying failed",
            Self::NotWorthwhile => {
                "drafting does not pay at the moment, or its gain is being measured"
            }
            Self::DisabledByRequest => "a request turned speculation off",
            Self::Images => {
                "a request has images, which move the positions of the text behind them"
            }
            Self::OutOfStep => "the KV caches of target and draft model were out of step",
        }
    }
}

/// Counts since the start. `accepts[a]` is the number of verify steps that accepted `a` drafts.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct StatsSnapshot {
    /// Verify steps, one a sequence.
    pub drafts: u64,
    /// Draft tokens that were verified.
    pub proposed: u64,
    /// Draft tokens that were accepted.
    pub accepted: u64,
    /// Tokens emitted by verify steps, bonus tokens included.
    pub emitted: u64,
    /// Histogram of accept lengths.
    pub accepts: Vec<u64>,
    /// Prompts that continued from a prefix-cache hit with the hit's draft KV.
    pub restored: u64,
    /// Steps decoded plainly, one a sequence, by reason.
    pub fallbacks: BTreeMap<Fallback, u64>,
    /// Sequences and prefix-cache entries that own draft KV now.
    pub live: u64,
}

impl StatsSnapshot {
    /// Mean tokens a verify step, bonus included (tau); `None` before the first step.
    pub fn tau(&self) -> Option<f64> {
        (self.drafts > 0).then(|| self.emitted as f64 / self.drafts as f64)
    }

    /// What was counted after `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let accepts = self
            .accepts
            .iter()
            .enumerate()
            .map(|(i, n)| n - earlier.accepts.get(i).copied().unwrap_or(0))
            .collect();
        let fallbacks = self
            .fallbacks
            .iter()
            .map(|(k, n)| (*k, n - earlier.fallbacks.get(k).copied().unwrap_or(0)))
            .filter(|(_, n)| *n > 0)
            .collect();
        Self {
            drafts: self.drafts - earlier.drafts,
            proposed: self.proposed - earlier.proposed,
            accepted: self.accepted - earlier.accepted,
            emitted: self.emitted - earlier.emitted,
            accepts,
            restored: self.restored - earlier.restored,
            fallbacks,
            live: self.live,
        }
    }
}

/// Owners of draft KV, for the host's metrics.
const LIVE_METRIC: &str = "mistralrs_speculative_draft_states";

/// A handle on the counters; clones count into the same ones.
#[derive(Debug, Clone, Default)]
pub struct Stats(Arc<Mutex<StatsSnapshot>>);

impl Stats {
    fn lock(&self) -> MutexGuard<'_, StatsSnapshot> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Count one verified block: drafts verified, drafts accepted, tokens emitted.
    pub fn verified(&self, proposed: usize, accepted: usize, emitted: usize) {
        let mut stats = self.lock();
        stats.drafts += 1;
        stats.proposed += proposed as u64;
        stats.accepted += accepted as u64;
        stats.emitted += emitted as u64;
        if stats.accepts.len() <= accepted {
            stats.accepts.resize(accepted + 1, 0);
        }
        stats.accepts[accepted] += 1;
    }

    /// Count a prompt that continued from a prefix-cache hit with the hit's draft KV.
    pub fn restored(&self) {
        self.lock().restored += 1;
    }

    /// Count one plain step of one sequence; the first of each reason is logged.
    pub fn fell_back(&self, reason: Fallback) {
        let mut stats = self.lock();
        let count = stats.fallbacks.entry(reason).or_default();
        *count += 1;
        let is_wanted = matches!(
            reason,
            Fallback::NotWorthwhile | Fallback::DisabledByRequest
        );
        if *count == 1 && !is_wanted {
            tracing::warn!(
                "DFlash: decoding plainly for a step: {} (said once, counted always)",
                reason.meaning()
            );
        }
    }

    /// A guard that counts one owner of draft KV as long as it lives.
    pub fn live(&self) -> Live {
        self.lock().live += 1;
        metrics::gauge!(LIVE_METRIC).increment(1.0);
        Live(self.clone())
    }

    pub fn snapshot(&self) -> StatsSnapshot {
        self.lock().clone()
    }
}

/// Counts an owner of draft KV until it is dropped; so does every clone.
#[derive(Debug)]
pub struct Live(Stats);

impl Clone for Live {
    fn clone(&self) -> Self {
        self.0.live()
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0.lock().live -= 1;
        metrics::gauge!(LIVE_METRIC).decrement(1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tau_counts_the_bonus_and_a_difference_counts_only_what_came_later() {
        let stats = Stats::default();
        assert_eq!(stats.snapshot().tau(), None);
        stats.verified(7, 2, 3);
        let before = stats.snapshot();
        stats.verified(7, 0, 1);
        stats.fell_back(Fallback::NoRoom);
        let all = stats.snapshot();
        assert_eq!(all.tau(), Some(2.0));
        let later = all.since(&before);
        assert_eq!(later.tau(), Some(1.0));
        assert_eq!(later.accepts, vec![1, 0, 0]);
        assert_eq!(later.fallbacks[&Fallback::NoRoom], 1);
    }

    #[test]
    fn owners_of_draft_kv_are_counted_while_they_live() {
        let stats = Stats::default();
        let one = stats.live();
        let two = one.clone();
        assert_eq!(stats.snapshot().live, 2);
        drop((one, two));
        assert_eq!(stats.snapshot().live, 0);
    }
}
