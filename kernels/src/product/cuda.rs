//! Launches the kernels of `cuda/product.cu`.

use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::cublas::result::gemm_ex;
use candle_core::cuda_backend::cudarc::cublas::{sys, CudaBlas};
use candle_core::cuda_backend::cudarc::driver::sys::CUstreamCaptureStatus;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, DeviceId, WrapErr};
use candle_core::{CudaDevice, DType, Result, Tensor};
use half::{bf16, f16};

use super::{Weight, MOST_PRODUCT_ROWS, MOST_WEIGHTS};
use crate::check::mismatch;
use crate::cuda::{
    address_of, aligned_rows, kernel, launch, shared_limit, tensor_of, to_i32, KernelSpec, Order,
};

const WARPS: usize = 8;
/// Outputs of a thread block at a time; half of each weight if gated.
const TILE: usize = 32;
/// Of the width, that a warp takes at a time.
const UNIT: usize = 64;

/// The struct `ProductParams` of `cuda/product.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: u64,
    residual: u64,
    weight: [u64; MOST_WEIGHTS],
    bias: [u64; MOST_WEIGHTS],
    out: [u64; MOST_WEIGHTS],
    x_stride: i64,
    outputs: [i32; MOST_WEIGHTS],
    first_tile: [i32; MOST_WEIGHTS],
    weights: i32,
    rows: i32,
    width: i32,
    steps: i32,
    tiles: i32,
    gated: i32,
}

// SAFETY: plain numbers in C layout.
unsafe impl DeviceRepr for Params {}

/// Names and stages of the variants for up to 8 and 16 rows, longest ring first; the table of
/// `KERNELS` in the kernel.
type Names = [(usize, &'static str, &'static str); 3];
const VARIANTS: [(usize, Names); 2] = [
    (
        8,
        [
            (
                10,
                "product_bf16_rows8_stages10",
                "product_f16_rows8_stages10",
            ),
            (7, "product_bf16_rows8_stages7", "product_f16_rows8_stages7"),
            (4, "product_bf16_rows8_stages4", "product_f16_rows8_stages4"),
        ],
    ),
    (
        MOST_PRODUCT_ROWS,
        [
            (
                8,
                "product_bf16_rows16_stages8",
                "product_f16_rows16_stages8",
            ),
            (
                6,
                "product_bf16_rows16_stages6",
                "product_f16_rows16_stages6",
            ),
            (
                3,
                "product_bf16_rows16_stages3",
                "product_f16_rows16_stages3",
            ),
        ],
    ),
];

/// Bytes of shared memory: the ring and the warps' sums.
fn shared_bytes(rows: usize, stages: usize) -> usize {
    stages * (TILE / 8 + rows / 8) * WARPS * 32 * 16 + WARPS * rows * (TILE + 4) * 4
}

/// The variant for so many rows with the longest ring that fits.
fn variant(dtype: DType, rows: usize, limit: usize) -> Option<KernelSpec> {
    let (most, names) = VARIANTS.iter().find(|(most, _)| rows <= *most)?;
    names.iter().find_map(|(stages, for_bf16, for_f16)| {
        let shared_bytes = shared_bytes(*most, *stages);
        (shared_bytes <= limit).then_some(KernelSpec {
            module: "product",
            name: if dtype == DType::BF16 {
                for_bf16
            } else {
                for_f16
            },
            threads: WARPS * 32,
            shared_bytes,
        })
    })
}

/// Whether thread blocks of this GPU have room for the kernel.
pub(crate) fn has_room(x: &Tensor) -> bool {
    let device = x.device().as_cuda_device();
    let limit = device.and_then(shared_limit).unwrap_or(0);
    variant(x.dtype(), MOST_PRODUCT_ROWS, limit).is_some()
}

/// Whether the kernel, and a chain of launches, can read this weight.
pub(crate) fn covers(each: &Weight, dtype: DType) -> bool {
    let weight = each.weight;
    weight.dtype() == dtype
        && each.outputs() > 0
        && weight.is_contiguous()
        && weight.layout().start_offset().is_multiple_of(8)
        && weight
            .dims()
            .get(1)
            .is_some_and(|width| *width > 0 && width.is_multiple_of(8))
}

