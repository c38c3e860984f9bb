//! The host's `Pipeline` around a target's pipeline.

use std::any::Any;
use std::sync::{atomic::AtomicUsize, Arc};
use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{Device, Tensor};
use mistralrs_core::plugin::{
    can_record, AnyMoePipelineMixin, CacheBackendMetadata, CacheManagerMixin, DeviceMapper,
    EitherCache, ForwardInputsResult, GeneralMetadata, HiddenTaps, IsqPipelineMixin, MetadataMixin,
    PreProcessingMixin, PrefixCacheManagerV2, Processor, Sequence, SpeculativeCounters,
    SpeculativeTarget,
};
use mistralrs_core::{ChatTemplate, IsqType, ModelCategory, ModelGenerationDefaults, Pipeline};
use rand_isaac::Isaac64Rng;
use tokenizers::Tokenizer;
use tokio::sync::OwnedMutexGuard;

use super::method::Hooks;
use super::ranks::Ranks;
use crate::controller::Controller;
use crate::pool::DraftPool;
use crate::trace::Phase;
use crate::worker::{DFlashWorker, TargetHead};

/// The target's pipeline, held locked for good: nobody else has a handle on it.
pub type Target = OwnedMutexGuard<dyn Pipeline + Send + Sync>;

/// A target that speculates. Everything but [`Pipeline::step`] is the target's own.
pub struct DFlashPipeline {
    pub(super) target: Target,
    pub(super) worker: DFlashWorker,
    /// Draft K/V of all blocks, if the target's cache is paged.
    pub(super) pool: Option<DraftPool>,
    /// The other ranks of the target, if it is tensor-parallel.
    pub(super) ranks: Option<Ranks>,
    pub(super) hooks: Hooks,
    /// Chooses the rows to verify; `None` verifies whole blocks always.
    pub(super) controller: Option<Controller>,
    /// What the host reports.
    pub(super) counters: Arc<SpeculativeCounters>,
    /// Warnings given so far; see `warn`.
    pub(super) warnings: AtomicUsize,
}

impl DFlashPipeline {
    /// `worker` must come from [`super::pairing::join`] with the same target.
    ///
    /// # Errors
    /// If the target's ranks cannot be joined.
    pub(super) fn new(
        target: Target,
        worker: DFlashWorker,
        pool: Option<DraftPool>,
        hooks: Hooks,
        is_adaptive: bool,
    ) -> candle_core::Result<Self> {
        // Those that are recorded as CUDA graphs: two as usual, and the recording.
        let slow_at_first = match pool.is_some() && can_record(&target.device()) {
            true => 3,
            false => 0,
        };
        let controller =
            is_adaptive.then(|| Controller::new(worker.block_size()).ignoring_first(slow_at_first));
        Ok(Self {
            ranks: Ranks::of(&*target)?,
            target,
            worker,
            pool,
            hooks,
            controller,
            counters: Arc::default(),
            warnings: AtomicUsize::new(0),
        })
    }

    /// The target's embedding and head. Checked at load, so an error here is a broken host.
    pub(super) fn head(&self) -> candle_core::Result<HostHead<'_>> {
        self.target
            .speculative_target()
            .map(HostHead)
            .ok_or_else(|| {
                candle_core::Error::msg("the target lends no embedding and head any more")
            })
    }

    /// The draft K/V of all blocks; there whenever a step is paged.
    pub(super) fn pool(&self) -> candle_core::Result<&DraftPool> {
        self.pool.as_ref().ok_or_else(|| {
            candle_core::Error::msg(
                "got a paged step, but the target was loaded without a paged cache",
            )
        })
    }

    /// Start of a part of a step, if somebody wants to know how long it takes.
    pub(super) fn clock(&self) -> candle_core::Result<Option<Instant>> {
        if self.hooks.phases.is_none() {
            return Ok(None);
        }
        self.target.device().synchronize()?;
        Ok(Some(Instant::now()))
    }

    /// End of a part of a step that began at `start`.
    pub(super) fn clocked(&self, phase: Phase, start: Option<Instant>) -> candle_core::Result<()> {
        if let (Some(start), Some(phases)) = (start, &self.hooks.phases) {
            self.target.device().synchronize()?;
            phases(phase, start.elapsed());
        }
        Ok(())
    }

    /// Positions up to which a verify pass computes what plain decoding does: for nearly every
    /// target all that it has.
    pub(super) fn exact_len(&self) -> usize {
        let max_seq_len = self.target.get_metadata().max_seq_len;
        let target = self.target.speculative_target();
        let exact = target.and_then(SpeculativeTarget::max_exact_len);
        exact.map_or(max_seq_len, |exact| exact.min(max_seq_len))
    }

    pub(super) fn taps(&self) -> candle_core::Result<&HiddenTaps> {
        self.target
            .hidden_taps()
            .ok_or_else(|| candle_core::Error::msg("the target has no hidden-state taps any more"))
    }
}

