//! One engine step of a batch: plan, draft, verify, accept, commit, or a plain step that keeps the
//! draft KV in step with the target's (invariant I2), so that speculation can go on after it.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::{IndexOp, Result, Tensor, D};
use mistralrs_core::plugin::{
    CacheBackendMetadata, CacheInstruction, InputProcessorOutput, PrefixCacheManagerV2, Sequence,
};
use rand_isaac::Isaac64Rng;

use super::pipeline::{DFlashPipeline, Target};
use super::{state, verify};
use crate::accept::{AcceptWalk, Verdict};
use crate::fault::FaultPoint;
use crate::stats::Fallback;
use crate::trace::Round;
use crate::worker::DraftJob;

/// What the host hands through a step to its sampler.
pub struct Sampling<'a> {
    pub prefix_cacher: &'a mut PrefixCacheManagerV2,
    pub disable_eos_stop: bool,
    pub rng: Arc<Mutex<Isaac64Rng>>,
}

impl Sampling<'_> {
    /// Sample one token for each of `seqs` with its own sampler, and add it.
    async fn sample(
        &mut self,
        target: &Target,
        seqs: &mut [&mut Sequence],
        logits: Vec<Tensor>,
    ) -> Result<()> {
        target
            .sample_causal_gen(
                seqs,
                logits,
                self.prefix_cacher,
                self.disable_eos_stop,
                self.rng.clone(),
            )
            .await
    }
}

/// A batch that is about to be verified.
struct Verification {
    /// Rows in every sequence's KV cache before the step (`n`).
    base: usize,
    /// Anchor and drafts of every sequence, all of one length.
    blocks: Vec<Vec<u32>>,
}

impl DFlashPipeline {
    pub(super) async fn run_step(
        &mut self,
        seqs: &mut [&mut Sequence],
        is_prompt: bool,
        return_raw_logits: bool,
        sampling: Sampling<'_>,
        backend: CacheBackendMetadata,
    ) -> Result<Duration> {
        let CacheBackendMetadata::DefaultInstructions { pre_op, post_op } = backend else {
            candle_core::bail!("DFlash was loaded without paged attention, but got a paged step");
        };
        if return_raw_logits {
            return self
                .delegate_step(seqs, is_prompt, sampling, pre_op, post_op)
                .await;
        }
        if is_prompt {
            return self.plain_step(seqs, true, sampling, pre_op, post_op).await;
        }
        apply(&self.target, seqs, pre_op);
        let start = Instant::now();
        match self.draft_and_verify(seqs) {
            Ok((verification, logits)) => {
                let elapsed = start.elapsed();
                self.accept(seqs, &verification, &logits, sampling).await?;
                Ok(elapsed)
            }
            Err(reason) => {
                seqs.iter().for_each(|_| self.hooks.stats.fell_back(reason));
                self.plain_step(seqs, false, sampling, CacheInstruction::Nothing, post_op)
                    .await
            }
        }
    }

    /// A step whose raw logits the caller wants: the target's own, and no draft KV comes of it.
    async fn delegate_step(
        &mut self,
        seqs: &mut [&mut Sequence],
        is_prompt: bool,
        sampling: Sampling<'_>,
        pre_op: CacheInstruction,
        post_op: CacheInstruction,
    ) -> Result<Duration> {
        let elapsed = self
            .target
            .step(
                seqs,
                is_prompt,
                true,
                sampling.prefix_cacher,
                sampling.disable_eos_stop,
                sampling.rng,
                CacheBackendMetadata::DefaultInstructions { pre_op, post_op },
            )
            .await;
        self.taps()?.clear();
        elapsed
    }

    /// Draft and run the verify pass; after it the draft KV of each sequence has all verified
    /// rows. On any error target and draft KV are as before, and the reason is returned.
    fn draft_and_verify(
        &mut self,
        seqs: &mut [&mut Sequence],
    ) -> std::result::Result<(Verification, Tensor), Fallback> {
        for seq in seqs.iter_mut() {
            let committed = seq.get_toks().len().saturating_sub(1);
            if state::kv(seq).is_some_and(|kv| kv.len() != committed) {
                tracing::warn!(
                    "DFlash: sequence {}: draft KV is out of step, dropped",
                    seq.id()
                );
                state::drop_kv(seq);
            }
        }
        let verification = self.plan(seqs)?;
        match self.verify(seqs, &verification) {
            Ok(logits) => Ok((verification, logits)),
            Err(error) => {
                tracing::warn!("DFlash: verify failed, decoding plainly: {error}");
                self.undo(seqs, verification.base)
                    .map_err(|error| tracing::error!("DFlash: rollback failed: {error}"))
                    .ok();
                Err(Fallback::Error)
            }
        }
    }

