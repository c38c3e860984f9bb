//! A head of the draft model's own, for a part of the vocabulary.

use candle_core::{DType, Tensor, D};
use candle_nn::{Init, VarBuilder};

use super::linear::Linear;
use crate::config::DraftConfig;
use crate::error::{DFlashError, Result};

/// Logits of the draft vocabulary, and which token of the target each of them stands for.
pub(super) struct DraftHead {
    logits: Linear,
    /// The target's token of each draft token.
    tokens: Vec<u32>,
}

impl DraftHead {
    /// `lm_head.weight` `[size, hidden]` and `d2t` `[size]`: the target's token less the draft token.
    ///
    /// # Errors
    /// [`DFlashError::Config`] when a token would be outside the target's vocabulary; candle's errors.
    pub fn load(config: &DraftConfig, size: usize, vb: &VarBuilder) -> Result<Self> {
        let offsets = vb.get_with_hints_dtype(size, "d2t", Init::Const(0.0), DType::I64)?;
        let tokens = offsets
            .to_vec1::<i64>()?
            .into_iter()
            .enumerate()
            .map(|(token, offset)| {
                let target = (token as i64).checked_add(offset);
                let target = target.and_then(|target| u32::try_from(target).ok());
                let known = target.filter(|target| (*target as usize) < config.vocab_size);
                known.ok_or_else(|| {
                    DFlashError::config(
                        "vocab_size",
                        format!(
                            "`d2t` maps draft token {token} by {offset} out of the vocabulary of {}",
                            config.vocab_size
                        ),
                    )
                })
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            logits: Linear::load(config.hidden_size, size, false, vb.pp("lm_head"))?,
            tokens,
        })
    }

    /// `[rows, hidden]` to the best token of each row.
    pub fn choose(&self, hidden: &Tensor) -> Result<Vec<u32>> {
        let logits = self.logits.forward(&hidden.contiguous()?)?;
        let best = logits.argmax(D::Minus1)?.to_vec1::<u32>()?;
        Ok(best
            .into_iter()
            .map(|id| self.tokens[id as usize])
            .collect())
    }
}
