//! Invariant I4: requests that run together do not touch each other.

use dflash_bench::engine::{Engine, Generation, Job, Prompt, Setup};
use dflash_tests::{compare_greedy, drafter, golden, target, GreedyFile};

const TOKENS: usize = 48;

async fn together(engine: &Engine, prompts: &[Vec<u32>]) -> Vec<Generation> {
    let jobs: Vec<Job> = prompts
        .iter()
        .map(|ids| Job::greedy(Prompt::Tokens(ids.clone()), TOKENS).recorded())
        .collect();
    let mut out = Vec::new();
    let mut running = Vec::new();
    for job in &jobs {
        running.push(engine.generate(job, |_| ()));
    }
    for generation in futures_util::future::join_all(running).await {
        out.push(generation.unwrap());
    }
    out
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_mixed_and_of_equal_length_each_give_their_own_tokens() {
    let file: GreedyFile = golden("greedy.json");
    let engine = Engine::load(&Setup::dflash(&target(), &drafter(), Some(8)))
        .await
        .unwrap();
    // Two of each prompt start with equal lengths, so they are verified in one batch until their
    // neighbours interfere; the others have lengths of their own.
    let chosen: Vec<_> = file
        .prompts
        .iter()
        .step_by(7)
        .take(3)
        .flat_map(|p| [p, p])
        .collect();
    let prompts: Vec<Vec<u32>> = chosen.iter().map(|p| p.input_ids.clone()).collect();
    let got = together(&engine, &prompts).await;
    for (got, want) in got.iter().zip(&chosen) {
        let reference = &want.greedy_ids[..TOKENS.min(want.greedy_ids.len())];
        compare_greedy(&want.id, reference, &want.gaps, &got.tokens).unwrap();
    }
    let stats = engine.stats();
    assert!(
        stats.fallbacks.is_empty(),
        "a neighbour switched drafting off: {stats:?}"
    );
    assert!(stats.tau().unwrap() > 1.8, "{stats:?}");
}

/// Plain decoding of a batch, which the fallbacks of DFlash use too.
#[tokio::test(flavor = "multi_thread")]
async fn plain_decoding_of_equal_lengths_together_gives_each_its_own_tokens() {
    let file: GreedyFile = golden("greedy.json");
    let engine = Engine::load(&Setup::plain(&target())).await.unwrap();
    // The same length, different words.
    let shortest = file
        .prompts
        .iter()
        .map(|p| p.input_ids.len())
        .min()
        .unwrap();
    let prompts: Vec<Vec<u32>> = file
        .prompts
        .iter()
        .step_by(6)
        .take(3)
        .map(|p| p.input_ids[..shortest].to_vec())
        .collect();
    let mut alone = Vec::new();
    for ids in &prompts {
        let job = Job::greedy(Prompt::Tokens(ids.clone()), TOKENS).recorded();
        alone.push(engine.generate(&job, |_| ()).await.unwrap());
    }
    let got = together(&engine, &prompts).await;
    for (i, (got, want)) in got.iter().zip(&alone).enumerate() {
        compare_greedy(
            &format!("prompt {i}"),
            &want.tokens,
            &want.gaps,
            &got.tokens,
        )
        .unwrap();
    }
}
