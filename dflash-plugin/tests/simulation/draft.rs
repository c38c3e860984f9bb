//! Draft KV with contents that can be checked: every element says whose row it is.

use candle_core::{DType, Device, Tensor};
use dflash_plugin::kv::SequenceKv;

use super::target::Row;

const LAYERS: usize = 2;
const HEADS: usize = 2;
const HEAD_DIM: usize = 4;

pub fn empty() -> SequenceKv {
    SequenceKv::with_shape(LAYERS, HEADS, HEAD_DIM, DType::F32, &Device::Cpu).unwrap()
}

/// What "materializing" `rows` appends.
pub fn append(kv: &mut SequenceKv, rows: &[Row]) {
    let tensor = |layer, side| {
        let values = values(rows, layer, side);
        Tensor::from_vec(values, (HEADS, rows.len(), HEAD_DIM), &Device::Cpu).unwrap()
    };
    let layers = (0..LAYERS).map(|layer| (tensor(layer, 0), tensor(layer, 1)));
    kv.append(layers.collect()).unwrap();
}

/// Compares every element with what `rows` must have left.
pub fn check(kv: &SequenceKv, rows: &[Row]) -> Result<(), String> {
    if kv.len() != rows.len() {
        let (found, expected) = (kv.len(), rows.len());
        return Err(format!(
            "I2: draft KV has {found} rows, expected {expected}"
        ));
    }
    for layer in 0..LAYERS {
        let (k, v) = kv.layer(layer).unwrap();
        for (side, tensor) in [k, v].iter().enumerate() {
            let flat = tensor.contiguous().unwrap().flatten_all().unwrap();
            let found: Vec<f32> = flat.to_vec1().unwrap();
            let expected = values(rows, layer, side);
            if let Some(i) = (0..expected.len()).find(|&i| found[i] != expected[i]) {
                let row = i / HEAD_DIM % rows.len();
                return Err(format!(
                    "I4: draft KV row {row} of layer {layer} is not that of {:?}",
                    rows[row]
                ));
            }
        }
    }
    Ok(())
}

/// `[HEADS, rows, HEAD_DIM]`, all integers that f32 holds exactly.
fn values(rows: &[Row], layer: usize, side: usize) -> Vec<f32> {
    let mut values = Vec::with_capacity(HEADS * rows.len() * HEAD_DIM);
    for head in 0..HEADS {
        let place = ((layer * 2 + side) * HEADS + head) as u32;
        for row in rows {
            let (high, low) = (row.context >> 16, row.context & 0xffff);
            let parts: [u32; HEAD_DIM] = [row.token, row.position, high, low];
            values.extend(parts.map(|part| (place << 17 | part) as f32));
        }
    }
    values
}
