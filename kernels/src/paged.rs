//! The shape of one layer's paged cache.

use candle_core::{DType, Result, Tensor};

use crate::check::{expect, expect_device, expect_float, mismatch};

/// Sizes of one layer's cache; see the crate's documentation for the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PagedShape {
    pub num_blocks: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub block_size: usize,
}

impl PagedShape {
    /// Reads the sizes off a pair of caches and checks that they belong together and are contiguous.
    pub fn of(keys: &Tensor, values: &Tensor) -> Result<Self> {
        expect_float("dtype of the key cache", keys)?;
        let &[num_blocks, kv_heads, head_dim, block_size] = values.dims() else {
            return Err(mismatch(
                "value cache",
                "[num_blocks, kv_heads, head_dim, block_size]",
                format!("{:?}", values.dims()),
            ));
        };
        let x = 16 / keys.dtype().size_in_bytes();
        if !head_dim.is_multiple_of(x) || head_dim == 0 || block_size == 0 || kv_heads == 0 {
            return Err(mismatch(
                "head dim of the value cache",
                format!("a multiple of {x}, with kv_heads and block_size above 0"),
                format!("{:?}", values.dims()),
            ));
        }
        let key_dims = [num_blocks, kv_heads, head_dim / x, block_size, x];
        expect("key cache", keys, &key_dims, keys.dtype(), values)?;
        expect_device("value cache", values, keys)?;
        if values.dtype() != keys.dtype() {
            return Err(mismatch(
                "dtype of the value cache",
                format!("that of the key cache, {:?}", keys.dtype()),
                format!("{:?}", values.dtype()),
            ));
        }
        for (what, cache) in [("key cache", keys), ("value cache", values)] {
            if !cache.is_contiguous() {
                return Err(mismatch(what, "a contiguous tensor", "a strided view"));
            }
        }
        Ok(Self {
            num_blocks,
            kv_heads,
            head_dim,
            block_size,
        })
    }

    pub fn num_slots(&self) -> usize {
        self.num_blocks * self.block_size
    }

    /// Element of the flat cache for each `[token, kv_head, dim]`.
    pub fn places(&self, slots: &[usize], dtype: DType, keys: bool) -> Vec<i64> {
        let (size, dim) = (self.block_size, self.head_dim);
        let x = 16 / dtype.size_in_bytes();
        let mut places = Vec::with_capacity(slots.len() * self.kv_heads * dim);
        for slot in slots {
            let (block, offset) = (slot / size, slot % size);
            for head in 0..self.kv_heads {
                let base = (block * self.kv_heads + head) * dim * size;
                places.extend((0..dim).map(|d| {
                    let place = match keys {
                        true => ((d / x) * size + offset) * x + d % x,
                        false => d * size + offset,
                    };
                    (base + place) as i64
                }));
            }
        }
        places
    }
}
