//! Linear layers for few rows.

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use dflash_kernels::{covers_product, gated_product, product, product_onto, silu_mul, Weight};

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

    pub fn as_weight(&self) -> Weight<'_> {
        Weight {
            weight: &self.weight,
            bias: self.bias.as_ref(),
        }
    }

    /// The layer's first and second half of the outputs.
    fn halves(&self) -> Result<(Self, Self)> {
        let half = self.weight.dim(0)? / 2;
        let part = |first: usize| -> Result<Self> {
            let bias = self.bias.as_ref();
            Ok(Self {
                weight: self.weight.narrow(0, first, half)?,
                bias: bias.map(|bias| bias.narrow(0, first, half)).transpose()?,
            })
        };
        Ok((part(0)?, part(half)?))
    }

    /// `[rows, in]` to `[rows, out]`, contiguous.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let rows = x.dim(0)?;
        if covers_product(x, &[self.as_weight()]) {
            if let Some(y) = product(x, &[self.as_weight()])?.pop() {
                return Ok(y);
            }
        }
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
    /// The weight, if it is not quantized.
    pub fn exact(&self) -> Option<Weight<'_>> {
        match self {
            Self::Exact(linear) => Some(linear.as_weight()),
            Self::Quantized(_) => None,
        }
    }

    /// `forward` plus `residual`, `[rows, out]`.
    pub fn forward_onto(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        match self {
            Self::Exact(linear) if covers_product(x, &[linear.as_weight()]) => {
                Ok(product_onto(x, linear.as_weight(), residual)?)
            }
            _ => Ok((residual + self.forward(x)?)?),
        }
    }

    /// `silu(gate) * up` of `[gate; up]`: `[rows, in]` to `[rows, out / 2]`.
    pub fn gated(&self, x: &Tensor) -> Result<Tensor> {
        if let Self::Exact(linear) = self {
            let (gate, up) = linear.halves()?;
            if covers_product(x, &[gate.as_weight(), up.as_weight()]) {
                return Ok(gated_product(x, gate.as_weight(), up.as_weight())?);
            }
        }
        Ok(silu_mul(&self.forward(x)?)?)
    }

    /// `[rows, in]` to `[rows, out]`, contiguous.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Exact(linear) => linear.forward(x),
            Self::Quantized(linear) => Ok(linear.forward(x)?),
        }
    }
}
