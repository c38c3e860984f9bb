//! One engine step of a batch: plan (`plan`), draft and verify (`passes`), accept (`accept`); or a
//! plain step (`plain`).

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::{Result, Tensor};
use mistralrs_core::plugin::{
    CacheBackendMetadata, CacheInstruction, PrefixCacheManagerV2, Sequence,
};
use rand_isaac::Isaac64Rng;

use super::cache::{Blocks, StepCache};
use super::pipeline::{DFlashPipeline, Target};
use super::plain::apply;
use super::plan::{give_back, reserve, Plan};
use super::state::{self, DraftKv};
use super::verify;
use crate::stats::Fallback;
use crate::trace::Phase;

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
        if return_raw_logits {
            return self.delegate_step(seqs, is_prompt, sampling, backend).await;
        }
        let (pre_op, cache) = match backend {
            CacheBackendMetadata::DefaultInstructions { pre_op, post_op } => {
                (pre_op, StepCache::Normal { post_op })
            }
            CacheBackendMetadata::PagedAttention { metadata } => {
                (CacheInstruction::Nothing, StepCache::Paged(metadata))
            }
        };
        if is_prompt {
            return self
                .plain_step(seqs, true, &mut sampling, pre_op, &cache)
                .await;
        }
        apply(&self.target, seqs, pre_op);
        let elapsed = self.decode_step(seqs, &mut sampling, &cache).await;
        if let StepCache::Paged(meta) = &cache {
            give_back(meta, seqs).await;
        }
        elapsed
    }

    /// A step whose raw logits the caller wants: the target's own, and no draft KV comes of it.
    async fn delegate_step(
        &mut self,
        seqs: &mut [&mut Sequence],
        is_prompt: bool,
        sampling: Sampling<'_>,
        backend: CacheBackendMetadata,
    ) -> Result<Duration> {
        if let CacheBackendMetadata::PagedAttention { metadata } = &backend {
            let blocks = Blocks::of(metadata, seqs).await;
            let all = blocks.tables.iter().flatten().copied().collect::<Vec<_>>();
            self.pool()?.mark_incomplete(&all);
        }
        let elapsed = self
            .target
            .step(
                seqs,
                is_prompt,
                true,
                sampling.prefix_cacher,
                sampling.disable_eos_stop,
                sampling.rng,
                backend,
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
        cache: &StepCache,
    ) -> Result<Duration> {
        self.align(seqs, cache)?;
        let start = Instant::now();
        let mut plan = self.plan(seqs, cache)?;
        if let StepCache::Paged(meta) = cache {
            reserve(meta, seqs, &mut plan).await;
        }
        self.agree_on(&mut plan)?;
        for reason in plan.plain.iter().flatten() {
            self.fell_back(*reason);
        }
        let speculating = plan.plain.iter().filter(|plain| plain.is_none()).count();
        let is_mixed = speculating != 0 && speculating != seqs.len();
        let has_images = plan.plain.contains(&Some(Fallback::Images));
        if is_mixed || has_images && seqs.len() > 1 {
            return self.mixed_step(seqs, &plan, sampling, cache).await;
        }
        if speculating == 0 {
            let nothing = CacheInstruction::Nothing;
            let elapsed = self
                .plain_step(seqs, false, sampling, nothing, cache)
                .await?;
            self.observe_cost(seqs.len(), 1, start.elapsed());
            return Ok(elapsed);
        }
        let (elapsed, as_planned) = self
            .speculative_step(seqs, plan.rows, sampling, cache)
            .await?;
        if as_planned {
            self.observe_cost(seqs.len(), plan.rows, start.elapsed());
        }
        Ok(elapsed)
    }

    /// Some sequences speculate and some do not: two passes, each with the model's cache to
    /// itself; and one more for each sequence whose positions images have moved, since the host
    /// takes positions from lengths where not all sequences have images.
    async fn mixed_step(
        &mut self,
        seqs: &mut [&mut Sequence],
        plan: &Plan,
        sampling: &mut Sampling<'_>,
        cache: &StepCache,
    ) -> Result<Duration> {
        let start = Instant::now();
        let (mut speculating, mut plain, mut apart) = (Vec::new(), Vec::new(), Vec::new());
        for (seq, reason) in seqs.iter_mut().zip(&plan.plain) {
            match reason {
                None => speculating.push(&mut **seq),
                Some(Fallback::Images) => apart.push(&mut **seq),
                Some(_) => plain.push(&mut **seq),
            }
        }
        let own = match cache {
            StepCache::Normal { .. } => CacheInstruction::In,
            StepCache::Paged(_) => CacheInstruction::Nothing,
        };
        if !speculating.is_empty() {
            apply(&self.target, &mut speculating, own);
            self.speculative_step(&mut speculating, plan.rows, sampling, cache)
                .await?;
        }
        if !plain.is_empty() {
            self.plain_step(&mut plain, false, sampling, own, cache)
                .await?;
        }
        for seq in apart {
            self.plain_step(&mut [seq], false, sampling, own, cache)
                .await?;
        }
        Ok(start.elapsed())
    }

    /// Draft, verify and accept, or, if that fails, decode plainly: the flag says which. The model's
    /// cache holds exactly these sequences.
    async fn speculative_step(
        &mut self,
        seqs: &mut [&mut Sequence],
        rows: usize,
        sampling: &mut Sampling<'_>,
        cache: &StepCache,
    ) -> Result<(Duration, bool)> {
        let start = Instant::now();
        let blocks = match cache {
            StepCache::Normal { .. } => None,
            StepCache::Paged(meta) => Some((meta, Blocks::of(meta, seqs).await)),
        };
        let paged = blocks.as_ref().map(|(meta, blocks)| (*meta, blocks));
        if let Some(verified) = self.draft_and_verify(seqs, rows, paged)? {
            let elapsed = start.elapsed();
            let clock = self.clock()?;
            self.accept(seqs, &verified, sampling, cache).await?;
            self.clocked(Phase::Accept, clock)?;
            return Ok((elapsed, true));
        }
        seqs.iter().for_each(|_| self.fell_back(Fallback::Error));
        if let StepCache::Paged(meta) = cache {
            give_back(meta, seqs).await; // The host counts on no more blocks than tokens need.
        }
        let nothing = CacheInstruction::Nothing;
        let elapsed = self
            .plain_step(seqs, false, sampling, nothing, cache)
            .await?;
        Ok((elapsed, false))
    }

    /// Make sure that the model's cache is that of these sequences, and their KV lengths right.
    fn align(&self, seqs: &mut [&mut Sequence], cache: &StepCache) -> Result<()> {
        for seq in seqs.iter_mut() {
            self.check_lengths(seq)?;
        }
        if matches!(cache, StepCache::Paged(_)) {
            return Ok(());
        }
        let lens: Vec<usize> = seqs.iter().map(|seq| committed(seq)).collect();
        // The host reloads it when other sequences are scheduled. It does not know of a step that
        // was run in two passes.
        if !verify::model_holds(&*self.target, &lens)? {
            self.target.clone_in_cache(seqs);
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
        let target = match self.pool {
            None => verify::seq_len(seq),
            Some(_) => Some(committed), // The host counts tokens, not rows.
        };
        let draft = state::kv(seq).map(DraftKv::len);
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
