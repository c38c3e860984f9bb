//! What steps cost: measured by batch size and rows, estimated where nothing was measured.

use super::explore::Schedule;
use std::collections::BTreeMap;

/// Measurements of a cell whose median counts: of 7, three outliers do no harm.
const WINDOW: usize = 7;
/// Share of a new median in a cell's cost: averages noise out over about 16 steps.
const SMOOTHING: f64 = 1.0 / 16.0;
/// Steps after which a cell's next measurement says more than its older ones.
const RECENT: u64 = 32;
/// Steps after which a measurement is too old to be believed: the context has grown since.
const FADED: u64 = 512;
/// Batch sizes remembered; beyond that the one unused for the longest time is forgotten.
pub(super) const MAX_BATCHES: usize = 64;

/// What one (batch, rows) costs.
#[derive(Debug, Clone, Default)]
pub(super) struct Cell {
    /// Seconds, oldest first.
    recent: Vec<f64>,
    /// Seconds.
    cost: f64,
    measured_at: u64,
    /// Measurements that were not believed.
    pub(super) ignored: usize,
}

impl Cell {
    pub(super) fn observe(&mut self, seconds: f64, now: u64) {
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

    pub(super) fn measured(&self) -> Option<f64> {
        (!self.recent.is_empty()).then_some(self.cost)
    }

    /// Measured often and not too long ago.
    pub(super) fn is_settled(&self, now: u64) -> bool {
        self.recent.len() >= WINDOW && now.saturating_sub(self.measured_at) <= FADED
    }

    pub(super) fn is_confirmed(&self) -> bool {
        self.recent.len() > 1
    }

    /// What it may cost at best, for all that the measurements say. A single one says nothing: it
    /// may be an outlier.
    pub(super) fn hope(&self, now: u64) -> f64 {
        if self.is_settled(now) {
            self.cost
        } else if self.is_confirmed() {
            self.recent.iter().copied().fold(self.cost, f64::min) * 0.9
        } else {
            0.0
        }
    }
}

/// One batch size: a cell a candidate, the first being the plain step.
#[derive(Debug, Clone)]
pub(super) struct Batch {
    pub(super) cells: Vec<Cell>,
    pub(super) schedule: Schedule,
    used_at: u64,
}

impl Batch {
    pub(super) fn plain(&self) -> Option<f64> {
        self.cells.first().and_then(Cell::measured)
    }

    pub(super) fn has_drafted(&self) -> bool {
        self.cells
            .iter()
            .skip(1)
            .any(|cell| cell.measured().is_some())
    }
}

/// Measured costs, by batch size.
#[derive(Debug)]
pub(super) struct Costs {
    /// Numbers of rows, ascending from 1.
    pub(super) candidates: Vec<usize>,
    pub(super) batches: BTreeMap<usize, Batch>,
}

impl Costs {
    pub(super) fn new(block_size: usize) -> Self {
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

    pub(super) fn rows(&self, index: usize) -> usize {
        self.candidates.get(index).copied().unwrap_or(1)
    }

    /// The entry of a batch size, which is new or not.
    pub(super) fn entry(&mut self, batch: usize, now: u64) -> &mut Batch {
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
    pub(super) fn has_confirmed(&self) -> bool {
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
    pub(super) fn reach(&self, batch: usize) -> usize {
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
    pub(super) fn estimate(&self, batch: usize) -> Option<Vec<f64>> {
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