/// The core ring's view of the host's [`SpeculativeTarget`].
pub struct HostHead<'a>(pub &'a dyn SpeculativeTarget);

impl TargetHead for HostHead<'_> {
    fn embed(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        self.0.embed_tokens(ids)
    }

    fn logits(&self, hidden: &Tensor) -> candle_core::Result<Tensor> {
        self.0.project_logits(hidden)
    }
}

#[async_trait::async_trait]
impl Pipeline for DFlashPipeline {
    fn forward_inputs(
        &mut self,
        inputs: Box<dyn Any>,
        return_raw_logits: bool,
    ) -> candle_core::Result<ForwardInputsResult> {
        self.target.forward_inputs(inputs, return_raw_logits)
    }

    async fn step(
        &mut self,
        seqs: &mut [&mut Sequence],
        is_prompt: bool,
        return_raw_logits: bool,
        prefix_cacher: &mut PrefixCacheManagerV2,
        disable_eos_stop: bool,
        rng: Arc<std::sync::Mutex<Isaac64Rng>>,
        backend: CacheBackendMetadata,
    ) -> candle_core::Result<Duration> {
        let sampling = super::step::Sampling {
            prefix_cacher,
            disable_eos_stop,
            rng,
        };
        self.run_step(seqs, is_prompt, return_raw_logits, sampling, backend)
            .await
    }

    async fn sample_causal_gen(
        &self,
        seqs: &mut [&mut Sequence],
        logits: Vec<Tensor>,
        prefix_cacher: &mut PrefixCacheManagerV2,
        disable_eos_stop: bool,
        rng: Arc<std::sync::Mutex<Isaac64Rng>>,
    ) -> candle_core::Result<()> {
        self.target
            .sample_causal_gen(seqs, logits, prefix_cacher, disable_eos_stop, rng)
            .await
    }

    fn category(&self) -> ModelCategory {
        self.target.category()
    }

    fn hidden_taps(&self) -> Option<&HiddenTaps> {
        self.target.hidden_taps()
    }

    fn speculative_target(&self) -> Option<&dyn SpeculativeTarget> {
        self.target.speculative_target()
    }

    fn batches_unequal_lengths(&self) -> bool {
        // Where a pass depends on how far its sequences are, they must not be at different places.
        self.exact_len() == self.target.get_metadata().max_seq_len
    }

    fn speculative_counters(&self) -> Option<Arc<SpeculativeCounters>> {
        Some(self.counters.clone())
    }

    fn encoder_cache_counters(&self) -> Option<(Arc<AtomicUsize>, Arc<AtomicUsize>)> {
        self.target.encoder_cache_counters()
    }
}

impl PreProcessingMixin for DFlashPipeline {
    fn get_processor(&self) -> Arc<dyn Processor> {
        self.target.get_processor()
    }
    fn get_chat_template(&self) -> Option<Arc<ChatTemplate>> {
        self.target.get_chat_template()
    }
    fn get_input_processor_config(&self) -> Option<Arc<dyn Any>> {
        self.target.get_input_processor_config()
    }
}

impl IsqPipelineMixin for DFlashPipeline {
    fn re_isq_model(&mut self, dtype: IsqType) -> Result<()> {
        self.target.re_isq_model(dtype)
    }
}

impl CacheManagerMixin for DFlashPipeline {
    fn clone_in_cache(&self, seqs: &mut [&mut Sequence]) {
        self.target.clone_in_cache(seqs)
    }
    fn clone_out_cache(&self, seqs: &mut [&mut Sequence]) {
        self.target.clone_out_cache(seqs)
    }
    fn set_none_cache(
        &self,
        seqs: &mut [&mut Sequence],
        reset_non_granular: bool,
        modify_draft_cache: bool,
        load_preallocated_cache: bool,
    ) {
        self.target.set_none_cache(
            seqs,
            reset_non_granular,
            modify_draft_cache,
            load_preallocated_cache,
        )
    }
    fn cache(&self) -> &EitherCache {
        self.target.cache()
    }
}

impl MetadataMixin for DFlashPipeline {
    fn device(&self) -> Device {
        self.target.device()
    }
    fn tokenizer(&self) -> Option<Arc<Tokenizer>> {
        self.target.tokenizer()
    }
    fn name(&self) -> String {
        self.target.name()
    }
    fn reset_non_granular_state(&self) {
        self.target.reset_non_granular_state()
    }
    fn get_metadata(&self) -> Arc<GeneralMetadata> {
        self.target.get_metadata()
    }
    fn generation_defaults(&self) -> Option<ModelGenerationDefaults> {
        self.target.generation_defaults()
    }
    fn device_mapper(&self) -> Option<&dyn DeviceMapper> {
        self.target.device_mapper()
    }
}

/// AnyMoE trains its gates before serving and takes the target's own loader, never this one.
impl AnyMoePipelineMixin for DFlashPipeline {}
