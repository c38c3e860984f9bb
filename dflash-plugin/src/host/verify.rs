//! The verify pass on the host's normal KV cache, and its rollback.

use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{Device, Result, Tensor};
use mistralrs_core::plugin::{
    CacheManagerMixin, EitherCache, FlashParams, ForwardInputsResult, HybridLayerCache, KvCache,
    ModelInputs, NormalCache, Sequence,
};
use mistralrs_core::Pipeline;

use super::drafted::Drafted;

/// How a verify pass gives its rows to the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// `[batch, rows]`.
    Blocks,
    /// `[batch * rows, 1]`: as decode rows of so many sequences, which the host's layers take without
    /// a transpose. For the paged cache only, and not for recurrent layers.
    Single,
}

/// The target's inputs for blocks of sequences whose KV caches hold `bases` rows. Logits of every row
/// are asked for.
pub fn inputs(
    blocks: &Drafted,
    bases: &[usize],
    layout: Rows,
    device: &Device,
) -> Result<ModelInputs> {
    let (batch, rows) = (blocks.batch(), blocks.rows());
    let (shape, offsets) = match layout {
        Rows::Blocks => ((batch, rows), bases.to_vec()),
        Rows::Single => {
            let offsets = bases.iter().flat_map(|base| *base..base + rows);
            ((batch * rows, 1), offsets.collect())
        }
    };
    Ok(ModelInputs {
        input_ids: blocks.ids(device)?.reshape(shape)?,
        input_ids_full: None,
        position_ids: offsets.iter().map(|offset| offset + shape.1).collect(),
        seqlen_offsets: offsets,
        seqlen_offsets_full: None,
        context_lens: vec![(0, shape.1); shape.0],
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

/// Set the rows of each sequence in the model's own cache: O(1), rows behind them are overwritten
/// later.
pub fn set_model_lens(target: &(dyn Pipeline + Send + Sync), lens: &[usize]) -> Result<()> {
    with_model_cache(target, |layers| {
        let mut layers = layers.iter_mut();
        layers.try_for_each(|layer| layer.set_row_lens(lens))
    })
}

/// Whether every layer of the model's own cache holds exactly these sequences' rows.
pub fn model_holds(target: &(dyn Pipeline + Send + Sync), lens: &[usize]) -> Result<bool> {
    with_model_cache(target, |layers| {
        Ok(layers.iter().all(|layer| match layer {
            KvCache::Normal { k, .. } => {
                let batch = k.all_data.as_ref().map_or(0, |data| data.dims()[0]);
                batch == lens.len()
                    && match &k.row_lens {
                        Some(rows) => rows == lens,
                        None => lens.iter().all(|len| *len == k.current_seq_len),
                    }
            }
            _ => false,
        }))
    })
}

/// Rows that the model's cache can hold in all. The host grows it by whole steps and refuses one
/// that ends past the maximum, so a maximum that is no multiple of the step is not reached.
pub fn model_capacity(target: &(dyn Pipeline + Send + Sync)) -> Result<usize> {
    with_model_cache(target, |layers| {
        Ok(layers
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

/// Let layers with a sliding window keep the rows that leave it, so that all layers can be rolled
/// back to any length.
pub fn keep_all_rows(target: &(dyn Pipeline + Send + Sync)) -> Result<()> {
    let max_seq_len = target.get_metadata().max_seq_len;
    with_model_cache(target, |layers| {
        let layers = layers.iter_mut();
        layers.for_each(|layer| layer.keep_all_rows(max_seq_len));
        Ok(())
    })
}

/// `f` on the layers of the model's own cache that hold K/V.
fn with_model_cache<T>(
    target: &(dyn Pipeline + Send + Sync),
    f: impl FnOnce(&mut [&mut KvCache]) -> Result<T>,
) -> Result<T> {
    match target.cache() {
        EitherCache::Normal(cache) => {
            let mut cache = locked(cache);
            f(&mut cache.0.iter_mut().collect::<Vec<_>>())
        }
        EitherCache::Hybrid(cache) => {
            let mut cache = locked(cache);
            let layers = cache.caches.iter_mut();
            let layers = layers.filter_map(HybridLayerCache::as_kv_cache_mut);
            f(&mut layers.collect::<Vec<_>>())
        }
        EitherCache::Full(_) => {
            candle_core::bail!("the target's KV cache is not one that can be set back any more")
        }
    }
}

/// A panic in the model's forward pass poisons the lock; the lengths are put right by those who come
/// here, and the rows behind them are overwritten.
pub(super) fn locked<T>(cache: &Arc<Mutex<T>>) -> MutexGuard<'_, T> {
    cache.lock().unwrap_or_else(|poisoned| {
        cache.clear_poison();
        poisoned.into_inner()
    })
}

/// Rows in the KV cache that `seq` owns (a copy of its part of the model's).
pub fn set_seq_len(seq: &mut Sequence, len: usize) -> Result<()> {
    seq.normal_cache()
        .iter_mut()
        .flatten()
        .try_for_each(|layer| layer.set_len(len))
}

/// Rows in the KV cache that `seq` owns, to be compared for invariant I2.
pub fn seq_len(seq: &mut Sequence) -> Option<usize> {
    seq.normal_cache()
        .iter()
        .flatten()
        .next()
        .map(KvCache::current_seq_len)
}

/// Hand the model's cache to the sequences, each with its own number of rows.
pub fn publish(
    target: &(dyn Pipeline + Send + Sync),
    seqs: &mut [&mut Sequence],
    lens: &[usize],
) -> Result<()> {
    set_model_lens(target, lens)?;
    CacheManagerMixin::clone_out_cache(target, seqs);
    Ok(())
}
