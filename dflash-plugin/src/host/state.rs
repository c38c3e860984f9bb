//! What a host sequence owns of speculation: its draft KV, and what its drafts were worth.

use std::any::Any;

use mistralrs_core::plugin::{Sequence, SpeculativeState};

use crate::controller::Acceptance;
use crate::error::{DFlashError, Result};
use crate::kv::SequenceKv;
use crate::stats::Live;

/// Lives in the sequence, so whatever ends the sequence frees it; goes into the host's prefix
/// cache with the sequence's KV, so a hit brings it back.
pub struct DraftState {
    pub kv: DraftKv,
    pub acceptance: Acceptance,
    live: Live,
}

/// The draft K/V of a sequence.
pub enum DraftKv {
    /// In buffers of its own.
    Own(SequenceKv),
    /// In the blocks that the sequence has of the host's paged cache.
    Pool {
        /// Valid positions.
        len: usize,
        /// Positions written and not overwritten since.
        written: usize,
    },
}

impl DraftKv {
    /// The first `len` positions of a sequence's blocks.
    pub fn in_pool(len: usize) -> Self {
        Self::Pool { len, written: len }
    }

    /// Number of valid positions.
    pub fn len(&self) -> usize {
        match self {
            Self::Own(kv) => kv.len(),
            Self::Pool { len, .. } => *len,
        }
    }

    /// See [`SequenceKv::set_len`].
    pub fn set_len(&mut self, new: usize) -> Result<()> {
        match self {
            Self::Own(kv) => kv.set_len(new),
            Self::Pool { len, written } if new <= *written => {
                *len = new;
                Ok(())
            }
            Self::Pool { written, .. } => Err(DFlashError::input(
                "draft KV length",
                format!("at most the {written} written positions"),
                new.to_string(),
            )),
        }
    }

    /// See [`SequenceKv::truncate`].
    pub fn truncate(&mut self, new: usize) {
        match self {
            Self::Own(kv) => kv.truncate(new),
            Self::Pool { len, written } => {
                *len = new.min(*len);
                *written = *len;
            }
        }
    }
}

impl DraftState {
    pub fn new(kv: DraftKv, live: Live) -> Self {
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
        // Paged blocks are shared by the host itself.
        let DraftKv::Own(kv) = &self.kv else {
            return None;
        };
        if len > kv.len() {
            return None;
        }
        match kv.deep_clone_prefix(len) {
            Ok(kv) => Some(Box::new(Self::new(DraftKv::Own(kv), self.live.clone()))),
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
pub fn kv(seq: &Sequence) -> Option<&DraftKv> {
    of(seq).map(|state| &state.kv)
}

/// The draft KV of `seq`, if it has any.
pub fn kv_mut(seq: &mut Sequence) -> Option<&mut DraftKv> {
    of_mut(seq).map(|state| &mut state.kv)
}

/// The draft KV of `seq`, if it has any in buffers of its own.
pub fn own_kv_mut(seq: &mut Sequence) -> Option<&mut SequenceKv> {
    match kv_mut(seq)? {
        DraftKv::Own(kv) => Some(kv),
        DraftKv::Pool { .. } => None,
    }
}

/// Give `seq` this state.
pub fn set(seq: &mut Sequence, state: DraftState) {
    seq.set_speculative_state(Some(Box::new(state)));
}

/// Take the draft KV away from `seq`: it decodes plainly from now on.
pub fn drop_kv(seq: &mut Sequence) {
    seq.set_speculative_state(None);
}
