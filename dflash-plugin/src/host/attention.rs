//! The block attention kernel in the target's decode steps: for the rows of a verify pass, and for
//! plain decode rows.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, DeviceLocation, Result, Tensor};
use dflash_kernels::{block_attention, covers, PagedContext};
use mistralrs_core::plugin::{
    BlockAttention, BlockInputs, DecodeAttention, DecodeRows, SdpaParams,
};

use super::decode::{f32_sinks, options};

/// Plain decode rows with the block attention kernel. The host's own reads a sequence's K/V once for
/// each query head instead of once for each K/V head, and walks 512 positions one after another.
#[derive(Debug)]
pub(super) struct DecodeKernel;

impl DecodeAttention for DecodeKernel {
    fn attend(
        &self,
        query: &Tensor,
        rows: &DecodeRows,
        params: &SdpaParams,
    ) -> Result<Option<Tensor>> {
        let context = PagedContext {
            keys: rows.key_cache,
            values: rows.value_cache,
            block_tables: rows.block_tables,
            context_lens: rows.context_lens,
            longest: Some(rows.longest),
        };
        attend(query, 1, &context, params)
    }
}

/// Reads the K/V of each sequence once for all rows of its block.
#[derive(Debug)]
pub(super) struct OneRead {
    pub rows: usize,
    /// `[sequences, most blocks]`
    pub tables: HashMap<DeviceLocation, Tensor>,
    /// `[sequences]`: positions, the block's own included.
    pub lens: HashMap<DeviceLocation, Tensor>,
    pub longest: usize,
}

impl BlockAttention for OneRead {
    fn attend(
        &self,
        query: &Tensor,
        key_cache: &Tensor,
        value_cache: &Tensor,
        params: &SdpaParams,
    ) -> Result<Option<Tensor>> {
        let here = query.device().location();
        let (Some(tables), Some(lens)) = (self.tables.get(&here), self.lens.get(&here)) else {
            return Ok(None);
        };
        let context = PagedContext {
            keys: key_cache,
            values: value_cache,
            block_tables: tables,
            context_lens: lens,
            longest: Some(self.longest),
        };
        attend(query, self.rows, &context, params)
    }

    fn inputs(&self, location: DeviceLocation) -> Option<BlockInputs> {
        Some(BlockInputs {
            block_tables: self.tables.get(&location)?.clone(),
            context_lens: self.lens.get(&location)?.clone(),
            longest: self.longest,
        })
    }

    fn with_inputs(
        &self,
        location: DeviceLocation,
        block_tables: Tensor,
        context_lens: Tensor,
        longest: usize,
    ) -> Arc<dyn BlockAttention> {
        Arc::new(Self {
            rows: self.rows,
            tables: HashMap::from([(location, block_tables)]),
            lens: HashMap::from([(location, context_lens)]),
            longest,
        })
    }
}

/// `query`: `[sequences * rows, heads, head_dim]`; `None` for what the host's kernel has to do.
fn attend(
    query: &Tensor,
    rows: usize,
    context: &PagedContext,
    params: &SdpaParams,
) -> Result<Option<Tensor>> {
    // In f32 and on the CPU the host's kernel: a row then comes out bit by bit as in plain
    // decoding. On a GPU it also rounds a window to whole blocks, which must be the same in both, and
    // has head dims that ours lacks.
    let is_covered = query.device().is_cuda()
        && covers(query.dim(2)?, context.values.dim(3)?)
        && matches!(query.dtype(), DType::BF16 | DType::F16)
        && context.keys.dtype() == query.dtype()
        && params.sliding_window.is_none();
    if !is_covered {
        return Ok(None);
    }
    let (all_rows, heads, head_dim) = query.dims3()?;
    let sinks = f32_sinks(params)?;
    let options = options(params, sinks.as_ref());
    let query = query.reshape((all_rows / rows, rows, heads, head_dim))?;
    let out = block_attention(&query, context, None, &options)?;
    Ok(Some(out.reshape((all_rows, heads, head_dim))?))
}
