//! `load`: several clients at once, with and without speculation, in one process: the check that
//! speculation is never slower than plain decoding.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{ensure, Context, Result};
use clap::Args;
use comfy_table::{presets::UTF8_FULL_CONDENSED, Table};
use dflash_plugin::stats::StatsSnapshot;
use futures_util::future::try_join_all;
use serde::Serialize;

use crate::engine::{Engine, Generation, Job, PairArgs, Prompt};
use crate::prompts::{self, PromptLine};
use crate::report::{self, median};

/// Options of `load`.
#[derive(Debug, Args)]
pub struct LoadArgs {
    #[command(flatten)]
    pub pair: PairArgs,
    /// Prompt files (JSONL with `id`, `kind`, `prompt`) or folders of them
    #[arg(long, required = true, num_args = 1..)]
    pub prompts: Vec<PathBuf>,
    /// Clients that send one request after the other
    #[arg(long, value_delimiter = ',', default_value = "1,4,8")]
    pub concurrency: Vec<usize>,
    /// Requests of each kind and number of clients: this many for each client
    #[arg(long, default_value_t = 2)]
    pub per_client: usize,
    #[arg(long, default_value_t = 64)]
    pub max_tokens: usize,
    /// Largest block (anchor and drafts) [default: the draft model's]
    #[arg(long)]
    pub block_size: Option<usize>,
    /// Verify whole blocks always, instead of what is measured to be fastest
    #[arg(long)]
    pub fixed: bool,
    /// Repetitions, plain and speculative in turn; the median ratio counts
    #[arg(long, default_value_t = 3)]
    pub repetitions: usize,
    /// Write all figures to this file
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// One kind of prompts at one number of clients.
#[derive(Debug, Serialize)]
struct Row {
    kind: String,
    concurrency: usize,
    /// Tokens a second of all clients together, prompts included: one figure a repetition.
    plain_tok_s: Vec<f64>,
    dflash_tok_s: Vec<f64>,
    /// Median over the repetitions of the ratio within one.
    ratio: f64,
    /// Requests whose text was that of plain decoding, of all.
    identical: usize,
    requests: usize,
    stats: StatsSnapshot,
}

/// Run it and print the table.
///
/// # Errors
/// If a request fails, or a prompt kind is missing.
pub async fn run(args: &LoadArgs) -> Result<()> {
    let prompts = prompts::load(&args.prompts, None)?;
    let mut kinds: Vec<&str> = prompts.iter().map(|p| p.kind.as_str()).collect();
    kinds.dedup();
    let plain = Engine::load(&args.pair.plain()).await?;
    let dflash = Engine::load(&args.pair.dflash(args.block_size, !args.fixed)).await?;
    let mut rows = Vec::new();
    for &concurrency in &args.concurrency {
        for kind in &kinds {
            let of_kind: Vec<&PromptLine> = prompts.iter().filter(|p| p.kind == *kind).collect();
            let jobs = jobs(&of_kind, concurrency * args.per_client, args.max_tokens);
            rows.push(measure(args, kind, concurrency, &jobs, &plain, &dflash).await?);
        }
    }
    println!("{}", render(&rows));
    if let Some(file) = &args.json {
        let report = serde_json::json!({
            "command": std::env::args().skip(1).collect::<Vec<_>>().join(" "),
            "rows": rows,
        });
        report::write_json(file, &report)?;
    }
    Ok(())
}

fn jobs(prompts: &[&PromptLine], count: usize, max_tokens: usize) -> Vec<Job> {
    prompts
        .iter()
        .cycle()
        .take(count)
        .map(|prompt| Job::greedy(Prompt::Chat(prompt.prompt.clone()), max_tokens))
        .collect()
}

async fn measure(
    args: &LoadArgs,
    kind: &str,
    concurrency: usize,
    jobs: &[Job],
    plain: &Engine,
    dflash: &Engine,
) -> Result<Row> {
    let before = dflash.stats();
    let (mut plain_tok_s, mut dflash_tok_s, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let (mut identical, mut requests) = (0, 0);
    for _ in 0..args.repetitions.max(1) {
        let (want, plain_speed) = serve(plain, jobs, concurrency).await?;
        let (got, dflash_speed) = serve(dflash, jobs, concurrency).await?;
        plain_tok_s.push(plain_speed);
        dflash_tok_s.push(dflash_speed);
        ratios.push(dflash_speed / plain_speed);
        requests += want.len();
        identical += want
            .iter()
            .zip(&got)
            .filter(|(a, b)| a.text == b.text)
            .count();
    }
    let ratio = median(ratios).context("no repetition")?;
    eprintln!("{kind} at {concurrency}: {ratio:.2}");
    Ok(Row {
        kind: kind.into(),
        concurrency,
        plain_tok_s,
        dflash_tok_s,
        ratio,
        identical,
        requests,
        stats: dflash.stats().since(&before),
    })
}

/// Let `concurrency` clients work the jobs off; returns the answers in order, and tokens a second
/// of all together.
async fn serve(
    engine: &Engine,
    jobs: &[Job],
    concurrency: usize,
) -> Result<(Vec<Generation>, f64)> {
    let queue: Mutex<VecDeque<usize>> = Mutex::new((0..jobs.len()).collect());
    let next = || {
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.pop_front()
    };
    let start = Instant::now();
    let clients = (0..concurrency).map(|_| async {
        let mut answers = Vec::new();
        while let Some(index) = next() {
            answers.push((index, engine.generate(&jobs[index], |_| ()).await?));
        }
        anyhow::Ok(answers)
    });
    let mut answers: Vec<_> = try_join_all(clients).await?.into_iter().flatten().collect();
    let seconds = start.elapsed().as_secs_f64();
    answers.sort_by_key(|(index, _)| *index);
    ensure!(answers.len() == jobs.len(), "a request has no answer");
    let answers: Vec<_> = answers.into_iter().map(|(_, answer)| answer).collect();
    let tokens: usize = answers.iter().map(|answer| answer.completion_tokens).sum();
    Ok((answers, tokens as f64 / seconds))
}

fn render(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header([
        "clients",
        "kind",
        "plain tok/s",
        "DFlash tok/s",
        "ratio",
        "tau",
        "plain steps",
        "identical",
    ]);
    for row in rows {
        let plain_steps: u64 = row.stats.fallbacks.values().sum();
        let all = plain_steps + row.stats.drafts;
        table.add_row([
            row.concurrency.to_string(),
            row.kind.clone(),
            format!("{:.1}", median(row.plain_tok_s.clone()).unwrap_or(f64::NAN)),
            format!(
                "{:.1}",
                median(row.dflash_tok_s.clone()).unwrap_or(f64::NAN)
            ),
            format!("{:.2}", row.ratio),
            format!("{:.2}", row.stats.tau().unwrap_or(f64::NAN)),
            format!("{:.0}%", 100.0 * plain_steps as f64 / all.max(1) as f64),
            format!("{}/{}", row.identical, row.requests),
        ]);
    }
    table
}
