//! Targets that the host quantizes at load (ISQ), with the head that the draft model borrows.
//!
//! A test program of its own with one test: the host keeps the wanted quantization in one place for
//! the whole process, and for later loads, too.

use dflash_bench::engine::{Drafting, Engine, Setup};
use dflash_plugin::DFlashMethod;
use dflash_tests::oracle::{
    check_text, difference, jobs_of, one_by_one, oracle, prompt, run, texts_of,
};
use dflash_tests::zoo::{self, LAYERS};

const TARGETS: [(&str, &str); 5] = [
    ("llama", "Q8_0"),
    ("qwen3, sliding window", "Q4_0"),
    ("gemma2, sliding window in every second layer", "Q8_0"),
    ("mixtral, sliding window", "Q8_0"),
    ("qwen3_moe", "Q4_0"),
];

#[tokio::test(flavor = "multi_thread")]
async fn targets_that_are_quantized_at_load_keep_their_text() {
    let mut models = Vec::new();
    for (title, isq) in TARGETS {
        let folder = tempfile::tempdir().unwrap();
        let target = zoo::find(title).write_target(LAYERS, &folder.path().join("target"));
        let exact = Engine::load(&Setup::plain(&target.path)).await.unwrap();
        let logits = run(&exact, prompt(0), 1).await.first_logits;
        models.push((title, isq, folder, target, logits));
    }
    for (title, isq, folder, target, exact) in models {
        let drafter = zoo::write_drafter(&folder.path().join("drafter"));
        let with_isq = |setup: Setup| Setup {
            isq: Some(isq.into()),
            ..setup
        };
        let plain = Engine::load(&with_isq(Setup::plain(&target.path)))
            .await
            .unwrap();
        let cases = texts_of(&plain).await;
        let what = format!("{title}, {isq}");
        let differ = difference(&exact, &cases[0].want.first_logits);
        assert!(differ > 1e-3, "{what}: not quantized: {differ}");
        let setup = with_isq(Setup {
            // The draft model is quantized as the target is.
            drafting: Drafting {
                draft_quant: Some("auto".into()),
                ..Drafting::default()
            },
            ..Setup::dflash(&target.path, &drafter, Some(8))
        });
        let method = DFlashMethod::new().with_drafts(oracle(cases.clone()));
        let engine = Engine::load_with(&setup, method).await.unwrap();
        let got = one_by_one(&engine, &jobs_of(&cases)).await;
        check_text(&what, &cases, &got);
        let stats = engine.stats();
        assert!(stats.fallbacks.is_empty(), "{what}: {stats:?}");
        assert!(stats.accepts.iter().all(|n| *n > 0), "{what}: {stats:?}");
    }
}
