//! The draft model over contexts in the blocks of a pool.

use std::sync::PoisonError;

use candle_core::Tensor;
use dflash_kernels::{KvOrder, MaterializeSpec};

use super::layer::Contexts;
use super::{expect_rows, DraftModel};
use crate::error::{DFlashError, Result};
use crate::pool::{DraftPool, PooledContexts};

impl DraftModel {
    /// As [`DraftModel::context_kv`], into a pool of this model's shape: row `i` goes to `slots[i]`.
    ///
    /// # Errors
    /// [`DFlashError::Input`] when shapes disagree, a slot does not exist or a position is not below
    /// [`DraftModel::max_positions`].
    pub fn context_to_pool(
        &self,
        fused: &Tensor,
        positions: &[usize],
        pool: &DraftPool,
        slots: &[usize],
    ) -> Result<()> {
        expect_rows("context features", fused, self.config.hidden_size)?;
        let rows = fused.dim(0)?;
        if positions.len() != rows || slots.len() != rows {
            return Err(DFlashError::input(
                "positions and slots of the context features",
                rows.to_string(),
                format!("{} and {}", positions.len(), slots.len()),
            ));
        }
        let last = positions.iter().copied().max().unwrap_or(0);
        let (cos, sin) = self.rope.tables(last)?;
        let product = self.context_proj.forward(&fused.to_dtype(self.dtype)?)?;
        let spec = MaterializeSpec {
            k_norm: &self.layer_k_norms,
            cos: &cos,
            sin: &sin,
            interleaved: self.rope.is_interleaved(),
            eps: self.eps(),
            order: KvOrder::KeysThenValues,
        };
        let positions: Vec<u32> = positions.iter().map(|p| *p as u32).collect();
        let positions = Tensor::from_vec(positions, rows, &self.device)?;
        let on_device = pool.slots(slots)?;
        dflash_kernels::materialize(&product, &spec, &positions, &on_device, None, pool.layers())?;
        pool.wrote(slots);
        Ok(())
    }

    /// As [`DraftModel::forward_block`], over contexts in the blocks of a pool of this model's shape. A
    /// bound of the context is rounded up to whole blocks, as the host does with its own windows.
    ///
    /// # Errors
    /// Those of `forward_block`, and if a block table does not fit.
    pub fn forward_block_pooled(
        &self,
        embeds: &Tensor,
        contexts: &PooledContexts<'_>,
    ) -> Result<Tensor> {
        let (batch, block) = self.check_block(embeds, contexts.lens.len())?;
        let rope = self.rope.blocks(&contexts.lens, block)?;
        let x = self.input(embeds)?;
        let window = self.config.layers.iter().find_map(|layer| layer.context);
        let recent = window.map(|window| contexts.recent(window)).transpose()?;
        // Positions are those of the whole contexts.
        let seen = recent.as_ref().unwrap_or(contexts);
        let pool = contexts.pool;
        let replay = self.replay.as_ref();
        let mut replay = replay.map(|replay| replay.lock().unwrap_or_else(PoisonError::into_inner));
        let out = match (&mut replay, pool.layers().first()) {
            (Some(replay), Some((keys, _))) if replay.is_on() => {
                let (tables, lens) = seen.roomy_tensors()?;
                let inputs = [x, rope.cos.clone(), rope.sin.clone(), tables, lens];
                replay.run(keys.id(), &inputs, &mut |inputs| {
                    let [x, cos, sin, tables, lens] = inputs else {
                        candle_core::bail!("a draft pass has five inputs");
                    };
                    let pooled = Contexts::Pool {
                        layers: pool.layers(),
                        longest: tables.dim(1)? * pool.block_size(),
                        tables: tables.clone(),
                        lens: lens.clone(),
                    };
                    let rope = rope.with(cos, sin);
                    let out = self.forward_layers(x, &rope, &pooled);
                    out.map_err(candle_core::Error::wrap)
                })?
            }
            _ => {
                let pooled = Contexts::pooled(seen)?;
                self.forward_layers(&x, &rope, &pooled)?
            }
        };
        Ok(out.reshape((batch, block, ()))?)
    }
}
