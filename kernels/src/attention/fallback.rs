//! Block attention out of candle's operations, on any device, sequence by sequence.

use candle_core::{DType, Result, Tensor, D};

use super::{AttentionOptions, PagedContext, Sizes};
use crate::check::mismatch;

/// Rows and keys of one sequence: row `j` is at `first_row + j`, key `i` at `first_key + i`.
struct Span {
    first_row: i64,
    rows: usize,
    first_key: i64,
    keys: usize,
}

pub(super) fn run(
    q: &Tensor,
    context: &PagedContext,
    own: Option<(&Tensor, &Tensor)>,
    options: &AttentionOptions,
    sizes: &Sizes,
) -> Result<Tensor> {
    let lens = context.context_lens.to_vec1::<u32>()?;
    let tables = context.block_tables.to_vec2::<u32>()?;
    let (rows, cache) = (sizes.rows, &sizes.cache);
    let mut outputs = Vec::with_capacity(sizes.batch);
    for (b, (len, table)) in lens.iter().zip(&tables).enumerate() {
        let len = *len as usize;
        let first_row = match own {
            Some(_) => len as i64,
            None => len as i64 - rows as i64,
        };
        // Blocks that no row's window reaches are left out.
        let oldest = match options.window {
            Some(window) => (first_row + 1 - window as i64).max(0) as usize,
            None => 0,
        };
        let first_block = oldest.min(len) / cache.block_size;
        let blocks = check_blocks(b, len, table, sizes)?;
        let first_key = first_block * cache.block_size;
        let mut parts = Vec::new();
        if len > first_key {
            let ids = Tensor::new(&blocks[first_block..], q.device())?;
            parts.push(gather(context, &ids, len - first_key, sizes)?);
        }
        if let Some((k, v)) = own {
            parts.push((dense(k, b)?, dense(v, b)?));
        }
        let span = Span {
            first_row,
            rows,
            first_key: first_key as i64,
            keys: parts.iter().map(|(k, _)| k.dims()[1]).sum(),
        };
        outputs.push(attend(&q.get(b)?, &parts, &span, options, sizes)?);
    }
    Tensor::stack(&outputs, 0)?.to_dtype(q.dtype())
}

/// The blocks that hold `len` positions.
fn check_blocks<'a>(b: usize, len: usize, table: &'a [u32], sizes: &Sizes) -> Result<&'a [u32]> {
    let cache = &sizes.cache;
    let needed = len.div_ceil(cache.block_size);
    let Some(blocks) = table.get(..needed) else {
        return Err(mismatch(
            &format!("context length of sequence {b}"),
            format!("at most {} of its table", table.len() * cache.block_size),
            len.to_string(),
        ));
    };
    if let Some(block) = blocks.iter().find(|id| **id as usize >= cache.num_blocks) {
        return Err(mismatch(
            &format!("block id of sequence {b}"),
            format!("below {}", cache.num_blocks),
            block.to_string(),
        ));
    }
    Ok(blocks)
}

/// K and V of some blocks, each f32 `[kv_heads, len, head_dim]`.
fn gather(
    context: &PagedContext,
    ids: &Tensor,
    len: usize,
    sizes: &Sizes,
) -> Result<(Tensor, Tensor)> {
    let shape = &sizes.cache;
    let places = ids.elem_count() * shape.block_size;
    // [blocks, kv_heads, head_dim / x, block_size, x] -> [kv_heads, blocks, block_size, head_dim / x, x]
    let k = context
        .keys
        .index_select(ids, 0)?
        .permute((1, 0, 3, 2, 4))?
        .reshape((shape.kv_heads, places, shape.head_dim))?;
    // [blocks, kv_heads, head_dim, block_size] -> [kv_heads, blocks, block_size, head_dim]
    let v = context
        .values
        .index_select(ids, 0)?
        .permute((1, 0, 3, 2))?
        .reshape((shape.kv_heads, places, shape.head_dim))?;
    let cut = |t: Tensor| t.narrow(1, 0, len)?.to_dtype(DType::F32)?.contiguous();
    Ok((cut(k)?, cut(v)?))
}

