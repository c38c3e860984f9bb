//! Launches `rms_norm` and `rotate_and_store` of `cuda/layer.cu`.

use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr};
use candle_core::cuda_backend::CudaDType;
use candle_core::{CudaDevice, DType, Result, Tensor};
use half::{bf16, f16};

use super::parts::{Norm, RotateAndStore};
use crate::cuda::{
    aligned_rows, by_dtype, enqueue, lock_address, lock_optional, tensor_of, to_i32, KernelSpec,
};
use crate::paged::PagedShape;

/// `NORM_THREADS` and `NORM_PIECES` in the kernel.
const NORM_THREADS: usize = 512;
const NORM_PIECES: usize = 4;
/// Heads of a thread block; `WARPS` in the kernel.
const WARPS: usize = 4;

/// The struct `RmsNormParams` of `cuda/layer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NormParams {
    pub x: u64,
    pub added: u64,
    pub sum: u64,
    pub weight: u64,
    pub out: u64,
    pub x_stride: i64,
    pub width: i32,
    pub eps: f32,
}

/// The struct `RotateParams` of `cuda/layer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RotateParams {
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub bias: [u64; 3],
    pub q_weight: u64,
    pub k_weight: u64,
    pub cos: u64,
    pub sin: u64,
    pub slots: u64,
    pub out: u64,
    pub k_cache: u64,
    pub v_cache: u64,
    pub strides: [i64; 3],
    pub num_slots: i64,
    pub heads: i32,
    pub kv_heads: i32,
    pub head_dim: i32,
    pub rotary_dim: i32,
    pub interleaved: i32,
    pub block_size: i32,
    pub q_eps: f32,
    pub k_eps: f32,
}

// SAFETY: plain numbers in C layout.
unsafe impl DeviceRepr for NormParams {}
// SAFETY: likewise.
unsafe impl DeviceRepr for RotateParams {}

pub(super) fn norm_is_covered(width: usize, dtype: DType) -> bool {
    let piece = 16 / dtype.size_in_bytes();
    width.is_multiple_of(piece) && width / piece <= NORM_THREADS * NORM_PIECES
}

pub(super) fn rotate_is_covered(rows: usize, cache: &PagedShape) -> bool {
    rows <= 65_535 && cache.head_dim <= 1024
}

/// Norm `rows` rows.
///
/// # Safety
/// The addresses must be valid for what the kernel does, and multiples of 16.
pub(super) unsafe fn enqueue_norm(
    device: &CudaDevice,
    dtype: DType,
    rows: usize,
    params: &NormParams,
) -> Result<()> {
    let spec = KernelSpec {
        module: "layer",
        name: by_dtype(dtype, ["rms_norm_bf16", "rms_norm_f16", "rms_norm_f32"]),
        threads: NORM_THREADS,
        shared_bytes: 0,
    };
    // SAFETY: the kernel takes these parameters; the rest is the caller's.
    unsafe { enqueue(device, spec, [rows, 1, 1], params) }
}

/// Rotate and store `rows` rows.
///
/// # Safety
/// The addresses must be valid for what the kernel does.
pub(super) unsafe fn enqueue_rotate(
    device: &CudaDevice,
    dtype: DType,
    rows: usize,
    params: &RotateParams,
) -> Result<()> {
    let names = [
        "rotate_and_store_bf16",
        "rotate_and_store_f16",
        "rotate_and_store_f32",
    ];
    let spec = KernelSpec {
        module: "layer",
        name: by_dtype(dtype, names),
        threads: WARPS * 32,
        shared_bytes: WARPS * params.head_dim as usize * 4,
    };
    let heads = (params.heads + 2 * params.kv_heads) as usize;
    let grid = [heads.div_ceil(WARPS), rows, 1];
    // SAFETY: the kernel takes these parameters; the rest is the caller's.
    unsafe { enqueue(device, spec, grid, params) }
}

pub(super) fn rms_norm(x: &Tensor, norm: Norm) -> Result<Tensor> {
    match x.dtype() {
        DType::BF16 => normed::<bf16>(x, norm),
        DType::F16 => normed::<f16>(x, norm),
        _ => normed::<f32>(x, norm),
    }
}

