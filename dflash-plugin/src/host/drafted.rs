//! The blocks that a step verifies: known on the host, or still on the GPU.

use candle_core::{Device, Result, Tensor};

/// Changes the drafts of the sequence with this index; for tests.
pub type Change<'a> = dyn Fn(usize, &mut Vec<u32>) + 'a;

/// Anchor and drafts of every sequence of a step, all of one length.
pub struct Drafted {
    batch: usize,
    rows: usize,
    tokens: Tokens,
}

enum Tokens {
    Host(Vec<Vec<u32>>),
    /// u32 `[batch, rows]`. The verify pass can be launched before the draft pass is over.
    Device(Tensor),
}

impl Drafted {
    /// `drafts`: u32 `[anchors, rows - 1]`. On a GPU they stay there unless `change` wants them.
    ///
    /// # Errors
    /// Only those of candle.
    pub fn new(anchors: &[u32], drafts: &Tensor, change: Option<&Change>) -> Result<Self> {
        let (batch, count) = drafts.dims2()?;
        let tokens = match (drafts.device(), change) {
            (Device::Cpu, _) | (_, Some(_)) => {
                let mut drafts = drafts.to_vec2::<u32>()?;
                if let Some(change) = change {
                    let each = drafts.iter_mut().enumerate();
                    each.for_each(|(i, drafts)| change(i, drafts));
                }
                let blocks = anchors.iter().zip(drafts);
                Tokens::Host(
                    blocks
                        .map(|(anchor, drafts)| std::iter::once(*anchor).chain(drafts).collect())
                        .collect(),
                )
            }
            (device, None) => {
                let anchors = Tensor::from_slice(anchors, (batch, 1), device)?;
                Tokens::Device(Tensor::cat(&[&anchors, drafts], 1)?)
            }
        };
        Ok(Self {
            batch,
            rows: count + 1,
            tokens,
        })
    }

    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Anchor and drafts.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Token ids, u32 `[batch, rows]`.
    ///
    /// # Errors
    /// Only those of candle.
    pub fn ids(&self, device: &Device) -> Result<Tensor> {
        match &self.tokens {
            Tokens::Host(blocks) => {
                Tensor::new(blocks.concat(), device)?.reshape((self.batch, self.rows))
            }
            Tokens::Device(ids) => ids.to_device(device),
        }
    }

    /// The blocks, and the values of `others` (u32), with one copy from the GPU for both.
    ///
    /// # Errors
    /// Only those of candle.
    pub fn with(&self, others: Option<Tensor>) -> Result<(Vec<Vec<u32>>, Vec<u32>)> {
        let on_host = |others: Option<Tensor>| match others {
            Some(others) => others.flatten_all()?.to_vec1::<u32>(),
            None => Ok(Vec::new()),
        };
        match &self.tokens {
            Tokens::Host(blocks) => Ok((blocks.clone(), on_host(others)?)),
            Tokens::Device(ids) => {
                let mut parts = vec![ids.flatten_all()?];
                if let Some(others) = others {
                    parts.push(others.flatten_all()?.to_device(ids.device())?);
                }
                let mut all = Tensor::cat(&parts, 0)?.to_vec1::<u32>()?;
                let others = all.split_off(self.batch * self.rows);
                Ok((all.chunks(self.rows).map(<[u32]>::to_vec).collect(), others))
            }
        }
    }
}
