//! One engine step of a batch: plan, draft, verify, accept, commit; or a plain step (`plain`).

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::{IndexOp, Result, Tensor};
use mistralrs_core::plugin::{
    CacheBackendMetadata, CacheInstruction, PrefixCacheManagerV2, Sequence,
};
use rand_isaac::Isaac64Rng;

use super::method::Hooks;
use super::pipeline::{DFlashPipeline, Target};
use super::plain::apply;
use super::{state, verify};
use crate::commit::{self, Choice, VerifiedSequence};
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

/// How the sequences of a step are decoded.
struct Plan {
    /// Rows to verify of each speculating sequence: its anchor and `rows - 1` drafts.
    rows: usize,
    /// By sequence: why it is decoded plainly; `None` speculates.
    plain: Vec<Option<Fallback>>,
}

/// Sequences that have been verified in one pass.
struct Verified {
    /// Rows in every sequence's KV cache before the step (`n`).
    bases: Vec<usize>,
    /// Anchor and drafts of every sequence, all of one length.
    blocks: Vec<Vec<u32>>,
    /// `[batch, rows, vocab]`
    logits: Tensor,
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
        self.decode_step(seqs, sampling, post_op).await
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
        mut sampling: Sampling<'_>,
        post_op: CacheInstruction,
    ) -> Result<Duration> {
        self.align(seqs)?;
        let start = Instant::now();
        let plan = self.plan(seqs)?;
        for reason in plan.plain.iter().flatten() {
            self.fell_back(*reason);
        }
        let speculating = plan.plain.iter().filter(|plain| plain.is_none()).count();
        if speculating == seqs.len() {
            if let Some(verified) = self.draft_and_verify(seqs, plan.rows)? {
                let elapsed = start.elapsed();
                self.accept(seqs, &verified, &mut sampling).await?;
                self.observe_cost(seqs.len(), plan.rows, start.elapsed());
                return Ok(elapsed);
            }
            seqs.iter().for_each(|_| self.fell_back(Fallback::Error));
            return self
                .plain_step(seqs, false, sampling, CacheInstruction::Nothing, post_op)
                .await;
        }
        if speculating == 0 {
            let elapsed = self
                .plain_step(seqs, false, sampling, CacheInstruction::Nothing, post_op)
                .await?;
            self.observe_cost(seqs.len(), 1, start.elapsed());
            return Ok(elapsed);
        }
        self.mixed_step(seqs, &plan, sampling, post_op).await
    }

    /// Some sequences speculate and some do not: two passes, each with the model's cache to
    /// itself.
    async fn mixed_step(
        &mut self,
        seqs: &mut [&mut Sequence],
        plan: &Plan,
        mut sampling: Sampling<'_>,
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
        match self.draft_and_verify(&mut speculating, plan.rows)? {
            Some(verified) => {
                self.accept(&mut speculating, &verified, &mut sampling)
                    .await?;
            }
            None => {
                speculating
                    .iter()
                    .for_each(|_| self.fell_back(Fallback::Error));
                let sampling = Sampling {
                    prefix_cacher: sampling.prefix_cacher,
                    disable_eos_stop: sampling.disable_eos_stop,
                    rng: sampling.rng.clone(),
                };
                let nothing = CacheInstruction::Nothing;
                self.plain_step(&mut speculating, false, sampling, nothing, post_op)
                    .await?;
            }
        }
        self.plain_step(&mut plain, false, sampling, CacheInstruction::In, post_op)
            .await?;
        Ok(start.elapsed())
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

    /// Decide which sequences speculate, and how many rows to verify.
    fn plan(&mut self, seqs: &[&mut Sequence]) -> Result<Plan> {
        let capacity =
            verify::model_capacity(&*self.target)?.min(self.target.get_metadata().max_seq_len);
        // Rows that each may verify, or why it is decoded plainly.
        let rooms: Vec<std::result::Result<usize, Fallback>> =
            seqs.iter().map(|seq| self.room(seq, capacity)).collect();
        let most = seqs
            .iter()
            .zip(&rooms)
            .filter_map(|(seq, room)| Some(self.useful(seq, *room.as_ref().ok()?)))
            .max()
            .unwrap_or(1);
        let speculating: Vec<_> = seqs
            .iter()
            .zip(&rooms)
            .filter(|(_, room)| room.is_ok())
            .filter_map(|(seq, _)| state::of(seq))
            .collect();
        let rows = match &mut self.controller {
            Some(controller) if !speculating.is_empty() => {
                let acceptances: Vec<_> = speculating.iter().map(|s| &s.acceptance).collect();
                controller.choose(&acceptances, most)
            }
            _ => self.worker.block_size().min(most),
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

    /// Rows that a sequence can verify: 2 or more.
    fn room(&self, seq: &Sequence, capacity: usize) -> std::result::Result<usize, Fallback> {
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

    /// Rows that can be worth verifying, of `room`: those behind the last token that the request
    /// may have are never emitted.
    fn useful(&self, seq: &Sequence, room: usize) -> usize {
        match self.controller {
            Some(_) => seq.remaining_tokens().map_or(room, |left| room.min(left)),
            None => room,
        }
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
        if self.hooks.fault_at(FaultPoint::NanFeatures).is_err() {
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

    /// Let each sequence sample its rows until its choice is no draft or it ends.
    async fn accept(
        &mut self,
        seqs: &mut [&mut Sequence],
        verified: &Verified,
        sampling: &mut Sampling<'_>,
    ) -> Result<()> {
        let Verified {
            bases,
            blocks,
            logits,
        } = verified;
        let first_rows: Vec<usize> = bases.iter().map(|base| base + 1).collect();
        verify::publish(&*self.target, seqs, &first_rows)?;
        for (i, seq) in seqs.iter_mut().enumerate() {
            let drafts = blocks[i].get(1..).unwrap_or_default();
            seq.set_pending_drafts(drafts.iter().copied());
            let mut rows = Rows {
                seq,
                target: &self.target,
                sampling: &mut *sampling,
                logits: logits.i(i)?,
                drafts,
                hooks: &self.hooks,
            };
            let walked = commit::walk(&mut rows, bases[i], drafts).await?;
            self.hooks
                .stats
                .verified(drafts.len(), walked.accepted, walked.emitted.len());
            self.counters
                .record(drafts.len(), walked.accepted, walked.emitted.len());
            // A sequence that ended with an accepted draft says nothing of the drafts behind it.
            let judged = match walked.ended && walked.emitted.len() == walked.accepted {
                true => walked.accepted,
                false => drafts.len(),
            };
            if let Some(state) = state::of_mut(seq) {
                state.acceptance.observe(judged, walked.accepted);
            }
            if let Some(controller) = &mut self.controller {
                controller.observe_acceptance(judged, walked.accepted);
            }
            if let Some(observer) = &self.hooks.observer {
                observer(&Round {
                    sequence: *seq.id(),
                    batch: blocks.len(),
                    position: bases[i],
                    anchor: blocks[i][0],
                    drafts: drafts.to_vec(),
                    accepted: walked.accepted,
                    emitted: walked.emitted,
                });
            }
            self.check_lengths(seq)?;
        }
        // The model's cache goes on with what each has committed.
        let lens: Vec<usize> = seqs.iter().map(|seq| committed(seq)).collect();
        verify::set_model_lens(&*self.target, &lens)
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

/// The verified rows of one sequence, in front of the host's sampler.
struct Rows<'a, 'b> {
    seq: &'a mut Sequence,
    target: &'a Target,
    sampling: &'a mut Sampling<'b>,
    /// `[rows, vocab]`
    logits: Tensor,
    drafts: &'a [u32],
    hooks: &'a Hooks,
}

impl VerifiedSequence for Rows<'_, '_> {
    type Error = candle_core::Error;

    fn set_len(&mut self, len: usize) -> Result<()> {
        verify::set_seq_len(self.seq, len)?;
        match state::kv_mut(self.seq) {
            Some(kv) => Ok(kv.set_len(len)?),
            None => Ok(()),
        }
    }

    async fn choose(&mut self, row: usize) -> Result<Choice> {
        let before = self.seq.get_toks().len();
        let logits = self.logits.narrow(0, row, 1)?;
        self.sampling
            .sample(self.target, &mut [&mut *self.seq], vec![logits])
            .await?;
        let mut emitted = self.seq.get_toks().get(before).copied();
        let draft = self.drafts.get(row).copied();
        if emitted.is_some() && draft.is_some() && self.hooks.goes_wrong_at(FaultPoint::Accept) {
            emitted = draft;
        }
        Ok(match emitted {
            Some(token) if self.seq.is_running() => Choice::Token(token),
            Some(token) => Choice::Last(token),
            // The sampler failed and has told the client; the sequence is in error.
            None => Choice::None,
        })
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
