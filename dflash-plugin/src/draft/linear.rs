//! Linear layers for few rows.

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;

use crate::error::Result;
use crate::quantize::{QuantizedLinear, Quantizer};

/// Up to this many rows, the CPU multiplies as `W · xᵀ`.
///
/// candle's CPU product repacks the whole right-hand side on each call. With the usual `x · Wᵀ` that is
/// the weight, which costs several times the product itself when `x` has few rows; with `W · xᵀ` it is
/// `x`. Measured break-even on two cores: between 128 and 300 rows.
const FEW_ROWS: usize = 128;

/// A weight `[out, in]` with an optional bias `[out]`.
#[derive(Debug, Clone)]
pub(super) struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    pub fn load(
        in_features: usize,
        out_features: usize,
        with_bias: bool,
        vb: VarBuilder,
    ) -> Result<Self> {
        let weight = vb.get((out_features, in_features), "weight")?;
        let bias = with_bias
            .then(|| vb.get(out_features, "bias"))
            .transpose()?;
        Ok(Self { weight, bias })
    }

    /// One layer whose output columns are those of `parts`, side by side.
    pub fn stack(parts: &[Linear]) -> Result<Self> {
        let weights: Vec<&Tensor> = parts.iter().map(|part| &part.weight).collect();
        let biases: Vec<&Tensor> = parts.iter().filter_map(|part| part.bias.as_ref()).collect();
        Ok(Self {
            weight: Tensor::cat(&weights, 0)?,
            bias: match biases.is_empty() {
                true => None,
                false => Some(Tensor::cat(&biases, 0)?),
            },
        })
    }

    pub fn in_features(&self) -> usize {
        self.weight.dims().last().copied().unwrap_or(0)
    }

    /// In fewer bits, where there is a quantizer and it can.
    pub fn quantized(self, quantizer: Option<&dyn Quantizer>) -> Result<Projection> {
        let quantized = match quantizer {
            Some(quantizer) => quantizer.quantize(&self.weight, self.bias.as_ref())?,
            None => None,
        };
        Ok(match quantized {
            Some(quantized) => Projection::Quantized(quantized),
            None => Projection::Exact(self),
        })
    }

    /// `[rows, in]` to `[rows, out]`, contiguous.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let rows = x.dim(0)?;
        let y = if matches!(x.device(), Device::Cpu) && (2..=FEW_ROWS).contains(&rows) {
            self.weight.matmul(&x.t()?)?.t()?.contiguous()?
        } else {
            x.matmul(&self.weight.t()?)?
        };
        match &self.bias {
            Some(bias) => Ok(y.broadcast_add(bias)?),
            None => Ok(y),
        }
    }
}

/// A linear layer that may be quantized.
pub(super) enum Projection {
    Exact(Linear),
    Quantized(Box<dyn QuantizedLinear>),
}

impl Projection {
    /// `[rows, in]` to `[rows, out]`, contiguous.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Exact(linear) => linear.forward(x),
            Self::Quantized(linear) => Ok(linear.forward(x)?),
        }
    }
}
