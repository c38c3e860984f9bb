//! A target's layer as a chain of launches.

use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::CudaDType;
use candle_core::{DType, Result, Tensor};
use half::{bf16, f16};

use super::chain::{self, Spec};
use super::cuda::{
    enqueue_rotate, norm_is_covered, rotate_is_covered, rotate_params, RotateParams,
};
use super::parts::Norm;
use super::{sequences, DecoderLayer};
use crate::attention::cuda::{dense_tables, unsupported, Planned, Wanted};
use crate::attention::{check_options, Sizes};
use crate::cuda::address_of;
use crate::paged::PagedShape;
use crate::product::Weight;

/// Sizes of the layer if everything fits together. Otherwise the operations, one by one, do it or say what
/// is wrong.
fn sizes(x: &Tensor, layer: &DecoderLayer) -> Option<Sizes> {
    let (rows, hidden) = x.dims2().ok()?;
    let (heads, head_dim) = layer.heads().ok()?;
    let cache = PagedShape::of(layer.rotate.keys, layer.rotate.values).ok()?;
    let sequences = sequences(rows, layer.block_tables).ok()?;
    let (q, kv, mlp) = (
        heads * head_dim,
        cache.kv_heads * head_dim,
        layer.gate.outputs(),
    );
    let has = |t: &Tensor, dtype: DType, dims: &[usize]| {
        t.dtype() == dtype && t.dims() == dims && t.device().same_device(x.device())
    };
    let dtype = x.dtype();
    let is_linear = |each: &Weight, outputs: usize, width: usize| {
        has(each.weight, dtype, &[outputs, width])
            && each.bias.is_none_or(|bias| has(bias, dtype, &[outputs]))
    };
    let is_norm = |norm: Norm, width: usize| has(norm.weight, dtype, &[width]);
    let rotate = &layer.rotate;
    let half = rotate.cos.dims().last().copied().unwrap_or(0);
    let max_blocks = layer.block_tables.dims().get(1).copied().unwrap_or(0);
    let fits = heads.is_multiple_of(cache.kv_heads)
        && has(rotate.keys, dtype, rotate.keys.dims())
        && is_linear(&layer.q, q, hidden)
        && is_linear(&layer.k, kv, hidden)
        && is_linear(&layer.v, kv, hidden)
        && is_linear(&layer.o, hidden, q)
        && is_linear(&layer.gate, mlp, hidden)
        && is_linear(&layer.up, mlp, hidden)
        && is_linear(&layer.down, hidden, mlp)
        && is_norm(layer.input_norm, hidden)
        && is_norm(layer.mlp_norm, hidden)
        && rotate.q_norm.is_none_or(|norm| is_norm(norm, head_dim))
        && rotate.k_norm.is_none_or(|norm| is_norm(norm, head_dim))
        && (1..=head_dim / 2).contains(&half)
        && has(rotate.cos, dtype, &[rows, half])
        && has(rotate.sin, dtype, &[rows, half])
        && has(rotate.slots, DType::I64, &[rows])
        && has(layer.block_tables, DType::U32, &[sequences, max_blocks])
        && has(layer.context_lens, DType::U32, &[sequences])
        && check_options(&layer.attention, heads, x).is_ok();
    fits.then_some(Sizes {
        batch: sequences,
        rows: rows / sequences,
        heads,
        max_blocks,
        cache,
    })
}

/// Whether all of a layer of these sizes has kernels.
fn covers(x: &Tensor, layer: &DecoderLayer, sizes: &Sizes) -> bool {
    let width = x.dims()[1];
    let cache = &sizes.cache;
    let widths = [sizes.heads, cache.kv_heads].map(|heads| heads * cache.head_dim);
    x.device().is_cuda()
        && [width, widths[0], widths[1], layer.gate.outputs()]
            .iter()
            .all(|width| width.is_multiple_of(8))
        && chain::covers(x, &spec(layer, &[layer.q, layer.k, layer.v], widths[0]))
        && norm_is_covered(width, x.dtype())
        && rotate_is_covered(x.dims()[0], cache)
        && unsupported(sizes).is_none()
}

