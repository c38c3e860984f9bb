//! Launches the kernels of `cuda/layer.cu`.

use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr};
use candle_core::cuda_backend::CudaDType;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor};
use half::{bf16, f16};

use super::NormRope;
use crate::cuda::{address, aligned_rows, kernel, launch, lock_address, to_i32, KernelSpec, Order};

/// Heads of a thread block; `WARPS` in the kernel.
const WARPS: usize = 4;
const SILU_THREADS: usize = 256;

/// The struct `NormRopeParams` of `cuda/layer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct NormRopeParams {
    x: u64,
    weight: u64,
    cos: u64,
    sin: u64,
    out: u64,
    x_stride: i64,
    heads: i32,
    head_dim: i32,
    interleaved: i32,
    eps: f32,
}

/// The struct `SiluMulParams` of `cuda/layer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SiluMulParams {
    x: u64,
    out: u64,
    x_stride: i64,
    width: i32,
    by_pieces: i32,
}

// SAFETY: plain numbers in C layout.
unsafe impl DeviceRepr for NormRopeParams {}
// SAFETY: likewise.
unsafe impl DeviceRepr for SiluMulParams {}

/// Why the kernel does not cover these sizes.
pub(super) fn unsupported(rows: usize, head_dim: usize, rotary_dim: usize) -> Option<String> {
    if rotary_dim != head_dim {
        return Some(format!(
            "RoPE on {rotary_dim} of the {head_dim} dims of a head"
        ));
    }
    if rows > 65_535 {
        return Some("more than 65535 rows".into());
    }
    if head_dim > 1024 {
        return Some(format!("head dim {head_dim} is above 1024"));
    }
    None
}

pub(super) fn norm_rope(x: &Tensor, spec: &NormRope) -> Result<Tensor> {
    aligned_rows(x, 2)?.apply_op1_no_bwd(&NormRopeOp {
        weight: spec.weight.contiguous()?,
        cos: spec.cos.contiguous()?,
        sin: spec.sin.contiguous()?,
        interleaved: spec.interleaved,
        eps: spec.eps,
    })
}

pub(super) fn silu_mul(gate_up: &Tensor) -> Result<Tensor> {
    aligned_rows(gate_up, 1)?.apply_op1_no_bwd(&SiluMulOp)
}

struct NormRopeOp {
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    eps: f32,
}

impl CustomOp1 for NormRopeOp {
    fn name(&self) -> &'static str {
        "norm-rope"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        candle_core::bail!("norm_rope on the CPU is a function of its own")
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        match candle_core::backend::BackendStorage::dtype(x) {
            DType::BF16 => self.launch::<bf16>(x, layout, "norm_rope_bf16"),
            DType::F16 => self.launch::<f16>(x, layout, "norm_rope_f16"),
            _ => self.launch::<f32>(x, layout, "norm_rope_f32"),
        }
    }
}

impl NormRopeOp {
    fn launch<T: CudaDType + DeviceRepr>(
        &self,
        x: &CudaStorage,
        layout: &Layout,
        name: &'static str,
    ) -> Result<(CudaStorage, Shape)> {
        let device = &x.device;
        let stream = device.cuda_stream();
        let rows = layout.dims()[0];
        let (heads, head_dim) = self.weight.dims2()?;
        let kernel = kernel(
            device,
            KernelSpec {
                module: "layer",
                name,
                threads: WARPS * 32,
                shared_bytes: WARPS * head_dim * 4,
            },
        )?;
        // SAFETY: the kernel writes every element.
        let out = unsafe { device.alloc::<T>(rows * heads * head_dim)? };
        {
            lock_address!(weight, self.weight, &stream);
            lock_address!(cos, self.cos, &stream);
            lock_address!(sin, self.sin, &stream);
            let at = address(x, layout, &stream)?;
            let (out_at, _out_guard) = out.device_ptr(&stream);
            let params = NormRopeParams {
                x: at.at,
                weight: weight.at,
                cos: cos.at,
                sin: sin.at,
                out: out_at,
                x_stride: layout.stride()[0] as i64,
                heads: to_i32(heads)?,
                head_dim: to_i32(head_dim)?,
                interleaved: i32::from(self.interleaved),
                eps: self.eps,
            };
            let grid = [heads.div_ceil(WARPS), rows, 1];
            // SAFETY: the kernel takes these parameters; the addresses live until the guards drop.
            unsafe { launch(&stream, &kernel, grid, &params, Order::After)? };
        }
        let storage = CudaStorage::wrap_cuda_slice(out, device.clone());
        Ok((storage, Shape::from((rows, heads, head_dim))))
    }
}

struct SiluMulOp;

impl CustomOp1 for SiluMulOp {
    fn name(&self) -> &'static str {
        "silu-mul"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        candle_core::bail!("silu_mul on the CPU is a function of its own")
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        match candle_core::backend::BackendStorage::dtype(x) {
            DType::BF16 => launch_silu_mul::<bf16>(x, layout, "silu_mul_bf16"),
            DType::F16 => launch_silu_mul::<f16>(x, layout, "silu_mul_f16"),
            _ => launch_silu_mul::<f32>(x, layout, "silu_mul_f32"),
        }
    }
}

fn launch_silu_mul<T: CudaDType + DeviceRepr>(
    x: &CudaStorage,
    layout: &Layout,
    name: &'static str,
) -> Result<(CudaStorage, Shape)> {
    let device = &x.device;
    let stream = device.cuda_stream();
    let (rows, width) = (layout.dims()[0], layout.dims()[1] / 2);
    let kernel = kernel(
        device,
        KernelSpec {
            module: "layer",
            name,
            threads: SILU_THREADS,
            shared_bytes: 0,
        },
    )?;
    let piece = 16 / std::mem::size_of::<T>();
    let by_pieces = width.is_multiple_of(piece);
    let steps = if by_pieces { width / piece } else { width };
    // SAFETY: the kernel writes every element.
    let out = unsafe { device.alloc::<T>(rows * width)? };
    {
        let at = address(x, layout, &stream)?;
        let (out_at, _out_guard) = out.device_ptr(&stream);
        let params = SiluMulParams {
            x: at.at,
            out: out_at,
            x_stride: layout.stride()[0] as i64,
            width: to_i32(width)?,
            by_pieces: i32::from(by_pieces),
        };
        let grid = [steps.div_ceil(SILU_THREADS), rows, 1];
        // SAFETY: the kernel takes these parameters; the addresses live until the guards drop.
        unsafe { launch(&stream, &kernel, grid, &params, Order::After)? };
    }
    let storage = CudaStorage::wrap_cuda_slice(out, device.clone());
    Ok((storage, Shape::from((rows, width))))
}
