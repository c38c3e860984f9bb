//! How many rows to verify, so that speculation is never slower than plain decoding.
//!
//! A step with `r` rows emits, for each sequence, one token and every draft up to the first that
//! is not the target's choice. What it costs depends on hardware, target and batch, so it is
//! measured. The controller takes the rows with the most expected tokens a second (the "regular
//! choice") and now and then another number of rows, to learn what cannot be known otherwise (a
//! "probe"). Probes are paid from an account, which bounds what all of them together may lose.
//!
//! Nothing here reads a clock or draws random numbers: the same observations give the same rows.

use std::collections::BTreeMap;
use std::time::Duration;

/// Share of drafts accepted while nothing is known; also what a trial assumes, since the drafter
/// may have become good since it was last asked.
const OPTIMISM: f64 = 0.85;
/// Memory of one sequence's acceptance, in verify steps: short, since texts change their nature.
const SEQUENCE_MEMORY: f64 = 24.0;
/// Memory of the acceptance of all sequences, in verify steps.
const PRIOR_MEMORY: f64 = 64.0;
/// Weight of the prior in a sequence's acceptance, in verify steps.
const SEQUENCE_PSEUDO: f64 = 4.0;
/// Weight of the position before in a position's prior, in verify steps.
const PRIOR_PSEUDO: f64 = 2.0;
/// A run of steps less likely than this is not chance: what was seen before it is forgotten but
/// for a small share.
const SURPRISE: f64 = 1e-3;
const SURPRISED_KEEP: f64 = 0.1;
/// Draft positions that are counted at most: bounds what a sequence carries.
const MAX_POSITIONS: usize = 128;

/// Measurements of a cell whose median counts: of 7, three outliers do no harm.
const WINDOW: usize = 7;
/// Share of a new median in a cell's cost: averages noise out over about 16 steps.
const SMOOTHING: f64 = 1.0 / 16.0;
/// Steps after which a cell's next measurement says more than its older ones.
const RECENT: u64 = 32;
/// Steps after which a measurement is too old to be believed: the context has grown since.
const FADED: u64 = 512;
/// Batch sizes remembered; beyond that the one unused for the longest time is forgotten.
const MAX_BATCHES: usize = 64;

/// Rows of the first verify step: enough to tell the drafter's cost from that of a row, and cheap
/// where a row costs as much as a plain step.
const FIRST_ROWS: usize = 4;
/// The regular choice is left for one that is better by this factor.
const HYSTERESIS: f64 = 1.05;
/// Steps between a trial of drafting that failed and the next one: doubles from the first to the
/// second with every failure.
const TRIAL_WAIT: (u64, u64) = (8, 256);
/// Tokens a second that a trial may give up to have fewer rows to lose.
const TRIAL_SLACK: f64 = 1.15;
/// What a trial may lose before it has failed, in plain steps: one bad step proves little.
const TRIAL_LOSS: f64 = 0.5;
/// Steps between plain steps while drafting: doubles likewise, up to the share of the second that
/// a plain step loses. The closer the two are, the better their costs must be known.
const PLAIN_WAIT: (u64, u64) = (4, 200);
/// Steps until something is measured that nothing else stands in for.
const SOON: u64 = 2;
/// Steps between probes of other numbers of rows while drafting.
const ROWS_WAIT: u64 = 16;

/// Share of all time that probes may lose.
const PROBE_SHARE: f64 = 0.015;
/// What probes may lose at the start, in plain steps.
const PROBE_START: f64 = 3.0;

/// How often a draft position was reached and accepted, older steps counting less.
#[derive(Debug, Clone, Copy, Default)]
struct Position {
    reached: f64,
    accepted: f64,
}

impl Position {
    /// Share accepted, with `weight` more observations of `prior`.
    fn share(self, prior: f64, weight: f64) -> f64 {
        (self.accepted + weight * prior) / (self.reached + weight)
    }
}

/// Counts by draft position, each given that all positions before were accepted: unlike counts of
/// whole prefixes these can be mixed from steps with different numbers of rows.
#[derive(Debug, Clone, Default)]
struct Positions {
    counts: Vec<Position>,
    /// Whether the last steps accepted their first draft, and the log-probability of so many
    /// alike in a row.
    run: (bool, f64),
}

impl Positions {
    fn observe(&mut self, proposed: usize, accepted: usize, memory: f64) {
        let reached = proposed.min(accepted.saturating_add(1)).min(MAX_POSITIONS);
        if self.counts.len() < reached {
            self.counts.resize(reached, Position::default());
        }
        // Positions that are no longer reached fade too: what is nearer says more then.
        let keep = match self.is_surprised(accepted > 0) {
            true => SURPRISED_KEEP,
            false => 1.0 - 1.0 / memory,
        };
        for (i, position) in self.counts.iter_mut().enumerate() {
            position.reached *= keep;
            position.accepted *= keep;
            if i < reached {
                position.reached += 1.0;
                position.accepted += f64::from(i < accepted);
            }
        }
    }

