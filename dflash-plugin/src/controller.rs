//! How many rows to verify, so that speculation is never slower than plain decoding.
//!
//! A step with `r` rows emits, for each sequence, one token and every draft up to the first that
//! is not the target's choice. What it costs depends on hardware, target and batch, so it is
//! measured. The controller takes the rows with the most expected tokens a second (the "regular
//! choice") and now and then another number of rows, to learn what cannot be known otherwise (a
//! "probe"). Probes are paid from an account, which bounds what all of them together may lose.
//!
//! Nothing here reads a clock or draws random numbers: the same observations give the same rows.

mod acceptance;
mod costs;
mod explore;
mod outlook;
#[cfg(test)]
mod tests;

pub use acceptance::Acceptance;

use acceptance::Positions;
use costs::{Batch, Cell, Costs};
use explore::{Account, Pending, Probe, Schedule, PLAIN_WAIT, TRIAL_WAIT};
use outlook::Outlook;
use std::time::Duration;

/// Share of drafts accepted while nothing is known; also what a trial assumes, since the drafter
/// may have become good since it was last asked.
const OPTIMISM: f64 = 0.85;
/// Memory of the acceptance of all sequences, in verify steps.
const PRIOR_MEMORY: f64 = 64.0;
/// Weight of the prior in a sequence's acceptance, in verify steps.
const SEQUENCE_PSEUDO: f64 = 4.0;
/// Weight of the position before in a position's prior, in verify steps.
const PRIOR_PSEUDO: f64 = 2.0;
/// Rows of the first verify step: enough to tell the drafter's cost from that of a row, and cheap
/// where a row costs as much as a plain step.
const FIRST_ROWS: usize = 4;
/// What a trial may lose before it has failed, in plain steps: one bad step proves little.
const TRIAL_LOSS: f64 = 0.5;
/// Steps until something is measured that nothing else stands in for.
const SOON: u64 = 2;
/// Steps between probes of other numbers of rows while drafting.
const ROWS_WAIT: u64 = 16;
/// Share of all time that probes may lose.
const PROBE_SHARE: f64 = 0.015;

/// Chooses the rows of every step. One for each loaded model.
#[derive(Debug)]
pub struct Controller {
    costs: Costs,
    prior: Positions,
    account: Account,
    /// What the running trial has gained so far, in plain steps: it goes on while it has paid.
    trial: Option<f64>,
    pending: Option<Pending>,
    now: u64,
    rows: usize,
    /// Measurements of each batch size and rows that are not believed.
    ignored: usize,
}

impl Controller {
    /// `block_size`: rows of a verify step at most, anchor and drafts.
    pub fn new(block_size: usize) -> Self {
        Self {
            costs: Costs::new(block_size),
            prior: Positions::default(),
            account: Account::new(),
            trial: None,
            pending: None,
            now: 0,
            rows: 1,
            ignored: 0,
        }
    }

    /// Do not believe the first `count` measurements of each batch size and rows: where steps are
    /// recorded when they have been seen some times, the first ones are slower than all that follow.
    pub fn ignoring_first(mut self, count: usize) -> Self {
        self.ignored = count;
        self
    }

    /// Rows of the last choice.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Rows for each sequence of the next step: 1 (plain decoding) up to `limit`, the rows that all
    /// sequences have room for, and up to the block size. Always 1 without room or sequences.
    pub fn choose(&mut self, sequences: &[&Acceptance], limit: usize) -> usize {
        self.settle();
        self.now += 1;
        let allowed = self.costs.candidates.partition_point(|&rows| rows <= limit);
        let index = if sequences.is_empty() || allowed < 2 {
            0
        } else {
            self.choose_index(sequences, allowed)
        };
        self.rows = self.costs.rows(index);
        self.rows
    }

