//! The header of a safetensors file.
//!
//! Read here and not by the `safetensors` crate, which wants the whole file in memory and does not say
//! which tensor is wrong.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use candle_core::DType;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::StoredTensor;
use crate::error::{DFlashError, Result};

/// The format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// The header's length, a little-endian u64, comes before it.
const LENGTH_BYTES: u64 = 8;

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// Reads the header of `file` and checks that the data of each tensor lies in the file and has the size
/// that its shape and type ask for.
pub(super) fn read_header(file: &Path) -> Result<Vec<StoredTensor>> {
    let (header, data_start, file_len) = header_json(file)?;
    let data_len = file_len - data_start;
    let mut tensors = Vec::with_capacity(header.len());
    for (name, value) in header {
        if name == "__metadata__" {
            continue;
        }
        let fail = |message: String| DFlashError::tensor(file, &name, message);
        let entry: Entry = serde_json::from_value(value)
            .map_err(|e| fail(format!("unreadable header entry: {e}")))?;
        let dtype = match entry.dtype.as_str() {
            "F32" => DType::F32,
            "F16" => DType::F16,
            "BF16" => DType::BF16,
            // Vocabulary maps: offsets, and flags of one byte.
            "I64" if name.ends_with("d2t") => DType::I64,
            "BOOL" if name.ends_with("t2d") => DType::U8,
            other => {
                return Err(fail(format!(
                    "expected the type F32, F16 or BF16, found {other}; convert the checkpoint"
                )))
            }
        };
        let (begin, end) = entry.data_offsets;
        let len = entry
            .shape
            .iter()
            .try_fold(dtype.size_in_bytes(), |bytes, dim| bytes.checked_mul(*dim))
            .ok_or_else(|| fail(format!("its shape {:?} is too large", entry.shape)))?;
        if end.checked_sub(begin) != Some(len as u64) {
            return Err(fail(format!(
                "its shape {:?} of {} takes {len} bytes, but its data is at {begin}..{end}",
                entry.shape, entry.dtype
            )));
        }
        if end > data_len {
            return Err(fail(format!(
                "the file is cut off: data at {begin}..{end}, but only {data_len} bytes are there; \
                 fetch the file again"
            )));
        }
        tensors.push(StoredTensor {
            file: file.to_path_buf(),
            stored_name: name,
            dtype,
            shape: entry.shape,
            offset: data_start + begin,
            len,
        });
    }
    check_layout(file, &tensors, file_len)?;
    Ok(tensors)
}

/// The header's entries, where the data starts, and the file's length.
fn header_json(file: &Path) -> Result<(Map<String, Value>, u64, u64)> {
    let io = |source| DFlashError::Io {
        path: file.to_path_buf(),
        source,
    };
    let mut reader = File::open(file).map_err(io)?;
    let file_len = reader.metadata().map_err(io)?.len();
    if file_len < LENGTH_BYTES {
        return Err(DFlashError::file(
            file,
            format!("not a safetensors file: only {file_len} bytes long"),
        ));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    reader.read_exact(&mut length).map_err(io)?;
    let header_len = u64::from_le_bytes(length);
    if header_len > MAX_HEADER_BYTES {
        return Err(DFlashError::file(
            file,
            format!(
                "not a safetensors file: it announces a header of {header_len} bytes, at most \
                 {MAX_HEADER_BYTES} are allowed"
            ),
        ));
    }
    if header_len > file_len - LENGTH_BYTES {
        return Err(DFlashError::file(
            file,
            format!(
                "the file is cut off inside its header: {header_len} bytes announced, {} there; \
                 fetch the file again",
                file_len - LENGTH_BYTES
            ),
        ));
    }
    let mut header = vec![0; header_len as usize];
    reader.read_exact(&mut header).map_err(io)?;
    let header = serde_json::from_slice(&header)
        .map_err(|e| DFlashError::file(file, format!("unreadable header: {e}")))?;
    Ok((header, LENGTH_BYTES + header_len, file_len))
}

/// Tensors must neither overlap nor leave bytes at the end: both mean a damaged file.
fn check_layout(file: &Path, tensors: &[StoredTensor], file_len: u64) -> Result<()> {
    let mut by_offset: Vec<&StoredTensor> = tensors.iter().filter(|t| t.len > 0).collect();
    by_offset.sort_by_key(|tensor| tensor.offset);
    for pair in by_offset.windows(2) {
        if pair[0].offset + pair[0].len as u64 > pair[1].offset {
            return Err(DFlashError::tensor(
                file,
                &pair[1].stored_name,
                format!("its data overlaps that of `{}`", pair[0].stored_name),
            ));
        }
    }
    let end = by_offset.last().map(|t| t.offset + t.len as u64);
    match end {
        Some(end) if end < file_len => Err(DFlashError::file(
            file,
            format!(
                "{} bytes follow the last tensor; expected none, fetch the file again",
                file_len - end
            ),
        )),
        _ => Ok(()),
    }
}