    /// Whether so many steps alike are so unlikely that the text must have changed its nature.
    fn is_surprised(&mut self, accepted: bool) -> bool {
        let share = self.get(0).share(0.5, 1.0);
        let likely = if accepted { share } else { 1.0 - share };
        let before = if self.run.0 == accepted {
            self.run.1
        } else {
            0.0
        };
        self.run = (accepted, before + likely.ln());
        let surprised = self.run.1 < SURPRISE.ln();
        if surprised {
            self.run.1 = 0.0;
        }
        surprised
    }

    fn get(&self, i: usize) -> Position {
        self.counts.get(i).copied().unwrap_or_default()
    }
}

/// What one sequence's drafts were worth: lives with the sequence.
#[derive(Debug, Clone, Default)]
pub struct Acceptance(Positions);

impl Acceptance {
    /// Knows nothing: takes what the controller has seen of other sequences.
    pub fn new() -> Self {
        Self::default()
    }

    /// After a verify step: drafts verified (rows - 1) and accepted. A sequence that ended inside
    /// its accepted drafts says nothing about the rest: `proposed` is `accepted` then.
    pub fn observe(&mut self, proposed: usize, accepted: usize) {
        if proposed > 0 {
            self.0.observe(proposed, accepted, SEQUENCE_MEMORY);
        }
    }

    fn is_new(&self) -> bool {
        self.0.counts.is_empty()
    }
}

/// What one (batch, rows) costs.
#[derive(Debug, Clone, Default)]
struct Cell {
    /// Seconds, oldest first.
    recent: Vec<f64>,
    /// Seconds.
    cost: f64,
    measured_at: u64,
}

impl Cell {
    fn observe(&mut self, seconds: f64, now: u64) {
        let age = now.saturating_sub(self.measured_at);
        if age > FADED {
            // Two stay, so that one outlier is not all that is known.
            self.recent.drain(..self.recent.len().saturating_sub(2));
        }
        let settled = self.recent.len() >= WINDOW;
        if settled {
            self.recent.remove(0);
        }
        self.recent.push(seconds);
        self.measured_at = now;
        let mut sorted = self.recent.clone();
        sorted.sort_by(f64::total_cmp);
        // The lower one of two: the first step of a kind is often slow, none is ever too fast.
        let median = sorted.get((sorted.len() - 1) / 2).copied();
        let median = median.unwrap_or(seconds);
        let share = match (settled, age > RECENT) {
            (false, _) => 1.0,
            (true, true) => 0.5,
            (true, false) => SMOOTHING,
        };
        self.cost += share * (median - self.cost);
    }

    fn measured(&self) -> Option<f64> {
        (!self.recent.is_empty()).then_some(self.cost)
    }

    /// Measured often and not too long ago.
    fn is_settled(&self, now: u64) -> bool {
        self.recent.len() >= WINDOW && now.saturating_sub(self.measured_at) <= FADED
    }

    fn is_confirmed(&self) -> bool {
        self.recent.len() > 1
    }

    /// What it may cost at best, for all that the measurements say. A single one says nothing: it
    /// may be an outlier.
    fn hope(&self, now: u64) -> f64 {
        if self.is_settled(now) {
            self.cost
        } else if self.is_confirmed() {
            self.recent.iter().copied().fold(self.cost, f64::min) * 0.9
        } else {
            0.0
        }
    }
}

/// When a batch size was last explored and when it is to be next, in steps of that batch size.
#[derive(Debug, Clone, Copy)]
struct Schedule {
    steps: u64,
    plain_at: u64,
    plain_wait: u64,
    trial_at: u64,
    trial_wait: u64,
    rows_at: u64,
    /// The regular choice, an index of the candidates.
    choice: Option<usize>,
}

impl Schedule {
    fn new() -> Self {
        Self {
            steps: 0,
            plain_at: 0,
            plain_wait: PLAIN_WAIT.0,
            trial_at: 0,
            trial_wait: TRIAL_WAIT.0,
            rows_at: 0,
            choice: None,
        }
    }

    /// Another batch size goes on with the patience that this one has learned.
    fn inherited(&self) -> Self {
        Self {
            plain_wait: self.plain_wait,
            trial_wait: self.trial_wait,
            ..Self::new()
        }
    }
}

/// One batch size: a cell a candidate, the first being the plain step.
#[derive(Debug, Clone)]
struct Batch {
    cells: Vec<Cell>,
    schedule: Schedule,
    used_at: u64,
}

