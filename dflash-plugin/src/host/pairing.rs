//! Do target and drafter fit? Everything is checked at load, and every error has both numbers.

use candle_core::{DType, Tensor, D};
use mistralrs_core::plugin::EitherCache;
use mistralrs_core::{ModelCategory, ModelKind, Pipeline};

use super::loader::Drafter;
use super::pipeline::HostHead;
use super::replay::Graphs;
use super::targets::{self, Refusal};
use super::verify;
use crate::config::DraftConfig;
use crate::error::{DFlashError, Result};
use crate::mask_token::resolve_mask_token;
use crate::pool::DraftPool;
use crate::worker::{DFlashWorker, TargetHead};

/// What the drafter must fit.
struct TargetShape {
    layers: usize,
    hidden: usize,
    vocab: usize,
}

/// Check the pair, load the drafter next to the target, and switch the target's taps on.
///
/// # Errors
/// If the target is not supported, or target and drafter do not fit.
pub fn join(
    target: &(dyn Pipeline + Send + Sync),
    drafter: &Drafter,
    block_size: Option<usize>,
) -> Result<DFlashWorker> {
    let shape = check_target(target)?;
    let config = drafter.checkpoint.config();
    let taps = check_pair(&shape, config)?;
    let tokenizer = target
        .tokenizer()
        .ok_or_else(|| unsupported(target, "it has no tokenizer"))?;
    let mask_token =
        resolve_mask_token(config, &|token| tokenizer.token_to_id(token), shape.vocab)?;
    let dtype = target.get_metadata().activation_dtype;
    let model = drafter
        .checkpoint
        .load_quantized(dtype, &target.device(), drafter.quantizer())?;
    let model = model.with_replay(Box::new(Graphs::new(&target.device())));
    let block_size = block_size.unwrap_or(config.verify_rows());
    let worker = DFlashWorker::new(model, mask_token, block_size)?;
    // Only now: without a draft model, sliding windows save memory.
    if target.get_metadata().cache_config.is_none() {
        verify::keep_all_rows(target)?;
    }
    match target.hidden_taps() {
        Some(hidden_taps) => hidden_taps.set_layers(&taps, shape.layers)?,
        None => return Err(unsupported(target, "its layer outputs cannot be captured")),
    }
    Ok(worker)
}

/// Draft K/V for the blocks of the target's paged cache, if it has one.
///
/// # Errors
/// If there is no memory for it, or the draft model's heads cannot be laid out in blocks.
pub fn pool(
    target: &(dyn Pipeline + Send + Sync),
    worker: &DFlashWorker,
) -> Result<Option<DraftPool>> {
    match &target.get_metadata().cache_config {
        Some(cache) => worker
            .new_pool(cache.num_gpu_blocks, cache.block_size)
            .map(Some),
        None => Ok(None),
    }
}

fn unsupported(target: &(dyn Pipeline + Send + Sync), why: &str) -> DFlashError {
    unsupported_model(&target.name(), why)
}

fn unsupported_model(name: &str, why: &str) -> DFlashError {
    DFlashError::unsupported(
        format!("target {name}"),
        format!(
            "{why}. Targets that can be used with DFlash: {}",
            targets::list()
        ),
    )
}

/// What can be said before the target is loaded.
///
/// # Errors
/// If no model of this kind can be used.
pub fn check_kind(kind: &ModelKind, name: &str) -> Result<()> {
    let is_xlora = kind.is_adapted_and(|adapter| adapter.is_x_lora());
    match kind {
        ModelKind::GgufAdapter { .. } if !is_xlora => {
            Err(unsupported_model(name, Refusal::GgufAdapter.reason()))
        }
        _ => Ok(()),
    }
}

/// Why this target cannot be used, if it cannot.
fn refusal(target: &(dyn Pipeline + Send + Sync)) -> Option<Refusal> {
    // First: pipelines of other kinds have no KV cache to ask for.
    if !matches!(
        target.category(),
        ModelCategory::Text | ModelCategory::Multimodal { .. }
    ) {
        return Some(Refusal::NotText);
    }
    let metadata = target.get_metadata();
    if metadata.is_xlora {
        return Some(Refusal::XLora);
    }
    if metadata.no_kv_cache {
        return Some(Refusal::NoKvCache);
    }
    let head = target.speculative_target();
    let is_known = head.is_some_and(|head| targets::find(head.family()).is_some());
    let is_usable = is_known && !matches!(target.cache(), EitherCache::Full(_));
    (!is_usable).then_some(Refusal::Family)
}

