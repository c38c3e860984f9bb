//! When a step is not the regular choice: how long to wait for a probe, and what it may lose.

/// Steps between a trial of drafting that failed and the next one: doubles from the first to the
/// second with every failure.
pub(super) const TRIAL_WAIT: (u64, u64) = (8, 256);
/// Steps between plain steps while drafting: doubles likewise, up to the share of the second that
/// a plain step loses. The closer the two are, the better their costs must be known.
pub(super) const PLAIN_WAIT: (u64, u64) = (4, 200);
/// What probes may lose at the start, in plain steps.
const PROBE_START: f64 = 3.0;

/// When a batch size was last explored and when it is to be next, in steps of that batch size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    pub(super) steps: u64,
    pub(super) plain_at: u64,
    pub(super) plain_wait: u64,
    pub(super) trial_at: u64,
    pub(super) trial_wait: u64,
    pub(super) rows_at: u64,
    /// The regular choice, an index of the candidates.
    pub(super) choice: Option<usize>,
}

impl Schedule {
    pub(super) fn new() -> Self {
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
    pub(super) fn inherited(&self) -> Self {
        Self {
            plain_wait: self.plain_wait,
            trial_wait: self.trial_wait,
            ..Self::new()
        }
    }
}

/// Why a step is not the regular choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Probe {
    /// Drafting, to see whether it pays by now.
    Trial,
    /// Other rows, to measure what they cost.
    Rows,
    /// Plain, likewise.
    Plain,
}

/// The step that was chosen last, until it is settled.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) batch: usize,
    pub(super) index: usize,
    pub(super) probe: Option<Probe>,
    /// Expected tokens of the step and seconds a token of the regular choice.
    pub(super) tokens: f64,
    pub(super) per_token: f64,
    /// Seconds of a plain step.
    pub(super) plain: f64,
    /// Drafts accepted, of all sequences.
    pub(super) accepted: usize,
    pub(super) timed: bool,
}

/// What probes may still lose, in plain steps: a share of all time, and a little at the start. A
/// probe needs a positive balance and may overdraw it once.
#[derive(Debug)]
pub(super) struct Account(f64);

impl Account {
    pub(super) fn new() -> Self {
        Self(PROBE_START)
    }

    pub(super) fn allows(&self) -> bool {
        self.0 > 0.0
    }

    pub(super) fn add(&mut self, plain_steps: f64) {
        if plain_steps.is_finite() {
            self.0 = (self.0 + plain_steps).clamp(-PROBE_START, PROBE_START);
        }
    }
}
