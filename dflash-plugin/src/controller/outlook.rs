//! What the next step is expected to give and to cost, and which rows are best by that.

use super::costs::Cell;

/// The regular choice is left for one that is better by this factor.
const HYSTERESIS: f64 = 1.05;
/// Tokens a second that a trial may give up to have fewer rows to lose.
const TRIAL_SLACK: f64 = 1.15;

/// What is known about a step that is to be chosen, by candidate, as far as they are allowed.
pub(super) struct Outlook {
    /// Expected tokens of all sequences.
    pub(super) tokens: Vec<f64>,
    /// The same if the drafter were good.
    pub(super) hoped: Vec<f64>,
    /// Estimated seconds.
    pub(super) costs: Vec<f64>,
}

impl Outlook {
    /// Tokens a second.
    fn rate(tokens: &[f64], costs: &[f64], i: usize) -> f64 {
        match (tokens.get(i), costs.get(i)) {
            (Some(tokens), Some(cost)) => tokens / cost,
            _ => 0.0,
        }
    }

    pub(super) fn expected(&self, i: usize) -> f64 {
        Self::rate(&self.tokens, &self.costs, i)
    }

    fn hoped(&self, i: usize) -> f64 {
        Self::rate(&self.hoped, &self.costs, i)
    }

    /// The regular choice, which stays with the one before unless another is clearly better.
    pub(super) fn best(&self, before: Option<usize>) -> usize {
        let best = argmax(0..self.tokens.len(), |i| self.expected(i)).unwrap_or(0);
        before
            .filter(|&i| self.expected(i) * HYSTERESIS > self.expected(best))
            .unwrap_or(best)
    }

    /// Rows of a trial: the fewest that would pay nearly best if the drafter were good, else the
    /// fewest of all, which cost least to measure. And whether they would pay.
    pub(super) fn trial(&self) -> (usize, bool) {
        let drafting = 1..self.tokens.len();
        let best = argmax(drafting.clone(), |i| self.hoped(i)).map_or(0.0, |i| self.hoped(i));
        if best < self.hoped(0) {
            return (1, false);
        }
        let mut drafting = drafting.filter(|&i| self.hoped(i) * TRIAL_SLACK >= best);
        (drafting.next().unwrap_or(1), true)
    }

    /// Rows other than the regular choice that may be better for all that is known.
    pub(super) fn promising(&self, choice: usize, cells: &[Cell], now: u64) -> Option<usize> {
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
