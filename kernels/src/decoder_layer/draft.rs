//! A draft model's layer as a chain of launches.

use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::CudaDType;
use candle_core::{DType, Result, Tensor};
use half::{bf16, f16};

use super::chain::{self, Spec};
use super::cuda::norm_is_covered;
use super::DraftLayer;
use crate::attention::cuda::{dense_tables, unsupported, Planned, Wanted};
use crate::attention::{check_options, Sizes};
use crate::cuda::{address_of, to_i32};
use crate::layer::cuda::{enqueue_norm_rope, NormRopeParams};
use crate::paged::PagedShape;
use crate::product::{Weight, MOST_PRODUCT_ROWS};

/// Sizes of the layer if everything fits together.
fn sizes(x: &Tensor, layer: &DraftLayer) -> Option<Sizes> {
    let (rows, hidden) = x.dims2().ok()?;
    let (all_heads, head_dim) = layer.qk_norm.dims2().ok()?;
    let cache = PagedShape::of(layer.keys, layer.values).ok()?;
    let heads = all_heads
        .checked_sub(cache.kv_heads)
        .filter(|heads| *heads > 0)?;
    let &[sequences, max_blocks] = layer.block_tables.dims() else {
        return None;
    };
    let mlp = layer.gate_up.outputs() / 2;
    let has = |t: &Tensor, dtype: DType, dims: &[usize]| {
        t.dtype() == dtype && t.dims() == dims && t.device().same_device(x.device())
    };
    let dtype = x.dtype();
    let is_linear = |each: &Weight, outputs: usize, width: usize| {
        has(each.weight, dtype, &[outputs, width])
            && each.bias.is_none_or(|bias| has(bias, dtype, &[outputs]))
    };
    let half = layer.cos.dims().last().copied().unwrap_or(0);
    let q = heads * head_dim;
    let fits = heads.is_multiple_of(cache.kv_heads)
        && (1..=rows).contains(&sequences)
        && rows.is_multiple_of(sequences)
        && cache.head_dim == head_dim
        && has(layer.keys, dtype, layer.keys.dims())
        && is_linear(&layer.qkv, (heads + 2 * cache.kv_heads) * head_dim, hidden)
        && is_linear(&layer.o, hidden, q)
        && is_linear(&layer.gate_up, 2 * mlp, hidden)
        && is_linear(&layer.down, hidden, mlp)
        && has(layer.input_norm.weight, dtype, &[hidden])
        && has(layer.mlp_norm.weight, dtype, &[hidden])
        && has(layer.qk_norm, DType::F32, &[all_heads, head_dim])
        && (1..=head_dim / 2).contains(&half)
        && has(layer.cos, DType::F32, &[rows, half])
        && has(layer.sin, DType::F32, &[rows, half])
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

/// A layer's weights with gate and up apart.
struct Halves {
    gate: Tensor,
    up: Tensor,
    biases: Option<(Tensor, Tensor)>,
}

impl Halves {
    fn of(gate_up: Weight) -> Result<Self> {
        let half = gate_up.outputs() / 2;
        let halves = |t: &Tensor| -> Result<(Tensor, Tensor)> {
            Ok((t.narrow(0, 0, half)?, t.narrow(0, half, half)?))
        };
        let (gate, up) = halves(gate_up.weight)?;
        Ok(Self {
            gate,
            up,
            biases: gate_up.bias.map(halves).transpose()?,
        })
    }

    fn spec<'a>(
        &'a self,
        layer: &DraftLayer<'a>,
        projections: &'a [Weight<'a>],
        attended: usize,
    ) -> Spec<'a> {
        let biases = self.biases.as_ref();
        Spec {
            input_norm: layer.input_norm,
            projections,
            o: layer.o,
            mlp_norm: layer.mlp_norm,
            gate: Weight {
                weight: &self.gate,
                bias: biases.map(|(gate, _)| gate),
            },
            up: Weight {
                weight: &self.up,
                bias: biases.map(|(_, up)| up),
            },
            down: layer.down,
            attended,
        }
    }
}

