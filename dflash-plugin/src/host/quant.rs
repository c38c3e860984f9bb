//! The draft model's linear layers in fewer bits, by the host's own in-situ quantization (ISQ).

use std::sync::atomic::AtomicUsize;
use std::sync::Arc;

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::Linear;
use mistralrs_core::{parse_isq_value, IsqType};
use mistralrs_quant::{QuantMethod, QuantMethodConfig, QuantizeOntoGuard, UnquantLinear};

use crate::error::DFlashError;
use crate::quantize::{QuantizedLinear, Quantizer};

/// Types whose product reads the small weight (fp8 does on a GPU only). The host's others unpack the
/// whole weight in every pass.
const TYPES: [IsqType; 13] = [
    IsqType::Q8_0,
    IsqType::Q8_1,
    IsqType::Q8K,
    IsqType::Q6K,
    IsqType::Q5K,
    IsqType::Q5_0,
    IsqType::Q5_1,
    IsqType::Q4K,
    IsqType::Q4_0,
    IsqType::Q4_1,
    IsqType::Q3K,
    IsqType::Q2K,
    IsqType::F8E4M3,
];

/// Quantizes to one type.
pub struct HostQuantizer {
    to: IsqType,
    device: Device,
}

impl HostQuantizer {
    /// What `--speculative-draft-quant` asks for: `none` (or nothing), `auto`, which is the target's own
    /// type, or a type by the host's names.
    ///
    /// # Errors
    /// If there is no such type, or it cannot be used on this device.
    pub fn choose(
        option: Option<&str>,
        target: Option<IsqType>,
        device: &Device,
    ) -> std::result::Result<Option<Self>, DFlashError> {
        let wanted = match option.map(str::to_lowercase).as_deref() {
            None | Some("none") => return Ok(None),
            Some("auto") => match target {
                Some(of_target) => of_target,
                None => return Ok(None),
            },
            Some(name) => {
                parse_isq_value(name, Some(device)).map_err(|_| misfit(name.into(), device))?
            }
        };
        if !can_use(wanted, device) {
            let found = match option {
                Some(name) if name.eq_ignore_ascii_case("auto") => {
                    format!("auto, which is the target's {wanted}")
                }
                _ => wanted.to_string(),
            };
            return Err(misfit(found, device));
        }
        Ok(Some(Self {
            to: wanted,
            device: device.clone(),
        }))
    }

    /// The type that is asked for.
    pub fn name(&self) -> String {
        self.to.to_string()
    }

    /// What becomes of layers of this width, if it is not what was asked for.
    pub fn exception(&self, width: usize) -> Option<String> {
        let instead = match self.stored(width) {
            Stored::As(dtype) if GgmlDType::try_from(self.to).ok() != Some(dtype) => {
                format!("{dtype:?}").to_lowercase()
            }
            Stored::Exact => "not at all".into(),
            _ => return None,
        };
        Some(format!(
            "width {width} is no multiple of {}'s blocks; layers of it are quantized as {instead}",
            self.to
        ))
    }

    /// What the host makes of rows of this width.
    fn stored(&self, width: usize) -> Stored {
        let Ok(mut dtype) = GgmlDType::try_from(self.to) else {
            return Stored::Float8;
        };
        // `get_quantization_behaviour` of mistralrs-quant.
        while !width.is_multiple_of(dtype.block_size()) {
            dtype = match dtype {
                GgmlDType::Q2K | GgmlDType::Q3K => GgmlDType::Q4_0,
                GgmlDType::Q4K => GgmlDType::Q4_1,
                GgmlDType::Q5K => GgmlDType::Q5_0,
                GgmlDType::Q6K => GgmlDType::Q5_1,
                GgmlDType::Q8K => GgmlDType::Q8_1,
                _ => return Stored::Exact,
            };
        }
        Stored::As(dtype)
    }
}

/// How a weight is kept.
enum Stored {
    As(GgmlDType),
    Float8,
    Exact,
}

impl Quantizer for HostQuantizer {
    fn quantize(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Option<Box<dyn QuantizedLinear>>> {
        let (_, width) = weight.dims2()?;
        if matches!(self.stored(width), Stored::Exact) {
            return Ok(None);
        }
        let exact = Linear::new(weight.clone(), bias.cloned());
        let exact = UnquantLinear::new(QuantMethodConfig::Unquantized(exact))?;
        let linear = HostLinear(Arc::new(exact).apply_isq(
            Some(self.to),
            self.device.clone(),
            &AtomicUsize::new(0),
            None,
            QuantizeOntoGuard::new(),
        )?);
        // What does not work here is said at load, not with the first request.
        let rows = Tensor::zeros((2, width), weight.dtype(), weight.device())?;
        match linear.forward(&rows) {
            Ok(_) => Ok(Some(Box::new(linear))),
            Err(error) => {
                let found = format!("{}, which fails: {error}", self.to);
                Err(misfit(found, &self.device).into())
            }
        }
    }

    fn bytes(&self, rows: usize, width: usize, dtype: DType) -> usize {
        match self.stored(width) {
            Stored::As(dtype) => rows * width / dtype.block_size() * dtype.type_size(),
            Stored::Float8 => rows * width,
            Stored::Exact => rows * width * dtype.size_in_bytes(),
        }
    }
}

/// The host's quantized layer.
struct HostLinear(Arc<dyn QuantMethod>);

impl QuantizedLinear for HostLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // The host's layers get `[batch, rows, in]`, and some of them take nothing else.
        let y = self.0.forward_autocast(&x.contiguous()?.unsqueeze(0)?)?;
        y.squeeze(0)?.contiguous()
    }
}

fn can_use(wanted: IsqType, device: &Device) -> bool {
    // candle has no products of these two on a GPU.
    let on_cpu_only = matches!(wanted, IsqType::Q8_1 | IsqType::Q8K);
    TYPES.contains(&wanted) && (device.is_cpu() || !on_cpu_only)
}

fn misfit(found: String, device: &Device) -> DFlashError {
    let names: Vec<String> = TYPES
        .iter()
        .filter(|wanted| can_use(**wanted, device))
        .map(ToString::to_string)
        .collect();
    DFlashError::input(
        "draft model quantization (--speculative-draft-quant, or draft_quant in \
         [models.speculative])",
        format!("none, auto or one of {}", names.join(", ")),
        found,
    )
}

#[cfg(test)]
mod tests;
