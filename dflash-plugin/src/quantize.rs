//! Linear layers of the draft model in fewer bits: the engine's quantization, which the core ring
//! does not name.

use candle_core::{DType, Result, Tensor};

/// An engine's quantization of one type.
pub trait Quantizer {
    /// The product with `weight` `[out, in]` and `bias` `[out]`, from a smaller copy of the weight;
    /// `None` where the weight has to stay as it is.
    ///
    /// # Errors
    /// Those of the engine.
    fn quantize(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Option<Box<dyn QuantizedLinear>>>;

    /// Bytes that a weight `[rows, width]` takes, which is of type `dtype` before.
    fn bytes(&self, rows: usize, width: usize, dtype: DType) -> usize;
}

/// A linear layer whose weight is quantized.
pub trait QuantizedLinear: Send + Sync {
    /// `[rows, in]` to `[rows, out]` of the same dtype, contiguous.
    ///
    /// # Errors
    /// Those of the engine.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;
}
