//! One engine step of a batch: plan (`plan`), draft, verify, accept (`accept`); or a plain step
//! (`plain`).

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::{Result, Tensor};
use mistralrs_core::plugin::{
    CacheBackendMetadata, CacheInstruction, PrefixCacheManagerV2, Sequence,
};
use rand_isaac::Isaac64Rng;

use super::accept::Verified;
use super::pipeline::{DFlashPipeline, Target};
use super::plain::apply;
use super::plan::Plan;
use super::{state, verify};
use crate::fault::FaultPoint;
use crate::kv::SequenceKv;
use crate::stats::Fallback;
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

impl DFlashPipeline {
    pub(super) async fn run_step(
        &mut self,
        seqs: &mut [&mut Sequence],
        is_prompt: bool,
        return_raw_logits: bool,
        mut sampling: Sampling<'_>,
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
            return self
                .plain_step(seqs, true, &mut sampling, pre_op, post_op)
                .await;
        }
        apply(&self.target, seqs, pre_op);
        self.decode_step(seqs, &mut sampling, post_op).await
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

    /// One step of sequences that are all decoding.
    async fn decode_step(
        &mut self,
        seqs: &mut [&mut Sequence],
        sampling: &mut Sampling<'_>,
        post_op: CacheInstruction,
    ) -> Result<Duration> {
        self.align(seqs)?;
        let start = Instant::now();
        let plan = self.plan(seqs)?;
        for reason in plan.plain.iter().flatten() {
            self.fell_back(*reason);
        }
        let speculating = plan.plain.iter().filter(|plain| plain.is_none()).count();
        if speculating != 0 && speculating != seqs.len() {
            return self.mixed_step(seqs, &plan, sampling, post_op).await;
        }
        if speculating == 0 {
            let nothing = CacheInstruction::Nothing;
            let elapsed = self
                .plain_step(seqs, false, sampling, nothing, post_op)
                .await?;
            self.observe_cost(seqs.len(), 1, start.elapsed());
            return Ok(elapsed);
        }
        let (elapsed, as_planned) = self
            .speculative_step(seqs, plan.rows, sampling, post_op)
            .await?;
        if as_planned {
            self.observe_cost(seqs.len(), plan.rows, start.elapsed());
        }
        Ok(elapsed)
    }

    /// Some sequences speculate and some do not: two passes, each with the model's cache to
    /// itself.
    async fn mixed_step(
        &mut self,
        seqs: &mut [&mut Sequence],
        plan: &Plan,
        sampling: &mut Sampling<'_>,
        post_op: CacheInstruction,
    ) -> Result<Duration> {
        let start = Instant::now();
        let (mut speculating, mut plain) = (Vec::new(), Vec::new());
        for (seq, reason) in seqs.iter_mut().zip(&plan.plain) {
            match reason {
                None => speculating.push(&mut **seq),
                Some(_) => plain.push(&mut **seq),
            }
        }
        self.target.clone_in_cache(&mut speculating);
        self.speculative_step(&mut speculating, plan.rows, sampling, post_op)
            .await?;
        self.plain_step(&mut plain, false, sampling, CacheInstruction::In, post_op)
            .await?;
        Ok(start.elapsed())
    }

    /// Draft, verify and accept, or, if that fails, decode plainly: the flag says which. The model's
    /// cache holds exactly these sequences.
    async fn speculative_step(
        &mut self,
        seqs: &mut [&mut Sequence],
        rows: usize,
        sampling: &mut Sampling<'_>,
        post_op: CacheInstruction,
    ) -> Result<(Duration, bool)> {
        let start = Instant::now();
        if let Some(verified) = self.draft_and_verify(seqs, rows)? {
            let elapsed = start.elapsed();
            self.accept(seqs, &verified, sampling).await?;
            return Ok((elapsed, true));
        }
        seqs.iter().for_each(|_| self.fell_back(Fallback::Error));
        let nothing = CacheInstruction::Nothing;
        let elapsed = self
            .plain_step(seqs, false, sampling, nothing, post_op)
            .await?;
        Ok((elapsed, false))
    }

