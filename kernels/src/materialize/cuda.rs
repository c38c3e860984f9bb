//! Launches the materialize kernel (`cuda/materialize.cu`).

use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, Tensor};

use super::{Kept, MaterializeSpec, Sizes};
use crate::cuda::{
    address, aligned_rows, kernel, launch, lock_address, lock_optional, on_cuda, to_i32,
    KernelSpec, Order,
};

/// Tokens of a thread block; `TOKENS` in the kernel.
const TOKENS: usize = 16;
/// Layers of one launch; `MAX_LAYERS` in the kernel.
const MAX_LAYERS: usize = 32;
const MAX_HEAD_DIM: usize = 1024;

/// The struct `MaterializeParams` of `cuda/materialize.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    kv: u64,
    k_norm: u64,
    cos: u64,
    sin: u64,
    positions: u64,
    slots: u64,
    kept: u64,
    kept_stride: i64,
    kept_extra: i64,
    kv_stride: i64,
    k_offset: i64,
    v_offset: i64,
    layer_stride: i64,
    num_slots: i64,
    tokens: i32,
    rows: i32,
    kv_heads: i32,
    head_dim: i32,
    rotary_dim: i32,
    block_size: i32,
    table_positions: i32,
    interleaved: i32,
    first_layer: i32,
    eps: f32,
    k_caches: [u64; MAX_LAYERS],
    v_caches: [u64; MAX_LAYERS],
}

// SAFETY: plain numbers in C layout.
unsafe impl DeviceRepr for Params {}

/// Why the kernel does not cover these sizes.
pub(super) fn unsupported(sizes: &Sizes) -> Option<String> {
    let cache = &sizes.cache;
    if cache.head_dim > MAX_HEAD_DIM {
        return Some(format!(
            "head dim {} is over {MAX_HEAD_DIM}",
            cache.head_dim
        ));
    }
    if cache.kv_heads > 65_535 / MAX_LAYERS {
        return Some(format!("{} kv heads are too many", cache.kv_heads));
    }
    None
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
    let kv = aligned_rows(kv, 1)?;
    let k_norm = spec.k_norm.contiguous()?;
    let (cos, sin) = (spec.cos.contiguous()?, spec.sin.contiguous()?);
    let (positions, slots) = (positions.contiguous()?, slots.contiguous()?);

    let (kv_storage, kv_layout) = kv.storage_and_layout();
    let kv_storage = on_cuda("product of K and V", &kv_storage)?;
    let device = kv_storage.device.clone();
    let stream = device.cuda_stream();
    let kv_at = address(kv_storage, kv_layout, &stream)?;
    lock_address!(k_norm_at, k_norm, &stream);
    lock_address!(cos_at, cos, &stream);
    lock_address!(sin_at, sin, &stream);
    lock_address!(positions_at, positions, &stream);
    lock_address!(slots_at, slots, &stream);
    lock_optional!(kept_at, kept.map(|kept| kept.lens()), &stream);

    let cache = &sizes.cache;
    let (k_offset, v_offset, layer_stride) = sizes.offsets(spec.order);
    let mut params = Params {
        kv: kv_at.at,
        k_norm: k_norm_at.at,
        cos: cos_at.at,
        sin: sin_at.at,
        positions: positions_at.at,
        slots: slots_at.at,
        kept: kept_at,
        kept_stride: 0,
        kept_extra: 0,
        kv_stride: kv_layout.stride()[0] as i64,
        k_offset: k_offset as i64,
        v_offset: v_offset as i64,
        layer_stride: layer_stride as i64,
        num_slots: cache.num_slots() as i64,
        tokens: to_i32(sizes.tokens)?,
        rows: to_i32(sizes.rows)?,
        kv_heads: to_i32(cache.kv_heads)?,
        head_dim: to_i32(cache.head_dim)?,
        rotary_dim: to_i32(sizes.rotary_dim)?,
        block_size: to_i32(cache.block_size)?,
        table_positions: to_i32(sizes.table_positions)?,
        interleaved: i32::from(spec.interleaved),
        first_layer: 0,
        eps: spec.eps,
        k_caches: [0; MAX_LAYERS],
        v_caches: [0; MAX_LAYERS],
    };
    if let Some(kept) = kept {
        params.kept_stride = kept.lens().layout().stride()[0] as i64;
        params.kept_extra = kept.extra() as i64;
    }
    let (name, size) = match kv.dtype() {
        DType::BF16 => ("materialize_bf16", 2),
        DType::F16 => ("materialize_f16", 2),
        _ => ("materialize_f32", 4),
    };
    let kernel = kernel(
        &device,
        KernelSpec {
            module: "materialize",
            name,
            threads: TOKENS * 32,
            shared_bytes: TOKENS * (4 * cache.head_dim + size * cache.head_dim + 4),
        },
    )?;
    for (i, caches) in caches.chunks(MAX_LAYERS).enumerate() {
        params.first_layer = to_i32(i * MAX_LAYERS)?;
        let locks = caches
            .iter()
            .map(|(k, v)| (k.storage_and_layout(), v.storage_and_layout()))
            .collect::<Vec<_>>();
        let mut guards = Vec::with_capacity(2 * caches.len());
        for (layer, ((k, k_layout), (v, v_layout))) in locks.iter().enumerate() {
            let k = address(on_cuda("key cache", k)?, k_layout, &stream)?;
            let v = address(on_cuda("value cache", v)?, v_layout, &stream)?;
            (params.k_caches[layer], params.v_caches[layer]) = (k.at, v.at);
            guards.extend([k, v]);
        }
        let grid = [
            sizes.tokens.div_ceil(TOKENS),
            caches.len() * cache.kv_heads,
            1,
        ];
        // SAFETY: the kernel takes these parameters; the addresses live until the guards drop.
        unsafe { launch(&stream, &kernel, grid, &params, Order::After)? };
    }
    Ok(())
}
