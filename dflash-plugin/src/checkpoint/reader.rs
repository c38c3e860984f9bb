//! Reads weights one by one while the model is built, so that they are in memory only once.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::Init;

use super::StoredTensor;
use crate::error::{DFlashError, Result};

/// The largest finite f16.
const F16_MAX: f32 = 65504.0;

/// The first error of a [`WeightReader`], kept with its type.
#[derive(Clone, Default)]
pub(super) struct Failure(Arc<Mutex<Option<DFlashError>>>);

impl Failure {
    pub fn take(&self) -> Option<DFlashError> {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slot.take()
    }

    fn keep(&self, error: DFlashError) {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slot.get_or_insert(error);
    }
}

/// The source of candle's `VarBuilder` for a checkpoint.
pub(super) struct WeightReader {
    tensors: BTreeMap<String, StoredTensor>,
    failure: Failure,
}

impl WeightReader {
    pub fn new(tensors: BTreeMap<String, StoredTensor>) -> (Self, Failure) {
        let failure = Failure::default();
        let reader = Self {
            tensors,
            failure: failure.clone(),
        };
        (reader, failure)
    }

    fn read(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let Some(tensor) = self.tensors.get(name) else {
            candle_core::bail!("the checkpoint has no tensor `{name}`")
        };
        read_tensor(tensor, dtype, device).map_err(|error| {
            let text = error.to_string();
            self.failure.keep(error);
            candle_core::Error::Msg(text)
        })
    }
}

impl SimpleBackend for WeightReader {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.read(name, dtype, device)?;
        if tensor.shape() != &shape {
            candle_core::bail!(
                "tensor `{name}`: expected shape {shape:?}, found {:?}",
                tensor.shape()
            )
        }
        Ok(tensor)
    }

    fn get_unchecked(
        &self,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        self.read(name, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}

fn read_tensor(stored: &StoredTensor, dtype: DType, device: &Device) -> Result<Tensor> {
    let io = |source| DFlashError::Io {
        path: stored.file.clone(),
        source,
    };
    let mut file = File::open(&stored.file).map_err(io)?;
    file.seek(SeekFrom::Start(stored.offset)).map_err(io)?;
    let mut data = vec![0; stored.len];
    file.read_exact(&mut data).map_err(io)?;
    check_values(stored, &data, dtype)?;
    let tensor = Tensor::from_raw_buffer(&data, stored.dtype, &stored.shape, &Device::Cpu)?;
    Ok(tensor.to_dtype(dtype)?.to_device(device)?)
}

/// Fails on the first value that is not finite, or not so as `dtype`.
fn check_values(stored: &StoredTensor, data: &[u8], dtype: DType) -> Result<()> {
    let limit = match dtype {
        DType::F16 => F16_MAX,
        _ => f32::MAX,
    };
    if matches!(stored.dtype, DType::I64 | DType::U8) {
        return Ok(());
    }
    // NaN compares false too.
    let is_bad = |value: f32| !matches!(value.abs().partial_cmp(&limit), Some(o) if o.is_le());
    let bad = match stored.dtype {
        DType::F32 => data
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .enumerate()
            .find(|(_, value)| is_bad(*value)),
        DType::BF16 => data
            .chunks_exact(2)
            .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
            .enumerate()
            .find(|(_, value)| is_bad(*value)),
        _ => data
            .chunks_exact(2)
            .map(|b| special_f16(u16::from_le_bytes([b[0], b[1]])))
            .enumerate()
            .find(|(_, value)| is_bad(*value)),
    };
    match bad {
        None => Ok(()),
        Some((index, value)) if value.is_finite() => Err(DFlashError::tensor(
            &stored.file,
            &stored.stored_name,
            format!("element {index} is {value}, beyond the range of f16; load as bf16 or f32"),
        )),
        Some((index, value)) => Err(DFlashError::tensor(
            &stored.file,
            &stored.stored_name,
            format!(
                "element {index} is {value}; expected finite weights, the checkpoint is damaged"
            ),
        )),
    }
}

/// NaN and infinities of f16 as f32; any finite value as 0, for all of those are in range.
fn special_f16(bits: u16) -> f32 {
    match (bits & 0x7c00 == 0x7c00, bits & 0x03ff) {
        (false, _) => 0.0,
        (true, 0) if bits & 0x8000 != 0 => f32::NEG_INFINITY,
        (true, 0) => f32::INFINITY,
        (true, _) => f32::NAN,
    }
}
