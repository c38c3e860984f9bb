//! The same from candle's operations.

use candle_core::{DType, Result, Tensor};

use super::Weight;

pub(super) fn product(x: &Tensor, weights: &[Weight]) -> Result<Vec<Tensor>> {
    let one = |each: &Weight| {
        // candle multiplies bf16 on GPUs only.
        let dtype = match x.device().is_cpu() {
            true => DType::F32,
            false => x.dtype(),
        };
        let weight = each.weight.to_dtype(dtype)?;
        let out = x.to_dtype(dtype)?.matmul(&weight.t()?)?;
        let out = match each.bias {
            Some(bias) => out.broadcast_add(&bias.to_dtype(dtype)?)?,
            None => out,
        };
        out.to_dtype(x.dtype())
    };
    weights.iter().map(one).collect()
}
