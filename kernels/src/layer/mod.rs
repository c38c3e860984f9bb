//! The operations of a draft layer between its matrix products.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod fallback;

use candle_core::{DType, Result, Tensor};

use crate::check::{expect, expect_float, mismatch};
#[cfg(feature = "cuda")]
use crate::slow_path::SlowPath;

#[cfg(feature = "cuda")]
static SLOW: SlowPath = SlowPath::new("norm_rope");

/// What [`norm_rope`] does to the heads.
#[derive(Clone, Copy, Debug)]
pub struct NormRope<'a> {
    /// f32 `[heads, head_dim]`: weights of the RMS norm over each head.
    pub weight: &'a Tensor,
    /// f32 `[rows, rotary_dim / 2]`, for each row's position; the first `rotary_dim` dims of a head are
    /// rotated.
    pub cos: &'a Tensor,
    /// f32 `[rows, rotary_dim / 2]`.
    pub sin: &'a Tensor,
    /// Pairs are neighbours (`2i`, `2i + 1`); otherwise `i`, `i + rotary_dim / 2`.
    pub interleaved: bool,
    /// Epsilon of the norm.
    pub eps: f32,
}

/// Norms and rotates the first `heads` heads of each row: `[rows, heads or more, head_dim]` (f32, bf16 or
/// f16) to `[rows, heads, head_dim]`, with as many heads as `spec.weight` has rows. In f32, rounded once.
///
/// # Errors
/// When shapes, dtypes or devices do not fit.
pub fn norm_rope(x: &Tensor, spec: &NormRope) -> Result<Tensor> {
    expect_float("heads", x)?;
    let (rows, head_dim, heads) = match (x.dims(), spec.weight.dims()) {
        (&[rows, all, head_dim], &[heads, _]) if heads <= all && head_dim.is_multiple_of(2) => {
            (rows, head_dim, heads)
        }
        (dims, weight) => {
            return Err(mismatch(
                "heads",
                format!("[rows, heads, even head dim], with at least the heads of {weight:?}"),
                format!("{dims:?}"),
            ))
        }
    };
    expect("weight", spec.weight, &[heads, head_dim], DType::F32, x)?;
    let half = spec.cos.dims().last().copied().unwrap_or(0);
    if !(1..=head_dim / 2).contains(&half) {
        return Err(mismatch(
            "width of the RoPE tables",
            format!("from 1 to {}, half the head dim", head_dim / 2),
            half.to_string(),
        ));
    }
    for (what, table) in [("cos", spec.cos), ("sin", spec.sin)] {
        expect(what, table, &[rows, half], DType::F32, x)?;
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && rows * heads > 0 {
        match cuda::unsupported(rows, head_dim) {
            None => return cuda::norm_rope(x, spec),
            Some(why) => SLOW.note(&why),
        }
    }
    fallback::norm_rope(x, spec)
}

/// `silu(gate) * up` of `[rows, 2 * width]` (f32, bf16 or f16), gate first: `[rows, width]`. The
/// activated gate is rounded before the product, as two operations would.
///
/// # Errors
/// When shape or dtype does not fit.
pub fn silu_mul(gate_up: &Tensor) -> Result<Tensor> {
    expect_float("gate and up", gate_up)?;
    match *gate_up.dims() {
        [_, both] if both.is_multiple_of(2) => (),
        _ => {
            return Err(mismatch(
                "gate and up",
                "[rows, 2 * width]",
                format!("{:?}", gate_up.dims()),
            ))
        }
    }
    #[cfg(feature = "cuda")]
    if gate_up.device().is_cuda() && gate_up.elem_count() > 0 && gate_up.dims()[0] <= 65_535 {
        return cuda::silu_mul(gate_up);
    }
    fallback::silu_mul(gate_up)
}
