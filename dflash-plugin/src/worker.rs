//! The engine-agnostic half of a speculative step: tensors and tokens in, tokens out.
//!
//! One step of a sequence with `n` committed tokens is: [`DFlashWorker::draft`] a block behind the
//! anchor at position `n`; the caller verifies it with one target forward; the caller walks the
//! accept rule ([`crate::accept`]); [`DFlashWorker::materialize`] turns the target features of the
//! verified rows into draft K/V. Prompt rows are materialized the same way.

use candle_core::{DType, Device, Tensor, D};

use crate::config::DraftConfig;
use crate::draft::DraftModel;
use crate::error::{DFlashError, Result};
use crate::kv::SequenceKv;
use crate::pool::{DraftPool, PooledContexts};

/// The target's token embedding and output head, which the draft model borrows.
pub trait TargetHead {
    /// `[rows]` u32 to `[rows, hidden]`.
    fn embed(&self, ids: &Tensor) -> candle_core::Result<Tensor>;
    /// `[rows, hidden]` (after the draft model's final norm) to `[rows, vocab]`.
    fn logits(&self, hidden: &Tensor) -> candle_core::Result<Tensor>;
}

/// One sequence to draft for.
pub struct DraftJob<'a> {
    /// Last committed token, at position `kv.len()`; its target KV is not written yet.
    pub anchor: u32,
    /// Draft K/V of positions `0..n`.
    pub kv: &'a SequenceKv,
}

/// The draft model with what it needs to be run.
pub struct DFlashWorker {
    model: DraftModel,
    mask_token: u32,
    block_size: usize,
}

impl DFlashWorker {
    /// `block_size`: anchor and drafts, `2..=` the checkpoint's [`DraftConfig::verify_rows`].
    ///
    /// # Errors
    /// If the block size is outside that range.
    pub fn new(model: DraftModel, mask_token: u32, block_size: usize) -> Result<Self> {
        let trained = model.config().verify_rows();
        if !(2..=trained).contains(&block_size) {
            return Err(DFlashError::input(
                "speculative block size (--speculative-block-size, or block_size in \
                 [models.speculative])",
                format!("2 to the draft model's own {trained}"),
                block_size.to_string(),
            ));
        }
        Ok(Self {
            model,
            mask_token,
            block_size,
        })
    }

    pub fn config(&self) -> &DraftConfig {
        self.model.config()
    }

    pub fn mask_token(&self) -> u32 {
        self.mask_token
    }

    /// Anchor and drafts.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Positions that the draft model's RoPE table and training configuration allow.
    pub fn max_positions(&self) -> usize {
        self.model.max_positions()
    }

    /// Draft K/V of a sequence that has none yet.
    pub fn new_kv(&self) -> Result<SequenceKv> {
        self.model.new_kv()
    }

