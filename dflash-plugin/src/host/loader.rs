//! Loads the target through its own loader, then the drafter, and joins them.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{DType, Device};
use mistralrs_core::{
    DeviceMapSetting, IsqType, Loader, ModelKind, ModelPaths, PagedAttentionConfig, Pipeline,
    SpeculativeOptions, TokenSource, TryIntoDType,
};
use tokio::sync::Mutex;

use super::{method::Hooks, pairing, pipeline::DFlashPipeline, quant::HostQuantizer, source};
use crate::checkpoint::Checkpoint;
use crate::pool::DraftPool;
use crate::quantize::Quantizer;

type LoadedPipeline = Arc<Mutex<dyn Pipeline + Send + Sync>>;

/// Wraps a target's loader.
pub struct DFlashLoader {
    target: Box<dyn Loader>,
    draft_model: String,
    block_size: Option<usize>,
    is_adaptive: bool,
    draft_quant: Option<String>,
    draft_window: Option<usize>,
    hooks: Hooks,
}

/// A draft model that has been checked but not loaded.
pub struct Drafter {
    pub checkpoint: Checkpoint,
    pub quantizer: Option<HostQuantizer>,
}

impl Drafter {
    pub fn quantizer(&self) -> Option<&dyn Quantizer> {
        self.quantizer.as_ref().map(|q| q as &dyn Quantizer)
    }

    /// Bytes of the weights, as they will be kept.
    pub fn bytes(&self, dtype: DType) -> usize {
        self.checkpoint.bytes(dtype, self.quantizer())
    }

    /// Say which layers are quantized otherwise than was asked for.
    fn tell_exceptions(&self) {
        let Some(quantizer) = &self.quantizer else {
            return;
        };
        let config = self.checkpoint.config();
        let mut widths = vec![
            config.hidden_size,
            config.num_attention_heads * config.head_dim,
            config.intermediate_size,
        ];
        widths.sort_unstable();
        widths.dedup();
        for told in widths.into_iter().filter_map(|w| quantizer.exception(w)) {
            tracing::info!("DFlash: draft model: {told}");
        }
    }
}

impl DFlashLoader {
    /// # Errors
    /// If the options name no draft model or an impossible block size.
    pub(super) fn new(
        target: Box<dyn Loader>,
        options: &SpeculativeOptions,
        hooks: Hooks,
    ) -> Result<Self> {
        let draft_model = options.draft_model.clone().context(
            "speculative method `dflash` needs a draft model: give --speculative-draft-model, or \
             draft_model in [models.speculative]",
        )?;
        if let Some(block_size) = options.block_size.filter(|size| *size < 2) {
            anyhow::bail!(
                "speculative block size {block_size}: a block is the last token and at least one \
                 draft, so give 2 or more (--speculative-block-size, or block_size in \
                 [models.speculative])"
            );
        }
        Ok(Self {
            target,
            draft_model,
            block_size: options.block_size,
            is_adaptive: options.adaptive.unwrap_or(true),
            draft_quant: options.draft_quant.clone(),
            draft_window: options.draft_window.filter(|tokens| *tokens > 0),
            hooks,
        })
    }

    /// The draft model's files, before the target is loaded: what is wrong with them, or with the
    /// kind of the target, is said without that wait. `isq` is the quantization of the target.
    fn open(
        &self,
        token_source: &TokenSource,
        silent: bool,
        isq: Option<IsqType>,
        device: &Device,
    ) -> Result<Drafter> {
        pairing::check_kind(&self.target.get_kind(), &self.target.get_id())?;
        let quantizer = HostQuantizer::choose(self.draft_quant.as_deref(), isq, device)?;
        let folder = source::resolve(&self.draft_model, token_source, silent)?;
        let mut checkpoint = Checkpoint::open(&folder).with_context(|| self.cannot_use(&folder))?;
        if let Some(tokens) = self.draft_window {
            checkpoint.bound_context(tokens);
        }
        Ok(Drafter {
            checkpoint,
            quantizer,
        })
    }

