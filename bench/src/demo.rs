//! `demo`: a few real prompts answered twice, without and with DFlash, while you watch.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use dflash_plugin::stats::StatsSnapshot;
use serde::Serialize;

use crate::engine::{Engine, Generation, Job, PairArgs, Prompt};
use crate::report::{self, Pair, Summary};

/// Prompts that are in no training file: one of each kind.
const PROMPTS: &[(&str, &str)] = &[
    ("math", "A farmer has 17 rows of apple trees with 24 trees in each row. He plants 36 more. How many trees does he have?"),
    ("code", "Write a Python function that returns the longest word in a sentence."),
    ("lists", "List eight things to pack for a week of hiking."),
    ("chat", "Can you explain why the sky is blue?"),
];

/// Options of `demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    #[command(flatten)]
    pub pair: PairArgs,
    /// Anchor and drafts in one block
    #[arg(long, default_value_t = 8)]
    pub block_size: usize,
    #[arg(long, default_value_t = 128)]
    pub max_tokens: usize,
    /// Write all figures to this file
    #[arg(long)]
    pub json: Option<PathBuf>,
}

#[derive(Serialize)]
struct Figures<'a> {
    block_size: usize,
    max_tokens: usize,
    summaries: &'a [Summary],
    prompts: &'a [Pair],
    stats: &'a StatsSnapshot,
}

/// Run it.
pub async fn run(args: &DemoArgs) -> Result<()> {
    println!("Loading the target twice: once alone, once with the draft model.");
    let plain = Engine::load(&args.pair.plain()).await?;
    let dflash = Engine::load(&args.pair.dflash(Some(args.block_size), true)).await?;
    let mut pairs = Vec::new();
    for (number, (kind, prompt)) in PROMPTS.iter().enumerate() {
        println!("\n=== {}/{} ({kind}): {prompt}", number + 1, PROMPTS.len());
        let job = Job::greedy(Prompt::Chat((*prompt).into()), args.max_tokens);
        let without = watch("without DFlash", &plain, &job).await?;
        let before = dflash.stats();
        let with = watch("with DFlash", &dflash, &job).await?;
        let stats = dflash.stats().since(&before);
        pairs.push(Pair {
            id: format!("demo-{kind}"),
            kind: (*kind).into(),
            block_size: args.block_size,
            new_tokens: with.completion_tokens,
            plain_tok_s: without.tokens_per_second(),
            dflash_tok_s: with.tokens_per_second(),
            rounds: stats.drafts,
            emitted: stats.emitted,
            accepts: stats.accepts,
            identical: Pair::same(&without, &with),
            divergence: None,
        });
    }
    let summaries = Summary::table_of(&pairs);
    let stats = dflash.stats();
    println!("\n{}", report::render(&summaries));
    println!(
        "Drafts accepted in a verify step (of {}):",
        args.block_size - 1
    );
    print!("{}", report::histogram(&stats));
    let identical = pairs.iter().all(|pair| pair.identical);
    println!("identical output: {}", if identical { "yes" } else { "no" });
    if let Some(file) = &args.json {
        let figures = Figures {
            block_size: args.block_size,
            max_tokens: args.max_tokens,
            summaries: &summaries,
            prompts: &pairs,
            stats: &stats,
        };
        report::write_json(file, &figures)?;
    }
    anyhow::ensure!(
        identical,
        "the output with DFlash differs from the output without it"
    );
    Ok(())
}

/// Print the answer as it comes, then its speed.
async fn watch(title: &str, engine: &Engine, job: &Job) -> Result<Generation> {
    println!("--- {title}");
    let generation = engine
        .generate(job, |text| {
            print!("{text}");
            std::io::stdout().flush().ok();
        })
        .await?;
    println!(
        "\n    [{} tokens, first after {:.2} s, then {:.1} tok/s]",
        generation.completion_tokens,
        generation.first_token.as_secs_f64(),
        generation.tokens_per_second()
    );
    Ok(generation)
}