impl Batch {
    fn plain(&self) -> Option<f64> {
        self.cells.first().and_then(Cell::measured)
    }

    fn has_drafted(&self) -> bool {
        self.cells
            .iter()
            .skip(1)
            .any(|cell| cell.measured().is_some())
    }
}

/// Measured costs, by batch size.
#[derive(Debug)]
struct Costs {
    /// Numbers of rows, ascending from 1.
    candidates: Vec<usize>,
    batches: BTreeMap<usize, Batch>,
}

impl Costs {
    fn new(block_size: usize) -> Self {
        // 1, 2, 3, 4, 6, 8, 12, 16, 24, ..: steps of at most a half, so that few cells suffice.
        let mut candidates: Vec<usize> = (0..usize::BITS - 2)
            .flat_map(|i| [1 << i, 3 << i >> 1])
            .filter(|&rows| rows < block_size)
            .chain([1, block_size.max(1)])
            .collect();
        candidates.sort_unstable();
        candidates.dedup();
        Self {
            candidates,
            batches: BTreeMap::new(),
        }
    }

    fn rows(&self, index: usize) -> usize {
        self.candidates.get(index).copied().unwrap_or(1)
    }

    /// The entry of a batch size, which is new or not.
    fn entry(&mut self, batch: usize, now: u64) -> &mut Batch {
        let known = self.batches.remove(&batch);
        let mut entry = known.unwrap_or_else(|| self.unmeasured(batch));
        entry.used_at = now;
        if self.batches.len() >= MAX_BATCHES {
            let unused = self.batches.iter().min_by_key(|(_, entry)| entry.used_at);
            if let Some(unused) = unused.map(|(&batch, _)| batch) {
                self.batches.remove(&unused);
            }
        }
        self.batches.entry(batch).or_insert(entry)
    }

    fn unmeasured(&self, batch: usize) -> Batch {
        let near = self.nearest(batch, |_| true);
        Batch {
            cells: vec![Cell::default(); self.candidates.len()],
            schedule: near.map_or_else(Schedule::new, |(_, near)| near.schedule.inherited()),
            used_at: 0,
        }
    }

    /// Whether there is more than first impressions of what verify steps cost.
    fn has_confirmed(&self) -> bool {
        let drafted = self
            .batches
            .values()
            .flat_map(|entry| entry.cells.iter().skip(1));
        let (cells, confirmed) = drafted.fold((0, false), |(cells, confirmed), cell| {
            let measured = usize::from(cell.measured().is_some());
            (cells + measured, confirmed || cell.is_confirmed())
        });
        confirmed || cells > 3
    }

    /// The batch size nearest by ratio, this one before any other.
    fn nearest(&self, batch: usize, wanted: impl Fn(&Batch) -> bool) -> Option<(usize, &Batch)> {
        let distance = |other: usize| (other as f64 / batch as f64).ln().abs();
        self.batches
            .iter()
            .filter(|(_, entry)| wanted(entry))
            .min_by(|(a, _), (b, _)| distance(**a).total_cmp(&distance(**b)))
            .map(|(&size, entry)| (size, entry))
    }

    /// Estimated seconds of a plain step.
    fn plain(&self, batch: usize, verify: &Curve) -> Option<f64> {
        let plain = |(&size, entry): (&usize, &Batch)| Some((size as f64, entry.plain()?));
        let measured: Vec<(f64, f64)> = self.batches.iter().filter_map(plain).collect();
        match measured.as_slice() {
            [] => None,
            // Rows of more sequences cost what rows of longer blocks do.
            &[(size, seconds)] => {
                let change = verify.at(batch as f64) - verify.at(size);
                Some((seconds + change).max(seconds * (batch as f64 / size).min(1.0)))
            }
            _ => Some(Curve(measured).at(batch as f64)),
        }
    }

    /// Candidates up to twice the rows that were measured: what costs more is not tried on the
    /// word of an estimate from far away.
    fn reach(&self, batch: usize) -> usize {
        let measured = self
            .nearest(batch, Batch::has_drafted)
            .map_or(0, |(size, near)| {
                let index = near
                    .cells
                    .iter()
                    .rposition(|cell| cell.measured().is_some());
                size * self.rows(index.unwrap_or(0))
            });
        let reach = |rows: usize| batch * rows <= 2 * measured;
        self.candidates
            .partition_point(|&rows| rows <= 2 || reach(rows))
    }