    fn cannot_use(&self, folder: &Path) -> String {
        format!(
            "cannot use draft model `{}` ({})",
            self.draft_model,
            folder.display()
        )
    }

    /// Leave room for draft model and draft KV in the memory budget of a paged cache.
    fn share(
        paged: Option<PagedAttentionConfig>,
        drafter: &Drafter,
        dtype: &dyn TryIntoDType,
        device: &Device,
    ) -> Result<Option<PagedAttentionConfig>> {
        let Some(paged) = paged else { return Ok(None) };
        let dtype = dtype.try_into_dtype(&[device])?;
        Ok(Some(paged.reserve(
            drafter.bytes(dtype),
            DraftPool::bytes_per_token(drafter.checkpoint.config(), dtype),
        )))
    }

    fn attach(&self, target: LoadedPipeline, drafter: &Drafter) -> Result<LoadedPipeline> {
        // The target's loader has handed out the only handle, so this lock is free and stays ours.
        let target = target
            .try_lock_owned()
            .context("the target's pipeline is in use while it is being loaded")?;
        let attach = || -> Result<DFlashPipeline> {
            let worker = pairing::join(&*target, drafter, self.block_size)?;
            let pool = pairing::pool(&*target, &worker)?;
            tracing::info!(
                "{}",
                pairing::describe(&*target, &self.draft_model, drafter, &worker)?
            );
            drafter.tell_exceptions();
            if pairing::is_slow(&*target) && !self.is_adaptive {
                tracing::warn!(
                    "DFlash: quantized products on the CPU are compute-bound: with a GGUF target \
                     there, verifying whole blocks is slower than plain decoding; leave \
                     --speculative-adaptive false out"
                );
            }
            let hooks = self.hooks.clone();
            let is_adaptive = self.is_adaptive;
            let pipeline = DFlashPipeline::new(target, worker, pool, hooks, is_adaptive);
            pipeline.context("the ranks of the target cannot be joined")
        };
        let pipeline = attach().with_context(|| self.cannot_use(drafter.checkpoint.dir()))?;
        Ok(Arc::new(Mutex::new(pipeline)))
    }
}

impl Loader for DFlashLoader {
    fn load_model_from_hf(
        &self,
        revision: Option<String>,
        token_source: TokenSource,
        dtype: &dyn TryIntoDType,
        device: &Device,
        silent: bool,
        mapper: DeviceMapSetting,
        in_situ_quant: Option<IsqType>,
        paged_attn_config: Option<PagedAttentionConfig>,
    ) -> Result<LoadedPipeline> {
        let drafter = self.open(&token_source, silent, in_situ_quant, device)?;
        let paged_attn_config = Self::share(paged_attn_config, &drafter, dtype, device)?;
        let target = self.target.load_model_from_hf(
            revision,
            token_source,
            dtype,
            device,
            silent,
            mapper,
            in_situ_quant,
            paged_attn_config,
        )?;
        self.attach(target, &drafter)
    }

    fn load_model_from_path(
        &self,
        paths: &Box<dyn ModelPaths>,
        dtype: &dyn TryIntoDType,
        device: &Device,
        silent: bool,
        mapper: DeviceMapSetting,
        in_situ_quant: Option<IsqType>,
        paged_attn_config: Option<PagedAttentionConfig>,
    ) -> Result<LoadedPipeline> {
        let drafter = self.open(&TokenSource::CacheToken, silent, in_situ_quant, device)?;
        let paged_attn_config = Self::share(paged_attn_config, &drafter, dtype, device)?;
        let target = self.target.load_model_from_path(
            paths,
            dtype,
            device,
            silent,
            mapper,
            in_situ_quant,
            paged_attn_config,
        )?;
        self.attach(target, &drafter)
    }

    fn get_id(&self) -> String {
        self.target.get_id()
    }

    fn get_kind(&self) -> ModelKind {
        self.target.get_kind()
    }
}
