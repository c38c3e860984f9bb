//! Invariant I1 at T = 1: speculation does not change the distribution of the output.
//!
//! A tiny random target with eight tokens answers one prompt thousands of times, four tokens each.
//! The last three of an answer are one observation of 8 * 8 * 8 outcomes, independent of all other
//! answers, so plain and speculative answers can be compared by a two-sample chi-square test. With
//! so few tokens even a random draft model's drafts are accepted about one time in eight, so blocks
//! of all accept lengths contribute.
//!
//! The engine's random stream starts from a fixed seed, and speculation draws the same number for
//! the same token: with the same requests, both samples would be the same answers, and the test
//! would say nothing about distributions. So the plain engine first draws and throws away as many
//! numbers as the other one uses.
//!
//! Whether the test is sharp is tested too: with a wrong accept rule (`FaultPoint::Accept`: the walk
//! over the drafts does not stop at the first that the target did not choose, so later tokens are
//! chosen behind drafts that are not in the text) it must reject. An oracle without this hook, such
//! as taking the observer's drafts for the output, would only show that an argmax is not a sample.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflash_bench::engine::{Engine, Job, Prompt, Setup};
use dflash_plugin::fault::FaultPoint;
use dflash_plugin::DFlashMethod;
use dflash_tests::full;
use dflash_tests::tiny::{self, TinyPair};
use futures_util::future::join_all;
use statrs::distribution::{ChiSquared, ContinuousCDF};

const LETTERS: usize = 8;
const TOKENS: usize = 4;
/// 5,000 answers of 4 tokens.
const ANSWERS: usize = 5_000;
/// Outcomes that are expected less often are counted together.
const LEAST_EXPECTED: f64 = 5.0;

/// How often each answer's last three tokens were seen.
type Counts = BTreeMap<String, usize>;

/// Sample answers, `together` at a time.
async fn sample(engine: &Engine, answers: usize, together: usize) -> Counts {
    let job = Job {
        temperature: 1.0,
        ..Job::greedy(Prompt::Tokens(vec![0, 3, 1, 2, 5, 4]), TOKENS)
    };
    let mut counts = Counts::new();
    for _ in 0..answers / together {
        let running = (0..together).map(|_| engine.generate(&job, |_| ()));
        for answer in join_all(running).await {
            let answer = answer.unwrap();
            assert_eq!(answer.text.len(), TOKENS, "{:?}", answer.text);
            *counts.entry(answer.text[1..].to_string()).or_default() += 1;
        }
    }
    counts
}

/// The p value of the hypothesis that both samples have one distribution.
fn p_value(a: &Counts, b: &Counts) -> f64 {
    let total = |counts: &Counts| counts.values().sum::<usize>() as f64;
    let (total_a, total_b) = (total(a), total(b));
    let share_a = total_a / (total_a + total_b);
    let outcomes: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let mut bins: Vec<(f64, f64)> = Vec::new();
    let mut rare = (0.0, 0.0);
    for outcome in outcomes {
        let seen = |counts: &Counts| counts.get(outcome).copied().unwrap_or(0) as f64;
        let (a, b) = (seen(a), seen(b));
        if (a + b) * share_a.min(1.0 - share_a) < LEAST_EXPECTED {
            rare = (rare.0 + a, rare.1 + b);
        } else {
            bins.push((a, b));
        }
    }
    bins.push(rare);
    bins.retain(|(a, b)| a + b > 0.0);
    let statistic: f64 = bins
        .iter()
        .map(|(a, b)| {
            let (of_a, of_b) = ((a + b) * share_a, (a + b) * (1.0 - share_a));
            (a - of_a).powi(2) / of_a + (b - of_b).powi(2) / of_b
        })
        .sum();
    let freedom = (bins.len() - 1) as f64;
    let p = ChiSquared::new(freedom).unwrap().sf(statistic);
    println!("chi-square {statistic:.1} with {freedom} degrees of freedom: p = {p:.3e}");
    p
}

#[test]
fn the_chi_square_test_accepts_equal_counts_and_rejects_others() {
    let counts = |n: [usize; 3]| {
        Counts::from(
            ["x", "y", "z"]
                .map(String::from)
                .into_iter()
                .zip(n)
                .collect::<BTreeMap<_, _>>(),
        )
    };
    assert!(p_value(&counts([100, 200, 700]), &counts([100, 200, 700])) > 0.999);
    // A 2 x 3 table: the statistic is 8.7, with 2 degrees of freedom.
    let p = p_value(&counts([100, 200, 700]), &counts([130, 230, 640]));
    assert!((0.005..0.02).contains(&p), "{p}");
    // The two rare outcomes are one bin, which leaves one degree of freedom.
    let p = p_value(&counts([2, 1, 700]), &counts([1, 2, 700]));
    assert!(p > 0.9, "{p}");
}

/// The tiny pair: an engine without, one with, and one with a wrong accept rule.
async fn engines(seed: u64, block_size: usize) -> [Engine; 3] {
    let folder = tempfile::tempdir().unwrap();
    let pair = TinyPair {
        letters: Some(LETTERS),
        seed,
        ..TinyPair::default()
    };
    let (target, drafter) = tiny::write(&pair, folder.path());
    let setup = Setup::dflash(&target, &drafter, Some(block_size));
    let wrong = DFlashMethod::new().with_fault(Arc::new(|at| at == FaultPoint::Accept));
    [
        Engine::load(&Setup::plain(&target)).await.unwrap(),
        Engine::load(&setup).await.unwrap(),
        Engine::load_with(&setup, wrong).await.unwrap(),
    ]
}

/// One request at a time, so the draws and with them the result are the same at every run.
#[tokio::test(flavor = "multi_thread")]
async fn speculation_keeps_the_distribution_and_a_wrong_accept_rule_does_not() {
    let block_sizes: &[usize] = if full() { &[2, 4, 8, 16] } else { &[4] };
    for &block_size in block_sizes {
        let [plain, dflash, wrong] = engines(1, block_size).await;
        sample(&plain, ANSWERS, 1).await;
        let want = sample(&plain, ANSWERS, 1).await;
        let got = sample(&dflash, ANSWERS, 1).await;
        let stats = dflash.stats();
        println!("block {block_size}: {} outcomes, {stats:?}", want.len());
        assert!(stats.fallbacks.is_empty(), "{stats:?}");
        let accepted = stats.accepted as f64 / stats.drafts as f64;
        assert!(
            accepted > 0.05,
            "{accepted} drafts accepted a step: the test sees nothing"
        );
        let p = p_value(&want, &got);
        assert!(p > 0.01, "block {block_size}: p = {p}");
        let p = p_value(&want, &sample(&wrong, ANSWERS, 1).await);
        assert!(
            p < 1e-6,
            "block {block_size}: a wrong accept rule passes with p = {p}"
        );
    }
}

/// Batches of eight, whose rows are sampled in an order that depends on when they arrive: the
/// result differs from run to run, so one rejection in a hundred is expected. Two in a row are not.
#[tokio::test(flavor = "multi_thread")]
async fn speculation_keeps_the_distribution_in_batches() {
    if !full() {
        return;
    }
    let [plain, dflash, _] = engines(2, 4).await;
    sample(&plain, ANSWERS, 8).await;
    let mut p = [0.0; 2];
    for p in &mut p {
        let want = sample(&plain, ANSWERS, 8).await;
        *p = p_value(&want, &sample(&dflash, ANSWERS, 8).await);
    }
    assert!(p.iter().any(|p| *p > 0.01), "{p:?}");
    assert!(dflash.stats().fallbacks.is_empty(), "{:?}", dflash.stats());
}
