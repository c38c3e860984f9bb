//! One engine step of a batch: plan, draft, verify, accept, commit; or a plain step (`plain`).

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::{IndexOp, Result, Tensor};
use mistralrs_core::plugin::{
    CacheBackendMetadata, CacheInstruction, PrefixCacheManagerV2, Sequence,
};
use rand_isaac::Isaac64Rng;

use super::pipeline::{DFlashPipeline, Target};
use super::plain::apply;
use super::{state, verify};
use crate::accept::{AcceptWalk, Verdict};
use crate::fault::FaultPoint;
use crate::kv::SequenceKv;
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
    pub(super) async fn sample(
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
        match self.draft_and_verify(seqs)? {
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
    /// rows. If that cannot be done, target and draft KV are as before and the reason is returned.
    ///
    /// # Errors
    /// If they could not be put back: a plain step would then decode from wrong KV.
    fn draft_and_verify(
        &mut self,
        seqs: &mut [&mut Sequence],
    ) -> Result<std::result::Result<(Verification, Tensor), Fallback>> {
        self.align(seqs)?;
        let verification = match self.plan(seqs) {
            Ok(verification) => verification,
            Err(reason) => return Ok(Err(reason)),
        };
        match self.verify(seqs, &verification) {
            Ok(logits) => Ok(Ok((verification, logits))),
            Err(error) => {
                self.warn("verify failed, decoding plainly", &error);
                self.undo(seqs, verification.base)?;
                Ok(Err(Fallback::Error))
            }
        }
    }

    /// Make sure that the model's cache is that of these sequences, and their KV lengths right.
    fn align(&self, seqs: &mut [&mut Sequence]) -> Result<()> {
        for seq in seqs.iter_mut() {
            self.check_lengths(seq)?;
        }
        let committed = seqs.first().map_or(0, |seq| committed(seq));
        if verify::model_len(&*self.target)? != Some(committed) {
            // The host reloads it when other sequences are scheduled; this is for a host that
            // has missed a reason to.
            self.hooks.stats.fell_back(Fallback::OutOfStep);
            self.target.clone_in_cache(seqs);
        }
        Ok(())
    }

    /// Decide how many rows to verify and draft them.
    fn plan(&self, seqs: &[&mut Sequence]) -> std::result::Result<Verification, Fallback> {
        let base = seqs.first().map_or(0, |seq| committed(seq));
        // The host's scheduler batches sequences of equal length only.
        if seqs.iter().any(|seq| committed(seq) != base) {
            return Err(Fallback::OutOfStep);
        }
        let capacity = verify::model_capacity(&*self.target)
            .map_err(|error| {
                self.warn("the target's KV cache cannot be read", &error);
                Fallback::Error
            })?
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
            self.warn("draft failed, decoding plainly", &error);
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
        let rows = blocks.first().map_or(0, Vec::len);
        let len = verify::model_len(&*self.target)?;
        if len != Some(base + rows) {
            candle_core::bail!("the target's KV cache has {len:?} rows after a pass over {rows} rows behind {base}");
        }
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
                    batch: blocks.len(),
                    position: *base,
                    anchor: blocks[i][0],
                    drafts: drafts.to_vec(),
                    accepted: walk.accepted(),
                    emitted,
                });
            }
            self.check_lengths(seq)?;
        }
        // Sequences that are of equal length again are scheduled together without a reload of the
        // model's cache; for all others the host reloads it.
        if let Some(first) = seqs.first() {
            let len = committed(first);
            if seqs.iter().all(|seq| committed(seq) == len) {
                verify::set_model_len(&*self.target, len)?;
            }
        }
        Ok(())
    }

    /// Invariant I2: the KV caches of a running sequence hold every token but the last one. (Those
    /// of one that has ended belong to the prefix cache.)
    ///
    /// # Errors
    /// In strict mode, if they do not; otherwise the sequence goes on without draft KV.
    pub(super) fn check_lengths(&self, seq: &mut Sequence) -> Result<()> {
        if !seq.is_running() {
            return Ok(());
        }
        let committed = committed(seq);
        let target = verify::seq_len(seq);
        let draft = state::kv(seq).map(SequenceKv::len);
        if target == Some(committed) && draft.is_none_or(|len| len == committed) {
            return Ok(());
        }
        let message = format!(
            "sequence {}: {committed} committed tokens, {target:?} target KV rows, {draft:?} draft \
             KV rows",
            seq.id()
        );
        if self.hooks.strict {
            candle_core::bail!("invariant I2: {message}");
        }
        self.warn("KV out of step", &message);
        self.hooks.stats.fell_back(Fallback::OutOfStep);
        state::drop_kv(seq);
        Ok(())
    }

    /// Log something that can come back at every step only so many times.
    pub(super) fn warn(&self, what: &str, why: &dyn std::fmt::Display) {
        const MOST: usize = 5;
        let said = self.warnings.fetch_add(1, Ordering::Relaxed);
        if said < MOST {
            tracing::warn!("DFlash: {what}: {why}");
        } else if said == MOST {
            tracing::warn!("DFlash: no more warnings of this kind; the counters go on");
        }
    }
}

/// Tokens whose KV is written: all but the last one.
fn committed(seq: &Sequence) -> usize {
    seq.get_toks().len().saturating_sub(1)
}
