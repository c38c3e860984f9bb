//! The controller in service: it drafts where that pays, and does not where it does not; the text is
//! the same either way.

use dflash_bench::engine::{Engine, Job, Prompt, Setup};
use dflash_plugin::stats::{Fallback, StatsSnapshot};
use dflash_tests::{compare_greedy, drafter, gguf, golden, target, GreedyFile};

const TOKENS: usize = 96;

/// Two prompts, one after the other, plainly and adaptively.
async fn run(model: &std::path::Path) -> StatsSnapshot {
    let file: GreedyFile = golden("greedy.json");
    let plain = Engine::load(&Setup::plain(model)).await.unwrap();
    let dflash = Engine::load(&Setup {
        adaptive: true,
        ..Setup::dflash(model, &drafter(), None)
    })
    .await
    .unwrap();
    for prompt in file.prompts.iter().step_by(9).take(2) {
        let job = Job::greedy(Prompt::Tokens(prompt.input_ids.clone()), TOKENS).recorded();
        let want = plain.generate(&job, |_| ()).await.unwrap();
        let got = dflash.generate(&job, |_| ()).await.unwrap();
        compare_greedy(&prompt.id, &want.tokens, &want.gaps, &got.tokens).unwrap();
    }
    dflash.stats()
}

fn plain_share(stats: &StatsSnapshot) -> f64 {
    let plain = stats.fallbacks.get(&Fallback::NotWorthwhile).copied();
    let plain = plain.unwrap_or(0) as f64;
    plain / (plain + stats.drafts as f64)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_f32_target_drafts_nearly_always() {
    let stats = run(&target()).await;
    assert!(plain_share(&stats) < 0.3, "{stats:?}");
    assert!(stats.tau().unwrap() > 1.8, "{stats:?}");
}

/// On a CPU each verified row of a quantized target costs as much as a decoded one.
#[tokio::test(flavor = "multi_thread")]
async fn a_quantized_target_on_the_cpu_decodes_plainly_nearly_always() {
    let stats = run(&gguf()).await;
    assert!(plain_share(&stats) > 0.7, "{stats:?}");
}
