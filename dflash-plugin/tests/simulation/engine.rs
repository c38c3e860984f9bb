//! A toy engine around the real walk and the real draft KV: the host's steps, with every cache
//! checked row by row after each of them.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use super::coverage::Coverage;
use super::draft;
use super::mutants::{walk_as, Mutant};
use super::request::{End, Limits, Request};
use super::scenario::{Event, RequestPlan, Scenario};
use super::sequence::{PrefixCache, Sequence, Verified};
use super::target::Row;

pub struct Engine<'a> {
    limits: &'a Limits,
    mutant: Option<Mutant>,
    running: Vec<Sequence>,
    cache: PrefixCache,
    /// Texts of the sequences that have ended.
    texts: Vec<Vec<u32>>,
    coverage: &'a mut Coverage,
}

/// Runs a scenario to the end of all its requests.
pub fn run(
    scenario: &Scenario,
    mutant: Option<Mutant>,
    coverage: &mut Coverage,
) -> Result<(), String> {
    coverage.cases += 1;
    let mut engine = Engine {
        limits: &scenario.limits,
        mutant,
        running: Vec::new(),
        cache: PrefixCache::default(),
        texts: Vec::new(),
        coverage,
    };
    let mut waiting = scenario.requests.iter();
    let mut admit = |engine: &mut Engine| match waiting.next() {
        Some(plan) => {
            engine.admit(plan);
            true
        }
        None => false,
    };
    for event in &scenario.events {
        if matches!(event, Event::Admit) || engine.running.is_empty() {
            admit(&mut engine);
        }
        engine.event(event)?;
    }
    for step in 0.. {
        if engine.running.is_empty() && !admit(&mut engine) {
            break;
        }
        engine.event(&Event::Speculate {
            pick: step,
            batch: 2,
            accept: [step, step / 2, 0],
        })?;
    }
    engine.cache.check()
}