    /// Draft `rows - 1` tokens for every job in one forward pass (any context lengths).
    ///
    /// The block is `[anchor, MASK, ..]` at positions `n..`; the drafts are the argmax of the target's
    /// head, or of the draft model's own, on the rows that [`crate::config::Harvest`] names. Does not
    /// change the jobs' K/V. The drafts, u32 `[jobs, rows - 1]`, are left where they are: nothing waits
    /// for a GPU.
    ///
    /// # Errors
    /// If `rows` is not within `2..=block_size`.
    pub fn draft(
        &self,
        target: &dyn TargetHead,
        jobs: &[DraftJob<'_>],
        rows: usize,
    ) -> Result<Tensor> {
        let kv: Vec<&SequenceKv> = jobs.iter().map(|job| job.kv).collect();
        let anchors: Vec<u32> = jobs.iter().map(|job| job.anchor).collect();
        self.draft_with(target, &anchors, rows, |embeds| {
            self.model.forward_block(embeds, &kv)
        })
    }

    /// As [`DFlashWorker::draft`], for sequences whose contexts are in a pool.
    ///
    /// # Errors
    /// If `rows` is not within `2..=block_size`, or a block table does not fit.
    pub fn draft_pooled(
        &self,
        target: &dyn TargetHead,
        anchors: &[u32],
        contexts: &PooledContexts<'_>,
        rows: usize,
    ) -> Result<Tensor> {
        self.draft_with(target, anchors, rows, |embeds| {
            self.model.forward_block_pooled(embeds, contexts)
        })
    }

    fn draft_with(
        &self,
        target: &dyn TargetHead,
        anchors: &[u32],
        rows: usize,
        forward: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if !(2..=self.block_size).contains(&rows) {
            return Err(DFlashError::input(
                "rows of a draft block",
                format!("2 to {}", self.block_size),
                rows.to_string(),
            ));
        }
        let shift = self.config().harvest.shift();
        let (batch, block) = (anchors.len(), rows - shift);
        let mut ids = vec![self.mask_token; batch * block];
        for (row, anchor) in ids.chunks_mut(block).zip(anchors) {
            row[0] = *anchor;
        }
        let ids = Tensor::from_vec(ids, batch * block, self.model.device())?;
        let embeds =
            target
                .embed(&ids)?
                .to_dtype(self.model.dtype())?
                .reshape((batch, block, ()))?;
        let hidden = forward(&embeds)?;
        let width = hidden.dim(D::Minus1)?;
        // [batch, block, hidden] -> [batch * (rows - 1), hidden]
        let count = rows - 1;
        let hidden = hidden
            .narrow(1, block - count, count)?
            .reshape((batch * count, width))?;
        let drafts = match self.model.own_choices(&hidden)? {
            Some(drafts) => Tensor::new(drafts, &Device::Cpu)?,
            None => {
                let logits = target.logits(&hidden)?;
                match logits.device() {
                    Device::Cpu => logits.argmax(D::Minus1)?.to_dtype(DType::U32)?,
                    _ => dflash_kernels::argmax_last(&logits.contiguous()?)?,
                }
            }
        };
        Ok(drafts.reshape((batch, count))?)
    }

    /// Append the draft K/V of `rows` new context rows at positions `kv.len()..`.
    ///
    /// `taps`: `[rows, taps * target_hidden]`, the target's tapped layer outputs side by side in
    /// the order of the config's ids.
    ///
    /// # Errors
    /// If a shape is wrong; the context is then what it was.
    pub fn materialize(&self, kv: &mut SequenceKv, taps: &Tensor) -> Result<()> {
        self.materialize_all(&mut [kv], &taps.unsqueeze(0)?)
    }

    /// As [`DFlashWorker::materialize`], for several sequences with `rows` new rows each: one matrix
    /// product for all of them. `taps`: `[sequences, rows, taps * target_hidden]`.
    ///
    /// # Errors
    /// If a shape is wrong; the contexts before the one that failed have then grown.
    pub fn materialize_all(&self, kvs: &mut [&mut SequenceKv], taps: &Tensor) -> Result<()> {
        let (sequences, rows, width) = taps.dims3()?;
        if sequences != kvs.len() {
            return Err(DFlashError::input(
                "sequences of the tapped layer outputs",
                kvs.len().to_string(),
                sequences.to_string(),
            ));
        }
        let positions: Vec<usize> = kvs
            .iter()
            .flat_map(|kv| kv.len()..kv.len() + rows)
            .collect();
        let layers = self.project(&taps.reshape((sequences * rows, width))?, &positions)?;
        for (i, kv) in kvs.iter_mut().enumerate() {
            let own = |tensor: &Tensor| tensor.narrow(1, i * rows, rows);
            let layers = layers
                .iter()
                .map(|(k, v)| Ok((own(k)?, own(v)?)))
                .collect::<Result<Vec<_>>>()?;
            kv.append(layers)?;
        }
        Ok(())
    }

    /// As [`DFlashWorker::materialize`], into the blocks of a pool: row `i` is at `positions[i]` of
    /// its sequence and goes to `slots[i]`. `taps`: `[rows, taps * target_hidden]`.
    ///
    /// # Errors
    /// If a shape is wrong or a slot or position does not exist.
    pub fn materialize_slots(
        &self,
        pool: &DraftPool,
        positions: &[usize],
        slots: &[usize],
        taps: &Tensor,
    ) -> Result<()> {
        let fused = self.model.fuse(&self.taps(taps)?)?;
        self.model.context_to_pool(&fused, positions, pool, slots)
    }

    /// K/V of all layers, `[kv_heads, rows, head_dim]`, from taps `[rows, taps * target_hidden]`.
    fn project(&self, taps: &Tensor, positions: &[usize]) -> Result<Vec<(Tensor, Tensor)>> {
        let fused = self.model.fuse(&self.taps(taps)?)?;
        self.model.context_kv(&fused, positions)
    }

    /// Taps where and as the draft model computes.
    fn taps(&self, taps: &Tensor) -> Result<Tensor> {
        Ok(taps
            .to_device(self.model.device())?
            .to_dtype(self.model.dtype())?)
    }

    /// An empty pool for a paged cache of this many blocks.
    ///
    /// # Errors
    /// Those of [`DraftPool::new`].
    pub fn new_pool(&self, blocks: usize, block_size: usize) -> Result<DraftPool> {
        DraftPool::new(
            self.model.config(),
            self.model.dtype(),
            self.model.device(),
            blocks,
            block_size,
        )
    }
}