    /// Decide how many rows to verify and draft them.
    fn plan(&self, seqs: &[&mut Sequence]) -> std::result::Result<Verification, Fallback> {
        let base = seqs
            .first()
            .map_or(0, |seq| seq.get_toks().len().saturating_sub(1));
        // The host's scheduler batches sequences of equal length only.
        if seqs.iter().any(|seq| seq.get_toks().len() != base + 1) {
            return Err(Fallback::NoRoom);
        }
        let capacity = verify::model_capacity(&*self.target)
            .unwrap_or(0)
            .min(self.target.get_metadata().max_seq_len);
        let rows = self.worker.block_size().min(capacity.saturating_sub(base));
        if rows < 2 {
            return Err(Fallback::NoRoom);
        }
        if base + self.worker.block_size() > self.worker.max_positions() {
            return Err(Fallback::DraftContextEnd);
        }
        let jobs: Vec<DraftJob> = seqs
            .iter()
            .filter_map(|seq| {
                let anchor = seq.get_toks().last().copied()?;
                let kv = state::kv(seq)?;
                Some(DraftJob { anchor, kv })
            })
            .collect();
        if jobs.is_empty() {
            return Err(Fallback::NoDraftContext);
        }
        let drafted = self
            .hooks
            .fault_at(FaultPoint::Draft)
            .and_then(|()| self.head())
            .map_err(Into::into)
            .and_then(|head| self.worker.draft(&head, &jobs));
        let drafts = drafted.map_err(|error| {
            tracing::warn!("DFlash: draft failed, decoding plainly: {error}");
            Fallback::Error
        })?;
        // A sequence without draft KV rides along with drafts that are merely unlikely: whatever
        // they are, the target's choices decide.
        let mut drafts = drafts.into_iter();
        let blocks = seqs
            .iter()
            .map(|seq| {
                let anchor = seq.get_toks().last().copied().unwrap_or_default();
                let drafts = match state::kv(seq) {
                    Some(_) => drafts.next().unwrap_or_default(),
                    None => vec![self.worker.mask_token(); rows - 1],
                };
                std::iter::once(anchor)
                    .chain(drafts.into_iter().take(rows - 1))
                    .collect()
            })
            .collect();
        Ok(Verification { base, blocks })
    }

    /// One target forward over all blocks; its features become draft K/V. `[batch, rows, vocab]`.
    fn verify(
        &mut self,
        seqs: &mut [&mut Sequence],
        Verification { base, blocks }: &Verification,
    ) -> Result<Tensor> {
        let inputs = verify::inputs(blocks, *base, &self.target.device())?;
        let result = self.target.forward_inputs(Box::new(inputs), false)?;
        let logits = verify::logits_of(result)?;
        self.hooks.fault_at(FaultPoint::Verify)?;
        let taps = self.take_taps()?;
        for (i, seq) in seqs.iter_mut().enumerate() {
            if let Some(kv) = state::kv_mut(seq) {
                self.worker.materialize(kv, &taps.i(i)?)?;
            }
        }
        Ok(logits)
    }

    /// Put target and draft KV back to `base` rows after a failed verify pass.
    fn undo(&self, seqs: &mut [&mut Sequence], base: usize) -> Result<()> {
        for seq in seqs.iter_mut() {
            if let Some(kv) = state::kv_mut(seq) {
                kv.truncate(base);
            }
        }
        self.taps()?.clear();
        verify::set_model_len(&*self.target, base)
    }

