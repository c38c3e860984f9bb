//! The verified rows of a step in front of the host's sampler: accept and commit.

use candle_core::{Device, IndexOp, Result, Tensor};
use mistralrs_core::plugin::{GreedyChoice, Sequence};

use super::cache::StepCache;
use super::drafted::Drafted;
use super::method::Hooks;
use super::pipeline::{DFlashPipeline, Target};
use super::step::{committed, Sampling};
use super::{recurrent, state, verify};
use crate::commit::{self, Choice, VerifiedSequence};
use crate::fault::FaultPoint;
use crate::trace::Round;

/// Sequences that have been verified in one pass.
pub struct Verified {
    /// Rows in every sequence's KV cache before the step (`n`).
    pub bases: Vec<usize>,
    pub blocks: Drafted,
    /// `[batch, rows, vocab]`
    pub logits: Tensor,
}

impl DFlashPipeline {
    /// Let each sequence sample its rows until its choice is no draft or it ends.
    pub(super) async fn accept(
        &mut self,
        seqs: &mut [&mut Sequence],
        verified: &Verified,
        sampling: &mut Sampling<'_>,
        cache: &StepCache,
    ) -> Result<()> {
        let Verified {
            bases,
            blocks,
            logits,
        } = verified;
        let greedy = Greedy::on_device(seqs, logits)?;
        let (blocks, tokens) = blocks.with(greedy.tokens.clone())?;
        let mut choices = greedy.choices(seqs.len(), &tokens);
        let is_paged = matches!(cache, StepCache::Paged(_));
        if !is_paged {
            let first_rows: Vec<usize> = bases.iter().map(|base| base + 1).collect();
            verify::publish(&*self.target, seqs, &first_rows)?;
        }
        for (i, seq) in seqs.iter_mut().enumerate() {
            let drafts = blocks[i].get(1..).unwrap_or_default();
            seq.set_pending_drafts(drafts.iter().copied());
            let mut rows = Rows {
                seq,
                target: &self.target,
                sampling: &mut *sampling,
                logits: logits.i(i)?,
                choices: std::mem::take(&mut choices[i]),
                drafts,
                base: bases[i],
                hooks: &self.hooks,
                is_paged,
            };
            let walked = commit::walk(&mut rows, bases[i], drafts).await?;
            self.hooks
                .stats
                .verified(drafts.len(), walked.accepted, walked.emitted.len());
            self.counters
                .record(drafts.len(), walked.accepted, walked.emitted.len());
            // A sequence that ended with an accepted draft says nothing of the drafts behind it.
            let judged = match walked.ended && walked.emitted.len() == walked.accepted {
                true => walked.accepted,
                false => drafts.len(),
            };
            if let Some(state) = state::of_mut(seq) {
                state.acceptance.observe(judged, walked.accepted);
            }
            if let Some(controller) = &mut self.controller {
                controller.observe_acceptance(judged, walked.accepted);
            }
            if let Some(observer) = &self.hooks.observer {
                observer(&Round {
                    sequence: *seq.id(),
                    batch: blocks.len(),
                    position: bases[i],
                    anchor: blocks[i][0],
                    drafts: drafts.to_vec(),
                    accepted: walked.accepted,
                    emitted: walked.emitted,
                });
            }
            self.check_lengths(seq)?;
        }
        recurrent::settle(&*self.target)?;
        if is_paged {
            return Ok(());
        }
        // The model's cache goes on with what each has committed.
        let lens: Vec<usize> = seqs.iter().map(|seq| committed(seq)).collect();
        verify::set_model_lens(&*self.target, &lens)
    }
}

/// On a GPU: the choices of all rows of the sequences that choose greedily.
pub(super) struct Greedy {
    /// Which sequences.
    sequences: Vec<usize>,
    /// Rows of each.
    rows: usize,
    /// u32 `[sequences * rows]`, on the GPU; `None` if there are no such sequences.
    pub tokens: Option<Tensor>,
}

impl Greedy {
    /// `logits`: `[batch, rows, vocab]`. Nothing waits for the GPU.
    pub(super) fn on_device(seqs: &[&mut Sequence], logits: &Tensor) -> Result<Self> {
        let (_, rows, vocab) = logits.dims3()?;
        let sequences: Vec<usize> = match logits.device() {
            Device::Cpu => Vec::new(),
            _ => (0..seqs.len())
                .filter(|i| seqs[*i].chooses_greedily())
                .collect(),
        };
        let logits = match sequences.len() {
            0 => None,
            all if all == seqs.len() => Some(logits.clone()),
            _ => {
                let parts = sequences.iter().map(|i| logits.narrow(0, *i, 1));
                Some(Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
            }
        };
        let tokens = logits.map(|logits| {
            dflash_kernels::argmax_last(&logits.reshape((sequences.len() * rows, vocab))?)
        });
        Ok(Self {
            tokens: tokens.transpose()?,
            sequences,
            rows,
        })
    }

    /// By sequence of the batch and row, from the values of `tokens`. Empty for the others.
    pub(super) fn choices(&self, batch: usize, tokens: &[u32]) -> Vec<Vec<Option<GreedyChoice>>> {
        let mut all = vec![Vec::new(); batch];
        for (i, tokens) in self.sequences.iter().zip(tokens.chunks(self.rows.max(1))) {
            let choice = |token: &u32| GreedyChoice {
                token: *token,
                // Who asks for logprobs is not chosen for here. The host adds them up all the same to
                // compare choices of a request, which are equal then.
                logit: 1.0,
            };
            all[*i] = tokens.iter().map(|token| Some(choice(token))).collect();
        }
        all
    }
}

/// The verified rows of one sequence, in front of the host's sampler.
struct Rows<'a, 'b> {
    seq: &'a mut Sequence,
    target: &'a Target,
    sampling: &'a mut Sampling<'b>,
    /// `[rows, vocab]`
    logits: Tensor,
    /// By row, where they were made for the whole batch.
    choices: Vec<Option<GreedyChoice>>,
    drafts: &'a [u32],
    /// Committed positions before the step.
    base: usize,
    hooks: &'a Hooks,
    is_paged: bool,
}

impl VerifiedSequence for Rows<'_, '_> {
    type Error = candle_core::Error;

    fn set_len(&mut self, len: usize) -> Result<()> {
        if !self.is_paged {
            verify::set_seq_len(self.seq, len)?;
        }
        let rows = len.saturating_sub(self.base);
        recurrent::select_rows(&**self.target, self.seq, rows)?;
        match state::kv_mut(self.seq) {
            Some(kv) => Ok(kv.set_len(len)?),
            None => Ok(()),
        }
    }

    async fn choose(&mut self, row: usize) -> Result<Choice> {
        let before = self.seq.get_toks().len();
        let logits = self.logits.narrow(0, row, 1)?;
        if let Some(choice) = self.choices.get(row).copied().flatten() {
            self.seq.set_greedy_choice(choice);
        }
        self.sampling
            .sample(self.target, &mut [&mut *self.seq], vec![logits])
            .await?;
        let mut emitted = self.seq.get_toks().get(before).copied();
        let draft = self.drafts.get(row).copied();
        if emitted.is_some() && draft.is_some() && self.hooks.goes_wrong_at(FaultPoint::Accept) {
            emitted = draft;
        }
        Ok(match emitted {
            Some(token) if self.seq.is_running() => Choice::Token(token),
            Some(token) => Choice::Last(token),
            // The sampler failed and has told the client; the sequence is in error.
            None => Choice::None,
        })
    }
}