/// `[batch, rows, kv_heads, head_dim]` to f32 `[kv_heads, rows, head_dim]` of one sequence.
fn dense(own: &Tensor, b: usize) -> Result<Tensor> {
    own.get(b)?
        .transpose(0, 1)?
        .to_dtype(DType::F32)?
        .contiguous()
}

/// `q` is `[rows, heads, head_dim]`; the result is f32 of that shape.
fn attend(
    q: &Tensor,
    parts: &[(Tensor, Tensor)],
    span: &Span,
    options: &AttentionOptions,
    sizes: &Sizes,
) -> Result<Tensor> {
    let (rows, heads, dim) = (sizes.rows, sizes.heads, sizes.cache.head_dim);
    if parts.is_empty() {
        return Tensor::zeros((rows, heads, dim), DType::F32, q.device());
    }
    let kv_heads = sizes.cache.kv_heads;
    let group = heads / kv_heads;
    let join = |parts: Vec<&Tensor>| Tensor::cat(&parts, 1);
    let k = join(parts.iter().map(|(k, _)| k).collect())?;
    let v = join(parts.iter().map(|(_, v)| v).collect())?;
    // [rows, heads, dim] -> [kv_heads, group * rows, dim]
    let q = q
        .to_dtype(DType::F32)?
        .transpose(0, 1)?
        .reshape((kv_heads, group * rows, dim))?
        .contiguous()?;
    let mut scores = (q.matmul(&k.transpose(1, 2)?)? * options.scale as f64)?;
    if let Some(cap) = options.softcap {
        scores = ((scores / cap as f64)?.tanh()? * cap as f64)?;
    }
    // [kv_heads, group, rows, keys]
    let scores = scores
        .reshape((kv_heads, group, rows, span.keys))?
        .broadcast_add(&mask(span, options, q.device())?)?;
    // A row that sees nothing has maximum -inf; any finite shift gives it weights of 0.
    let mut shift = scores.max_keepdim(D::Minus1)?.maximum(-1e30)?;
    let sinks = match options.sinks {
        Some(sinks) => Some(sinks.reshape((kv_heads, group, 1, 1))?),
        None => None,
    };
    if let Some(sinks) = &sinks {
        shift = shift.broadcast_maximum(sinks)?;
    }
    let weights = scores.broadcast_sub(&shift)?.exp()?;
    let mut total = weights.sum_keepdim(D::Minus1)?;
    if let Some(sinks) = &sinks {
        total = (total + sinks.broadcast_sub(&shift)?.exp()?)?;
    }
    let probs = weights.broadcast_div(&total.maximum(1e-30)?)?.reshape((
        kv_heads,
        group * rows,
        span.keys,
    ))?;
    probs
        .matmul(&v)?
        .reshape((heads, rows, dim))?
        .transpose(0, 1)?
        .contiguous()
}

/// 0 where a row sees a key and -inf where not, `[rows, keys]`.
fn mask(span: &Span, options: &AttentionOptions, device: &candle_core::Device) -> Result<Tensor> {
    let window = options.window.map(|w| w as u64);
    let sees = |row: usize, key: usize| {
        let (query, key) = (span.first_row + row as i64, span.first_key + key as i64);
        query >= 0
            && window.is_none_or(|window| query.abs_diff(key) < window)
            && (!options.causal || key <= query)
    };
    let bias: Vec<f32> = (0..span.rows)
        .flat_map(|row| (0..span.keys).map(move |key| (row, key)))
        .map(|(row, key)| match sees(row, key) {
            true => 0.0,
            false => f32::NEG_INFINITY,
        })
        .collect();
    Tensor::from_vec(bias, (span.rows, span.keys), device)
}
