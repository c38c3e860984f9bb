//! Launches the accept kernel (`cuda/accept.cu`).

use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor};

use super::Sizes;
use crate::cuda::{
    address, counters, kernel, launch, lock_optional, to_i32, KernelSpec, Order, COUNTERS,
};

const THREADS: usize = 256;
/// Rows of one sequence; `MAX_ROWS` in the kernel.
const MAX_ROWS: usize = 64;
/// Entries of a row that are worth a thread block of their own.
const LEAST_PART: usize = 4096;
/// Parts of one row at most.
const MOST_SPLITS: usize = 64;

/// The struct `AcceptParams` of `cuda/accept.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    logits: u64,
    drafts: u64,
    out: u64,
    parts: u64,
    counters: u64,
    drafts_stride: i64,
    rows: i32,
    vocab: i32,
    splits: i32,
    part: i32,
}

// SAFETY: plain numbers in C layout.
unsafe impl DeviceRepr for Params {}

/// Why the kernel does not cover these sizes.
pub(super) fn unsupported(sizes: &Sizes) -> Option<String> {
    if sizes.sequences > COUNTERS {
        return Some(format!("more than {COUNTERS} sequences"));
    }
    if sizes.rows > MAX_ROWS {
        return Some(format!("more than {MAX_ROWS} rows of a sequence"));
    }
    None
}

pub(super) fn run(logits: &Tensor, drafts: Option<&Tensor>, sizes: &Sizes) -> Result<Tensor> {
    let drafts = match drafts {
        Some(drafts) => Some(match drafts.layout().stride() {
            [_, 1] => drafts.clone(),
            _ => drafts.force_contiguous()?,
        }),
        None => None,
    };
    logits.contiguous()?.apply_op1_no_bwd(&Accept {
        drafts,
        sizes: *sizes,
    })
}

struct Accept {
    drafts: Option<Tensor>,
    sizes: Sizes,
}

impl CustomOp1 for Accept {
    fn name(&self) -> &'static str {
        "accept"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        candle_core::bail!("accept on the CPU is a function of its own")
    }

    fn cuda_fwd(&self, logits: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let device = &logits.device;
        let stream = device.cuda_stream();
        let sizes = &self.sizes;
        let name = match candle_core::backend::BackendStorage::dtype(logits) {
            DType::BF16 => "accept_bf16",
            DType::F16 => "accept_f16",
            _ => "accept_f32",
        };
        let kernel = kernel(
            device,
            KernelSpec {
                module: "accept",
                name,
                threads: THREADS,
                shared_bytes: 0,
            },
        )?;
        let rows = sizes.sequences * sizes.rows;
        let splits = kernel
            .slots
            .div_ceil(rows)
            .min(sizes.vocab.div_ceil(LEAST_PART))
            .clamp(1, MOST_SPLITS);
        // Parts of whole 16-byte pieces, so that all but the last start aligned.
        let part = sizes.vocab.div_ceil(splits).next_multiple_of(64);
        let splits = sizes.vocab.div_ceil(part);
        let shape = match self.drafts {
            Some(_) => Shape::from((sizes.sequences, sizes.rows + 1)),
            None => Shape::from(rows),
        };
        // SAFETY: the kernel writes every element of `out`, and reads of `parts` what it wrote.
        let out = unsafe { device.alloc::<u32>(shape.elem_count())? };
        let parts = unsafe { device.alloc::<u32>(4 * rows * splits)? };
        {
            lock_optional!(drafts, self.drafts.as_ref(), &stream);
            let logits = address(logits, layout, &stream)?;
            let (out_at, _out_guard) = out.device_ptr(&stream);
            let (parts_at, _parts_guard) = parts.device_ptr(&stream);
            let params = Params {
                logits: logits.at,
                drafts,
                out: out_at,
                parts: parts_at,
                counters: counters(device)?,
                drafts_stride: self
                    .drafts
                    .as_ref()
                    .map_or(0, |drafts| drafts.layout().stride()[0] as i64),
                rows: to_i32(sizes.rows)?,
                vocab: to_i32(sizes.vocab)?,
                splits: to_i32(splits)?,
                part: to_i32(part)?,
            };
            let grid = [splits, sizes.rows, sizes.sequences];
            // SAFETY: the kernel takes these parameters; the addresses live until the guards drop.
            unsafe { launch(&stream, &kernel, grid, &params, Order::After)? };
        }
        Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), shape))
    }
}
