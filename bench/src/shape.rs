//! `shape`: the time of a step with random weights of a real model's shape, with accept lengths drawn at
//! random instead of earned. What comes out is not text; only its speed means something.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use clap::Args;
use comfy_table::{presets::UTF8_FULL_CONDENSED, Table};
use dflash_plugin::fault::FaultPoint;
use dflash_plugin::trace::Phase;
use dflash_plugin::DFlashMethod;
use futures_util::future::try_join_all;
use serde::Serialize;

use crate::engine::{Engine, Generation, Job, PairArgs, Prompt};
use crate::report::{self, median};

/// Options of `shape`.
#[derive(Debug, Args)]
pub struct ShapeArgs {
    #[command(flatten)]
    pub pair: PairArgs,
    /// Mean number of accepted drafts of a whole block, drawn from a geometric distribution
    #[arg(long, default_value_t = 5.49)]
    pub accept_length: f64,
    /// Sequences at once
    #[arg(long, value_delimiter = ',', default_value = "1,4,8,16,32")]
    pub concurrency: Vec<usize>,
    /// Tokens of each prompt
    #[arg(long, value_delimiter = ',', default_value = "1024")]
    pub context: Vec<usize>,
    /// Tokens of each answer
    #[arg(long, default_value_t = 128)]
    pub tokens: usize,
    /// Blocks to compare (anchor and drafts), and 0 for the rows that are measured to be fastest
    #[arg(long, value_delimiter = ',', default_value = "16")]
    pub block_sizes: Vec<usize>,
    /// Measure plain decoding alone
    #[arg(long)]
    pub plain_only: bool,
    /// Write all figures to this file
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// One way of decoding at one context and number of sequences.
#[derive(Debug, Serialize)]
struct Row {
    context: usize,
    concurrency: usize,
    /// 1 is plain decoding; 0 is what is measured to be fastest.
    block: usize,
    /// Tokens a second of all sequences together, while all of them decode.
    tok_s: f64,
    /// Of one step, from outside: the mean over the answers.
    step_ms: f64,
    /// Tokens a step and sequence.
    tau: f64,
    /// Median time of the parts of a step, measured apart, with the device waited for.
    phases_ms: BTreeMap<Phase, f64>,
    /// What the bytes and operations of a step ask for at least (`docs/perf.md`).
    bound_ms: f64,
}

/// Run it and print the table.
///
/// # Errors
/// If a model cannot be loaded, or a request fails.
pub async fn run(args: &ShapeArgs) -> Result<()> {
    let shape = Shape::of(&args.pair.target, &args.pair.draft)?;
    let mut rows = Vec::new();
    let plain = Engine::load(&args.pair.plain()).await?;
    for (context, concurrency) in cells(args) {
        rows.push(measure(args, &shape, &plain, None, context, concurrency, 1).await?);
        print(&rows[rows.len() - 1..]);
    }
    drop(plain);
    for &block in args.block_sizes.iter().filter(|_| !args.plain_only) {
        let largest = (block > 0).then_some(block);
        let setup = args.pair.dflash(largest, block == 0);
        let phases = Phases::default();
        // One engine for speed, then one that is timed: waiting for the device costs time.
        let fast = Engine::load_with(&setup, accepting(args)).await?;
        let mut measured = Vec::new();
        for (context, concurrency) in cells(args) {
            measured.push(measure(args, &shape, &fast, None, context, concurrency, block).await?);
            print(&measured[measured.len() - 1..]);
        }
        drop(fast);
        let method = accepting(args).with_phases(phases.observer());
        let timed = Engine::load_with(&setup, method).await?;
        for (row, (context, concurrency)) in measured.iter_mut().zip(cells(args)) {
            let row_of_phases = measure(
                args,
                &shape,
                &timed,
                Some(&phases),
                context,
                concurrency,
                block,
            )
            .await?;
            row.phases_ms = row_of_phases.phases_ms;
        }
        rows.extend(measured);
    }
    print(&rows);
    if let Some(file) = &args.json {
        let report = serde_json::json!({
            "command": std::env::args().skip(1).collect::<Vec<_>>().join(" "),
            "rows": rows,
        });
        report::write_json(file, &report)?;
    }
    Ok(())
}

fn cells(args: &ShapeArgs) -> impl Iterator<Item = (usize, usize)> + '_ {
    args.context
        .iter()
        .flat_map(|context| args.concurrency.iter().map(move |c| (*context, *c)))
}

