//! RMS norm of rows.

use candle_core::Tensor;
use dflash_kernels::Norm;

use crate::error::Result;

/// Over the last dim of `x`. On a GPU by a kernel that reads whole rows at once.
pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    if x.device().is_cuda() && x.rank() == 2 && weight.dtype() == x.dtype() {
        return Ok(dflash_kernels::rms_norm(x, Norm { weight, eps })?);
    }
    Ok(candle_nn::ops::rms_norm(x, weight, eps)?)
}