    /// After a step, if it went as chosen: sequences, rows of each, and the whole step's time,
    /// with drafting and sampling. Other rows than [`Self::choose`] ever gives are ignored.
    pub fn observe_step(&mut self, batch: usize, rows: usize, time: Duration) {
        let seconds = time.as_secs_f64().max(1e-9);
        let Ok(index) = self.costs.candidates.binary_search(&rows) else {
            return;
        };
        if batch == 0 {
            return;
        }
        let entry = self.costs.entry(batch, self.now);
        if let Some(cell) = entry.cells.get_mut(index) {
            if cell.ignored < self.ignored {
                cell.ignored += 1;
                return;
            }
            cell.observe(seconds, self.now);
        }
        if let Some(pending) = &mut self.pending {
            pending.timed |= (pending.batch, pending.index) == (batch, index);
        }
    }

    /// After a verify step, for each of its sequences, before the next [`Self::choose`]: like
    /// [`Acceptance::observe`].
    pub fn observe_acceptance(&mut self, proposed: usize, accepted: usize) {
        if proposed > 0 {
            self.prior.observe(proposed, accepted, PRIOR_MEMORY);
        }
        if let Some(pending) = &mut self.pending {
            pending.accepted = pending.accepted.saturating_add(accepted.min(proposed));
        }
    }

    fn choose_index(&mut self, sequences: &[&Acceptance], allowed: usize) -> usize {
        let batch = sequences.len();
        let mut schedule = self.costs.entry(batch, self.now).schedule;
        schedule.steps += 1;
        let index = match self.costs.estimate(batch) {
            None => self.first_steps(allowed),
            Some(mut costs) => {
                let allowed = allowed.min(self.costs.reach(batch));
                costs.truncate(allowed);
                let outlook = Outlook {
                    tokens: self.expected_tokens(sequences, allowed, 0.0),
                    hoped: self.expected_tokens(sequences, allowed, OPTIMISM),
                    costs,
                };
                let is_new = sequences.iter().any(|sequence| sequence.is_new());
                let before = schedule.choice.filter(|&choice| choice < allowed);
                let choice = outlook.best(before);
                if before == schedule.choice {
                    schedule.choice = Some(choice); // Else there is only no room for it just now.
                }
                let probe = match choice {
                    0 => self.trial(&outlook, &mut schedule, is_new),
                    _ => self.cost_probe(&outlook, &mut schedule, batch, choice),
                };
                let (index, probe) = probe.map_or((choice, None), |(i, probe)| (i, Some(probe)));
                self.pending = Some(Pending {
                    batch,
                    index,
                    probe,
                    tokens: outlook.tokens.get(index).copied().unwrap_or_default(),
                    per_token: 1.0 / outlook.expected(choice),
                    plain: outlook.costs.first().copied().unwrap_or_default(),
                    accepted: 0,
                    timed: false,
                });
                index
            }
        };
        self.costs.entry(batch, self.now).schedule = schedule;
        index
    }

    /// Nothing can be compared yet: measure a verify step, then a plain one.
    fn first_steps(&self, allowed: usize) -> usize {
        let has_drafted = self.costs.batches.values().any(Batch::has_drafted);
        let rows = if has_drafted { 1 } else { FIRST_ROWS };
        let fits = self.costs.candidates.partition_point(|&r| r <= rows);
        fits.min(allowed).saturating_sub(1)
    }

    /// While plain decoding is the regular choice: draft after a while, and as long as it pays.
    fn trial(
        &mut self,
        outlook: &Outlook,
        schedule: &mut Schedule,
        is_new: bool,
    ) -> Option<(usize, Probe)> {
        schedule.plain_at = schedule.steps;
        let (index, may_pay) = outlook.trial();
        if self.trial.is_none() || !may_pay {
            self.trial = None;
            // The first verify steps may have been slow for other reasons.
            let urgent = !self.costs.has_confirmed();
            let wait = match (may_pay, is_new) {
                _ if urgent => SOON,
                (false, _) => TRIAL_WAIT.1,
                // What others have shown may not hold for this one.
                (true, true) => TRIAL_WAIT.0,
                (true, false) => schedule.trial_wait,
            };
            if schedule.steps - schedule.trial_at < wait || !(urgent || self.account.allows()) {
                return None;
            }
            self.trial = Some(0.0);
        }
        schedule.trial_at = schedule.steps;
        Some((index, Probe::Trial))
    }