/// Accepts as many drafts as if each were right with the same probability.
fn accepting(args: &ShapeArgs) -> DFlashMethod {
    let probability = acceptance(args.accept_length);
    let state = Mutex::new(0x9E37_79B9_7F4A_7C15_u64);
    DFlashMethod::new().with_fault(Arc::new(move |point| {
        if point != FaultPoint::Accept {
            return false;
        }
        // xorshift64*: any even stream will do, and it must be the same every time.
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        *state ^= *state >> 12;
        *state ^= *state << 25;
        *state ^= *state >> 27;
        let drawn = state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11;
        (drawn as f64 / (1u64 << 53) as f64) < probability
    }))
}

/// The probability of a draft at which a block of 16 has `mean` accepted ones; shorter blocks get the
/// same one, so they accept what the head of the long one would.
fn acceptance(mean: f64) -> f64 {
    let expected = |p: f64| (1..16).map(|k| p.powi(k)).sum::<f64>();
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        match expected(middle) < mean {
            true => low = middle,
            false => high = middle,
        }
    }
    low
}

/// Times of parts of steps.
#[derive(Clone, Default)]
struct Phases(Arc<Mutex<BTreeMap<Phase, Vec<f64>>>>);

impl Phases {
    fn observer(&self) -> dflash_plugin::trace::PhaseObserver {
        let times = self.0.clone();
        Arc::new(move |phase, time: Duration| {
            let mut times = times.lock().unwrap_or_else(PoisonError::into_inner);
            times
                .entry(phase)
                .or_default()
                .push(time.as_secs_f64() * 1e3);
        })
    }

    fn take(&self) -> BTreeMap<Phase, f64> {
        let times = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        times
            .into_iter()
            .filter_map(|(phase, times)| Some((phase, median(times)?)))
            .collect()
    }
}

async fn measure(
    args: &ShapeArgs,
    shape: &Shape,
    engine: &Engine,
    phases: Option<&Phases>,
    context: usize,
    concurrency: usize,
    block: usize,
) -> Result<Row> {
    let jobs = |first: usize| -> Vec<Job> {
        (first..first + concurrency)
            .map(|i| Job::greedy(Prompt::Tokens(shape.prompt(i, context)), args.tokens))
            .collect()
    };
    // Once, with prompts of its own, for what is made when a shape of step is first seen.
    let warm = jobs(concurrency);
    try_join_all(warm.iter().map(|job| engine.generate(job, |_| ()))).await?;
    let jobs = jobs(0);
    if let Some(phases) = phases {
        phases.take();
    }
    let before = engine.stats();
    let running = jobs.iter().map(|job| engine.generate(job, |_| ()));
    let got: Vec<Generation> = try_join_all(running).await?;
    let stats = engine.stats().since(&before);
    let tok_s = speed_together(&got)?;
    let tau = stats.tau().unwrap_or(1.0);
    Ok(Row {
        context,
        concurrency,
        block,
        tok_s,
        step_ms: 1e3 * concurrency as f64 * tau / tok_s,
        tau,
        phases_ms: phases.map(Phases::take).unwrap_or_default(),
        bound_ms: shape.bound_ms(context, concurrency, block),
    })
}

/// Tokens a second while all sequences decode: from the last one's first token to the end of the first.
fn speed_together(got: &[Generation]) -> Result<f64> {
    let firsts = got.iter().filter_map(|one| one.arrivals.first());
    let lasts = got.iter().filter_map(|one| one.arrivals.last());
    let (Some(start), Some(end)) = (firsts.max(), lasts.min()) else {
        anyhow::bail!("no token came");
    };
    ensure!(
        end > start,
        "the sequences never decode together: ask for more --tokens"
    );
    let tokens = got
        .iter()
        .flat_map(|one| &one.arrivals)
        .filter(|at| *at > start && *at <= end)
        .count();
    Ok(tokens as f64 / (*end - *start).as_secs_f64())
}

fn print(rows: &[Row]) {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header([
        "context",
        "sequences",
        "block",
        "tok/s",
        "step ms",
        "bound ms",
        "tau",
        "parts ms",
    ]);
    for row in rows {
        let parts: Vec<String> = row
            .phases_ms
            .iter()
            .map(|(phase, ms)| format!("{phase:?} {ms:.2}").to_lowercase())
            .collect();
        table.add_row([
            row.context.to_string(),
            row.concurrency.to_string(),
            row.block.to_string(),
            format!("{:.0}", row.tok_s),
            format!("{:.2}", row.step_ms),
            format!("{:.2}", row.bound_ms),
            format!("{:.2}", row.tau),
            parts.join(", "),
        ]);
    }
    println!("{table}");
}

