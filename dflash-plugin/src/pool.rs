//! Draft K/V in blocks that somebody else hands out: the host's paged KV cache.
//!
//! The pool holds, for each draft layer, K/V of every block of the host's cache, at the same block
//! ids. So whatever the host does with a block (share it by prefix, take it back, give it to another
//! sequence) happens to the draft K/V of the same positions.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};

use crate::config::DraftConfig;
use crate::error::{DFlashError, Result};

/// Draft K/V of all blocks, in the layout of the host's own cache (and of [`dflash_kernels`]).
pub struct DraftPool {
    /// K and V of each layer: `[blocks, kv_heads, head_dim / x, block_size, x]` with
    /// `x = 16 / bytes of an element`, and `[blocks, kv_heads, head_dim, block_size]`.
    layers: Vec<(Tensor, Tensor)>,
    blocks: usize,
    block_size: usize,
    device: Device,
    /// By block: whether all its positions that hold target KV hold draft K/V as well.
    complete: Mutex<Vec<bool>>,
}

impl DraftPool {
    /// Bytes for each position.
    pub fn bytes_per_token(cfg: &DraftConfig, dtype: DType) -> usize {
        2 * cfg.num_hidden_layers * cfg.num_key_value_heads * cfg.head_dim * dtype.size_in_bytes()
    }

    /// Allocates all of it, with zeros.
    ///
    /// # Errors
    /// If the head dimension cannot be laid out, or memory is short.
    pub fn new(
        cfg: &DraftConfig,
        dtype: DType,
        device: &Device,
        blocks: usize,
        block_size: usize,
    ) -> Result<Self> {
        let (kv_heads, head_dim) = (cfg.num_key_value_heads, cfg.head_dim);
        let x = 16 / dtype.size_in_bytes();
        if head_dim % x != 0 {
            return Err(DFlashError::unsupported(
                "head_dim",
                format!("paged draft K/V of {dtype:?} needs a multiple of {x}, found {head_dim}; add --paged-attn off"),
            ));
        }
        let layers = (0..cfg.num_hidden_layers)
            .map(|_| {
                let k = (blocks, kv_heads, head_dim / x, block_size, x);
                let v = (blocks, kv_heads, head_dim, block_size);
                Ok((
                    Tensor::zeros(k, dtype, device)?,
                    Tensor::zeros(v, dtype, device)?,
                ))
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            layers,
            blocks,
            block_size,
            device: device.clone(),
            complete: Mutex::new(vec![false; blocks]),
        })
    }

    /// Positions of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// K and V of each layer.
    pub fn layers(&self) -> &[(Tensor, Tensor)] {
        &self.layers
    }

    /// `slots` (block times block size plus offset) on the device, i64.
    ///
    /// # Errors
    /// If one is outside the pool.
    pub fn slots(&self, slots: &[usize]) -> Result<Tensor> {
        let all = self.blocks * self.block_size;
        if let Some(slot) = slots.iter().find(|slot| **slot >= all) {
            return Err(DFlashError::input(
                "slot of a draft K/V row",
                format!("below {all}"),
                slot.to_string(),
            ));
        }
        let slots: Vec<i64> = slots.iter().map(|slot| *slot as i64).collect();
        let count = slots.len();
        Ok(Tensor::from_vec(slots, count, &self.device)?)
    }

    /// Draft K/V of these slots has been written.
    pub fn wrote(&self, slots: &[usize]) {
        let mut complete = self.complete();
        for slot in slots {
            // The first position of a block: what it held before is gone.
            if slot % self.block_size == 0 {
                complete[slot / self.block_size] = true;
            }
        }
    }

    /// Rows went into the target's KV at these blocks without their draft K/V: whoever gets these
    /// blocks by prefix has no draft context.
    pub fn mark_incomplete(&self, blocks: &[usize]) {
        let mut complete = self.complete();
        for block in blocks {
            if let Some(complete) = complete.get_mut(*block) {
                *complete = false;
            }
        }
    }

