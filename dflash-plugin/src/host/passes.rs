//! The draft pass and the verify pass of a step, and how a failed one is undone.

use candle_core::{Result, Tensor, D};
use mistralrs_core::plugin::{PagedAttentionMeta, Sequence};

use super::accept::Verified;
use super::cache::{verify_metadata, Blocks};
use super::drafted::{Change, Drafted};
use super::pipeline::DFlashPipeline;
use super::state::{self, DraftKv};
use super::step::{caught, committed};
use super::{decode, recurrent, verify};
use crate::fault::FaultPoint;
use crate::pool::PooledContexts;
use crate::trace::Phase;
use crate::worker::DraftJob;

/// The blocks of a paged step's sequences.
pub(super) type Paged<'a> = (&'a PagedAttentionMeta, &'a Blocks);

impl DFlashPipeline {
    /// Draft and run the verify pass; after it the draft KV of each sequence has all verified
    /// rows. If that cannot be done, target and draft KV are as before and `None` is returned.
    ///
    /// # Errors
    /// If they could not be put back: a plain step would then decode from wrong KV.
    pub(super) fn draft_and_verify(
        &mut self,
        seqs: &mut [&mut Sequence],
        rows: usize,
        paged: Option<Paged<'_>>,
    ) -> Result<Option<Verified>> {
        let bases: Vec<usize> = seqs.iter().map(|seq| committed(seq)).collect();
        let mut result = caught(|| {
            let start = self.clock()?;
            let blocks = self.draft(seqs, rows, paged)?;
            self.clocked(Phase::Draft, start)?;
            let logits = self.verify(seqs, &bases, &blocks, paged)?;
            Ok((blocks, logits))
        });
        if let Some(ranks) = &self.ranks {
            if ranks.on_all([result.is_ok()])? != [true] && result.is_ok() {
                result = Err(candle_core::Error::msg("it failed on another rank"));
            }
        }
        match result {
            Ok((blocks, logits)) => Ok(Some(Verified {
                bases,
                blocks,
                logits,
            })),
            Err(error) => {
                self.warn("draft or verify failed, decoding plainly", &error);
                self.undo(seqs, &bases, paged.is_some())?;
                Ok(None)
            }
        }
    }

    /// Anchor and drafts of every sequence.
    fn draft(
        &self,
        seqs: &[&mut Sequence],
        rows: usize,
        paged: Option<Paged<'_>>,
    ) -> Result<Drafted> {
        let anchors = seqs
            .iter()
            .map(|seq| match seq.get_toks().last() {
                Some(anchor) => Ok(*anchor),
                None => candle_core::bail!("sequence {} has no token to draft from", seq.id()),
            })
            .collect::<Result<Vec<u32>>>()?;
        let drafts = || self.own_drafts(seqs, &anchors, rows, paged);
        let drafts = match &self.ranks {
            Some(ranks) => ranks.first_tokens(caught(drafts), (anchors.len(), rows - 1))?,
            None => drafts()?,
        };
        let change =
            self.hooks.drafts.as_ref().map(|hook| {
                move |i: usize, drafts: &mut Vec<u32>| hook(seqs[i].get_toks(), drafts)
            });
        Drafted::new(
            &anchors,
            &drafts,
            change.as_ref().map(|change| change as &Change),
        )
    }

