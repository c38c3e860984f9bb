//! Which sequences of a step speculate, and with how many rows.

use candle_core::Result;
use mistralrs_core::plugin::{PagedAttentionMeta, Sequence, SpeculativeTarget};

use super::cache::StepCache;
use super::pipeline::DFlashPipeline;
use super::step::committed;
use super::{state, verify};
use crate::stats::Fallback;

/// How the sequences of a step are decoded.
pub struct Plan {
    /// Rows to verify of each speculating sequence: its anchor and `rows - 1` drafts.
    pub rows: usize,
    /// By sequence: why it is decoded plainly; `None` speculates.
    pub plain: Vec<Option<Fallback>>,
}

impl DFlashPipeline {
    /// Decide which sequences speculate, and how many rows to verify.
    pub(super) fn plan(&mut self, seqs: &[&mut Sequence], cache: &StepCache) -> Result<Plan> {
        let exact = self.exact_len();
        let capacity = match cache {
            StepCache::Normal { .. } => verify::model_capacity(&*self.target)?.min(exact),
            StepCache::Paged(_) => exact, // Blocks are reserved afterwards.
        };
        // Rows that each may verify, or why it is decoded plainly.
        let rooms: Vec<std::result::Result<usize, Fallback>> =
            seqs.iter().map(|seq| self.room(seq, capacity)).collect();
        let most = seqs
            .iter()
            .zip(&rooms)
            .filter_map(|(seq, room)| Some(self.useful(seq, *room.as_ref().ok()?)))
            .max()
            .unwrap_or(1);
        let acceptances: Vec<_> = seqs
            .iter()
            .zip(&rooms)
            .filter(|(_, room)| room.is_ok())
            .filter_map(|(seq, _)| Some(&state::of(seq)?.acceptance))
            .collect();
        let rows = match &mut self.controller {
            Some(controller) if !acceptances.is_empty() => controller.choose(&acceptances, most),
            _ => self.worker.block_size().min(most),
        };
        let rows = match &self.ranks {
            Some(ranks) => ranks.first_number(rows)?,
            None => rows,
        };
        metrics::gauge!("mistralrs_speculative_rows").set(rows as f64);
        let plain = rooms
            .into_iter()
            .map(|room| match room {
                Err(reason) => Some(reason),
                Ok(_) if rows < 2 => Some(Fallback::NotWorthwhile),
                // Its last tokens, while its neighbours' blocks are longer.
                Ok(room) if room < rows => Some(Fallback::NoRoom),
                Ok(_) => None,
            })
            .collect();
        Ok(Plan { rows, plain })
    }

    /// Let sequences speculate only if all ranks can.
    pub(super) fn agree_on(&self, plan: &mut Plan) -> Result<()> {
        let Some(ranks) = &self.ranks else {
            return Ok(());
        };
        let on_all = ranks.on_all(plan.plain.iter().map(Option::is_none))?;
        for (plain, on_all) in plan.plain.iter_mut().zip(on_all) {
            if plain.is_none() && !on_all {
                *plain = Some(Fallback::OtherRank);
            }
        }
        Ok(())
    }

    /// Rows that a sequence can verify: 2 or more.
    fn room(&self, seq: &Sequence, capacity: usize) -> std::result::Result<usize, Fallback> {
        if self.has_moved_positions(seq) {
            return Err(Fallback::Images);
        }
        if !seq.speculation_enabled() {
            return Err(Fallback::DisabledByRequest);
        }
        let committed = committed(seq);
        if state::kv(seq).is_none() {
            return Err(Fallback::NoDraftContext);
        }
        let room = self
            .worker
            .block_size()
            .min(capacity.saturating_sub(committed));
        if room < 2 {
            return Err(Fallback::NoRoom);
        }
        let room = room.min(self.worker.max_positions().saturating_sub(committed));
        if room < 2 {
            return Err(Fallback::DraftContextEnd);
        }
        Ok(room)
    }

    /// Whether the position of the next token of `seq` is not its length, because images have moved
    /// it. Such a sequence is decoded plainly, and by itself.
    pub(super) fn has_moved_positions(&self, seq: &Sequence) -> bool {
        let target = self.target.speculative_target();
        let media = [seq.image_hashes(), seq.video_hashes()];
        target.is_some_and(SpeculativeTarget::images_move_positions)
            && media.iter().flatten().any(|hashes| !hashes.is_empty())
    }

    /// Rows that can be worth verifying, of `room`: those behind the last token that the request
    /// may have are never emitted.
    fn useful(&self, seq: &Sequence, room: usize) -> usize {
        match self.controller {
            Some(_) => seq.remaining_tokens().map_or(room, |left| room.min(left)),
            None => room,
        }
    }
}

/// Get KV blocks for the rows to verify. The host's scheduler has one row's for every sequence; one
/// for which there are no more is decoded plainly.
pub async fn reserve(meta: &PagedAttentionMeta, seqs: &[&mut Sequence], plan: &mut Plan) {
    let mut manager = meta.kv_cache_manager.lock().await;
    for (seq, plain) in seqs.iter().zip(&mut plan.plain) {
        let wanted = committed(seq) + plan.rows;
        if plain.is_none() && manager.allocate_slots(*seq.id(), wanted, &[]).is_none() {
            *plain = Some(Fallback::NoBlocks);
        }
    }
}

/// Give back the blocks behind the tokens that each sequence has now: those of rejected rows.
pub async fn give_back(meta: &PagedAttentionMeta, seqs: &[&mut Sequence]) {
    let mut manager = meta.kv_cache_manager.lock().await;
    for seq in seqs {
        // The scheduler takes those of one that has ended.
        if seq.is_running() {
            manager.trim_request_to_num_tokens(*seq.id(), seq.get_toks().len());
        }
    }
}
