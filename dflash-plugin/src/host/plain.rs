//! Plain steps: prompts and plain decoding, in the host's own order of calls, with the draft KV of the
//! rows they process, so that speculation can go on after them.

use std::time::{Duration, Instant};

use candle_core::{IndexOp, Result, Tensor, D};
use mistralrs_core::plugin::{CacheInstruction, InputProcessorOutput, Sequence};

use super::accept::Greedy;
use super::cache::{Blocks, StepCache};
use super::pipeline::{DFlashPipeline, Target};
use super::state::{self, DraftKv, DraftState};
use super::step::{caught, Sampling};
use super::{recurrent, verify};
use crate::fault::FaultPoint;
use crate::stats::Fallback;
use crate::trace::Phase;

impl DFlashPipeline {
    /// The host's own step for prompts and plain decoding, with the draft KV of the new rows.
    pub(super) async fn plain_step(
        &mut self,
        seqs: &mut [&mut Sequence],
        is_prompt: bool,
        sampling: &mut Sampling<'_>,
        pre_op: CacheInstruction,
        cache: &StepCache,
    ) -> Result<Duration> {
        let clock = self.clock()?;
        let metadata = self.target.get_metadata();
        let (paged, blocks) = match cache {
            StepCache::Normal { .. } => (None, None),
            StepCache::Paged(meta) => (Some(meta.clone()), Some(Blocks::of(meta, seqs).await)),
        };
        let InputProcessorOutput {
            inputs,
            seq_indices,
        } = self
            .target
            .get_processor()
            .inputs_processor()
            .process_inputs(
                self.target.tokenizer(),
                seqs,
                is_prompt,
                metadata.is_xlora,
                &self.target.device(),
                metadata.no_kv_cache,
                None,
                false,
                metadata.sliding_window,
                self.target.get_input_processor_config(),
                paged,
                self.target.device_mapper(),
            )
            .map_err(candle_core::Error::msg)?;
        apply(&self.target, seqs, pre_op);
        recurrent::begin(&*self.target, seqs)?;
        let start = Instant::now();
        let logits = verify::logits_of(self.target.forward_inputs(inputs, false)?)?;
        let elapsed = start.elapsed();
        let rows: Vec<NewRows> = seqs
            .iter()
            .map(|seq| NewRows::of(seq, is_prompt, cache))
            .collect();
        if let Err(error) = caught(|| self.commit_rows(seqs, &rows, blocks.as_ref())) {
            self.warn("no draft KV for this batch, it decodes plainly", &error);
            seqs.iter_mut().for_each(|seq| state::drop_kv(seq));
            if let (Some(blocks), Some(pool)) = (&blocks, &self.pool) {
                for (i, rows) in rows.iter().enumerate() {
                    pool.mark_incomplete(blocks.covering(i, rows.start, rows.count));
                }
            }
        }
        if let StepCache::Normal { post_op } = cache {
            apply(&self.target, seqs, *post_op);
        }
        let mut row_of = vec![None; seqs.len()];
        for (row, seq) in seq_indices.into_iter().enumerate() {
            row_of[seq] = Some(row);
        }
        let row_of = row_of
            .into_iter()
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| {
                candle_core::Error::msg("the target returned no logits for a sequence")
            })?;
        let logits = in_order(logits, &row_of)?;
        let greedy = Greedy::on_device(seqs, &logits)?;
        let tokens = match &greedy.tokens {
            Some(tokens) => tokens.to_vec1::<u32>()?,
            None => Vec::new(),
        };
        let choices = greedy.choices(seqs.len(), &tokens);
        // One by one: the host's batch sampling stops at the first sequence that fails.
        for (i, (seq, choices)) in seqs.iter_mut().zip(choices).enumerate() {
            let seq = &mut **seq;
            if let Some(choice) = choices.first().copied().flatten() {
                seq.set_greedy_choice(choice);
            }
            sampling
                .sample(&self.target, &mut [seq], vec![logits.i(i)?])
                .await?;
            self.check_lengths(seq)?;
        }
        self.clocked(Phase::Plain, clock)?;
        Ok(elapsed)
    }

    /// Materialize the rows that a plain pass has just processed.
    fn commit_rows(
        &self,
        seqs: &mut [&mut Sequence],
        rows: &[NewRows],
        blocks: Option<&Blocks>,
    ) -> Result<()> {
        self.hooks.fault_at(FaultPoint::Materialize)?;
        for (i, (seq, rows)) in seqs.iter_mut().zip(rows).enumerate() {
            if self.has_moved_positions(seq) {
                state::drop_kv(seq);
            } else if rows.is_first {
                self.begin_context(i, seq, rows, blocks)?;
            }
        }
        // The rows of all that have a context in step, by their number: one product each.
        let mut in_step: Vec<(usize, usize)> = Vec::new();
        for (i, (seq, rows)) in seqs.iter_mut().zip(rows).enumerate() {
            let fits = rows.start + rows.count <= self.worker.max_positions();
            let has_context = match state::kv(seq).map(DraftKv::len) {
                Some(len) if len == rows.start && fits => true,
                Some(_) => {
                    let reason = match fits {
                        true => Fallback::OutOfStep,
                        false => Fallback::DraftContextEnd,
                    };
                    self.fell_back(reason);
                    state::drop_kv(seq);
                    false
                }
                None => false,
            };
            if has_context {
                in_step.push((rows.count, i));
                if rows.is_continued_prompt {
                    self.hooks.stats.restored();
                }
            } else if let (Some(blocks), Some(pool)) = (blocks, &self.pool) {
                pool.mark_incomplete(blocks.covering(i, rows.start, rows.count));
            }
        }
        if in_step.is_empty() {
            self.taps()?.clear();
            return Ok(());
        }
        let taps = self.take_taps(seqs.len())?;
        in_step.sort_unstable();
        for group in in_step.chunk_by(|a, b| a.0 == b.0) {
            let count = group[0].0;
            let taps = taps.narrow(1, 0, count)?;
            let is_all = group.len() == taps.dim(0)?;
            let taps = match is_all {
                true => taps,
                false => {
                    let indices: Vec<u32> = group.iter().map(|(_, i)| *i as u32).collect();
                    taps.index_select(&Tensor::new(indices, taps.device())?, 0)?
                }
            };
            if let Some(blocks) = blocks {
                let of: Vec<_> = group.iter().map(|(_, i)| (*i, rows[*i].start)).collect();
                self.materialize_in_pool(seqs, &of, count, blocks, &taps)?;
                continue;
            }
            let mut kvs: Vec<_> = seqs
                .iter_mut()
                .enumerate()
                .filter(|(i, _)| group.iter().any(|(_, member)| member == i))
                .filter_map(|(_, seq)| state::own_kv_mut(seq))
                .collect();
            self.worker.materialize_all(&mut kvs, &taps)?;
        }
        Ok(())
    }

    /// The draft context of a sequence whose prompt has just been processed: empty, or what the
    /// blocks that it got by prefix hold.
    fn begin_context(
        &self,
        i: usize,
        seq: &mut Sequence,
        rows: &NewRows,
        blocks: Option<&Blocks>,
    ) -> Result<()> {
        let kv = match blocks {
            Some(blocks) => {
                if !self.pool()?.is_complete(blocks.covering(i, 0, rows.start)) {
                    state::drop_kv(seq);
                    return Ok(());
                }
                DraftKv::in_pool(rows.start)
            }
            None => DraftKv::Own(self.worker.new_kv()?),
        };
        state::set(seq, DraftState::new(kv, self.hooks.stats.live()));
        Ok(())
    }

    /// Draft K/V of `count` rows each of sequences `of` (index, first position), into their blocks.
    /// `taps`: `[of, count, taps * hidden]`.
    pub(super) fn materialize_in_pool(
        &self,
        seqs: &mut [&mut Sequence],
        of: &[(usize, usize)],
        count: usize,
        blocks: &Blocks,
        taps: &Tensor,
    ) -> Result<()> {
        let (mut positions, mut slots) = (Vec::new(), Vec::new());
        for (i, start) in of {
            positions.extend(*start..start + count);
            slots.extend(blocks.slots(*i, *start, count)?);
        }
        let taps = taps.reshape((positions.len(), taps.dim(D::Minus1)?))?;
        self.worker
            .materialize_slots(self.pool()?, &positions, &slots, &taps)?;
        for (i, start) in of {
            let seq = seqs.get_mut(*i).map(|seq| &mut **seq);
            if let Some(kv) = seq.and_then(|seq| state::kv_mut(seq)) {
                *kv = DraftKv::in_pool(start + count);
            }
        }
        Ok(())
    }

    /// The tapped layer outputs of the last pass over `batch` sequences, side by side: `[batch, rows,
    /// taps * hidden]`.
    pub(super) fn take_taps(&self, batch: usize) -> Result<Tensor> {
        let taps = self.taps()?.take()?;
        match taps.first().map(Tensor::device).cloned() {
            Some(device) => {
                let taps = taps
                    .iter()
                    .map(|tap| tap.to_device(&device))
                    .collect::<Result<Vec<_>>>()?;
                let taps = Tensor::cat(&taps, D::Minus1)?;
                let taps = taps.reshape((batch, (), taps.dim(D::Minus1)?))?;
                if let Some(observer) = &self.hooks.taps {
                    observer(&taps);
                }
                Ok(taps)
            }
            None => candle_core::bail!("no layer outputs were captured"),
        }
    }
}