fn normed<T: CudaDType + DeviceRepr>(x: &Tensor, norm: Norm) -> Result<Tensor> {
    let (x, weight) = (aligned_rows(x, 1)?, aligned_rows(norm.weight, 1)?);
    let device = x.device().as_cuda_device()?.clone();
    let stream = device.cuda_stream();
    let (rows, width) = x.dims2()?;
    // SAFETY: the kernel writes every element.
    let out = unsafe { device.alloc::<T>(rows * width)? };
    {
        lock_address!(x_at, x, &stream);
        lock_address!(weight_at, weight, &stream);
        let (out_at, _out_guard) = out.device_ptr(&stream);
        let params = NormParams {
            x: x_at.at,
            added: 0,
            sum: 0,
            weight: weight_at.at,
            out: out_at,
            x_stride: x.layout().stride()[0] as i64,
            width: to_i32(width)?,
            eps: norm.eps,
        };
        // SAFETY: the addresses live until the guards drop; `aligned_rows` sees to the alignment.
        unsafe { enqueue_norm(&device, x.dtype(), rows, &params)? };
    }
    Ok(tensor_of(out, device, (rows, width)))
}

pub(super) fn rotate_and_store(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &RotateAndStore,
    cache: &PagedShape,
) -> Result<Tensor> {
    match q.dtype() {
        DType::BF16 => rotated::<bf16>(q, k, v, spec, cache),
        DType::F16 => rotated::<f16>(q, k, v, spec, cache),
        _ => rotated::<f32>(q, k, v, spec, cache),
    }
}

/// Everything but the addresses.
pub(super) fn rotate_params(
    heads: usize,
    spec: &RotateAndStore,
    cache: &PagedShape,
) -> Result<RotateParams> {
    let half = spec.cos.dims().last().copied().unwrap_or(0);
    Ok(RotateParams {
        q: 0,
        k: 0,
        v: 0,
        bias: [0; 3],
        q_weight: 0,
        k_weight: 0,
        cos: 0,
        sin: 0,
        slots: 0,
        out: 0,
        k_cache: 0,
        v_cache: 0,
        strides: [heads, cache.kv_heads, cache.kv_heads].map(|n| (n * cache.head_dim) as i64),
        num_slots: cache.num_slots() as i64,
        heads: to_i32(heads)?,
        kv_heads: to_i32(cache.kv_heads)?,
        head_dim: to_i32(cache.head_dim)?,
        rotary_dim: to_i32(2 * half)?,
        interleaved: i32::from(spec.interleaved),
        block_size: to_i32(cache.block_size)?,
        q_eps: spec.q_norm.map_or(0.0, |norm| norm.eps),
        k_eps: spec.k_norm.map_or(0.0, |norm| norm.eps),
    })
}

fn rotated<T: CudaDType + DeviceRepr>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &RotateAndStore,
    cache: &PagedShape,
) -> Result<Tensor> {
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let (cos, sin) = (spec.cos.contiguous()?, spec.sin.contiguous()?);
    let slots = spec.slots.contiguous()?;
    let device = q.device().as_cuda_device()?.clone();
    let stream = device.cuda_stream();
    let dims = q.dims3()?;
    let weight = |norm: Option<Norm>| norm.map(|norm| norm.weight.contiguous()).transpose();
    let (q_weight, k_weight) = (weight(spec.q_norm)?, weight(spec.k_norm)?);
    // SAFETY: the kernel writes every element.
    let out = unsafe { device.alloc::<T>(q.elem_count())? };
    {
        lock_address!(q_at, q, &stream);
        lock_address!(k_at, k, &stream);
        lock_address!(v_at, v, &stream);
        lock_address!(cos_at, cos, &stream);
        lock_address!(sin_at, sin, &stream);
        lock_address!(slots_at, slots, &stream);
        lock_address!(keys_at, spec.keys, &stream);
        lock_address!(values_at, spec.values, &stream);
        lock_optional!(q_weight_at, q_weight.as_ref(), &stream);
        lock_optional!(k_weight_at, k_weight.as_ref(), &stream);
        let (out_at, _out_guard) = out.device_ptr(&stream);
        let params = RotateParams {
            q: q_at.at,
            k: k_at.at,
            v: v_at.at,
            q_weight: q_weight_at,
            k_weight: k_weight_at,
            cos: cos_at.at,
            sin: sin_at.at,
            slots: slots_at.at,
            out: out_at,
            k_cache: keys_at.at,
            v_cache: values_at.at,
            ..rotate_params(dims.1, spec, cache)?
        };
        // SAFETY: the addresses live until the guards drop.
        unsafe { enqueue_rotate(&device, q.dtype(), dims.0, &params)? };
    }
    Ok(tensor_of(out, device, dims))
}