    /// Estimated seconds of a step by candidate; `None` until both a plain and a verify step of
    /// any batch size were measured.
    fn estimate(&self, batch: usize) -> Option<Vec<f64>> {
        let curve = Curve::of(self.nearest(batch, Batch::has_drafted)?, &self.candidates)?;
        let plain = self.plain(batch, &curve)?;
        let own = self.batches.get(&batch);
        // An unmeasured step costs no less than a measured one with fewer rows.
        let mut floor = plain;
        let costs = self.candidates.iter().enumerate().map(|(i, &rows)| {
            let measured = own.and_then(|own| own.cells.get(i)?.measured());
            match measured {
                Some(measured) => {
                    floor = floor.max(measured);
                    measured
                }
                None if i == 0 => plain,
                None => curve.at((batch * rows) as f64).max(floor),
            }
        });
        Some(costs.collect())
    }
}

/// Seconds of a verify step over the rows of all its sequences, from one batch size's cells.
struct Curve(Vec<(f64, f64)>);

impl Curve {
    fn of((size, batch): (usize, &Batch), candidates: &[usize]) -> Option<Self> {
        let mut points: Vec<(f64, f64)> = candidates
            .iter()
            .zip(&batch.cells)
            .skip(1)
            .filter_map(|(&rows, cell)| Some(((size * rows) as f64, cell.measured()?)))
            .collect();
        let (_, first) = points.first().copied()?;
        // A verify step with one row: half of the rise from the plain step is the drafter's.
        let plain = batch.plain().unwrap_or(first);
        points.insert(0, (size as f64, first.min((first + plain) / 2.0)));
        Some(Self(points))
    }

    /// Linear between the points and beyond them, where it neither falls nor rises faster than in
    /// proportion to the rows.
    fn at(&self, rows: f64) -> f64 {
        let points = &self.0;
        let right = points
            .partition_point(|&(x, _)| x < rows)
            .clamp(1, points.len().saturating_sub(1).max(1));
        let (Some(&(x0, y0)), Some(&(x1, y1))) = (points.get(right - 1), points.get(right)) else {
            return points.first().map_or(0.0, |&(_, y)| y);
        };
        let slope = (y1 - y0) / (x1 - x0);
        if rows < x0 {
            y0 - slope.clamp(0.0, y0 / x0) * (x0 - rows)
        } else if rows > x1 {
            y1 + slope.clamp(0.0, y1 / x1) * (rows - x1)
        } else {
            y0 + slope * (rows - x0)
        }
    }
}

/// What is known about a step that is to be chosen, by candidate, as far as they are allowed.
struct Outlook {
    /// Expected tokens of all sequences.
    tokens: Vec<f64>,
    /// The same if the drafter were good.
    hoped: Vec<f64>,
    /// Estimated seconds.
    costs: Vec<f64>,
}

impl Outlook {
    /// Tokens a second.
    fn rate(tokens: &[f64], costs: &[f64], i: usize) -> f64 {
        match (tokens.get(i), costs.get(i)) {
            (Some(tokens), Some(cost)) => tokens / cost,
            _ => 0.0,
        }
    }

    fn expected(&self, i: usize) -> f64 {
        Self::rate(&self.tokens, &self.costs, i)
    }

    fn hoped(&self, i: usize) -> f64 {
        Self::rate(&self.hoped, &self.costs, i)
    }

    /// The regular choice, which stays with the one before unless another is clearly better.
    fn best(&self, before: Option<usize>) -> usize {
        let best = argmax(0..self.tokens.len(), |i| self.expected(i)).unwrap_or(0);
        before
            .filter(|&i| self.expected(i) * HYSTERESIS > self.expected(best))
            .unwrap_or(best)
    }

    /// Rows of a trial: the fewest that would pay nearly best if the drafter were good, else the
    /// fewest of all, which cost least to measure. And whether they would pay.
    fn trial(&self) -> (usize, bool) {
        let drafting = 1..self.tokens.len();
        let best = argmax(drafting.clone(), |i| self.hoped(i)).map_or(0.0, |i| self.hoped(i));
        if best < self.hoped(0) {
            return (1, false);
        }
        let mut drafting = drafting.filter(|&i| self.hoped(i) * TRIAL_SLACK >= best);
        (drafting.next().unwrap_or(1), true)
    }

    /// Rows other than the regular choice that may be better for all that is known.
    fn promising(&self, choice: usize, cells: &[Cell], now: u64) -> Option<usize> {
        let mut floor = self.costs.first().copied()?;
        let mut hopes = Vec::with_capacity(self.costs.len());
        for (i, (cell, &cost)) in cells.iter().zip(&self.costs).enumerate() {
            let hope = cell.hope(now).max(floor);
            hopes.push(if i == choice { f64::INFINITY } else { hope });
            if cell.is_settled(now) {
                floor = floor.max(cost * 0.9);
            }
        }
        let hope = |i: usize| Self::rate(&self.tokens, &hopes, i);
        argmax(1..self.tokens.len(), hope).filter(|&i| hope(i) > self.expected(choice) * HYSTERESIS)
    }
}

