//! Products of few rows with weights, as decode steps and verify passes have them.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod fallback;

use candle_core::{DType, Result, Tensor};

use crate::check::{expect, expect_device, expect_float, mismatch};

/// Up to so many rows the kernel takes; from there on a product of large matrices is faster.
pub const MOST_PRODUCT_ROWS: usize = 16;

/// At most so many weights are multiplied with in one launch.
pub const MOST_WEIGHTS: usize = 3;

/// A linear layer.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    /// `[outputs, width]`, contiguous.
    pub weight: &'a Tensor,
    /// `[outputs]`
    pub bias: Option<&'a Tensor>,
}

impl Weight<'_> {
    pub(crate) fn outputs(&self) -> usize {
        self.weight.dims().first().copied().unwrap_or(0)
    }
}

/// Whether [`product`] of `x` and its relatives launch the kernel: on a CUDA device, in bf16 or f16, with
/// up to [`MOST_PRODUCT_ROWS`] rows and a width that is a multiple of 8. Elsewhere they take candle's
/// product, as good, but a row can come out otherwise among others than alone.
pub fn covers_product(x: &Tensor, weights: &[Weight]) -> bool {
    #[cfg(feature = "cuda")]
    {
        let rows = x.dims().first().copied().unwrap_or(0);
        x.device().is_cuda()
            && (1..=MOST_PRODUCT_ROWS).contains(&rows)
            && (1..=MOST_WEIGHTS).contains(&weights.len())
            && matches!(x.dtype(), DType::BF16 | DType::F16)
            && weights.iter().all(|each| cuda::covers(each, x.dtype()))
            && cuda::has_room(x)
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (x, weights);
        false
    }
}

/// `x W^T + b` of `x` `[rows, width]` (f32, bf16 or f16) for each of up to [`MOST_WEIGHTS`] weights: one
/// tensor `[rows, outputs]` each. The kernel reads every weight once, in one launch; sums are in f32 and
/// rounded once. How a row comes out does not depend on the rows beside it.
///
/// # Errors
/// When shapes, dtypes or devices do not fit.
pub fn product(x: &Tensor, weights: &[Weight]) -> Result<Vec<Tensor>> {
    check(x, weights)?;
    #[cfg(feature = "cuda")]
    if covers_product(x, weights) {
        return cuda::product(x, weights, None, false);
    }
    fallback::product(x, weights)
}

/// [`product`] with one weight, plus `residual` `[rows, outputs]`. The product is rounded before.
///
/// # Errors
/// As [`product`].
pub fn product_onto(x: &Tensor, weight: Weight, residual: &Tensor) -> Result<Tensor> {
    check(x, &[weight])?;
    let dims = [x.dims()[0], weight.outputs()];
    expect("residual", residual, &dims, x.dtype(), x)?;
    #[cfg(feature = "cuda")]
    if covers_product(x, &[weight]) {
        return first(cuda::product(x, &[weight], Some(residual), false)?);
    }
    first(fallback::product(x, &[weight])?)? + residual
}

/// `silu(x G^T) * (x U^T)` for weights of one shape; every step is rounded, as separate operations would.
///
/// # Errors
/// As [`product`], and when the shapes of `gate` and `up` differ.
pub fn gated_product(x: &Tensor, gate: Weight, up: Weight) -> Result<Tensor> {
    let both = [gate, up];
    check(x, &both)?;
    if gate.outputs() != up.outputs() {
        return Err(mismatch(
            "outputs of the up projection",
            format!("those of the gate, {}", gate.outputs()),
            up.outputs().to_string(),
        ));
    }
    #[cfg(feature = "cuda")]
    if covers_product(x, &both) {
        return first(cuda::product(x, &both, None, true)?);
    }
    let [gate, up] = &fallback::product(x, &both)?[..] else {
        return Err(mismatch("products", "two", "another number"));
    };
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && gate.elem_count() > 0 && gate.dims()[0] <= 65_535 {
        return crate::layer::cuda::silu_times(gate, up);
    }
    gate.silu()? * up
}

fn first(tensors: Vec<Tensor>) -> Result<Tensor> {
    tensors
        .into_iter()
        .next()
        .ok_or_else(|| mismatch("weights", "at least one", "none"))
}

fn check(x: &Tensor, weights: &[Weight]) -> Result<()> {
    expect_float("rows", x)?;
    let &[_, width] = x.dims() else {
        return Err(mismatch("rows", "[rows, width]", format!("{:?}", x.dims())));
    };
    if !(1..=MOST_WEIGHTS).contains(&weights.len()) {
        return Err(mismatch(
            "number of weights",
            format!("from 1 to {MOST_WEIGHTS}"),
            weights.len().to_string(),
        ));
    }
    for each in weights {
        match *each.weight.dims() {
            [outputs, columns] if columns == width && each.weight.dtype() == x.dtype() => {
                expect_device("weight", each.weight, x)?;
                if let Some(bias) = each.bias {
                    expect("bias", bias, &[outputs], x.dtype(), x)?;
                }
            }
            _ => {
                let dtype: DType = x.dtype();
                return Err(mismatch(
                    "weight",
                    format!("{dtype:?} [outputs, {width}]"),
                    format!("{:?} {:?}", each.weight.dtype(), each.weight.dims()),
                ));
            }
        }
    }
    Ok(())
}
