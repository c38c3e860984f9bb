//! Materialize out of candle's operations, on any device.

use candle_core::{DType, Result, Tensor, D};

use super::{Kept, MaterializeSpec, Sizes};
use crate::check::mismatch;

/// Tokens that are written, and where.
struct Written {
    tokens: Vec<u32>,
    slots: Vec<usize>,
}

pub(super) fn run(
    kv: &Tensor,
    spec: &MaterializeSpec,
    positions: &Tensor,
    slots: &Tensor,
    kept: Option<Kept>,
    caches: &[(Tensor, Tensor)],
    sizes: &Sizes,
) -> Result<()> {
    let written = written(positions, slots, kept, sizes)?;
    if written.tokens.is_empty() {
        return Ok(());
    }
    let tokens = Tensor::new(written.tokens.as_slice(), kv.device())?;
    let kv = kv.index_select(&tokens, 0)?;
    let positions = positions.index_select(&tokens, 0)?;
    // [written, 1, rotary_dim / 2]
    let cos = spec.cos.index_select(&positions, 0)?.unsqueeze(1)?;
    let sin = spec.sin.index_select(&positions, 0)?.unsqueeze(1)?;

    let cache = &sizes.cache;
    let count = written.slots.len();
    let part = cache.kv_heads * cache.head_dim;
    let (k_offset, v_offset, layer_stride) = sizes.offsets(spec.order);
    let key_places = cache.places(&written.slots, kv.dtype(), true);
    let value_places = cache.places(&written.slots, kv.dtype(), false);
    let key_places = Tensor::from_vec(key_places, count * part, kv.device())?;
    let value_places = Tensor::from_vec(value_places, count * part, kv.device())?;
    for (layer, (keys, values)) in caches.iter().enumerate() {
        // [written, kv_heads, head_dim]
        let head_rows = |offset: usize| {
            kv.narrow(1, offset + layer * layer_stride, part)?.reshape((
                count,
                cache.kv_heads,
                cache.head_dim,
            ))
        };
        let k = head_rows(k_offset)?.to_dtype(DType::F32)?;
        let k = norm(&k, &spec.k_norm.get(layer)?, spec.eps)?;
        let k = rotate(&k, &cos, &sin, spec.interleaved)?.to_dtype(kv.dtype())?;
        let v = head_rows(v_offset)?;
        keys.flatten_all()?
            .scatter_set(&key_places, &k.flatten_all()?.contiguous()?, 0)?;
        values
            .flatten_all()?
            .scatter_set(&value_places, &v.flatten_all()?.contiguous()?, 0)?;
    }
    Ok(())
}

fn written(
    positions: &Tensor,
    slots: &Tensor,
    kept: Option<Kept>,
    sizes: &Sizes,
) -> Result<Written> {
    let positions = positions.to_vec1::<u32>()?;
    let slots = slots.to_vec1::<i64>()?;
    let kept_rows = match kept {
        Some(kept) => Some((kept.lens().to_vec1::<u32>()?, kept.extra())),
        None => None,
    };
    let mut written = Written {
        tokens: Vec::new(),
        slots: Vec::new(),
    };
    for (token, (slot, position)) in slots.iter().zip(positions).enumerate() {
        if *slot == -1 {
            continue;
        }
        if let Some((lens, extra)) = &kept_rows {
            let (sequence, row) = (token / sizes.rows, token % sizes.rows);
            if row >= lens[sequence] as usize + extra {
                continue;
            }
        }
        let num_slots = sizes.cache.num_slots();
        let Some(place) = usize::try_from(*slot).ok().filter(|s| *s < num_slots) else {
            return Err(mismatch(
                &format!("slot of token {token}"),
                format!("-1 or below {num_slots}"),
                slot.to_string(),
            ));
        };
        if position as usize >= sizes.table_positions {
            return Err(mismatch(
                &format!("position of token {token}"),
                format!("below {}, the RoPE tables' length", sizes.table_positions),
                position.to_string(),
            ));
        }
        written.tokens.push(token as u32);
        written.slots.push(place);
    }
    Ok(written)
}

/// RMS norm over the last dim.
pub(crate) fn norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + eps as f64)?.sqrt()?)?
        .broadcast_mul(weight)
}

/// Rotates the first `2 * half` dims of `[tokens, heads, dim]`; the tables are `[tokens, 1, half]`.
pub(crate) fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor, interleaved: bool) -> Result<Tensor> {
    let (tokens, heads, dim) = x.dims3()?;
    let half = cos.dims()[2];
    if half == 0 {
        return Ok(x.clone());
    }
    let turned = x.narrow(2, 0, 2 * half)?;
    let (first, second) = match interleaved {
        true => {
            let pairs = turned.reshape((tokens, heads, half, 2))?;
            (pairs.get_on_dim(3, 0)?, pairs.get_on_dim(3, 1)?)
        }
        false => (turned.narrow(2, 0, half)?, turned.narrow(2, half, half)?),
    };
    let new_first = (first.broadcast_mul(cos)? - second.broadcast_mul(sin)?)?;
    let new_second = (second.broadcast_mul(cos)? + first.broadcast_mul(sin)?)?;
    let turned = match interleaved {
        true => Tensor::stack(&[new_first, new_second], 3)?.reshape((tokens, heads, 2 * half))?,
        false => Tensor::cat(&[new_first, new_second], 2)?,
    };
    if 2 * half == dim {
        return Ok(turned);
    }
    Tensor::cat(&[turned, x.narrow(2, 2 * half, dim - 2 * half)?], 2)
}