/// The first index with the highest value.
fn argmax(indices: std::ops::Range<usize>, value: impl Fn(usize) -> f64) -> Option<usize> {
    indices.reduce(|best, i| if value(i) > value(best) { i } else { best })
}

/// Why a step is not the regular choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probe {
    /// Drafting, to see whether it pays by now.
    Trial,
    /// Other rows, to measure what they cost.
    Rows,
    /// Plain, likewise.
    Plain,
}

/// The step that was chosen last, until it is settled.
#[derive(Debug)]
struct Pending {
    batch: usize,
    index: usize,
    probe: Option<Probe>,
    /// Expected tokens of the step and seconds a token of the regular choice.
    tokens: f64,
    per_token: f64,
    /// Seconds of a plain step.
    plain: f64,
    /// Drafts accepted, of all sequences.
    accepted: usize,
    timed: bool,
}

/// What probes may still lose, in plain steps: a share of all time, and a little at the start. A
/// probe needs a positive balance and may overdraw it once.
#[derive(Debug)]
struct Account(f64);

impl Account {
    fn allows(&self) -> bool {
        self.0 > 0.0
    }

    fn add(&mut self, plain_steps: f64) {
        if plain_steps.is_finite() {
            self.0 = (self.0 + plain_steps).clamp(-PROBE_START, PROBE_START);
        }
    }
}

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
}

impl Controller {
    /// `block_size`: rows of a verify step at most, anchor and drafts.
    pub fn new(block_size: usize) -> Self {
        Self {
            costs: Costs::new(block_size),
            prior: Positions::default(),
            account: Account(PROBE_START),
            trial: None,
            pending: None,
            now: 0,
            rows: 1,
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    /// Seeded random numbers (splitmix64).
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }

        fn unit(&mut self) -> f64 {
            (self.next() >> 11) as f64 / (1u64 << 53) as f64
        }

        fn below(&mut self, n: usize) -> usize {
            (self.next() % n as u64) as usize
        }
    }

    type Cost = fn(usize, usize) -> f64;

    /// Milliseconds as measured on a CPU: a few rows are nearly free, more are not.
    fn cpu(batch: usize, rows: usize) -> f64 {
        let n = (batch * rows) as f64;
        let verify = 41.0 + 0.7 * (n.min(8.0) - 1.0) + 4.5 * (n - 8.0).max(0.0);
        let draft = 10.0 + 4.0 * batch as f64;
        verify + if rows > 1 { draft } else { 0.0 }
    }

    /// A row costs a whole decode.
    fn quantized_cpu(batch: usize, rows: usize) -> f64 {
        let draft = if rows > 1 { 12.0 } else { 0.0 };
        41.0 * (batch * rows) as f64 + draft
    }

    fn gpu(batch: usize, rows: usize) -> f64 {
        let draft = if rows > 1 { 2.0 } else { 0.0 };
        20.0 + 0.01 * (batch * rows) as f64 + draft
    }

    /// Expected tokens of one sequence.
    fn tokens(p: f64, rows: usize) -> f64 {
        (0..rows).map(|i| p.powi(i as i32)).sum()
    }

    struct World {
        cost: Cost,
        /// Noise of a step's time, and share of the steps that take ten times as long.
        noise: f64,
        outliers: f64,
        block: usize,
    }

    /// By step: what was chosen, and what of it is no matter of luck.
    #[derive(Default)]
    struct Outcome {
        rows: Vec<usize>,
        /// The regular choice, an index of the candidates.
        choices: Vec<Option<usize>>,
        /// Milliseconds without noise.
        times: Vec<f64>,
        /// Milliseconds in which plain decoding, and the best fixed rows, emit the tokens
        /// expected of the step.
        plain: Vec<f64>,
        best: Vec<f64>,
    }

    impl Outcome {
        /// Time of some steps, in that of plain decoding.
        fn against_plain(&self, steps: Range<usize>) -> f64 {
            self.times[steps.clone()].iter().sum::<f64>() / self.plain[steps].iter().sum::<f64>()
        }

        /// Time of all steps, in that of the best fixed rows.
        fn against_best(&self) -> f64 {
            self.times.iter().sum::<f64>() / self.best.iter().sum::<f64>()
        }

        fn switches(&self) -> usize {
            self.choices
                .windows(2)
                .filter(|pair| pair[0] != pair[1])
                .count()
        }

