//! Families that hand their decode steps' layers over: what they hand over computes what their own layers
//! compute. On a GPU kernels run such layers; here their fallback does, on any device, in a process of
//! its own, since it cannot be taken back.

use dflash_bench::engine::{Engine, Setup};
use dflash_plugin::{decode_layers_run, use_decode_layers_anywhere, DFlashMethod};
use dflash_tests::oracle::{check_text, first_texts_of, jobs_of, oracle, together};
use dflash_tests::zoo::{self, LAYERS};

const PROMPTS: usize = 8;
const PAGED_TOKENS: usize = 8192;

#[tokio::test(flavor = "multi_thread")]
async fn layers_that_are_handed_over_compute_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let drafter = zoo::write_drafter(&folder.path().join("drafter"));
    let mut all = Vec::new();
    for title in ["llama", "mistral, sliding window", "qwen2", "qwen3"] {
        let family = zoo::find(title);
        let target = family.write_target(LAYERS, &folder.path().join(family.host_name));
        without_window(&target.path);
        // The model's own layers, on the host's normal cache, which hands nothing over.
        let mut setup = Setup::plain(&target.path);
        setup.place.paged = None;
        let plain = Engine::load(&setup).await.unwrap();
        all.push((title, target, first_texts_of(&plain, PROMPTS).await));
    }
    use_decode_layers_anywhere();
    for (title, target, cases) in all {
        let before = decode_layers_run();
        let plain = Setup::plain(&target.path).on_paged(Some(PAGED_TOKENS));
        let engine = Engine::load(&plain).await.unwrap();
        check_text(title, &cases, &together(&engine, &jobs_of(&cases)).await);
        let plainly = decode_layers_run() - before;
        let steps = cases[0].want.tokens.len() - 1;
        assert!(
            plainly >= (steps * LAYERS) as u64,
            "{title}: {plainly} runs"
        );

        let setup = Setup::dflash(&target.path, &drafter, Some(8)).on_paged(Some(PAGED_TOKENS));
        let method = DFlashMethod::new().with_drafts(oracle(cases.clone()));
        let engine = Engine::load_with(&setup, method).await.unwrap();
        let what = format!("{title}, verified");
        check_text(&what, &cases, &together(&engine, &jobs_of(&cases)).await);
        let verified = decode_layers_run() - before - plainly;
        let stats = engine.stats();
        assert!(stats.accepts.iter().all(|n| *n > 0), "{what}: {stats:?}");
        assert!(
            verified > 0 && verified < plainly,
            "{what}: {verified} runs"
        );
    }
}

/// Layers with a window are not handed over.
fn without_window(target: &std::path::Path) {
    let path = target.join("config.json");
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    if config.get("sliding_window").is_some() {
        config["sliding_window"] = serde_json::Value::Null;
        std::fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
    }
}