    /// While drafting is the regular choice: measure plain decoding and other rows now and then.
    fn cost_probe(
        &mut self,
        outlook: &Outlook,
        schedule: &mut Schedule,
        batch: usize,
        choice: usize,
    ) -> Option<(usize, Probe)> {
        self.trial = None;
        schedule.trial_wait = schedule
            .trial_wait
            .saturating_sub(TRIAL_WAIT.0)
            .max(TRIAL_WAIT.0);
        schedule.trial_at = schedule.steps;
        let now = self.now;
        let own = self.costs.batches.get(&batch)?;
        let wait = match own.plain() {
            Some(_) => schedule.plain_wait,
            None => SOON,
        };
        if schedule.steps - schedule.plain_at >= wait {
            let lost = 1.0 - outlook.expected(0) / outlook.expected(choice);
            let longest = (PLAIN_WAIT.1 as f64 * lost) as u64;
            schedule.plain_at = schedule.steps;
            schedule.plain_wait = (schedule.plain_wait * 2).min(longest).max(PLAIN_WAIT.0);
            return Some((0, Probe::Plain));
        }
        if schedule.steps - schedule.rows_at >= ROWS_WAIT && self.account.allows() {
            let index = outlook.promising(choice, &own.cells, now)?;
            schedule.rows_at = schedule.steps;
            return Some((index, Probe::Rows));
        }
        None
    }

    /// Draw the conclusions from the step before.
    fn settle(&mut self) {
        let Some(step) = self.pending.take() else {
            return;
        };
        let Some(batch) = self.costs.batches.get_mut(&step.batch) else {
            return;
        };
        if !step.timed {
            // The step has failed: do not try again at once.
            if self.trial.take().is_some() {
                batch.schedule.trial_wait = (batch.schedule.trial_wait * 2).min(TRIAL_WAIT.1);
            }
            return;
        }
        // The cell's cost rather than the step's time: an outlier is not the probe's fault.
        let cell = batch.cells.get(step.index);
        let cost = cell.and_then(Cell::measured).unwrap_or_default() / step.plain;
        let per_token = step.per_token / step.plain;
        // A single measurement, as by a first step that loads kernels, is not held against probes.
        let limit = match cell.is_some_and(Cell::is_confirmed) {
            true => f64::INFINITY,
            false => 1.0,
        };
        self.account.add(PROBE_SHARE * cost.min(limit));
        match step.probe {
            None | Some(Probe::Plain) => (), // Plain steps are rare enough by themselves.
            Some(Probe::Rows) => self
                .account
                .add((step.tokens * per_token - cost).max(-limit)),
            Some(Probe::Trial) => {
                let gain = (step.batch + step.accepted) as f64 * per_token - cost;
                self.account.add(gain.max(-limit));
                self.trial = self
                    .trial
                    .map(|sum| sum + gain)
                    .filter(|sum| *sum >= -TRIAL_LOSS);
                if self.trial.is_none() {
                    let wait = &mut batch.schedule.trial_wait;
                    *wait = (*wait * 2).min(TRIAL_WAIT.1);
                }
            }
        }
    }

    /// Expected tokens of all sequences by candidate, if at least the share `least` of the drafts
    /// is accepted.
    fn expected_tokens(&self, sequences: &[&Acceptance], allowed: usize, least: f64) -> Vec<f64> {
        let longest = self.costs.rows(allowed - 1);
        let mut prior = OPTIMISM;
        let prior: Vec<f64> = (0..longest - 1)
            .map(|i| {
                prior = self.prior.get(i).share(prior, PRIOR_PSEUDO);
                prior
            })
            .collect();
        // Of all sequences by rows: 1 + survival(1) + .. + survival(rows - 1).
        let mut tokens = vec![sequences.len() as f64; longest];
        for sequence in sequences {
            let (mut survival, mut sum) = (1.0, 0.0);
            for ((i, &prior), tokens) in prior.iter().enumerate().zip(tokens.iter_mut().skip(1)) {
                let share = sequence.0.get(i).share(prior, SEQUENCE_PSEUDO);
                survival *= share.max(least);
                sum += survival;
                *tokens += sum;
            }
        }
        let candidates = self.costs.candidates.iter().take(allowed);
        candidates
            .filter_map(|rows| tokens.get(rows - 1).copied())
            .collect()
    }
}