/// Whether all of a layer of these sizes has kernels.
fn covers(x: &Tensor, layer: &DraftLayer, halves: &Halves, sizes: &Sizes) -> bool {
    let (rows, hidden) = (x.dims()[0], x.dims()[1]);
    let q = sizes.heads * sizes.cache.head_dim;
    let projections = [layer.qkv];
    x.device().is_cuda()
        && [hidden, q, halves.gate.dims()[0], sizes.cache.head_dim]
            .iter()
            .all(|width| width.is_multiple_of(8))
        && chain::covers(x, &halves.spec(layer, &projections, q))
        && (rows <= MOST_PRODUCT_ROWS || layer.qkv.bias.is_none())
        && rows <= 65_535
        && norm_is_covered(hidden, x.dtype())
        && unsupported(sizes).is_none()
}

/// The layer's output, if it fits together and has kernels.
pub(super) fn run(x: &Tensor, layer: &DraftLayer) -> Result<Option<Tensor>> {
    let Some(sizes) = sizes(x, layer) else {
        return Ok(None);
    };
    let halves = Halves::of(layer.gate_up)?;
    if !covers(x, layer, &halves, &sizes) {
        return Ok(None);
    }
    match x.dtype() {
        DType::BF16 => launched::<bf16>(x, layer, &halves, sizes).map(Some),
        _ => launched::<f16>(x, layer, &halves, sizes).map(Some),
    }
}

fn launched<T: CudaDType + DeviceRepr>(
    x: &Tensor,
    layer: &DraftLayer,
    halves: &Halves,
    sizes: Sizes,
) -> Result<Tensor> {
    let cache = &sizes.cache;
    let dense = |t: &Tensor| t.contiguous();
    let (cos, sin, qk_norm) = (dense(layer.cos)?, dense(layer.sin)?, dense(layer.qk_norm)?);
    let (tables, lens) = (
        dense_tables(layer.block_tables)?,
        dense(layer.context_lens)?,
    );
    let sinks = layer.attention.sinks.map(dense).transpose()?;
    let wanted = Wanted {
        options: &layer.attention,
        longest: layer.longest,
        own: true,
        splits: None,
    };
    let planned = Planned::new(x.device().as_cuda_device()?, x.dtype(), &sizes, &wanted)?;
    let size = std::mem::size_of::<T>();
    let (q, turned) = (
        sizes.heads * cache.head_dim,
        (sizes.heads + cache.kv_heads) * cache.head_dim,
    );
    let all = turned + cache.kv_heads * cache.head_dim;
    let turned_bytes = (x.dims()[0] * turned * size).next_multiple_of(256);
    let projections = [layer.qkv];
    let spec = halves.spec(layer, &projections, q);
    // SAFETY: `sizes` has checked all shapes. The tensors live until `run` returns, and memory is freed
    // in the stream's order.
    unsafe {
        chain::run::<T>(
            x,
            &spec,
            turned_bytes + 4 * planned.scratch(),
            |chain, from, to, scratch| {
                let params = NormRopeParams {
                    x: from.at[0],
                    weight: address_of(&qk_norm)?,
                    cos: address_of(&cos)?,
                    sin: address_of(&sin)?,
                    out: scratch,
                    x_stride: all as i64,
                    heads: to_i32(sizes.heads + cache.kv_heads)?,
                    head_dim: to_i32(cache.head_dim)?,
                    rotary_dim: to_i32(2 * cos.dim(1)?)?,
                    interleaved: i32::from(layer.interleaved),
                    eps: layer.head_eps,
                };
                enqueue_norm_rope(chain.device, chain.dtype, chain.rows, &params)?;
                let strides = |width: usize| [(sizes.rows * width) as i64, width as i64];
                let own = [strides(turned), strides(all)];
                let table_stride = tables.layout().stride()[0];
                let mut params =
                    planned.params(&layer.attention, strides(turned), own, table_stride)?;
                (params.q, params.out) = (scratch, to);
                (params.k_cache, params.v_cache) =
                    (address_of(layer.keys)?, address_of(layer.values)?);
                params.k_own = scratch + (q * size) as u64;
                params.v_own = from.at[0] + (turned * size) as u64;
                (params.block_tables, params.context_lens) =
                    (address_of(&tables)?, address_of(&lens)?);
                params.sinks = sinks.as_ref().map_or(Ok(0), address_of)?;
                planned.enqueue(chain.device, &mut params, scratch + turned_bytes as u64)
            },
        )
    }
}