/// The rows of `logits` by sequence. The host gives them so; nothing is copied then.
fn in_order(logits: Tensor, row_of: &[usize]) -> Result<Tensor> {
    if row_of.iter().copied().eq(0..logits.dim(0)?) {
        return Ok(logits);
    }
    let rows: Vec<u32> = row_of.iter().map(|row| *row as u32).collect();
    logits.index_select(&Tensor::new(rows, logits.device())?, 0)
}

/// The positions that a plain pass processes for one sequence.
struct NewRows {
    start: usize,
    count: usize,
    /// The sequence has no draft context yet.
    is_first: bool,
    /// The tail of a prompt whose head was in the prefix cache.
    is_continued_prompt: bool,
}

impl NewRows {
    fn of(seq: &Sequence, is_prompt: bool, cache: &StepCache) -> Self {
        let tokens = seq.get_toks().len();
        match (is_prompt, cache) {
            (false, _) => Self {
                start: tokens.saturating_sub(1),
                count: 1,
                is_first: false,
                is_continued_prompt: false,
            },
            // After a prefix-cache hit `get_toks` is the uncached tail, and the entry's draft KV
            // has come with it.
            (true, StepCache::Normal { .. }) => Self {
                start: seq.token_offset(),
                count: tokens,
                is_first: seq.token_offset() == 0,
                is_continued_prompt: seq.token_offset() > 0,
            },
            (true, StepCache::Paged(_)) => Self {
                start: seq.prefix_cache_len(),
                count: tokens.saturating_sub(seq.prefix_cache_len()),
                is_first: true,
                is_continued_prompt: seq.prefix_cache_len() > 0,
            },
        }
    }
}

/// What the host does around a forward pass with the sequences' KV caches.
pub(super) fn apply(target: &Target, seqs: &mut [&mut Sequence], op: CacheInstruction) {
    match op {
        CacheInstruction::In => target.clone_in_cache(seqs),
        CacheInstruction::Out => target.clone_out_cache(seqs),
        CacheInstruction::Reset {
            load_preallocated_cache,
            reset_non_granular,
        } => target.set_none_cache(seqs, reset_non_granular, false, load_preallocated_cache),
        CacheInstruction::Nothing => (),
    }
}
