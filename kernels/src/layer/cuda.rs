//! Launches the kernels of `cuda/layer.cu`.

use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr};
use candle_core::cuda_backend::CudaDType;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor,
};
use half::{bf16, f16};

use super::NormRope;
use crate::cuda::{
    address, aligned_rows, by_dtype, enqueue, lock_address, tensor_of, to_i32, KernelSpec,
};

/// Heads of a thread block; `WARPS` in the kernel.
const WARPS: usize = 4;
const SILU_THREADS: usize = 256;

/// The struct `NormRopeParams` of `cuda/layer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct NormRopeParams {
    pub x: u64,
    pub weight: u64,
    pub cos: u64,
    pub sin: u64,
    pub out: u64,
    pub x_stride: i64,
    pub heads: i32,
    pub head_dim: i32,
    pub rotary_dim: i32,
    pub interleaved: i32,
    pub eps: f32,
}

/// The struct `SiluMulParams` of `cuda/layer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SiluMulParams {
    pub gate: u64,
    pub up: u64,
    pub out: u64,
    pub stride: i64,
    pub width: i32,
    pub by_pieces: i32,
}

// SAFETY: plain numbers in C layout.
unsafe impl DeviceRepr for NormRopeParams {}
// SAFETY: likewise.
unsafe impl DeviceRepr for SiluMulParams {}

/// Why the kernel does not cover these sizes.
pub(super) fn unsupported(rows: usize, head_dim: usize) -> Option<String> {
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
    let gate_up = aligned_rows(gate_up, 1)?;
    let width = gate_up.dim(1)? / 2;
    let gate = gate_up.narrow(1, 0, width)?;
    let up = gate_up.narrow(1, width, width)?;
    silu_times(&gate, &up)
}

/// `silu(gate) * up` of matrices whose dense rows lie equally far apart.
pub(crate) fn silu_times(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    match gate.dtype() {
        DType::BF16 => launch_silu::<bf16>(gate, up),
        DType::F16 => launch_silu::<f16>(gate, up),
        _ => launch_silu::<f32>(gate, up),
    }
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
            DType::BF16 => self.launch::<bf16>(x, layout),
            DType::F16 => self.launch::<f16>(x, layout),
            _ => self.launch::<f32>(x, layout),
        }
    }
}

impl NormRopeOp {
    fn launch<T: CudaDType + DeviceRepr>(
        &self,
        x: &CudaStorage,
        layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let device = &x.device;
        let stream = device.cuda_stream();
        let rows = layout.dims()[0];
        let (heads, head_dim) = self.weight.dims2()?;
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
                rotary_dim: to_i32(2 * self.cos.dim(1)?)?,
                interleaved: i32::from(self.interleaved),
                eps: self.eps,
            };
            let dtype = candle_core::backend::BackendStorage::dtype(x);
            // SAFETY: the addresses live until the guards drop.
            unsafe { enqueue_norm_rope(device, dtype, rows, &params)? };
        }
        let storage = CudaStorage::wrap_cuda_slice(out, device.clone());
        Ok((storage, Shape::from((rows, heads, head_dim))))
    }
}

/// Launch norm and RoPE of `rows` rows.
///
/// # Safety
/// The addresses must be valid for what the kernel does.
pub(crate) unsafe fn enqueue_norm_rope(
    device: &CudaDevice,
    dtype: DType,
    rows: usize,
    params: &NormRopeParams,
) -> Result<()> {
    let spec = KernelSpec {
        module: "layer",
        name: by_dtype(dtype, ["norm_rope_bf16", "norm_rope_f16", "norm_rope_f32"]),
        threads: WARPS * 32,
        shared_bytes: WARPS * params.head_dim as usize * 4,
    };
    let grid = [(params.heads as usize).div_ceil(WARPS), rows, 1];
    // SAFETY: the kernel takes these parameters; the rest is the caller's.
    unsafe { enqueue(device, spec, grid, params) }
}

/// Launch the gated activation of `rows` rows.
///
/// # Safety
/// The addresses must be valid for what the kernel does; if `by_pieces` is set, all of them and the
/// bytes of a row must be multiples of 16.
pub(crate) unsafe fn enqueue_silu(
    device: &CudaDevice,
    dtype: DType,
    rows: usize,
    params: &SiluMulParams,
) -> Result<()> {
    let spec = KernelSpec {
        module: "layer",
        name: by_dtype(dtype, ["silu_mul_bf16", "silu_mul_f16", "silu_mul_f32"]),
        threads: SILU_THREADS,
        shared_bytes: 0,
    };
    let piece = if params.by_pieces != 0 {
        16 / dtype.size_in_bytes()
    } else {
        1
    };
    let steps = params.width as usize / piece;
    let grid = [steps.div_ceil(SILU_THREADS), rows, 1];
    // SAFETY: the kernel takes these parameters; the rest is the caller's.
    unsafe { enqueue(device, spec, grid, params) }
}

fn launch_silu<T: CudaDType + DeviceRepr>(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let device = gate.device().as_cuda_device()?.clone();
    let stream = device.cuda_stream();
    let (rows, width) = gate.dims2()?;
    let stride = gate.layout().stride()[0];
    if up.layout().stride() != gate.layout().stride() {
        candle_core::bail!("rows of gate and up lie at different distances");
    }
    let piece = 16 / std::mem::size_of::<T>();
    let by_pieces = [width, stride]
        .into_iter()
        .chain([gate, up].map(|t| t.layout().start_offset()))
        .all(|n| n.is_multiple_of(piece));
    // SAFETY: the kernel writes every element.
    let out = unsafe { device.alloc::<T>(rows * width)? };
    {
        lock_address!(gate_at, gate, &stream);
        lock_address!(up_at, up, &stream);
        let (out_at, _out_guard) = out.device_ptr(&stream);
        let params = SiluMulParams {
            gate: gate_at.at,
            up: up_at.at,
            out: out_at,
            stride: stride as i64,
            width: to_i32(width)?,
            by_pieces: i32::from(by_pieces),
        };
        // SAFETY: the addresses live until the guards drop.
        unsafe { enqueue_silu(&device, gate.dtype(), rows, &params)? };
    }
    Ok(tensor_of(out, device, (rows, width)))
}