fn spec<'a>(layer: &DecoderLayer<'a>, projections: &'a [Weight<'a>], attended: usize) -> Spec<'a> {
    Spec {
        input_norm: layer.input_norm,
        projections,
        o: layer.o,
        mlp_norm: layer.mlp_norm,
        gate: layer.gate,
        up: layer.up,
        down: layer.down,
        attended,
    }
}

/// The layer's output, if it fits together and has kernels.
pub(super) fn run(x: &Tensor, layer: &DecoderLayer) -> Result<Option<Tensor>> {
    match sizes(x, layer).filter(|sizes| covers(x, layer, sizes)) {
        Some(sizes) if x.dtype() == DType::BF16 => launched::<bf16>(x, layer, sizes).map(Some),
        Some(sizes) => launched::<f16>(x, layer, sizes).map(Some),
        None => Ok(None),
    }
}

fn launched<T: CudaDType + DeviceRepr>(
    x: &Tensor,
    layer: &DecoderLayer,
    sizes: Sizes,
) -> Result<Tensor> {
    let (rotate, cache) = (&layer.rotate, &sizes.cache);
    let dense = |t: &Tensor| t.contiguous();
    let weight_of = |norm: Option<Norm>| norm.map(|norm| dense(norm.weight)).transpose();
    let (cos, sin, slots) = (dense(rotate.cos)?, dense(rotate.sin)?, dense(rotate.slots)?);
    let (tables, lens) = (
        dense_tables(layer.block_tables)?,
        dense(layer.context_lens)?,
    );
    let sinks = layer.attention.sinks.map(dense).transpose()?;
    let (q_norm, k_norm) = (weight_of(rotate.q_norm)?, weight_of(rotate.k_norm)?);
    let optional = |t: &Option<Tensor>| t.as_ref().map_or(Ok(0), address_of);

    let wanted = Wanted {
        options: &layer.attention,
        longest: layer.longest,
        own: false,
        splits: None,
    };
    let planned = Planned::new(x.device().as_cuda_device()?, x.dtype(), &sizes, &wanted)?;
    let q = sizes.heads * cache.head_dim;
    let turned_bytes = (x.dims()[0] * q * std::mem::size_of::<T>()).next_multiple_of(256);
    let projections = [layer.q, layer.k, layer.v];
    let spec = spec(layer, &projections, q);
    // SAFETY: `sizes` has checked all shapes. The tensors live until `run` returns, and memory is freed
    // in the stream's order.
    unsafe {
        chain::run::<T>(
            x,
            &spec,
            turned_bytes + 4 * planned.scratch(),
            |chain, from, to, scratch| {
                let params = RotateParams {
                    q: from.at[0],
                    k: from.at[1],
                    v: from.at[2],
                    strides: from.strides.map(|stride| stride as i64),
                    bias: from.bias,
                    q_weight: optional(&q_norm)?,
                    k_weight: optional(&k_norm)?,
                    cos: address_of(&cos)?,
                    sin: address_of(&sin)?,
                    slots: address_of(&slots)?,
                    out: scratch,
                    k_cache: address_of(rotate.keys)?,
                    v_cache: address_of(rotate.values)?,
                    ..rotate_params(sizes.heads, rotate, cache)?
                };
                enqueue_rotate(chain.device, chain.dtype, chain.rows, &params)?;
                let strides = [(sizes.rows * q) as i64, q as i64];
                let table_stride = tables.layout().stride()[0];
                let options = &layer.attention;
                let mut params = planned.params(options, strides, [[0; 2]; 2], table_stride)?;
                (params.q, params.out) = (scratch, to);
                (params.k_cache, params.v_cache) =
                    (address_of(rotate.keys)?, address_of(rotate.values)?);
                (params.block_tables, params.context_lens) =
                    (address_of(&tables)?, address_of(&lens)?);
                params.sinks = optional(&sinks)?;
                planned.enqueue(chain.device, &mut params, scratch + turned_bytes as u64)
            },
        )
    }
}
