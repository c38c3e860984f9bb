//! A layer as one chain of launches. All intermediate results lie in one piece of memory that is asked
//! for before the first launch: a memory operation between two launches would keep the second from
//! starting while the first one ends, in a CUDA graph for good.

use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr};
use candle_core::cuda_backend::CudaDType;
use candle_core::{CudaDevice, DType, Result, Tensor};

use super::cuda::{enqueue_norm, NormParams};
use super::parts::Norm;
use crate::cuda::{address_of, aligned_rows, tensor_of, to_i32};
use crate::layer::cuda::{enqueue_silu, SiluMulParams};
use crate::product::cuda::{self as product, Gemm, Job, Part};
use crate::product::{Weight, MOST_PRODUCT_ROWS};

/// The weights of a layer.
pub(crate) struct Spec<'a> {
    pub input_norm: Norm<'a>,
    /// q, k and v, or one for all.
    pub projections: &'a [Weight<'a>],
    pub o: Weight<'a>,
    pub mlp_norm: Norm<'a>,
    pub gate: Weight<'a>,
    pub up: Weight<'a>,
    pub down: Weight<'a>,
    /// Width of what attention returns.
    pub attended: usize,
}

/// q, k and v of a layer's rows.
#[derive(Clone, Copy)]
pub(crate) struct Projected {
    /// Addresses of what each projection computed. Of one for all, only the first.
    pub at: [u64; 3],
    /// Elements from one row to the next.
    pub strides: [usize; 3],
    /// Biases that are still to be added.
    pub bias: [u64; 3],
}

/// What launches of a chain share.
pub(crate) struct Chain<'a> {
    pub device: &'a CudaDevice,
    pub dtype: DType,
    pub rows: usize,
}

/// Hands out parts of the piece of memory, by their offset in bytes; each starts at a multiple of 256.
#[derive(Default)]
struct Room(usize);

impl Room {
    fn take(&mut self, bytes: usize) -> u64 {
        let at = self.0;
        self.0 += bytes.next_multiple_of(256);
        at as u64
    }
}

/// Whether products of so many rows are the kernel's.
fn is_few(rows: usize) -> bool {
    rows <= MOST_PRODUCT_ROWS
}

/// Whether a chain can be made: shapes are the caller's care.
pub(crate) fn covers(x: &Tensor, spec: &Spec) -> bool {
    let rows = x.dims().first().copied().unwrap_or(0);
    let inner = [spec.o, spec.gate, spec.up, spec.down];
    let all = || spec.projections.iter().chain(&inner);
    let has_fit = all().all(|each| product::covers(each, x.dtype()));
    // Elsewhere biases are added by what follows, if it can.
    let has_bias = inner.iter().any(|each| each.bias.is_some());
    matches!(x.dtype(), DType::BF16 | DType::F16)
        && has_fit
        && (is_few(rows) || !has_bias)
        && (!is_few(rows) || product::has_room(x))
}

