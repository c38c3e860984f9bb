//! The same from candle's operations.

use candle_core::{DType, Result, Tensor, D};
use candle_nn::ops::rms_norm;
use candle_nn::rotary_emb::{rope, rope_i};

use super::NormRope;

pub(super) fn norm_rope(x: &Tensor, spec: &NormRope) -> Result<Tensor> {
    let (heads, head_dim) = spec.weight.dims2()?;
    let ones = Tensor::ones(head_dim, DType::F32, x.device())?;
    let heads = x.narrow(1, 0, heads)?.to_dtype(DType::F32)?.contiguous()?;
    let normed = rms_norm(&heads, &ones, spec.eps)?.broadcast_mul(spec.weight)?;
    // [rows, heads, 1, head_dim]: each row is a sequence of one position.
    let normed = normed.unsqueeze(2)?;
    let (cos, sin) = (spec.cos.unsqueeze(1)?, spec.sin.unsqueeze(1)?);
    let rotary_dim = 2 * cos.dim(D::Minus1)?;
    let first = normed.narrow(D::Minus1, 0, rotary_dim)?.contiguous()?;
    let turned = match spec.interleaved {
        true => rope_i(&first, &cos, &sin)?,
        false => rope(&first, &cos, &sin)?,
    };
    let turned = match head_dim - rotary_dim {
        0 => turned,
        rest => {
            let rest = normed.narrow(D::Minus1, rotary_dim, rest)?.contiguous()?;
            Tensor::cat(&[turned, rest], D::Minus1)?
        }
    };
    turned.squeeze(2)?.to_dtype(x.dtype())
}

pub(super) fn silu_mul(gate_up: &Tensor) -> Result<Tensor> {
    let width = gate_up.dim(1)? / 2;
    let (gate, up) = (
        gate_up.narrow(1, 0, width)?,
        gate_up.narrow(1, width, width)?,
    );
    gate.silu()? * up
}
