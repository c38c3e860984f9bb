//! One conformance suite for every kind of target and cache: two real servers, one without and one
//! with DFlash, get the same requests in the same order, and their answers must be equal.
//!
//! [`ROWS`] says on what it runs: another target, cache or device is another row. The cases are
//! listed by [`cases::all`]. Both servers start from the host's fixed random seed and draw once a
//! token, so sampled answers are equal too, as long as every request has an engine to itself; the
//! cases that break this (disconnects, concurrency) come last and look at greedy answers only.
//!
//! The short version leaves cases out and shortens answers, most on rows that are slow;
//! `DFLASH_TEST_FULL=1` runs everything. `DFLASH_TEST_CASE=name` runs the cases whose names contain
//! it.

mod answer;
mod cases;
mod pair;

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use dflash_tests::{drafter, full, gguf, target};
use futures_util::FutureExt;

use pair::Pair;

/// A kind of target on a kind of cache.
pub struct Row {
    pub name: &'static str,
    target: fn() -> PathBuf,
    drafter: fn() -> PathBuf,
    block_size: usize,
    /// Arguments of both servers: device, cache.
    arguments: &'static [&'static str],
    /// Largest difference of logprobs.
    pub tolerance: f64,
    /// Whether greedy answers may differ where the target's two best logits nearly tie.
    pub near_ties: bool,
    /// Whether the short version leaves most cases out.
    pub slow: bool,
}

const ROWS: [Row; 2] = [
    Row {
        name: "SmolLM2 f32, normal cache",
        target,
        drafter,
        block_size: 8,
        arguments: &[],
        tolerance: 1e-4,
        near_ties: true,
        slow: false,
    },
    Row {
        // A row of a quantized product is the same however many rows there are.
        name: "SmolLM2 Q4_1, normal cache",
        target: gguf,
        drafter,
        block_size: 4,
        arguments: &[],
        tolerance: 1e-6,
        near_ties: false,
        slow: true,
    },
];

#[tokio::test(flavor = "multi_thread")]
async fn safetensors_f32_with_the_normal_cache_conforms() {
    conforms(&ROWS[0]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gguf_q4_1_with_the_normal_cache_conforms() {
    conforms(&ROWS[1]).await;
}

/// Run all cases; the failures come together at the end, each with its row and case.
async fn conforms(row: &'static Row) {
    let only = std::env::var("DFLASH_TEST_CASE").unwrap_or_default();
    let mut pair = Pair::start(row).await;
    let mut failures = Vec::new();
    let mut near_ties = 0;
    let mut times: Vec<(&str, Duration, &str)> = Vec::new();
    for case in cases::all() {
        let chosen = if only.is_empty() {
            full() || case.runs_in_the_short_version(row.slow)
        } else {
            case.name.contains(&only)
        };
        if !chosen {
            times.push((case.name, Duration::ZERO, "left out"));
            continue;
        }
        let start = Instant::now();
        let result = AssertUnwindSafe((case.run)(&pair)).catch_unwind().await;
        let result = result.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            Err(anyhow!("panic: {}", text.unwrap_or_default()))
        });
        let failure = result.err().map(|error| format!("{error:#}"));
        let outcome = if failure.is_none() { "ok" } else { "FAILED" };
        times.push((case.name, start.elapsed(), outcome));
        println!(
            "{} / {}: {outcome}, {:.1} s",
            row.name,
            case.name,
            start.elapsed().as_secs_f64()
        );
        let differ = failure.is_some();
        if let Some(failure) = failure {
            println!("{failure}");
            failures.push(format!("{} / {}: {failure}", row.name, case.name));
        }
        if differ || pair.is_used_up() {
            near_ties += pair.near_ties();
            pair = Pair::start(row).await;
        }
    }
    println!("\n{}\n{:<40} {:>8}  outcome", row.name, "case", "seconds");
    for (name, time, outcome) in &times {
        println!("{name:<40} {:>8.1}  {outcome}", time.as_secs_f64());
    }
    println!("near ties: {}", near_ties + pair.near_ties());
    assert!(failures.is_empty(), "\n{}", failures.join("\n\n"));
}