        /// Share of some steps that had these rows.
        fn share(&self, steps: Range<usize>, rows: Range<usize>) -> f64 {
            let len = steps.len() as f64;
            let rows = self.rows[steps].iter().filter(|r| rows.contains(r));
            rows.count() as f64 / len
        }
    }

    fn mean_and_worst(values: impl Iterator<Item = f64>) -> (f64, f64) {
        let values: Vec<f64> = values.collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        (mean, values.iter().copied().fold(0.0, f64::max))
    }

    struct Run {
        controller: Controller,
        sequences: Vec<Acceptance>,
        random: Random,
        outcome: Outcome,
    }

    impl World {
        fn new(cost: Cost, block: usize) -> Self {
            Self {
                cost,
                noise: 0.0,
                outliers: 0.0,
                block,
            }
        }

        fn start(&self, seed: u64) -> Run {
            Run {
                controller: Controller::new(self.block),
                sequences: vec![Acceptance::new(); 8],
                random: Random(seed),
                outcome: Outcome::default(),
            }
        }

        fn step(&self, run: &mut Run, batch: usize, p: f64) {
            let sequences = &mut run.sequences[..batch];
            let views: Vec<&Acceptance> = sequences.iter().collect();
            let rows = run.controller.choose(&views, self.block);
            let time = (self.cost)(batch, rows);
            let mut measured = time * (1.0 + self.noise * (2.0 * run.random.unit() - 1.0));
            if run.random.unit() < self.outliers {
                measured *= 10.0;
            }
            run.controller
                .observe_step(batch, rows, Duration::from_secs_f64(measured / 1e3));
            for sequence in sequences {
                if rows > 1 {
                    let accepted = (1..rows).take_while(|_| run.random.unit() < p).count();
                    sequence.observe(rows - 1, accepted);
                    run.controller.observe_acceptance(rows - 1, accepted);
                }
            }
            let emitted = batch as f64 * tokens(p, rows);
            let choice = run.controller.costs.batches.get(&batch);
            let outcome = &mut run.outcome;
            outcome.rows.push(rows);
            outcome
                .choices
                .push(choice.and_then(|entry| entry.schedule.choice));
            outcome.times.push(time);
            outcome
                .plain
                .push(emitted * (self.cost)(batch, 1) / batch as f64);
            outcome.best.push(emitted * self.best_fixed(batch, p));
        }

        fn run(&self, seed: u64, steps: usize, at: impl Fn(usize) -> (usize, f64)) -> Outcome {
            let mut run = self.start(seed);
            for i in 0..steps {
                let (batch, p) = at(i);
                self.step(&mut run, batch, p);
            }
            run.outcome
        }

        /// Milliseconds a token of the best fixed number of rows.
        fn best_fixed(&self, batch: usize, p: f64) -> f64 {
            (1..=self.block)
                .map(|rows| (self.cost)(batch, rows) / (batch as f64 * tokens(p, rows)))
                .fold(f64::INFINITY, f64::min)
        }
    }

    const SEEDS: Range<u64> = 0..10;

    /// Outcomes of 10 runs.
    fn runs(world: &World, steps: usize, at: impl Fn(usize) -> (usize, f64)) -> Vec<Outcome> {
        SEEDS.map(|seed| world.run(seed, steps, &at)).collect()
    }

    #[test]
    fn on_a_cpu_the_best_rows_are_found() {
        for block in [8, 16] {
            let outcomes = runs(&World::new(cpu, block), 500, |_| (1, 0.707));
            let (mean, _) = mean_and_worst(outcomes.iter().map(Outcome::against_best));
            assert!(mean < 1.03, "block {block}: {mean}");
            let plain = outcomes.iter().map(|o| o.against_plain(0..500));
            let (_, worst) = mean_and_worst(plain);
            assert!(worst < 1.0 / 1.8, "block {block}: {worst}");
        }
    }

    #[test]
    fn a_worthless_drafter_costs_next_to_nothing() {
        for (name, cost) in [
            ("cpu", cpu as Cost),
            ("quantized", quantized_cpu),
            ("gpu", gpu),
        ] {
            for batch in [1, 2, 4, 8] {
                let outcomes = runs(&World::new(cost, 16), 1000, |_| (batch, 0.02));
                let of = |steps: Range<usize>| {
                    mean_and_worst(outcomes.iter().map(|o| o.against_plain(steps.clone()))).1
                };
                let figures = [0..200, 0..300, 500..1000].map(of);
                assert!(figures[0] < 1.05 && figures[1] < 1.05, "{name} {batch}");
                assert!(figures[2] < 1.02, "{name} {batch}");
            }
        }
    }