/// One weight's part of a launch.
#[derive(Clone, Copy, Default)]
pub(crate) struct Part {
    pub weight: u64,
    pub bias: u64,
    pub outputs: usize,
    pub out: u64,
}

impl Part {
    /// Of a weight with its bias, which is dense; where the result goes is not known yet.
    pub fn of(each: &Weight, bias: Option<&Tensor>) -> Result<Self> {
        Ok(Self {
            weight: address_of(each.weight)?,
            bias: bias.map_or(Ok(0), address_of)?,
            outputs: each.outputs(),
            out: 0,
        })
    }
}

/// Addresses and sizes of a launch.
pub(crate) struct Job<'a> {
    pub x: u64,
    pub x_stride: usize,
    pub rows: usize,
    pub width: usize,
    pub residual: u64,
    pub parts: &'a [Part],
    pub gated: bool,
}

/// Launch it.
///
/// # Safety
/// The addresses must be valid for what the kernel does, those of `x` and weights multiples of 16, and
/// `width` and `x_stride` multiples of 8.
pub(crate) unsafe fn enqueue(device: &CudaDevice, dtype: DType, job: &Job) -> Result<()> {
    let Some(spec) = variant(dtype, job.rows, shared_limit(device)?) else {
        return Err(mismatch(
            "rows of a product",
            format!("at most {MOST_PRODUCT_ROWS}, with shared memory for them"),
            job.rows.to_string(),
        ));
    };
    let kernel = kernel(device, spec)?;
    let mut params = Params {
        x: job.x,
        residual: job.residual,
        weight: [0; MOST_WEIGHTS],
        bias: [0; MOST_WEIGHTS],
        out: [0; MOST_WEIGHTS],
        x_stride: job.x_stride as i64,
        outputs: [0; MOST_WEIGHTS],
        first_tile: [0; MOST_WEIGHTS],
        weights: to_i32(job.parts.len())?,
        rows: to_i32(job.rows)?,
        width: to_i32(job.width)?,
        steps: to_i32(UNIT / 32 * job.width.div_ceil(UNIT).div_ceil(WARPS))?,
        tiles: 0,
        gated: i32::from(job.gated),
    };
    let mut tiles = 0;
    for (i, part) in job.parts.iter().enumerate().take(MOST_WEIGHTS) {
        (params.weight[i], params.bias[i], params.out[i]) = (part.weight, part.bias, part.out);
        params.outputs[i] = to_i32(part.outputs)?;
        if job.gated {
            tiles = part.outputs.div_ceil(TILE / 2);
        } else {
            params.first_tile[i] = to_i32(tiles)?;
            tiles += part.outputs.div_ceil(TILE);
        }
    }
    params.tiles = to_i32(tiles)?;
    let grid = [tiles.min(kernel.slots), 1, 1];
    // SAFETY: the kernel takes these parameters; the rest is the caller's.
    unsafe {
        launch(
            &device.cuda_stream(),
            &kernel,
            grid,
            &params,
            Order::Overlapping,
        )
    }
}

/// A product of many rows: `x`, `[rows, width]`, with one weight, without its bias.
pub(crate) struct Gemm {
    pub x: u64,
    pub rows: usize,
    pub width: usize,
    pub part: Part,
}

/// Launch it by cuBLAS.
///
/// # Safety
/// The addresses must be valid for what it reads and writes.
pub(crate) unsafe fn multiply(device: &CudaDevice, dtype: DType, gemm: &Gemm) -> Result<()> {
    let blas = workspace(device)?;
    let kind = match dtype {
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        _ => sys::cudaDataType::CUDA_R_16F,
    };
    let (one, zero) = (1f32, 0f32);
    let (outputs, width) = (to_i32(gemm.part.outputs)?, to_i32(gemm.width)?);
    // For cuBLAS, matrices are the other way round.
    // SAFETY: the caller's.
    unsafe {
        gemm_ex(
            *blas.handle(),
            sys::cublasOperation_t::CUBLAS_OP_T,
            sys::cublasOperation_t::CUBLAS_OP_N,
            outputs,
            to_i32(gemm.rows)?,
            width,
            (&one as *const f32).cast(),
            gemm.part.weight as *const c_void,
            kind,
            width,
            gemm.x as *const c_void,
            kind,
            width,
            (&zero as *const f32).cast(),
            gemm.part.out as *mut c_void,
            kind,
            outputs,
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
        )
    }
    .w()
}

