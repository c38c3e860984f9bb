//! Plain steps: prompts and plain decoding, in the host's own order of calls, with the draft KV of the
//! rows they process, so that speculation can go on after them.

use std::time::{Duration, Instant};

use candle_core::{IndexOp, Result, Tensor, D};
use mistralrs_core::plugin::{CacheInstruction, InputProcessorOutput, Sequence};

use super::pipeline::{DFlashPipeline, Target};
use super::state::{self, DraftState};
use super::step::{caught, Sampling};
use super::verify;
use crate::fault::FaultPoint;
use crate::kv::SequenceKv;
use crate::stats::Fallback;

impl DFlashPipeline {
    /// The host's own step for prompts and plain decoding, with the draft KV of the new rows.
    pub(super) async fn plain_step(
        &mut self,
        seqs: &mut [&mut Sequence],
        is_prompt: bool,
        sampling: &mut Sampling<'_>,
        pre_op: CacheInstruction,
        post_op: CacheInstruction,
    ) -> Result<Duration> {
        let metadata = self.target.get_metadata();
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
                None,
                self.target.device_mapper(),
            )
            .map_err(candle_core::Error::msg)?;
        apply(&self.target, seqs, pre_op);
        let start = Instant::now();
        let logits = verify::logits_of(self.target.forward_inputs(inputs, false)?)?;
        let elapsed = start.elapsed();
        let rows: Vec<NewRows> = seqs.iter().map(|seq| NewRows::of(seq, is_prompt)).collect();
        if let Err(error) = caught(|| self.commit_rows(seqs, &rows)) {
            self.warn("no draft KV for this batch, it decodes plainly", &error);
            seqs.iter_mut().for_each(|seq| state::drop_kv(seq));
        }
        apply(&self.target, seqs, post_op);
        let mut by_seq = vec![None; seqs.len()];
        for (row, seq) in seq_indices.into_iter().enumerate() {
            by_seq[seq] = Some(logits.i(row)?);
        }
        let by_seq = by_seq
            .into_iter()
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| {
                candle_core::Error::msg("the target returned no logits for a sequence")
            })?;
        // One by one: the host's batch sampling stops at the first sequence that fails.
        for (seq, logits) in seqs.iter_mut().zip(by_seq) {
            let seq = &mut **seq;
            sampling
                .sample(&self.target, &mut [seq], vec![logits])
                .await?;
            self.check_lengths(seq)?;
        }
        Ok(elapsed)
    }

    /// Materialize the rows that a plain pass has just processed.
    fn commit_rows(&self, seqs: &mut [&mut Sequence], rows: &[NewRows]) -> Result<()> {
        self.hooks.fault_at(FaultPoint::Materialize)?;
        let has_draft_kv = |seq: &&mut Sequence| state::kv(seq).is_some();
        if rows.iter().all(|rows| rows.start > 0) && !seqs.iter().any(has_draft_kv) {
            self.taps()?.clear();
            return Ok(());
        }
        let taps = self.take_taps()?;
        // The rows of all that have a context in step, by their number: one product each.
        let mut in_step: Vec<(usize, usize)> = Vec::new();
        for (i, (seq, rows)) in seqs.iter_mut().zip(rows).enumerate() {
            if rows.start == 0 {
                let kv = self.worker.new_kv()?;
                state::set(seq, DraftState::new(kv, self.hooks.stats.live()));
            }
            let fits = rows.start + rows.count <= self.worker.max_positions();
            match state::kv(seq).map(SequenceKv::len) {
                Some(len) if len == rows.start && fits => {
                    in_step.push((rows.count, i));
                    if rows.is_continued_prompt {
                        self.hooks.stats.restored();
                    }
                }
                Some(_) => {
                    let reason = match fits {
                        true => Fallback::OutOfStep,
                        false => Fallback::DraftContextEnd,
                    };
                    self.fell_back(reason);
                    state::drop_kv(seq);
                }
                None => (),
            }
        }
        in_step.sort_unstable();
        for group in in_step.chunk_by(|a, b| a.0 == b.0) {
            let count = group[0].0;
            let indices: Vec<u32> = group.iter().map(|(_, i)| *i as u32).collect();
            let indices = Tensor::new(indices, taps.device())?;
            let taps = taps.narrow(1, 0, count)?.index_select(&indices, 0)?;
            let mut kvs: Vec<_> = seqs
                .iter_mut()
                .enumerate()
                .filter(|(i, _)| group.iter().any(|(_, member)| member == i))
                .filter_map(|(_, seq)| state::kv_mut(seq))
                .collect();
            self.worker.materialize_all(&mut kvs, &taps)?;
        }
        Ok(())
    }

    /// The tapped layer outputs of the last pass, side by side: `[batch, rows, taps * hidden]`.
    pub(super) fn take_taps(&self) -> Result<Tensor> {
        let taps = self.taps()?.take()?;
        match taps.first().map(Tensor::device).cloned() {
            Some(device) => {
                let taps = taps
                    .iter()
                    .map(|tap| tap.to_device(&device))
                    .collect::<Result<Vec<_>>>()?;
                Tensor::cat(&taps, D::Minus1)
            }
            None => candle_core::bail!("no layer outputs were captured"),
        }
    }
}

/// The positions that a plain pass processes for one sequence.
struct NewRows {
    start: usize,
    count: usize,
    /// The tail of a prompt whose head was in the prefix cache.
    is_continued_prompt: bool,
}

impl NewRows {
    fn of(seq: &Sequence, is_prompt: bool) -> Self {
        let tokens = seq.get_toks().len();
        if is_prompt {
            // After a prefix-cache hit `get_toks` is the uncached tail.
            Self {
                start: seq.token_offset(),
                count: tokens,
                is_continued_prompt: seq.token_offset() > 0,
            }
        } else {
            Self {
                start: tokens.saturating_sub(1),
                count: 1,
                is_continued_prompt: false,
            }
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