    #[test]
    fn where_a_row_costs_a_decode_even_good_drafts_are_left_alone() {
        for p in [0.5, 0.707, 0.85] {
            for block in [8, 16] {
                let outcomes = runs(&World::new(quantized_cpu, block), 300, |_| (1, p));
                let plain = outcomes.iter().map(|o| o.against_plain(0..300));
                let (_, worst) = mean_and_worst(plain);
                assert!(worst < 1.05, "p {p}, block {block}: {worst}");
            }
        }
    }

    #[test]
    fn on_a_gpu_the_whole_block_is_verified() {
        for batch in [1, 4] {
            for (i, outcome) in runs(&World::new(gpu, 16), 500, |_| (batch, 0.85))
                .iter()
                .enumerate()
            {
                let share = outcome.share(50..500, 16..17);
                assert!(share > 0.9, "seed {i}, batch {batch}: {share}");
                assert!(outcome.against_best() < 1.03);
            }
        }
    }

    #[test]
    fn acceptance_that_changes_is_followed_both_ways() {
        let world = World::new(cpu, 16);
        let good = 400..1000;
        let (mut up, mut down) = (0, 0);
        for seed in SEEDS {
            let p = |i| if good.contains(&i) { 0.85 } else { 0.02 };
            let outcome = world.run(seed, 1400, |i| (1, p(i)));
            let drafts = |i: usize| outcome.choices[i] != Some(0);
            up = up.max(
                (400..1000)
                    .find(|&i| (i..i + 10).all(drafts))
                    .unwrap_or(1000)
                    - 400,
            );
            let plain = (1000..1390).find(|&i| !(i..i + 10).any(drafts));
            down = down.max(plain.unwrap_or(1400) - 1000);
            let after = outcome.against_plain(1000..1400);
            assert!(after < 1.05, "{after}");
        }
        // Up: at most the longest wait, and the trial.
        assert!(up < 256 + 20, "{up}");
        assert!(down < 40, "{down}");
    }

    #[test]
    fn a_new_sequence_is_tried_without_waiting_for_the_back_off() {
        let world = World::new(cpu, 16);
        let mut run = world.start(1);
        (0..400).for_each(|_| world.step(&mut run, 1, 0.02));
        run.sequences[0] = Acceptance::new();
        (0..100).for_each(|_| world.step(&mut run, 1, 0.85));
        assert!(run.outcome.share(440..500, 4..17) > 0.9);
    }

    #[test]
    fn noise_and_outliers_do_not_make_it_flap() {
        let noisy = |cost| World {
            noise: 0.3,
            outliers: 0.02,
            ..World::new(cost, 16)
        };
        for (name, cost, p) in [
            ("cpu", cpu as Cost, 0.707),
            ("quantized", quantized_cpu, 0.707),
            ("gpu", gpu, 0.85),
        ] {
            let outcomes = runs(&noisy(cost), 1000, |_| (1, p));
            let best = mean_and_worst(outcomes.iter().map(Outcome::against_best));
            let switches = mean_and_worst(outcomes.iter().map(|o| o.switches() as f64));
            assert!(best.0 < 1.05 && best.1 < 1.15, "{name}: {best:?}");
            assert!(
                switches.0 < 20.0 && switches.1 < 40.0,
                "{name}: {switches:?}"
            );
        }
    }

    #[test]
    fn changing_batches_share_what_is_known() {
        for (name, cost) in [
            ("cpu", cpu as Cost),
            ("quantized", quantized_cpu),
            ("gpu", gpu),
        ] {
            for dwell in [1, 20] {
                let batch = |i: usize| 1 + Random((i / dwell) as u64).below(8);
                let outcomes = runs(&World::new(cost, 16), 2000, |i| (batch(i), 0.707));
                let best = mean_and_worst(outcomes.iter().map(Outcome::against_best));
                let plain = outcomes.iter().map(|o| o.against_plain(0..200));
                let plain = mean_and_worst(plain);
                println!("{name}, dwell {dwell}: {best:.3?} of the best; 200: {plain:.3?}");
                assert!(best.0 < 1.04, "{name}: {best:?}");
                // The worst start there is: eight batch sizes in turn, each sequence a new one.
                assert!(plain.0 < 1.08, "{name}: {plain:?}");
            }
        }
    }

    #[test]
    fn a_slow_first_step_of_each_kind_is_forgiven() {
        let world = World::new(gpu, 16);
        let mut controller = Controller::new(16);
        let mut sequence = Acceptance::new();
        let mut seen = [false; 17];
        let mut last = 0;
        for _ in 0..200 {
            let rows = controller.choose(&[&sequence], 16);
            let slow = if std::mem::replace(&mut seen[rows], true) {
                1.0
            } else {
                200.0
            };
            let time = (world.cost)(1, rows) * slow / 1e3;
            controller.observe_step(1, rows, Duration::from_secs_f64(time));
            sequence.observe(rows - 1, rows - 1);
            controller.observe_acceptance(rows - 1, rows - 1);
            last = rows;
        }
        assert_eq!(last, 16);
    }

