//! What a host sequence owns of speculation: its draft KV, and what its drafts were worth.

use std::any::Any;

use mistralrs_core::plugin::{Sequence, SpeculativeState};

use crate::controller::Acceptance;
use crate::kv::SequenceKv;
use crate::stats::Live;

/// Lives in the sequence, so whatever ends the sequence frees it; goes into the host's prefix
/// cache with the sequence's KV, so a hit brings it back.
pub struct DraftState {
    pub kv: SequenceKv,
    pub acceptance: Acceptance,
    live: Live,
}

impl DraftState {
    pub fn new(kv: SequenceKv, live: Live) -> Self {
        Self {
            kv,
            acceptance: Acceptance::new(),
            live,
        }
    }
}

impl SpeculativeState for DraftState {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn fork(&self, len: usize) -> Option<Box<dyn SpeculativeState>> {
        if len > self.kv.len() {
            return None;
        }
        match self.kv.deep_clone_prefix(len) {
            Ok(kv) => Some(Box::new(Self::new(kv, self.live.clone()))),
            Err(error) => {
                tracing::warn!("DFlash: could not copy draft KV for a prefix-cache hit: {error}");
                None
            }
        }
    }
}

/// What `seq` owns, if it has anything.
pub fn of(seq: &Sequence) -> Option<&DraftState> {
    seq.speculative_state()?.as_any().downcast_ref()
}

/// What `seq` owns, if it has anything.
pub fn of_mut(seq: &mut Sequence) -> Option<&mut DraftState> {
    seq.speculative_state_mut()?.as_any_mut().downcast_mut()
}

/// The draft KV of `seq`, if it has any.
pub fn kv(seq: &Sequence) -> Option<&SequenceKv> {
    of(seq).map(|state| &state.kv)
}

/// The draft KV of `seq`, if it has any.
pub fn kv_mut(seq: &mut Sequence) -> Option<&mut SequenceKv> {
    of_mut(seq).map(|state| &mut state.kv)
}

/// Give `seq` this state.
pub fn set(seq: &mut Sequence, state: DraftState) {
    seq.set_speculative_state(Some(Box::new(state)));
}

/// Take the draft KV away from `seq`: it decodes plainly from now on.
pub fn drop_kv(seq: &mut Sequence) {
    seq.set_speculative_state(None);
}