    /// Draft and run the verify pass; after it the draft KV of each sequence has all verified
    /// rows. If that cannot be done, target and draft KV are as before and `None` is returned.
    ///
    /// # Errors
    /// If they could not be put back: a plain step would then decode from wrong KV.
    fn draft_and_verify(
        &mut self,
        seqs: &mut [&mut Sequence],
        rows: usize,
    ) -> Result<Option<Verified>> {
        let bases: Vec<usize> = seqs.iter().map(|seq| committed(seq)).collect();
        let result = caught(|| {
            let blocks = self.draft(seqs, rows)?;
            let logits = self.verify(seqs, &bases, &blocks)?;
            Ok((blocks, logits))
        });
        match result {
            Ok((blocks, logits)) => Ok(Some(Verified {
                bases,
                blocks,
                logits,
            })),
            Err(error) => {
                self.warn("draft or verify failed, decoding plainly", &error);
                self.undo(seqs, &bases)?;
                Ok(None)
            }
        }
    }

    /// Make sure that the model's cache is that of these sequences, and their KV lengths right.
    fn align(&self, seqs: &mut [&mut Sequence]) -> Result<()> {
        for seq in seqs.iter_mut() {
            self.check_lengths(seq)?;
        }
        let lens: Vec<usize> = seqs.iter().map(|seq| committed(seq)).collect();
        // The host reloads it when other sequences are scheduled. It does not know of a step that
        // was run in two passes.
        if !verify::model_holds(&*self.target, &lens)? {
            self.target.clone_in_cache(seqs);
        }
        Ok(())
    }

    /// Anchor and drafts of every sequence.
    fn draft(&self, seqs: &[&mut Sequence], rows: usize) -> Result<Vec<Vec<u32>>> {
        let jobs = seqs
            .iter()
            .map(|seq| {
                let anchor = seq.get_toks().last().copied();
                match (anchor, state::kv(seq)) {
                    (Some(anchor), Some(kv)) => Ok(DraftJob { anchor, kv }),
                    _ => candle_core::bail!("sequence {} has nothing to draft from", seq.id()),
                }
            })
            .collect::<Result<Vec<_>>>()?;
        self.hooks.fault_at(FaultPoint::Draft)?;
        let drafts = self.worker.draft(&self.head()?, &jobs, rows)?;
        Ok(jobs
            .iter()
            .zip(drafts)
            .map(|(job, drafts)| std::iter::once(job.anchor).chain(drafts).collect())
            .collect())
    }

    /// One target forward over all blocks; its features become draft K/V. `[batch, rows, vocab]`.
    fn verify(
        &mut self,
        seqs: &mut [&mut Sequence],
        bases: &[usize],
        blocks: &[Vec<u32>],
    ) -> Result<Tensor> {
        let inputs = verify::inputs(blocks, bases, &self.target.device())?;
        let result = self.target.forward_inputs(Box::new(inputs), false)?;
        let logits = verify::logits_of(result)?;
        self.hooks.fault_at(FaultPoint::Verify)?;
        let rows = blocks.first().map_or(0, Vec::len);
        let lens: Vec<usize> = bases.iter().map(|base| base + rows).collect();
        if !verify::model_holds(&*self.target, &lens)? {
            candle_core::bail!("the target's KV cache does not hold the {rows} verified rows");
        }
        let mut taps = self.take_taps()?;
        if self.hooks.goes_wrong_at(FaultPoint::NanFeatures) {
            taps = taps.affine(f64::NAN, 0.0)?;
        }
        let mut kvs: Vec<_> = seqs
            .iter_mut()
            .filter_map(|seq| state::kv_mut(seq))
            .collect();
        self.worker.materialize_all(&mut kvs, &taps)?;
        Ok(logits)
    }

    /// Put target and draft KV back to `bases` rows after a failed draft or verify pass.
    fn undo(&self, seqs: &mut [&mut Sequence], bases: &[usize]) -> Result<()> {
        for (seq, base) in seqs.iter_mut().zip(bases) {
            if let Some(kv) = state::kv_mut(seq) {
                kv.truncate(*base);
            }
        }
        self.taps()?.clear();
        verify::set_model_lens(&*self.target, bases)
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
        self.fell_back(Fallback::OutOfStep);
        state::drop_kv(seq);
        Ok(())
    }

    /// Count one plain step of one sequence.
    pub(super) fn fell_back(&self, reason: Fallback) {
        self.hooks.stats.fell_back(reason);
        self.counters.fallback(reason.name());
    }

    fn observe_cost(&mut self, batch: usize, rows: usize, time: Duration) {
        if let Some(controller) = &mut self.controller {
            controller.observe_step(batch, rows, time);
        }
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

/// Run `f`; a panic in it becomes an error.
pub(super) fn caught<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let message = panic
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "of an unknown kind".into());
        candle_core::bail!("panic: {message}")
    })
}

/// Tokens whose KV is written: all but the last one.
pub(super) fn committed(seq: &Sequence) -> usize {
    seq.get_toks().len().saturating_sub(1)
}
