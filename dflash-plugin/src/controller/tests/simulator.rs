//! A simulated drafter and target: runs a controller and compares it with fixed rows.

use crate::controller::{Acceptance, Controller};
use std::ops::Range;
use std::time::Duration;

/// Seeded random numbers (splitmix64).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

pub(super) type Cost = fn(usize, usize) -> f64;

/// Milliseconds as measured on a CPU: a few rows are nearly free, more are not.
pub(super) fn cpu(batch: usize, rows: usize) -> f64 {
    let n = (batch * rows) as f64;
    let verify = 41.0 + 0.7 * (n.min(8.0) - 1.0) + 4.5 * (n - 8.0).max(0.0);
    let draft = 10.0 + 4.0 * batch as f64;
    verify + if rows > 1 { draft } else { 0.0 }
}

/// A row costs a whole decode.
pub(super) fn quantized_cpu(batch: usize, rows: usize) -> f64 {
    let draft = if rows > 1 { 12.0 } else { 0.0 };
    41.0 * (batch * rows) as f64 + draft
}

pub(super) fn gpu(batch: usize, rows: usize) -> f64 {
    let draft = if rows > 1 { 2.0 } else { 0.0 };
    20.0 + 0.01 * (batch * rows) as f64 + draft
}

/// Expected tokens of one sequence.
pub(super) fn tokens(p: f64, rows: usize) -> f64 {
    (0..rows).map(|i| p.powi(i as i32)).sum()
}

pub(super) struct World {
    pub(super) cost: Cost,
    /// Noise of a step's time, and share of the steps that take ten times as long.
    pub(super) noise: f64,
    pub(super) outliers: f64,
    pub(super) block: usize,
}

/// By step: what was chosen, and what of it is no matter of luck.
#[derive(Default)]
pub(super) struct Outcome {
    pub(super) rows: Vec<usize>,
    /// The regular choice, an index of the candidates.
    pub(super) choices: Vec<Option<usize>>,
    /// Milliseconds without noise.
    times: Vec<f64>,
    /// Milliseconds in which plain decoding, and the best fixed rows, emit the tokens
    /// expected of the step.
    plain: Vec<f64>,
    best: Vec<f64>,
}

impl Outcome {
    /// Time of some steps, in that of plain decoding.
    pub(super) fn against_plain(&self, steps: Range<usize>) -> f64 {
        self.times[steps.clone()].iter().sum::<f64>() / self.plain[steps].iter().sum::<f64>()
    }

    /// Time of all steps, in that of the best fixed rows.
    pub(super) fn against_best(&self) -> f64 {
        self.times.iter().sum::<f64>() / self.best.iter().sum::<f64>()
    }

    pub(super) fn switches(&self) -> usize {
        self.choices
            .windows(2)
            .filter(|pair| pair[0] != pair[1])
            .count()
    }

    /// Share of some steps that had these rows.
    pub(super) fn share(&self, steps: Range<usize>, rows: Range<usize>) -> f64 {
        let len = steps.len() as f64;
        let rows = self.rows[steps].iter().filter(|r| rows.contains(r));
        rows.count() as f64 / len
    }
}

pub(super) fn mean_and_worst(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let values: Vec<f64> = values.collect();
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    (mean, values.iter().copied().fold(0.0, f64::max))
}

pub(super) struct Run {
    pub(super) controller: Controller,
    pub(super) sequences: Vec<Acceptance>,
    random: Random,
    pub(super) outcome: Outcome,
}

impl World {
    pub(super) fn new(cost: Cost, block: usize) -> Self {
        Self {
            cost,
            noise: 0.0,
            outliers: 0.0,
            block,
        }
    }

    pub(super) fn start(&self, seed: u64) -> Run {
        Run {
            controller: Controller::new(self.block),
            sequences: vec![Acceptance::new(); 8],
            random: Random(seed),
            outcome: Outcome::default(),
        }
    }

    pub(super) fn step(&self, run: &mut Run, batch: usize, p: f64) {
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

    pub(super) fn run(
        &self,
        seed: u64,
        steps: usize,
        at: impl Fn(usize) -> (usize, f64),
    ) -> Outcome {
        let mut run = self.start(seed);
        for i in 0..steps {
            let (batch, p) = at(i);
            self.step(&mut run, batch, p);
        }
        run.outcome
    }

    /// Milliseconds a token of the best fixed number of rows.
    pub(super) fn best_fixed(&self, batch: usize, p: f64) -> f64 {
        (1..=self.block)
            .map(|rows| (self.cost)(batch, rows) / (batch as f64 * tokens(p, rows)))
            .fold(f64::INFINITY, f64::min)
    }
}

pub(super) const SEEDS: Range<u64> = 0..10;

/// Outcomes of 10 runs.
pub(super) fn runs(
    world: &World,
    steps: usize,
    at: impl Fn(usize) -> (usize, f64),
) -> Vec<Outcome> {
    SEEDS.map(|seed| world.run(seed, steps, &at)).collect()
}
