//! What drafts were worth: the share accepted by position, of one sequence or of all.

/// Memory of one sequence's acceptance, in verify steps: short, since texts change their nature.
const SEQUENCE_MEMORY: f64 = 24.0;
/// A run of steps less likely than this is not chance: what was seen before it is forgotten but
/// for a small share.
const SURPRISE: f64 = 1e-3;
const SURPRISED_KEEP: f64 = 0.1;
/// Draft positions that are counted at most: bounds what a sequence carries.
const MAX_POSITIONS: usize = 128;

/// How often a draft position was reached and accepted, older steps counting less.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Position {
    reached: f64,
    accepted: f64,
}

impl Position {
    /// Share accepted, with `weight` more observations of `prior`.
    pub(super) fn share(self, prior: f64, weight: f64) -> f64 {
        (self.accepted + weight * prior) / (self.reached + weight)
    }
}

/// Counts by draft position, each given that all positions before were accepted: unlike counts of
/// whole prefixes these can be mixed from steps with different numbers of rows.
#[derive(Debug, Clone, Default)]
pub(super) struct Positions {
    counts: Vec<Position>,
    /// Whether the last steps accepted their first draft, and the log-probability of so many
    /// alike in a row.
    run: (bool, f64),
}

impl Positions {
    pub(super) fn observe(&mut self, proposed: usize, accepted: usize, memory: f64) {
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

    pub(super) fn get(&self, i: usize) -> Position {
        self.counts.get(i).copied().unwrap_or_default()
    }
}

/// What one sequence's drafts were worth: lives with the sequence.
#[derive(Debug, Clone, Default)]
pub struct Acceptance(pub(super) Positions);

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

    pub(super) fn is_new(&self) -> bool {
        self.0.counts.is_empty()
    }
}