fn check_target(target: &(dyn Pipeline + Send + Sync)) -> Result<TargetShape> {
    if let Some(refusal) = refusal(target) {
        return Err(unsupported(target, refusal.reason()));
    }
    let Some(head) = target.speculative_target() else {
        return Err(unsupported(target, Refusal::Family.reason()));
    };
    // Ask the model itself: its config is not always at hand (GGUF), and can differ (padding).
    let head = HostHead(head);
    let one = Tensor::zeros(1, DType::U32, &target.device())?;
    let embedding = head.embed(&one)?;
    let vocab = head.logits(&embedding)?.dim(D::Minus1)?;
    Ok(TargetShape {
        layers: target.get_metadata().num_hidden_layers,
        hidden: embedding.dim(D::Minus1)?,
        vocab,
    })
}

/// Returns the layers to tap, in the order of fc's input columns.
fn check_pair(target: &TargetShape, config: &DraftConfig) -> Result<Vec<usize>> {
    let sizes = [
        (
            "hidden size (`hidden_size`)",
            config.hidden_size,
            target.hidden,
        ),
        (
            "hidden size of the tapped layers (`target_hidden_size`)",
            config.target_hidden_size,
            target.hidden,
        ),
        ("vocabulary (`vocab_size`)", config.vocab_size, target.vocab),
    ];
    for (what, draft, target) in sizes {
        if draft != target {
            return Err(DFlashError::Pair {
                what: what.into(),
                draft,
                target,
                fix: "use the draft model that was trained for this target".into(),
            });
        }
    }
    config.target_layer_ids(target.layers)
}

/// Whether a verified row costs as much as a decoded one, so that speculation cannot pay.
pub fn is_slow(target: &(dyn Pipeline + Send + Sync)) -> bool {
    let is_gguf = matches!(
        target.get_metadata().kind,
        ModelKind::GgufQuantized { .. } | ModelKind::GgufAdapter { .. }
    );
    is_gguf && target.device().is_cpu()
}

/// The start-up line.
pub fn describe(
    target: &(dyn Pipeline + Send + Sync),
    draft_model: &str,
    drafter: &Drafter,
    worker: &DFlashWorker,
) -> Result<String> {
    let config = worker.config();
    let metadata = target.get_metadata();
    let dtype = metadata.activation_dtype;
    let family = target
        .speculative_target()
        .map_or("unknown", |target| target.family());
    let kv_per_token = DraftPool::bytes_per_token(config, dtype);
    let bounded = match config.context_rows() {
        Some(rows) => format!(", attention over the last {rows} tokens of the context"),
        None => String::new(),
    };
    let paged = match &metadata.cache_config {
        Some(cache) => format!(
            ", {:.1} MB of it in {} paged blocks of {}",
            (kv_per_token * cache.num_gpu_blocks * cache.block_size) as f64 / 1e6,
            cache.num_gpu_blocks,
            cache.block_size
        ),
        None => String::new(),
    };
    let quantized = match &drafter.quantizer {
        Some(quantizer) => format!(" and {}", quantizer.name()),
        None => String::new(),
    };
    Ok(format!(
        "DFlash: target {} ({family}, {} layers), drafter {draft_model} ({} layers, {:.1} M \
         parameters, {:.1} MB as {dtype:?}{quantized}, draft KV {:.1} KB a token{paged}{bounded}), taps {:?}, block size \
         {}",
        target.name(),
        metadata.num_hidden_layers,
        config.num_hidden_layers,
        drafter.checkpoint.num_parameters() as f64 / 1e6,
        drafter.bytes(dtype) as f64 / 1e6,
        kv_per_token as f64 / 1e3,
        config.target_layer_ids(metadata.num_hidden_layers)?,
        worker.block_size(),
    ))
}