    /// Drafts for these anchors: u32 `[anchors, rows - 1]`.
    fn own_drafts(
        &self,
        seqs: &[&mut Sequence],
        anchors: &[u32],
        rows: usize,
        paged: Option<Paged<'_>>,
    ) -> Result<Tensor> {
        self.hooks.fault_at(FaultPoint::Draft)?;
        let head = self.head()?;
        match paged {
            None => {
                let jobs = seqs
                    .iter()
                    .zip(anchors)
                    .map(|(seq, anchor)| match state::kv(seq) {
                        Some(DraftKv::Own(kv)) => Ok(DraftJob {
                            anchor: *anchor,
                            kv,
                        }),
                        _ => candle_core::bail!("sequence {} has nothing to draft from", seq.id()),
                    })
                    .collect::<Result<Vec<_>>>()?;
                Ok(self.worker.draft(&head, &jobs, rows)?)
            }
            Some((_, blocks)) => {
                let lens: Vec<usize> = seqs.iter().map(|seq| committed(seq)).collect();
                let contexts = PooledContexts {
                    pool: self.pool()?,
                    tables: (lens.iter().enumerate())
                        .map(|(i, len)| blocks.covering(i, 0, *len).to_vec())
                        .collect(),
                    lens,
                };
                Ok(self.worker.draft_pooled(&head, anchors, &contexts, rows)?)
            }
        }
    }

    /// One target forward over all blocks; its features become draft K/V. `[batch, rows, vocab]`.
    fn verify(
        &mut self,
        seqs: &mut [&mut Sequence],
        bases: &[usize],
        blocks: &Drafted,
        paged: Option<Paged<'_>>,
    ) -> Result<Tensor> {
        let start = self.clock()?;
        let rows = blocks.rows();
        let device = self.target.device();
        let layout = match paged {
            Some(_) if decode::takes_rows(&device) && !recurrent::is_recurrent(&*self.target) => {
                verify::Rows::Single
            }
            _ => verify::Rows::Blocks,
        };
        let mut inputs = verify::inputs(blocks, bases, layout, &device)?;
        if let Some((meta, kv_blocks)) = paged {
            let meta = verify_metadata(&self.target, meta, kv_blocks, bases, rows)?;
            inputs.paged_attn_meta = Some(meta);
        }
        recurrent::begin(&*self.target, seqs)?;
        recurrent::keep_rows(&*self.target)?;
        let result = self.target.forward_inputs(Box::new(inputs), false)?;
        let logits = verify::logits_of(result)?;
        let logits = logits.reshape((blocks.batch(), rows, logits.dim(D::Minus1)?))?;
        self.hooks.fault_at(FaultPoint::Verify)?;
        self.clocked(Phase::Verify, start)?;
        let start = self.clock()?;
        let lens: Vec<usize> = bases.iter().map(|base| base + rows).collect();
        if paged.is_none() && !verify::model_holds(&*self.target, &lens)? {
            candle_core::bail!("the target's KV cache does not hold the {rows} verified rows");
        }
        let mut taps = self.take_taps(blocks.batch())?;
        if self.hooks.goes_wrong_at(FaultPoint::NanFeatures) {
            taps = taps.affine(f64::NAN, 0.0)?;
        }
        match paged {
            None => {
                let mut kvs: Vec<_> = seqs
                    .iter_mut()
                    .filter_map(|seq| state::own_kv_mut(seq))
                    .collect();
                self.worker.materialize_all(&mut kvs, &taps)?;
            }
            Some((_, kv_blocks)) => {
                let all: Vec<_> = bases
                    .iter()
                    .enumerate()
                    .map(|(i, base)| (i, *base))
                    .collect();
                self.materialize_in_pool(seqs, &all, rows, kv_blocks, &taps)?;
            }
        }
        self.clocked(Phase::Materialize, start)?;
        Ok(logits)
    }

    /// Put target and draft KV back to `bases` rows after a failed draft or verify pass.
    fn undo(&self, seqs: &mut [&mut Sequence], bases: &[usize], is_paged: bool) -> Result<()> {
        for (seq, base) in seqs.iter_mut().zip(bases) {
            if let Some(kv) = state::kv_mut(seq) {
                kv.truncate(*base);
            }
        }
        self.taps()?.clear();
        recurrent::drop_rows(&*self.target)?;
        if is_paged {
            return Ok(()); // The next step writes over the rows behind the committed ones.
        }
        verify::set_model_lens(&*self.target, bases)
    }
}
