//! The target's KV cache of a step: the model's own, or the host's paged one.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{Device, DeviceLocation, Result, Tensor};
use mistralrs_core::plugin::{
    CacheInstruction, PagedAttentionInputMetadata, PagedAttentionMeta, Sequence,
};

use super::attention::OneRead;
use super::pipeline::Target;
use crate::pool::block_tables;

/// Where the target's K/V of this step is.
pub enum StepCache {
    /// In one tensor for the whole batch; the sequences own copies of their parts.
    Normal {
        /// What the host does with it after a forward pass.
        post_op: CacheInstruction,
    },
    /// In blocks that the host's scheduler hands out.
    Paged(PagedAttentionMeta),
}

/// The blocks of some sequences.
pub struct Blocks {
    /// By sequence, in order of position.
    pub tables: Vec<Vec<usize>>,
    pub block_size: usize,
}

impl Blocks {
    /// The blocks that these sequences have now.
    pub async fn of(meta: &PagedAttentionMeta, seqs: &[&mut Sequence]) -> Self {
        let manager = meta.kv_cache_manager.lock().await;
        Self {
            tables: seqs
                .iter()
                .map(|seq| {
                    manager
                        .get_block_ids(*seq.id())
                        .unwrap_or_default()
                        .to_vec()
                })
                .collect(),
            block_size: meta.block_size,
        }
    }

    /// Slots of positions `start..start + count` of sequence `i`.
    ///
    /// # Errors
    /// If it has too few blocks.
    pub fn slots(&self, i: usize, start: usize, count: usize) -> Result<Vec<usize>> {
        let table = self.tables.get(i).map(Vec::as_slice).unwrap_or_default();
        (start..start + count)
            .map(|position| match table.get(position / self.block_size) {
                Some(block) => Ok(block * self.block_size + position % self.block_size),
                None => candle_core::bail!(
                    "position {position} is behind the sequence's {} KV blocks",
                    table.len()
                ),
            })
            .collect()
    }

    /// The blocks of sequence `i` that hold positions `start..start + count`.
    pub fn covering(&self, i: usize, start: usize, count: usize) -> &[usize] {
        let table = self.tables.get(i).map(Vec::as_slice).unwrap_or_default();
        let end = (start + count).div_ceil(self.block_size).min(table.len());
        table.get(start / self.block_size..end).unwrap_or_default()
    }
}

/// The target's inputs for a verify pass: every row is a decode row of its own, with the block
/// table of its sequence and a context that ends with the row itself. Rows before it in the block
/// have been written by then, so causality needs no mask, and lengths may differ.
///
/// # Errors
/// If a sequence has too few blocks for its rows.
pub fn verify_metadata(
    target: &Target,
    meta: &PagedAttentionMeta,
    blocks: &Blocks,
    bases: &[usize],
    rows: usize,
) -> Result<PagedAttentionInputMetadata> {
    let mut slots = Vec::with_capacity(bases.len() * rows);
    let (mut full, mut windowed) = (Tables::default(), Tables::default());
    let mut whole = Tables::default();
    for (i, base) in bases.iter().enumerate() {
        slots.extend(
            blocks
                .slots(i, *base, rows)?
                .into_iter()
                .map(|slot| slot as i64),
        );
        whole.push(blocks.covering(i, 0, base + rows), base + rows);
        for row in 0..rows {
            let len = base + row + 1;
            let table = blocks.covering(i, 0, len);
            if meta.sliding_window.is_some() {
                full.push(table, len);
            }
            // As the host's own decode step: whole blocks, from the one where the window starts. (On
            // the CPU it leaves out what is before the window in that block.)
            let first = meta
                .sliding_window
                .map_or(0, |window| len.saturating_sub(window) / meta.block_size);
            windowed.push(&table[first..], len - first * meta.block_size);
        }
    }
    let count = slots.len();
    let slots = Tensor::from_vec(slots, count, &Device::Cpu)?;
    let (block_tables, context_lens) = windowed.tensors()?;
    let devices = match target.device_mapper() {
        Some(mapper) => mapper.get_unique_devices(),
        None => vec![target.device()],
    };
    let everywhere = |tensor: &Tensor| -> Result<HashMap<DeviceLocation, Tensor>> {
        devices
            .iter()
            .map(|device| Ok((device.location(), tensor.to_device(device)?)))
            .collect()
    };
    let (tables, lens) = whole.tensors()?;
    let once = OneRead {
        rows,
        tables: everywhere(&tables)?,
        lens: everywhere(&lens)?,
        longest: whole.longest(),
    };
    let longest = once.longest;
    let block_tables = everywhere(&block_tables)?;
    let context_lens = everywhere(&context_lens)?;
    let (full_block_tables, full_context_lens) = match meta.sliding_window {
        Some(_) => {
            let (tables, lens) = full.tensors()?;
            (everywhere(&tables)?, everywhere(&lens)?)
        }
        None => (block_tables.clone(), context_lens.clone()),
    };
    Ok(PagedAttentionInputMetadata {
        block_tables: Some(block_tables),
        context_lens: Some(context_lens),
        slot_mappings: everywhere(&slots)?,
        max_context_len: Some(windowed.longest()),
        full_block_tables: Some(full_block_tables),
        full_context_lens: Some(full_context_lens),
        full_max_context_len: Some(longest),
        is_first_prompt_chunk: false,
        paged_kv_indptr: None,
        paged_kv_indices: None,
        paged_kv_last_page_len: None,
        paged_kv_request_indices: None,
        paged_kv_tile_indices: None,
        paged_kv_o_indptr: None,
        paged_kv_chunk_size: None,
        num_cached_tokens: None,
        query_lens: None,
        cu_seqlens_q: None,
        cu_seqlens_kv: None,
        block_attention: Some(Arc::new(once)),
    })
}

/// Block tables and context lengths, a row each.
#[derive(Default)]
struct Tables<'a> {
    tables: Vec<&'a [usize]>,
    lens: Vec<usize>,
}

impl<'a> Tables<'a> {
    fn push(&mut self, table: &'a [usize], len: usize) {
        self.tables.push(table);
        self.lens.push(len);
    }

    fn longest(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    fn tensors(&self) -> Result<(Tensor, Tensor)> {
        Ok(block_tables(&self.tables, &self.lens, &Device::Cpu)?)
    }
}