    /// Let each sequence sample its rows until its choice is no draft or it ends. Before a row is
    /// sampled both KV caches hold exactly the rows that it has seen, because a sequence that
    /// ends is stored in the prefix cache from inside the sampler.
    async fn accept(
        &mut self,
        seqs: &mut [&mut Sequence],
        Verification { base, blocks }: &Verification,
        logits: &Tensor,
        mut sampling: Sampling<'_>,
    ) -> Result<()> {
        let drafted: Vec<bool> = seqs.iter().map(|seq| state::kv(seq).is_some()).collect();
        verify::publish(&*self.target, seqs, base + 1)?;
        for (i, seq) in seqs.iter_mut().enumerate() {
            let drafts = blocks[i].get(1..).unwrap_or_default();
            let mut walk = AcceptWalk::new(drafts);
            let mut emitted = Vec::new();
            for row in 0..=drafts.len() {
                let committed = base + row + 1;
                verify::set_seq_len(seq, committed)?;
                if let Some(kv) = state::kv_mut(seq) {
                    kv.set_len(committed)?;
                }
                let before = seq.get_toks().len();
                let row = logits.i(i)?.narrow(0, row, 1)?;
                sampling
                    .sample(&self.target, &mut [&mut **seq], vec![row])
                    .await?;
                if seq.get_toks().len() == before {
                    break; // The sampler failed and has told the client; the sequence is in error.
                }
                emitted.extend(seq.get_toks().last());
                let verdict = emitted
                    .last()
                    .map_or(Verdict::Bonus, |&token| walk.take(token));
                if verdict == Verdict::Bonus || !seq.is_running() {
                    break;
                }
            }
            if drafted[i] {
                self.hooks
                    .stats
                    .verified(drafts.len(), walk.accepted(), emitted.len());
            } else {
                self.hooks.stats.fell_back(Fallback::NoDraftContext);
            }
            if let Some(observer) = &self.hooks.observer {
                observer(&Round {
                    sequence: *seq.id(),
                    position: *base,
                    anchor: blocks[i][0],
                    drafts: drafts.to_vec(),
                    accepted: walk.accepted(),
                    emitted,
                });
            }
            debug_assert_lengths(seq);
        }
        // Sequences that are of equal length again are scheduled together without a reload of the
        // model's cache; for all others the host reloads it.
        if let Some(first) = seqs.first() {
            let len = first.get_toks().len().saturating_sub(1);
            if seqs.iter().all(|seq| seq.get_toks().len() == len + 1) {
                verify::set_model_len(&*self.target, len)?;
            }
        }
        Ok(())
    }

    /// The host's own step for prompts and plain decoding, with the draft KV of the new rows.
    async fn plain_step(
        &mut self,
        seqs: &mut [&mut Sequence],
        is_prompt: bool,
        mut sampling: Sampling<'_>,
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
        if let Err(error) = self.commit_rows(seqs, &rows) {
            tracing::warn!("DFlash: no draft KV for this batch, it decodes plainly: {error}");
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
        sampling.sample(&self.target, seqs, by_seq).await?;
        seqs.iter_mut().for_each(|seq| debug_assert_lengths(seq));
        Ok(elapsed)
    }

    /// Materialize the rows that a plain pass has just processed.
    fn commit_rows(&self, seqs: &mut [&mut Sequence], rows: &[NewRows]) -> Result<()> {
        self.hooks.fault_at(FaultPoint::Materialize)?;
        let taps = self.take_taps()?;
        for (i, (seq, rows)) in seqs.iter_mut().zip(rows).enumerate() {
            if rows.start == 0 {
                let kv = self.worker.new_kv()?;
                state::set_kv(seq, kv);
            }
            let fits = rows.start + rows.count <= self.worker.max_positions();
            match state::kv_mut(seq) {
                Some(kv) if kv.len() == rows.start && fits => {
                    let taps = taps.i(i)?.narrow(0, 0, rows.count)?;
                    self.worker.materialize(kv, &taps)?;
                }
                Some(_) => state::drop_kv(seq),
                None => (),
            }
        }
        Ok(())
    }

    /// The tapped layer outputs of the last pass, side by side: `[batch, rows, taps * hidden]`.
    fn take_taps(&self) -> Result<Tensor> {
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
}

impl NewRows {
    fn of(seq: &Sequence, is_prompt: bool) -> Self {
        let tokens = seq.get_toks().len();
        if is_prompt {
            // After a prefix-cache hit `get_toks` is the uncached tail.
            Self {
                start: seq.token_offset(),
                count: tokens,
            }
        } else {
            Self {
                start: tokens.saturating_sub(1),
                count: 1,
            }
        }
    }
}

/// What the host does around a forward pass with the sequences' KV caches.
fn apply(target: &Target, seqs: &mut [&mut Sequence], op: CacheInstruction) {
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

/// Invariant I2: both KV caches hold every token but the last one.
fn debug_assert_lengths(seq: &mut Sequence) {
    if cfg!(debug_assertions) && seq.is_running() {
        let committed = seq.get_toks().len() - 1;
        assert_eq!(
            verify::seq_len(seq),
            Some(committed),
            "target KV length (I2)"
        );
        if let Some(kv) = state::kv(seq) {
            assert_eq!(kv.len(), committed, "draft KV length (I2)");
        }
    }
}