/// The layer's output for `x`, `[rows, hidden]`. `attend` launches what is between the projections and
/// `o`: it writes `[rows, attended]` to the address it gets, and has `scratch` bytes at the other one.
///
/// # Safety
/// All weights must have the shapes that `x` and each other ask for, and `attend` must only launch what is
/// valid for its addresses.
pub(crate) unsafe fn run<T: CudaDType + DeviceRepr>(
    x: &Tensor,
    spec: &Spec,
    scratch: usize,
    attend: impl FnOnce(&Chain, Projected, u64, u64) -> Result<()>,
) -> Result<Tensor> {
    let x = aligned_rows(&x.contiguous()?, 1)?; // also read as the residual, dense
    let device = x.device().as_cuda_device()?.clone();
    let stream = device.cuda_stream();
    let (rows, hidden) = x.dims2()?;
    let mlp = spec.gate.outputs();
    let size = std::mem::size_of::<T>();
    let chain = Chain {
        device: &device,
        dtype: x.dtype(),
        rows,
    };
    // Copies, where weights are not dense, have to live as long.
    let dense = |t: &Tensor| t.contiguous();
    let (input_norm, mlp_norm) = (
        aligned_rows(spec.input_norm.weight, 1)?,
        aligned_rows(spec.mlp_norm.weight, 1)?,
    );
    let linears: Vec<Weight> = spec
        .projections
        .iter()
        .chain(&[spec.o, spec.gate, spec.up, spec.down])
        .copied()
        .collect();
    let biases = linears.iter().map(|each| each.bias.map(dense).transpose());
    let biases = biases.collect::<Result<Vec<_>>>()?;
    let parts = linears
        .iter()
        .zip(&biases)
        .map(|(each, bias)| Part::of(each, bias.as_ref()));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let (mut projections, inner) = (
        parts[..spec.projections.len()].to_vec(),
        &parts[spec.projections.len()..],
    );
    let &[o, gate, up, down] = inner else {
        candle_core::bail!("a layer has four weights behind its attention");
    };

    // Weights that lie side by side are one.
    let outputs: Vec<usize> = projections.iter().map(|part| part.outputs).collect();
    let is_plain = projections.iter().all(|part| part.bias == 0);
    let are_one = (is_plain || !is_few(rows)) && side_by_side(&projections, hidden, size);
    let project_biases = [0, 1, 2].map(|i| projections.get(i).map_or(0, |part| part.bias));
    let all_outputs: usize = outputs.iter().sum();
    if are_one {
        projections.truncate(1);
        projections[0].outputs = all_outputs;
    }
    let gate_and_up_are_one = side_by_side(&[gate, up], hidden, size);

    let mut room = Room::default();
    let mut matrix = |width: usize| room.take(rows * width * size);
    let (normed, attended) = (matrix(hidden), matrix(spec.attended));
    let projected: Vec<u64> = projections
        .iter()
        .map(|part| matrix(part.outputs))
        .collect();
    let (middle, active) = (matrix(hidden), matrix(mlp));
    // Only for products that are not the kernel's.
    let (both, product_out) = match is_few(rows) {
        true => (0, 0),
        false => (matrix(2 * mlp), matrix(hidden)),
    };
    let scratch = room.take(scratch);
    // SAFETY: every launch reads only what the ones before it have written.
    let memory = unsafe { device.alloc::<u8>(room.0)? };
    // Of its own, since it may be kept for longer.
    // SAFETY: the last launch writes every element.
    let out = unsafe { device.alloc::<T>(rows * hidden)? };
    {
        let (memory_at, _memory_guard) = memory.device_ptr(&stream);
        let (out_at, _out_guard) = out.device_ptr(&stream);
        let at = |offset: u64| memory_at + offset;
        for (part, place) in projections.iter_mut().zip(&projected) {
            part.out = at(*place);
        }
        let x_at = address_of(&x)?;
        let norm = |x: u64, added: u64, sum: u64, weight: u64, eps: f32| -> Result<()> {
            let params = NormParams {
                x,
                added,
                sum,
                weight,
                out: at(normed),
                x_stride: hidden as i64,
                width: to_i32(hidden)?,
                eps,
            };
            // SAFETY: the addresses live until the end, and hold what the caller promises.
            unsafe { enqueue_norm(&device, chain.dtype, rows, &params) }
        };
        let few = |x: u64, width: usize, residual: u64, parts: &[Part], gated: bool| {
            let job = Job {
                x,
                x_stride: width,
                rows,
                width,
                residual,
                parts,
                gated,
            };
            // SAFETY: as above.
            unsafe { product::enqueue(&device, chain.dtype, &job) }
        };
        let many = |x: u64, width: usize, part: Part| {
            let gemm = Gemm {
                x,
                rows,
                width,
                part,
            };
            // SAFETY: as above.
            unsafe { product::multiply(&device, chain.dtype, &gemm) }
        };

        norm(x_at, 0, 0, address_of(&input_norm)?, spec.input_norm.eps)?;
        if is_few(rows) {
            few(at(normed), hidden, 0, &projections, false)?;
        } else {
            projections
                .iter()
                .try_for_each(|part| many(at(normed), hidden, *part))?;
        }
        let mut places = Projected {
            at: [0; 3],
            strides: [0; 3],
            bias: if is_few(rows) { [0; 3] } else { project_biases },
        };
        let mut before = 0;
        for (i, outputs) in outputs.iter().enumerate().take(3) {
            places.at[i] = match are_one {
                true => at(projected[0]) + (before * size) as u64,
                false => at(projected[i]),
            };
            places.strides[i] = if are_one { all_outputs } else { *outputs };
            before += outputs;
        }
        attend(&chain, places, at(attended), at(scratch))?;

        let with_out = |part: Part, out: u64| Part { out, ..part };
        let mlp_norm = address_of(&mlp_norm)?;
        if is_few(rows) {
            let both = [with_out(gate, at(active)), with_out(up, at(active))];
            let onto = [with_out(o, at(middle))];
            few(at(attended), spec.attended, x_at, &onto, false)?;
            norm(at(middle), 0, 0, mlp_norm, spec.mlp_norm.eps)?;
            few(at(normed), hidden, 0, &both, true)?;
            let onto = [with_out(down, out_at)];
            few(at(active), mlp, at(middle), &onto, false)?;
        } else {
            many(at(attended), spec.attended, with_out(o, at(product_out)))?;
            norm(
                at(product_out),
                x_at,
                at(middle),
                mlp_norm,
                spec.mlp_norm.eps,
            )?;
            let (up_at, stride) = match gate_and_up_are_one {
                true => {
                    let all = Part {
                        outputs: 2 * mlp,
                        ..with_out(gate, at(both))
                    };
                    many(at(normed), hidden, all)?;
                    (at(both) + (mlp * size) as u64, 2 * mlp)
                }
                false => {
                    let up_at = at(both) + (rows * mlp * size) as u64;
                    many(at(normed), hidden, with_out(gate, at(both)))?;
                    many(at(normed), hidden, with_out(up, up_at))?;
                    (up_at, mlp)
                }
            };
            let params = SiluMulParams {
                gate: at(both),
                up: up_at,
                out: at(active),
                stride: stride as i64,
                width: to_i32(mlp)?,
                by_pieces: 1,
            };
            // SAFETY: as above.
            unsafe { enqueue_silu(&device, chain.dtype, rows, &params)? };
            many(at(active), mlp, with_out(down, at(product_out)))?;
            norm(at(product_out), at(middle), out_at, 0, 0.0)?;
        }
    }
    drop(memory);
    Ok(tensor_of(out, device.clone(), (rows, hidden)))
}

/// Whether the weights follow each other in memory, with `width` elements of `size` bytes for an output.
fn side_by_side(parts: &[Part], width: usize, size: usize) -> bool {
    parts
        .windows(2)
        .all(|pair| pair[1].weight == pair[0].weight + (pair[0].outputs * width * size) as u64)
}
