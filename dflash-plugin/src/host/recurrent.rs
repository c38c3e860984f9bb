//! The states of a target's recurrent layers over a step. Every sequence has a slot in the host's
//! pools for them; other targets have none, and nothing is done for those.
//!
//! A state cannot be set back as a KV cache can. So a verify pass leaves it as it is and keeps what
//! the recurrence took; the state after the committed rows is computed from that by the same
//! recurrence, once the walk is over, or for the prefix cache when a sequence ends inside it.

use candle_core::Result;
use mistralrs_core::plugin::{EitherCache, HybridCache, Sequence};
use mistralrs_core::Pipeline;

use super::verify::locked;

/// Whether the target has such layers. They take the rows of a sequence together.
pub fn is_recurrent(target: &(dyn Pipeline + Send + Sync)) -> bool {
    matches!(target.cache(), EitherCache::Hybrid(_))
}

/// Let the next pass be one over `seqs`. It changes their states, if its rows are not kept.
pub fn begin(target: &(dyn Pipeline + Send + Sync), seqs: &[&mut Sequence]) -> Result<()> {
    with_states(target, |states| {
        states.keep_row_states(false);
        states.set_sequences(seqs)
    })
}

/// Let the next pass leave the states as they are, and keep its rows.
pub fn keep_rows(target: &(dyn Pipeline + Send + Sync)) -> Result<()> {
    with_states(target, |states| {
        states.keep_row_states(true);
        Ok(())
    })
}

/// Drop kept rows: the states stay those before the pass.
pub fn drop_rows(target: &(dyn Pipeline + Send + Sync)) -> Result<()> {
    with_states(target, |states| {
        states.keep_row_states(false);
        Ok(())
    })
}

/// Let the state of `seq` be the one after so many rows of the kept pass.
pub fn select_rows(
    target: &(dyn Pipeline + Send + Sync),
    seq: &Sequence,
    rows: usize,
) -> Result<()> {
    with_states(target, |states| {
        if let Some(slot) = seq.recurrent_state_idx() {
            states.select_rows(slot, rows);
        }
        Ok(())
    })
}

/// Compute the selected states and go on from them.
pub fn settle(target: &(dyn Pipeline + Send + Sync)) -> Result<()> {
    with_states(target, HybridCache::settle_rows)
}

fn with_states(
    target: &(dyn Pipeline + Send + Sync),
    f: impl FnOnce(&mut HybridCache) -> Result<()>,
) -> Result<()> {
    match target.cache() {
        EitherCache::Hybrid(cache) => f(&mut locked(cache)),
        _ => Ok(()),
    }
}
