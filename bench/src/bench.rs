//! `bench`: real prompts with and without speculation, alternately, in one process.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::engine::{Engine, Generation, Job, PairArgs, Prompt};
use crate::prompts::{self, PromptLine};
use crate::report::{self, median, Divergence, Pair, Summary};

/// Options of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub pair: PairArgs,
    /// Prompt files (JSONL with `id`, `kind`, `prompt`) or folders of them
    #[arg(long, required = true, num_args = 1..)]
    pub prompts: Vec<PathBuf>,
    /// Only the first N prompts of each kind
    #[arg(long)]
    pub per_kind: Option<usize>,
    /// Block sizes (anchor and drafts) to compare
    #[arg(long, value_delimiter = ',', default_value = "16,8,4")]
    pub block_sizes: Vec<usize>,
    #[arg(long, default_value_t = 256)]
    pub max_tokens: usize,
    /// 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// Repetitions of each prompt; the median counts
    #[arg(long, default_value_t = 1)]
    pub repetitions: usize,
    /// Verify what is measured to be fastest, up to the block; otherwise whole blocks always
    #[arg(long)]
    pub adaptive: bool,
    /// Do not decode plainly: only tau is measured, speed and identity are not
    #[arg(long)]
    pub tau_only: bool,
    /// Where texts part: how far apart plain decoding's two best logits were there (a further run
    /// each, with logits on the host)
    #[arg(long, conflicts_with = "tau_only")]
    pub gaps: bool,
    /// Write all figures to this file
    #[arg(long)]
    pub json: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report<'a> {
    command: String,
    target: &'a PathBuf,
    draft: &'a PathBuf,
    max_tokens: usize,
    temperature: f64,
    repetitions: usize,
    tau_only: bool,
    summaries: &'a [Summary],
    pairs: &'a [Pair],
}

/// Run it and print the table.
pub async fn run(args: &BenchArgs) -> Result<()> {
    let prompts = prompts::load(&args.prompts, args.per_kind)?;
    let plain = match args.tau_only {
        true => None,
        false => Some(Engine::load(&args.pair.plain()).await?),
    };
    let mut speculative = Vec::new();
    for &block_size in &args.block_sizes {
        let setup = args.pair.dflash(Some(block_size), args.adaptive);
        speculative.push((block_size, Engine::load(&setup).await?));
    }
    let progress = ProgressBar::new(prompts.len() as u64);
    progress.set_style(
        ProgressStyle::with_template(
            "{bar:30} {pos}/{len} prompts, {elapsed} gone, {eta} left  {msg}",
        )
        .context("progress bar template")?,
    );
    progress.enable_steady_tick(Duration::from_secs(1));
    let mut pairs = Vec::new();
    for prompt in &prompts {
        progress.set_message(prompt.id.clone());
        pairs.extend(measure(args, prompt, plain.as_ref(), &speculative).await?);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let summaries = Summary::table_of(&pairs);
    println!("{}", report::render(&summaries));
    if args.gaps {
        println!("{}", report::render_divergences(&pairs));
    }
    if args.tau_only {
        println!(
            "tau only: the columns plain tok/s, speedup, efficiency and identical mean nothing"
        );
    }
    if let Some(file) = &args.json {
        let report = Report {
            command: std::env::args().skip(1).collect::<Vec<_>>().join(" "),
            target: &args.pair.target,
            draft: &args.pair.draft,
            max_tokens: args.max_tokens,
            temperature: args.temperature,
            repetitions: args.repetitions,
            tau_only: args.tau_only,
            summaries: &summaries,
            pairs: &pairs,
        };
        report::write_json(file, &report)?;
    }
    Ok(())
}

/// One prompt: plain and every block size in turn, `repetitions` times.
async fn measure(
    args: &BenchArgs,
    prompt: &PromptLine,
    plain: Option<&Engine>,
    speculative: &[(usize, Engine)],
) -> Result<Vec<Pair>> {
    let job = Job {
        temperature: args.temperature,
        ..Job::greedy(Prompt::Chat(prompt.prompt.clone()), args.max_tokens)
    };
    let mut plain_runs: Vec<Generation> = Vec::new();
    let mut runs: Vec<Vec<Generation>> = vec![Vec::new(); speculative.len()];
    let mut stats = Vec::new();
    for _ in 0..args.repetitions.max(1) {
        if let Some(plain) = plain {
            plain_runs.push(plain.generate(&job, |_| ()).await?);
        }
        stats.clear();
        for ((_, engine), runs) in speculative.iter().zip(&mut runs) {
            let before = engine.stats();
            runs.push(engine.generate(&job, |_| ()).await?);
            stats.push(engine.stats().since(&before));
        }
    }
    let mut divergences = vec![None; speculative.len()];
    if let (true, Some(plain)) = (args.gaps, plain) {
        let job = job.clone().recorded();
        let plain = plain.generate(&job, |_| ()).await?;
        for ((_, engine), divergence) in speculative.iter().zip(&mut divergences) {
            let run = engine.generate(&job, |_| ()).await?;
            *divergence = Divergence::between(&plain, &run);
        }
    }
    let speed = |runs: &[Generation]| {
        median(runs.iter().map(Generation::tokens_per_second)).unwrap_or(f64::NAN)
    };
    let pairs = speculative
        .iter()
        .zip(runs)
        .zip(stats)
        .zip(divergences)
        .map(|((((block_size, _), runs), stats), divergence)| Pair {
            id: prompt.id.clone(),
            kind: prompt.kind.clone(),
            block_size: *block_size,
            new_tokens: runs.first().map_or(0, |run| run.completion_tokens),
            plain_tok_s: speed(&plain_runs),
            dflash_tok_s: speed(&runs),
            rounds: stats.drafts,
            emitted: stats.emitted,
            accepts: stats.accepts,
            identical: match plain_runs.first() {
                Some(plain) => runs.iter().all(|run| Pair::same(plain, run)),
                None => false,
            },
            divergence,
        })
        .collect();
    Ok(pairs)
}
