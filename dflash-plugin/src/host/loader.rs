//! Loads the target through its own loader, then the drafter, and joins them.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::Device;
use mistralrs_core::{
    DeviceMapSetting, IsqType, Loader, ModelKind, ModelPaths, PagedAttentionConfig, Pipeline,
    SpeculativeOptions, TokenSource, TryIntoDType,
};
use tokio::sync::Mutex;

use super::{method::Hooks, pairing, pipeline::DFlashPipeline, source};
use crate::checkpoint::Checkpoint;
use crate::pool::DraftPool;

type LoadedPipeline = Arc<Mutex<dyn Pipeline + Send + Sync>>;

/// Wraps a target's loader.
pub struct DFlashLoader {
    target: Box<dyn Loader>,
    draft_model: String,
    block_size: Option<usize>,
    is_adaptive: bool,
    hooks: Hooks,
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
            hooks,
        })
    }

    /// The draft model's files, before the target is loaded: what is wrong with them is said
    /// without that wait.
    fn open(&self, token_source: &TokenSource, silent: bool) -> Result<Checkpoint> {
        let folder = source::resolve(&self.draft_model, token_source, silent)?;
        Checkpoint::open(&folder).with_context(|| self.cannot_use(&folder))
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
        checkpoint: &Checkpoint,
        dtype: &dyn TryIntoDType,
        device: &Device,
    ) -> Result<Option<PagedAttentionConfig>> {
        let Some(paged) = paged else { return Ok(None) };
        let dtype = dtype.try_into_dtype(&[device])?;
        Ok(Some(paged.reserve(
            checkpoint.bytes(dtype),
            DraftPool::bytes_per_token(checkpoint.config(), dtype),
        )))
    }

    fn attach(&self, target: LoadedPipeline, checkpoint: &Checkpoint) -> Result<LoadedPipeline> {
        // The target's loader has handed out the only handle, so this lock is free and stays ours.
        let target = target
            .try_lock_owned()
            .context("the target's pipeline is in use while it is being loaded")?;
        let attach = || -> Result<DFlashPipeline> {
            let worker = pairing::join(&*target, checkpoint, self.block_size)?;
            let pool = pairing::pool(&*target, &worker)?;
            tracing::info!(
                "{}",
                pairing::describe(&*target, &self.draft_model, checkpoint, &worker)?
            );
            if pairing::is_slow(&*target) && !self.is_adaptive {
                tracing::warn!(
                    "DFlash: quantized products on the CPU are compute-bound: with a GGUF target \
                     there, verifying whole blocks is slower than plain decoding; leave \
                     --speculative-adaptive false out"
                );
            }
            let hooks = self.hooks.clone();
            let is_adaptive = self.is_adaptive;
            Ok(DFlashPipeline::new(
                target,
                worker,
                pool,
                hooks,
                is_adaptive,
            ))
        };
        let pipeline = attach().with_context(|| self.cannot_use(checkpoint.dir()))?;
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
        let checkpoint = self.open(&token_source, silent)?;
        let paged_attn_config = Self::share(paged_attn_config, &checkpoint, dtype, device)?;
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
        self.attach(target, &checkpoint)
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
        let checkpoint = self.open(&TokenSource::CacheToken, silent)?;
        let paged_attn_config = Self::share(paged_attn_config, &checkpoint, dtype, device)?;
        let target = self.target.load_model_from_path(
            paths,
            dtype,
            device,
            silent,
            mapper,
            in_situ_quant,
            paged_attn_config,
        )?;
        self.attach(target, &checkpoint)
    }

    fn get_id(&self) -> String {
        self.target.get_id()
    }

    fn get_kind(&self) -> ModelKind {
        self.target.get_kind()
    }
}