    /// Whether these blocks hold draft K/V for all their positions.
    pub fn is_complete(&self, blocks: &[usize]) -> bool {
        let complete = self.complete();
        blocks
            .iter()
            .all(|block| complete.get(*block).copied().unwrap_or(false))
    }

    fn complete(&self) -> MutexGuard<'_, Vec<bool>> {
        self.complete.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The contexts of a batch of sequences in a pool.
pub struct PooledContexts<'a> {
    pub pool: &'a DraftPool,
    /// By sequence: its blocks in order of position.
    pub tables: Vec<Vec<usize>>,
    /// By sequence: valid positions.
    pub lens: Vec<usize>,
}

impl<'a> PooledContexts<'a> {
    /// These contexts without the blocks that are wholly older than the last `window` positions. Keys
    /// are stored as they are attended to, so only distances count from here on, and those stay.
    ///
    /// # Errors
    /// If a table does not cover its length.
    pub fn recent(&self, window: usize) -> Result<PooledContexts<'a>> {
        let size = self.pool.block_size;
        let (mut tables, mut lens) = (Vec::new(), Vec::new());
        for (table, len) in self.tables.iter().zip(&self.lens) {
            let old = len.saturating_sub(window) / size;
            let Some(table) = table.get(old..) else {
                return Err(self.misfit());
            };
            tables.push(table.to_vec());
            lens.push(len - old * size);
        }
        Ok(PooledContexts {
            pool: self.pool,
            tables,
            lens,
        })
    }

    fn misfit(&self) -> DFlashError {
        DFlashError::input(
            "blocks of the draft contexts",
            format!("for {:?} positions, below {}", self.lens, self.pool.blocks),
            format!("{:?}", self.tables),
        )
    }

    /// Block tables `[sequences, most blocks]` and lengths `[sequences]` on the pool's device, u32.
    ///
    /// # Errors
    /// If a table does not cover its length, or names a block that there is not.
    pub fn tensors(&self) -> Result<(Tensor, Tensor)> {
        self.check()?;
        block_tables(&self.tables, &self.lens, &self.pool.device)
    }

    /// The same, with room for contexts to grow: tables have a power of two of columns, so that many
    /// steps have tensors of one shape.
    ///
    /// # Errors
    /// As for [`PooledContexts::tensors`].
    pub fn roomy_tensors(&self) -> Result<(Tensor, Tensor)> {
        const LEAST: usize = 8;
        self.check()?;
        let most = self.tables.iter().map(Vec::len).max().unwrap_or(0);
        let width = most.next_power_of_two().max(LEAST);
        padded_tables(&self.tables, &self.lens, width, &self.pool.device)
    }

    fn check(&self) -> Result<()> {
        let pool = self.pool;
        let fits = self.tables.len() == self.lens.len()
            && self.tables.iter().zip(&self.lens).all(|(table, len)| {
                table.len() * pool.block_size >= *len
                    && table.iter().all(|block| *block < pool.blocks)
            });
        if !fits {
            return Err(self.misfit());
        }
        Ok(())
    }
}

/// Block tables, padded to `[rows, most blocks]`, and lengths `[rows]` as kernels take them: u32.
///
/// # Errors
/// Only those of candle.
pub fn block_tables<T: AsRef<[usize]>>(
    tables: &[T],
    lens: &[usize],
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let blocks = |table: &T| table.as_ref().len();
    let width = tables.iter().map(blocks).max().unwrap_or(0).max(1);
    padded_tables(tables, lens, width, device)
}

fn padded_tables<T: AsRef<[usize]>>(
    tables: &[T],
    lens: &[usize],
    width: usize,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let padded: Vec<u32> = tables
        .iter()
        .flat_map(|table| {
            let table = table.as_ref();
            let padding = std::iter::repeat_n(0, width - table.len());
            table.iter().map(|block| *block as u32).chain(padding)
        })
        .collect();
    let lens: Vec<u32> = lens.iter().map(|len| *len as u32).collect();
    let rows = lens.len();
    Ok((
        Tensor::from_vec(padded, (rows, width), device)?,
        Tensor::from_vec(lens, rows, device)?,
    ))
}