/// The device's cuBLAS, with memory of its own to work in: it would otherwise ask for some, and give it
/// back, at each product of a CUDA graph.
fn workspace(device: &CudaDevice) -> Result<Arc<CudaBlas>> {
    const BYTES: usize = 32 << 20; // what NVIDIA recommends for Hopper
    static GIVEN: LazyLock<Mutex<HashMap<DeviceId, CudaSlice<u8>>>> = LazyLock::new(Mutex::default);
    let blas = device.cublas_handle();
    let stream = device.cuda_stream();
    if stream.capture_status().w()? != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        return Ok(blas); // Memory that is asked for now would be the recording's.
    }
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Entry::Vacant(entry) = given.entry(device.id()) {
        // SAFETY: nobody reads it before cuBLAS has written it.
        let Ok(memory) = (unsafe { device.alloc::<u8>(BYTES) }) else {
            return Ok(blas); // It may do with less.
        };
        // SAFETY: it lives as long as the process; the device's stream is the only one that uses it.
        let status = unsafe {
            let at = memory.device_ptr(&stream).0 as *mut c_void;
            sys::cublasSetWorkspace_v2(*blas.handle(), at, BYTES)
        };
        status.result().w()?;
        entry.insert(memory);
    }
    Ok(blas)
}

pub(super) fn product(
    x: &Tensor,
    weights: &[Weight],
    residual: Option<&Tensor>,
    gated: bool,
) -> Result<Vec<Tensor>> {
    match x.dtype() {
        DType::BF16 => launched::<bf16>(x, weights, residual, gated),
        _ => launched::<f16>(x, weights, residual, gated),
    }
}

fn launched<T: CudaDType + DeviceRepr>(
    x: &Tensor,
    weights: &[Weight],
    residual: Option<&Tensor>,
    gated: bool,
) -> Result<Vec<Tensor>> {
    let x = aligned_rows(x, 1)?;
    let residual = residual.map(Tensor::contiguous).transpose()?;
    let biases = weights
        .iter()
        .map(|each| each.bias.map(Tensor::contiguous).transpose());
    let biases = biases.collect::<Result<Vec<_>>>()?;
    let device = x.device().as_cuda_device()?.clone();
    let stream = device.cuda_stream();
    let (rows, width) = x.dims2()?;
    let outputs: Vec<usize> = match gated {
        true => vec![weights[0].outputs()],
        false => weights.iter().map(Weight::outputs).collect(),
    };
    // One piece of memory; its parts start at multiples of 16 bytes.
    let starts: Vec<usize> = outputs
        .iter()
        .scan(0, |at, outputs| {
            let start = *at;
            *at += (rows * outputs).next_multiple_of(8);
            Some(start)
        })
        .collect();
    let all = starts.last().copied().unwrap_or(0) + rows * outputs.last().copied().unwrap_or(0);
    // SAFETY: the kernel writes every element but those between the parts, which nobody reads.
    let out = unsafe { device.alloc::<T>(all)? };
    {
        let (out_at, _out_guard) = out.device_ptr(&stream);
        let mut parts = Vec::with_capacity(weights.len());
        for (i, (each, bias)) in weights.iter().zip(&biases).enumerate() {
            // Of two gated ones there is one result.
            let start = starts.get(i).copied().unwrap_or(0);
            parts.push(Part {
                out: out_at + (start * std::mem::size_of::<T>()) as u64,
                ..Part::of(each, bias.as_ref())?
            });
        }
        let job = Job {
            x: address_of(&x)?,
            x_stride: x.layout().stride()[0],
            rows,
            width,
            residual: residual.as_ref().map_or(Ok(0), address_of)?,
            parts: &parts,
            gated,
        };
        // SAFETY: the tensors outlive the launch; `covers` and `aligned_rows` see to the rest.
        unsafe { enqueue(&device, x.dtype(), &job)? };
    }
    let out = tensor_of(out, device, all);
    let part = |(start, outputs): (&usize, &usize)| {
        out.narrow(0, *start, rows * outputs)?
            .reshape((rows, *outputs))
    };
    starts.iter().zip(&outputs).map(part).collect()
}