/// What of the two models' configurations the bound needs.
struct Shape {
    target: Sizes,
    draft: Sizes,
    taps: usize,
}

#[derive(serde::Deserialize)]
struct Sizes {
    hidden_size: f64,
    intermediate_size: f64,
    num_hidden_layers: f64,
    num_attention_heads: f64,
    num_key_value_heads: f64,
    head_dim: f64,
    vocab_size: usize,
}

impl Sizes {
    fn read(folder: &Path) -> Result<Self> {
        let file = folder.join("config.json");
        let text = std::fs::read_to_string(&file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} lacks a size", file.display()))
    }

    /// Weights of all layers.
    fn body(&self) -> f64 {
        let (heads, kv) = (self.num_attention_heads, self.num_key_value_heads);
        let attention = self.hidden_size * self.head_dim * (2.0 * heads + 2.0 * kv);
        self.num_hidden_layers * (attention + 3.0 * self.hidden_size * self.intermediate_size)
    }

    fn head(&self) -> f64 {
        self.hidden_size * self.vocab_size as f64
    }

    /// Elements of K and V of one position.
    fn kv(&self) -> f64 {
        2.0 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim
    }
}

impl Shape {
    fn of(target: &Path, draft: &Path) -> Result<Self> {
        let shape = Self {
            target: Sizes::read(target)?,
            draft: Sizes::read(draft)?,
            taps: 5,
        };
        ensure!(
            shape.target.vocab_size > 1000,
            "the vocabulary is too small"
        );
        Ok(shape)
    }

    /// Token ids that no other sequence's prompt begins with.
    fn prompt(&self, i: usize, len: usize) -> Vec<u32> {
        let vocab = self.target.vocab_size as u64;
        (0..len as u64)
            .map(|at| {
                let mixed = (at + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
                    ^ (i as u64 + 1).wrapping_mul(0xBF58_476D_1CE4_E5B9);
                (300 + (mixed >> 20) % (vocab - 400)) as u32
            })
            .collect()
    }

    /// Milliseconds of a step at 4.3 TB/s and 790 TFLOP/s in bf16, each part the larger of its two
    /// times: the target over all rows, and, for a block, the draft model, its head and the context
    /// features of the block's rows.
    fn bound_ms(&self, context: usize, concurrency: usize, block: usize) -> f64 {
        const BYTES_S: f64 = 4.3e12;
        const FLOPS_S: f64 = 790e12;
        let (c, ctx) = (concurrency as f64, context as f64);
        let block = if block == 0 { 16 } else { block };
        let part = |weights: f64, rows: f64, kv: f64| {
            let bytes = 2.0 * weights + 2.0 * kv * ctx * c;
            (bytes / BYTES_S).max(2.0 * weights * rows / FLOPS_S)
        };
        let rows = c * block as f64;
        let target = part(
            self.target.body() + self.target.head(),
            rows,
            self.target.kv(),
        );
        if block == 1 {
            return 1e3 * target;
        }
        let draft = part(self.draft.body() + self.draft.head(), rows, self.draft.kv());
        let features =
            self.draft.hidden_size * (self.taps as f64 * self.target.hidden_size + self.draft.kv());
        1e3 * (target + draft + part(features, rows, 0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drawn_acceptance_has_the_mean_asked_for() {
        let p = acceptance(5.49);
        let mean: f64 = (1..16).map(|k| p.powi(k)).sum();
        assert!((mean - 5.49).abs() < 1e-6, "{p} {mean}");
    }

    #[test]
    fn the_bound_of_qwen3_8b_is_the_papers() {
        let sizes = |layers, vocab| Sizes {
            hidden_size: 4096.0,
            intermediate_size: 12288.0,
            num_hidden_layers: layers,
            num_attention_heads: 32.0,
            num_key_value_heads: 8.0,
            head_dim: 128.0,
            vocab_size: vocab,
        };
        let shape = Shape {
            target: sizes(36.0, 151_936),
            draft: sizes(5.0, 151_936),
            taps: 5,
        };
        assert!((shape.bound_ms(1024, 1, 1) - 3.56).abs() < 0.01);
        assert!((shape.bound_ms(1024, 1, 16) - 4.36).abs() < 0.02);
    }
}
