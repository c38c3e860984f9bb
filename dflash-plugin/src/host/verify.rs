//! The verify pass on the host's normal KV cache, and its rollback.

use candle_core::{Device, Result, Tensor};
use mistralrs_core::plugin::{
    CacheManagerMixin, EitherCache, FlashParams, ForwardInputsResult, KvCache, ModelInputs,
    NormalCache, Sequence,
};
use mistralrs_core::Pipeline;

/// The target's inputs for `blocks` (anchor and drafts, all of one length) of sequences whose KV
/// caches all hold `base` rows. Logits of every row are asked for.
pub fn inputs(blocks: &[Vec<u32>], base: usize, device: &Device) -> Result<ModelInputs> {
    let (batch, rows) = (blocks.len(), blocks.first().map_or(0, Vec::len));
    let ids: Vec<u32> = blocks.iter().flatten().copied().collect();
    Ok(ModelInputs {
        input_ids: Tensor::from_vec(ids, (batch, rows), device)?,
        input_ids_full: None,
        seqlen_offsets: vec![base; batch],
        seqlen_offsets_full: None,
        context_lens: vec![(0, rows); batch],
        position_ids: vec![base + rows; batch],
        paged_attn_meta: None,
        flash_meta: FlashParams::empty(true),
        flash_meta_full: None,
    })
}

/// The logits of a verify or plain pass: `[batch, rows, vocab]`.
pub fn logits_of(result: ForwardInputsResult) -> Result<Tensor> {
    match result {
        ForwardInputsResult::CausalGeneration { logits } => Ok(logits),
        _ => candle_core::bail!("the target did not return next-token logits"),
    }
}

/// Set the model's own cache to `len` rows: O(1), rows behind it are overwritten later.
pub fn set_model_len(target: &(dyn Pipeline + Send + Sync), len: usize) -> Result<()> {
    with_model_cache(target, |cache| {
        cache.0.iter_mut().try_for_each(|layer| layer.set_len(len))
    })
}

/// Rows in the model's own cache, if all its layers have the same.
pub fn model_len(target: &(dyn Pipeline + Send + Sync)) -> Result<Option<usize>> {
    with_model_cache(target, |cache| {
        let mut lengths = cache.0.iter().map(KvCache::current_seq_len);
        let first = lengths.next();
        Ok(first.filter(|first| lengths.all(|len| len == *first)))
    })
}

/// Rows that the model's cache can hold in all. The host grows it by whole steps and refuses one
/// that ends past the maximum, so a maximum that is no multiple of the step is not reached.
pub fn model_capacity(target: &(dyn Pipeline + Send + Sync)) -> Result<usize> {
    with_model_cache(target, |cache| {
        Ok(cache
            .0
            .iter()
            .filter_map(|layer| match layer {
                KvCache::Normal { k, .. } => {
                    let growth = k.max_seq_len.saturating_sub(k.capacity_seq_len);
                    let step = NormalCache::CACHE_GROW_SIZE;
                    Some(k.capacity_seq_len + growth / step * step)
                }
                _ => None,
            })
            .min()
            .unwrap_or(0))
    })
}

fn with_model_cache<T>(
    target: &(dyn Pipeline + Send + Sync),
    f: impl FnOnce(&mut NormalCache) -> Result<T>,
) -> Result<T> {
    match target.cache() {
        EitherCache::Normal(cache) => match cache.lock() {
            Ok(mut cache) => f(&mut cache),
            Err(_) => candle_core::bail!("the target's KV cache lock is poisoned"),
        },
        _ => candle_core::bail!("the target's KV cache is not a normal one any more"),
    }
}

/// Rows in the KV cache that `seq` owns (a copy of its part of the model's).
pub fn set_seq_len(seq: &mut Sequence, len: usize) -> Result<()> {
    seq.normal_cache()
        .iter_mut()
        .flatten()
        .try_for_each(|layer| layer.set_len(len))
}

/// Rows in the KV cache that `seq` owns; debug assertions of invariant I2 compare them.
pub fn seq_len(seq: &mut Sequence) -> Option<usize> {
    seq.normal_cache()
        .iter()
        .flatten()
        .next()
        .map(KvCache::current_seq_len)
}

/// Hand the model's cache to the sequences, each with `len` rows.
pub fn publish(
    target: &(dyn Pipeline + Send + Sync),
    seqs: &mut [&mut Sequence],
    len: usize,
) -> Result<()> {
    set_model_len(target, len)?;
    CacheManagerMixin::clone_out_cache(target, seqs);
    Ok(())
}
