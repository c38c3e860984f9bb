//! The draft KV that a host sequence owns.

use std::any::Any;

use mistralrs_core::plugin::{Sequence, SpeculativeState};

use crate::kv::SequenceKv;

/// Lives in the sequence, so whatever ends the sequence frees it; goes into the host's prefix
/// cache with the sequence's KV, so a hit brings it back.
pub struct DraftState {
    pub kv: SequenceKv,
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
            Ok(kv) => Some(Box::new(Self { kv })),
            Err(error) => {
                tracing::warn!("DFlash: could not copy draft KV for a prefix-cache hit: {error}");
                None
            }
        }
    }
}

/// The draft KV of `seq`, if it has any.
pub fn kv(seq: &Sequence) -> Option<&SequenceKv> {
    let state = seq.speculative_state()?.as_any();
    state.downcast_ref::<DraftState>().map(|state| &state.kv)
}

/// The draft KV of `seq`, if it has any.
pub fn kv_mut(seq: &mut Sequence) -> Option<&mut SequenceKv> {
    let state = seq.speculative_state_mut()?.as_any_mut();
    state
        .downcast_mut::<DraftState>()
        .map(|state| &mut state.kv)
}

/// Give `seq` this draft KV.
pub fn set_kv(seq: &mut Sequence, kv: SequenceKv) {
    seq.set_speculative_state(Some(Box::new(DraftState { kv })));
}

/// Take the draft KV away from `seq`: it decodes plainly from now on.
pub fn drop_kv(seq: &mut Sequence) {
    seq.set_speculative_state(None);
}