impl Engine<'_> {
    fn admit(&mut self, plan: &RequestPlan) {
        let limits = self.limits;
        let followed = plan.follow.filter(|_| !self.texts.is_empty());
        let mut prompt = match followed {
            Some(pick) => self.texts[pick % self.texts.len()].clone(),
            None => (0..plan.shared)
                .map(|position| limits.shared_token(plan.text, position))
                .collect(),
        };
        prompt.extend(plan.suffix.iter().map(|token| token % limits.vocab));
        prompt.truncate(limits.max_len - 1);
        if prompt.is_empty() {
            prompt.push(limits.vocab - 1);
        }
        let request = Request {
            prompt,
            seed: plan.seed,
            max_tokens: plan.max_tokens,
            abort_at: plan.abort_at,
        };
        self.running.push(Sequence::new(limits, request));
    }

    fn event(&mut self, event: &Event) -> Result<(), String> {
        let Some(most) = self.running.len().checked_sub(1) else {
            return Ok(());
        };
        let one = |pick: usize| pick % (most + 1);
        match *event {
            Event::Admit => (),
            Event::Speculate {
                pick,
                batch,
                accept,
            } => self.speculate(&self.batch(one(pick), batch), &accept)?,
            Event::Plain { pick } => self.plain_step(one(pick))?,
            Event::FailVerify {
                pick,
                batch,
                written,
            } => self.fail_verify(&self.batch(one(pick), batch), written)?,
            Event::Preempt { pick } => {
                self.coverage.preemptions += 1;
                let sequence = &mut self.running[one(pick)];
                sequence.target = Default::default();
                if self.mutant != Some(Mutant::KeepDraftOnPreemption) {
                    sequence.draft = None;
                }
                sequence.needs_prompt = true;
            }
            Event::LoseDraft { pick } => self.running[one(pick)].draft = None,
            Event::Leave { pick } => self.running[one(pick)].ended = Some(End::Left),
            Event::Evict { pick } => self.cache.evict(pick),
        }
        self.retire()
    }

    /// Sequences of a step, from `first` on.
    fn batch(&self, first: usize, size: usize) -> Vec<usize> {
        let all = self.running.len();
        (0..size.min(all)).map(|i| (first + i) % all).collect()
    }

    /// Rows that a speculative step of this sequence has, the host's rule; `None`: a plain step.
    fn rows(&mut self, index: usize) -> Option<usize> {
        let sequence = &self.running[index];
        let base = sequence.committed();
        if sequence.needs_prompt || base + self.limits.block > self.limits.draft_positions {
            return None;
        }
        let rows = self.limits.block.min(self.limits.capacity - base);
        self.coverage.shrunk += usize::from(rows < self.limits.block);
        self.coverage.no_room += usize::from(rows < 2);
        (rows >= 2).then_some(rows)
    }

    /// Draft, verify everything, then walk sequence by sequence.
    fn speculate(&mut self, batch: &[usize], accept: &[usize; 3]) -> Result<(), String> {
        let mut verified = Vec::new();
        for (i, &index) in batch.iter().enumerate() {
            match self.rows(index) {
                None => self.plain_step(index)?,
                Some(rows) => {
                    let planted = accept[i % accept.len()] % rows;
                    let drafts = self.draft(index, rows - 1, planted);
                    let logits = self.verify(index, &drafts, true);
                    verified.push((index, drafts, planted, logits));
                }
            }
        }
        if self.mutant == Some(Mutant::AnotherSequencesLogits) {
            let last = verified.len().saturating_sub(1);
            let (head, tail) = verified.split_at_mut(last);
            if let (Some(first), Some(last)) = (head.first_mut(), tail.first_mut()) {
                std::mem::swap(&mut first.3, &mut last.3);
            }
        }
        for (index, drafts, planted, logits) in verified {
            self.walk(index, &drafts, planted, logits)?;
        }
        Ok(())
    }

    /// Drafts of which the first `right` are what the target will choose, and the next is not.
    fn draft(&mut self, index: usize, count: usize, right: usize) -> Vec<u32> {
        let limits = self.limits;
        let sequence = &self.running[index];
        if sequence.draft.is_none() {
            self.coverage.without_draft += 1;
            return vec![limits.mask(); count];
        }
        let (mut target, mut sampler) = (sequence.target.clone(), sequence.sampler.clone());
        let mut last = sequence.tokens[sequence.committed()];
        let mut drafts = Vec::new();
        for i in 0..count {
            let choice = sampler.choose(&target.forward(&[last])[0]);
            drafts.push(match i.cmp(&right) {
                std::cmp::Ordering::Less => choice,
                std::cmp::Ordering::Equal => (choice + 1) % limits.vocab,
                // As likely as not what would have been chosen behind the wrong one.
                std::cmp::Ordering::Greater => choice,
            });
            last = choice;
        }
        drafts
    }

    /// One target pass over anchor and drafts; `materialize`: their rows go into the draft KV.
    fn verify(&mut self, index: usize, drafts: &[u32], materialize: bool) -> Vec<Row> {
        let sequence = &mut self.running[index];
        let mut block = vec![sequence.tokens[sequence.committed()]];
        block.extend(drafts);
        let rows = sequence.target.forward(&block);
        if let Some(kv) = sequence.draft.as_mut().filter(|_| materialize) {
            draft::append(kv, &rows);
        }
        rows
    }

    fn walk(
        &mut self,
        index: usize,
        drafts: &[u32],
        planted: usize,
        logits: Vec<Row>,
    ) -> Result<(), String> {
        let sequence = &mut self.running[index];
        let (base, before) = (sequence.committed(), sequence.emitted.len());
        let has_draft = sequence.draft.is_some();
        let mut verified = Verified {
            sequence,
            limits: self.limits,
            cache: &mut self.cache,
            logits,
            base,
            next_row: 0,
        };
        let walked = block_on(walk_as(self.mutant, &mut verified, base, drafts))?;
        let sequence = &self.running[index];
        self.coverage.verified += 1;
        sequence.check_output()?;
        if walked.emitted != sequence.emitted[before..] {
            return Err("I1: the walk reports other tokens than were emitted".into());
        }
        if walked.ended != sequence.ended.is_some() {
            return Err("I3: the walk and the sequence disagree about the end".into());
        }
        if walked.ended {
            self.coverage.ended_inside_a_block += usize::from(walked.emitted.len() <= drafts.len());
            return Ok(());
        }
        sequence.check()?;
        if walked.emitted.len() != walked.accepted + 1 {
            return Err("a walk that goes on emits its accepted drafts and a bonus".into());
        }
        if has_draft && walked.accepted != planted {
            let accepted = walked.accepted;
            return Err(format!(
                "I6: {accepted} drafts accepted, {planted} were right"
            ));
        }
        self.coverage.accepted[walked.accepted] += usize::from(has_draft);
        Ok(())
    }

    /// A verify pass that fails midway, `undo`, and the plain steps that replace it.
    fn fail_verify(&mut self, batch: &[usize], written: usize) -> Result<(), String> {
        let mut failed = Vec::new();
        for (i, &index) in batch.iter().enumerate() {
            if let Some(rows) = self.rows(index) {
                let base = self.running[index].committed();
                let drafts = self.draft(index, rows - 1, 0);
                self.verify(index, &drafts, i < written);
                failed.push((index, base));
            }
        }
        for &(index, base) in &failed {
            self.coverage.failures += 1;
            let sequence = &mut self.running[index];
            if self.mutant != Some(Mutant::KeepTargetRowsAfterFailure) {
                sequence.target.set_len(base)?;
            }
            if let Some(kv) = &mut sequence.draft {
                if self.mutant != Some(Mutant::KeepDraftRowsAfterFailure) {
                    kv.truncate(base);
                }
            }
            sequence.check()?;
        }
        batch.iter().try_for_each(|&index| self.plain_step(index))
    }

    /// A prompt step or one token of plain decoding.
    fn plain_step(&mut self, index: usize) -> Result<(), String> {
        let new = match self.running[index].needs_prompt {
            true => self.begin_prompt(index)?,
            false => self.running[index].committed(),
        };
        self.coverage.plain += 1;
        let sequence = &mut self.running[index];
        let tokens = sequence.tokens[new..].to_vec();
        let rows = sequence.target.forward(&tokens);
        let fits = sequence.tokens.len() <= self.limits.draft_positions;
        match sequence.draft.as_mut().filter(|_| fits) {
            Some(kv) => draft::append(kv, &rows),
            None => sequence.draft = None,
        }
        let logits = rows[rows.len() - 1];
        sequence.sample(self.limits, &mut self.cache, &logits)?;
        sequence.check_output()?;
        match sequence.ended {
            None => sequence.check(),
            Some(_) => Ok(()),
        }
    }

    /// Restores what the prefix cache has; the first position that the prompt step must process.
    fn begin_prompt(&mut self, index: usize) -> Result<usize, String> {
        self.coverage.prompts += 1;
        let sequence = &mut self.running[index];
        sequence.needs_prompt = false;
        if self.mutant == Some(Mutant::KeepDraftOnPreemption) && sequence.draft.is_some() {
            return Ok(0);
        }
        let Some(hit) = self.cache.find(&sequence.tokens) else {
            sequence.draft = Some(draft::empty());
            return Ok(0);
        };
        self.cache.check()?;
        self.coverage.hits += 1;
        sequence.target = self.cache.target(hit.entry, hit.rows);
        sequence.draft = match self.mutant {
            Some(Mutant::ForkOneRowTooLong) => self.cache.fork(hit.entry, hit.rows + 1),
            Some(Mutant::ForkAnotherEntry) => {
                let other = (hit.entry + 1) % self.cache.len();
                self.cache.fork(other, hit.rows)
            }
            _ => self.cache.fork(hit.entry, hit.rows),
        };
        self.coverage.hits_without_draft += usize::from(sequence.draft.is_none());
        Ok(hit.rows)
    }

    /// Takes out the sequences that have ended, and compares them with plain decoding.
    fn retire(&mut self) -> Result<(), String> {
        let mut i = 0;
        while i < self.running.len() {
            let Some(end) = self.running[i].ended else {
                i += 1;
                continue;
            };
            let sequence = self.running.remove(i);
            self.compare(&sequence, end)?;
            self.texts.push(sequence.tokens);
        }
        Ok(())
    }

    fn compare(&mut self, sequence: &Sequence, end: End) -> Result<(), String> {
        let limits = self.limits;
        let emitted = &sequence.emitted;
        sequence.check_output()?;
        let (expected, expected_end) = &sequence.expected;
        if end != End::Left && (emitted.len(), end) != (expected.len(), *expected_end) {
            return Err(format!(
                "I1: ended with {emitted:?} ({end:?}), plain decoding with {expected:?} \
                 ({expected_end:?})"
            ));
        }
        let last = emitted.len().saturating_sub(1);
        if emitted.iter().take(last).any(|token| *token < limits.stops)
            || emitted.len() > sequence.request.max_tokens
            || sequence.tokens.len() > limits.max_len
            || sequence.tokens != [&sequence.request.prompt[..], emitted].concat()
        {
            return Err("I3: something past a stop or a limit".into());
        }
        self.coverage.sequences += 1;
        self.coverage.tokens += emitted.len();
        *match end {
            End::Stop => &mut self.coverage.stops,
            End::Length => &mut self.coverage.lengths,
            End::Aborted => &mut self.coverage.aborts,
            End::Left => &mut self.coverage.left,
        } += 1;
        Ok(())
    }
}

/// Polls until the future is ready; whoever waits here is woken at once.
fn block_on<F: std::future::Future + Send>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
    }
}
