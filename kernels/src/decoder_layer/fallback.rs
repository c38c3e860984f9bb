//! The parts from candle's operations.

use candle_core::{DType, Result, Tensor};

use super::parts::{Norm, RotateAndStore};
use crate::check::mismatch;
use crate::materialize::fallback::{norm, rotate};
use crate::paged::PagedShape;

pub(super) fn rms_norm(x: &Tensor, spec: Norm) -> Result<Tensor> {
    let weight = spec.weight.to_dtype(DType::F32)?;
    norm(&x.to_dtype(DType::F32)?, &weight, spec.eps)?.to_dtype(x.dtype())
}

pub(super) fn rotate_and_store(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &RotateAndStore,
    cache: &PagedShape,
) -> Result<Tensor> {
    let dtype = q.dtype();
    let cos = spec.cos.to_dtype(DType::F32)?.unsqueeze(1)?;
    let sin = spec.sin.to_dtype(DType::F32)?.unsqueeze(1)?;
    let turned = |x: &Tensor, of_heads: Option<Norm>| {
        let x = match of_heads {
            Some(of_heads) => rms_norm(x, of_heads)?,
            None => x.clone(),
        };
        rotate(&x.to_dtype(DType::F32)?, &cos, &sin, spec.interleaved)?.to_dtype(dtype)
    };
    let (rows, slots) = written(spec.slots, cache)?;
    if !rows.is_empty() {
        let rows = Tensor::new(rows, q.device())?;
        let k = turned(k, spec.k_norm)?;
        for (of_cache, x, is_keys) in [(spec.keys, &k, true), (spec.values, v, false)] {
            let places = cache.places(&slots, dtype, is_keys);
            let count = places.len();
            let places = Tensor::from_vec(places, count, q.device())?;
            let x = x.contiguous()?.index_select(&rows, 0)?.flatten_all()?;
            of_cache.flatten_all()?.scatter_set(&places, &x, 0)?;
        }
    }
    turned(q, spec.q_norm)
}

/// Rows that are written, and their slots.
fn written(slots: &Tensor, cache: &PagedShape) -> Result<(Vec<u32>, Vec<usize>)> {
    let (mut rows, mut places) = (Vec::new(), Vec::new());
    for (row, slot) in slots.to_vec1::<i64>()?.into_iter().enumerate() {
        if slot < 0 {
            continue;
        }
        let num_slots = cache.num_slots();
        let Some(place) = usize::try_from(slot).ok().filter(|s| *s < num_slots) else {
            return Err(mismatch(
                &format!("slot of row {row}"),
                format!("negative or below {num_slots}"),
                slot.to_string(),
            ));
        };
        rows.push(row as u32);
        places.push(place);
    }
    Ok((rows, places))
}