    #[test]
    fn a_step_that_fails_is_not_tried_at_once_again() {
        let world = World::new(cpu, 16);
        let mut run = world.start(3);
        (0..100).for_each(|_| world.step(&mut run, 1, 0.02));
        let mut failed = 0;
        for _ in 0..200 {
            let sequence = &run.sequences[0];
            if run.controller.choose(&[sequence], 16) > 1 {
                failed += 1;
            }
            run.controller.observe_step(1, 1, Duration::from_millis(41));
        }
        assert!(failed <= 3, "{failed}");
    }

    #[test]
    fn costs_that_grow_with_the_context_are_followed() {
        let world = World::new(cpu, 16);
        let mut controller = Controller::new(16);
        let (mut sequence, mut random) = (Acceptance::new(), Random(5));
        let (mut time, mut best) = (0.0, 0.0);
        for i in 0..3000 {
            let rows = controller.choose(&[&sequence], 16);
            let longer = 1.0 + f64::from(i % 1000) / 500.0;
            let cost = (world.cost)(1, rows) * longer;
            controller.observe_step(1, rows, Duration::from_secs_f64(cost / 1e3));
            let accepted = (1..rows).take_while(|_| random.unit() < 0.707).count();
            sequence.observe(rows - 1, accepted);
            controller.observe_acceptance(rows - 1, accepted);
            time += cost;
            best += tokens(0.707, rows) * world.best_fixed(1, 0.707) * longer;
        }
        assert!(time / best < 1.05);
    }

    #[test]
    fn positions_never_proposed_follow_those_before() {
        let mut controller = Controller::new(16);
        let mut sequence = Acceptance::new();
        for i in 0..200 {
            let accepted = if i % 2 == 0 { 2 } else { 0 };
            sequence.observe(2, accepted);
            controller.observe_acceptance(2, accepted);
        }
        // 1, 2, 3, 4, 6 rows; the first draft is accepted half of the time, the second then always.
        let tokens = controller.expected_tokens(&[&sequence], 5, 0.0);
        assert!((tokens[1] - 1.5).abs() < 0.1, "{tokens:?}");
        assert!((tokens[2] - 2.0).abs() < 0.15, "{tokens:?}");
        assert!(tokens[4] > 3.0, "{tokens:?}");
    }

    #[test]
    fn candidates_end_with_the_block_size() {
        let of = |block| Costs::new(block).candidates;
        assert_eq!(of(0), [1]);
        assert_eq!(of(1), [1]);
        assert_eq!(of(7), [1, 2, 3, 4, 6, 7]);
        assert_eq!(of(16), [1, 2, 3, 4, 6, 8, 12, 16]);
    }

    #[test]
    fn whatever_is_observed_the_limit_is_kept_and_memory_is_bounded() {
        let mut random = Random(7);
        for _ in 0..20 {
            let block = random.below(40);
            let mut controller = Controller::new(block);
            let mut sequences = vec![Acceptance::new(); 100];
            for _ in 0..300 {
                let batch = random.below(101);
                let views: Vec<&Acceptance> = sequences[..batch].iter().collect();
                let limit = match random.below(10) {
                    0 => usize::MAX,
                    _ => random.below(block + 2),
                };
                let rows = controller.choose(&views, limit);
                assert!((1..=limit.min(block).max(1)).contains(&rows));
                assert_eq!(controller.rows(), rows);
                let nanos = random.next() >> random.below(64);
                match random.below(4) {
                    0 => (),
                    1 => {
                        controller.observe_step(random.below(300), random.below(50), Duration::MAX)
                    }
                    2 => controller.observe_step(batch, rows, Duration::ZERO),
                    _ => controller.observe_step(batch, rows, Duration::from_nanos(nanos)),
                }
                for sequence in &mut sequences[..batch] {
                    let proposed = match random.below(50) {
                        0 => usize::MAX,
                        _ => random.below(50),
                    };
                    let accepted = random.below(60);
                    sequence.observe(proposed, accepted);
                    controller.observe_acceptance(proposed, accepted);
                }
            }
            assert!(controller.costs.batches.len() <= MAX_BATCHES);
        }
    }

    #[test]
    fn the_same_observations_give_the_same_rows() {
        let world = World {
            noise: 0.3,
            ..World::new(cpu, 16)
        };
        let run = || world.run(11, 300, |i| (1 + i / 50 % 3, 0.6)).rows;
        assert_eq!(run(), run());
    }
}
