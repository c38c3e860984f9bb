//! Every family of targets in the plugin's table, as a tiny random model with the real architecture:
//! greedy text with speculation is the text without it, with a random draft model and with an oracle
//! whose drafts are right up to a chosen offset, so that every accept length occurs; and the tapped
//! layer outputs are those of the layers that they are named after. The same, shorter, on the host's
//! paged KV cache.

use std::sync::{Arc, Mutex};

use candle_core::{Tensor, D};
use dflash_bench::engine::{Engine, Job, Prompt, Setup};
use dflash_plugin::fault::FaultPoint;
use dflash_plugin::host::targets;
use dflash_plugin::stats::{Fallback, StatsSnapshot};
use dflash_plugin::trace::Round;
use dflash_plugin::DFlashMethod;
use dflash_tests::compare_greedy;
use dflash_tests::oracle::{
    check_text, difference, first_texts_of, jobs_of, one_by_one, oracle, plain_text, prompt, run,
    together, Case, TOKENS,
};
use dflash_tests::zoo::{self, Export, Family, HIDDEN, LAYERS, TAPS, WINDOW};

const BLOCK_SIZES: [usize; 3] = [2, 8, 16];

macro_rules! families {
    ($($test:ident: $title:literal,)*) => {
        $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                conforms($title).await;
            }
        )*
        mod paged {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $test() {
                    super::conforms_paged($title).await;
                }
            )*
        }
        const TITLES: &[&str] = &[$($title),*];
    };
}

families! {
    llama: "llama",
    mistral: "mistral, sliding window",
    qwen2: "qwen2",
    qwen2_mixed: "qwen2, sliding window in the last layers only",
    qwen3: "qwen3",
    qwen3_window: "qwen3, sliding window",
    qwen3_mixed: "qwen3, sliding window in the last layers only",
    phi3: "phi3, sliding window",
    phi3_long: "phi3, LongRoPE",
    glm4: "glm4",
    smollm3: "smollm3",
    gemma: "gemma",
    gemma2: "gemma2, sliding window in every second layer",
    gemma3: "gemma3, sliding window in every second layer",
    phi2: "phi2",
    starcoder2: "starcoder2, sliding window",
    phi3_5_moe: "phi3.5moe, bias of the head",
    mixtral: "mixtral, sliding window",
    qwen3_moe: "qwen3_moe",
    glm4_moe: "glm4_moe",
    gpt_oss: "gpt_oss, sliding window in every second layer",
    deepseek2: "deepseek2",
    deepseek3: "deepseek3",
    qwen3_next: "qwen3_next",
    granitemoehybrid: "granitemoehybrid",
    gemma3_images: "gemma3, with images, sliding window in every second layer",
    mistral3: "mistral3, sliding window",
    qwen2_vl: "qwen2vl",
    qwen2_5_vl: "qwen2_5vl",
    qwen3_vl: "qwen3vl",
    qwen3_vl_moe: "qwen3vlmoe",
    qwen3_5: "qwen3_5",
    qwen3_5_moe: "qwen3_5moe",
    llama_gguf: "llama (GGUF)",
    qwen2_gguf: "qwen2 (GGUF)",
    qwen3_gguf: "qwen3 (GGUF)",
    qwen3_moe_gguf: "qwen3_moe (GGUF)",
    phi3_gguf: "phi3 (GGUF)",
    phi2_gguf: "phi2 (GGUF)",
    starcoder2_gguf: "starcoder2 (GGUF)",
}

#[test]
fn every_family_of_the_table_is_tested_here() {
    let models = zoo::all();
    let titles: Vec<String> = models.iter().map(Family::title).collect();
    assert_eq!(titles, TITLES);
    let tested = |name: &str| models.iter().any(|model| model.host_name == name);
    for target in targets::TARGETS {
        assert_eq!(
            tested(&target.host_name()),
            target.untested.is_none(),
            "{target:?}"
        );
    }
    for model in &models {
        assert!(
            targets::find(model.host_name).is_some(),
            "{}",
            model.title()
        );
    }
}

fn check_steps(what: &str, family: &Family, stats: &StatsSnapshot) {
    let is_allowed = |reason: &Fallback| family.has_plain_steps && *reason == Fallback::NoRoom;
    assert!(
        stats.fallbacks.keys().all(is_allowed),
        "{what}: plain steps: {stats:?}"
    );
    assert_eq!(
        !stats.fallbacks.is_empty(),
        family.has_plain_steps,
        "{what}: {stats:?}"
    );
}

async fn conforms(title: &str) {
    let family = zoo::find(title);
    let folder = tempfile::tempdir().unwrap();
    let target = family.write_target(LAYERS, &folder.path().join("target"));
    let drafter = zoo::write_drafter(&folder.path().join("drafter"));
    let cases = plain_text(&target).await;
    for block_size in BLOCK_SIZES {
        let setup = Setup::dflash(&target.path, &drafter, Some(block_size));

        // Together, so that batches of unequal lengths occur.
        let engine = Engine::load(&setup).await.unwrap();
        let got = together(&engine, &jobs_of(&cases)).await;
        let what = format!("{title}, block {block_size}, random draft model");
        check_text(&what, &cases, &got);
        check_steps(&what, &family, &engine.stats());

        let method = DFlashMethod::new().with_drafts(oracle(cases.clone()));
        let engine = Engine::load_with(&setup, method).await.unwrap();
        let got = one_by_one(&engine, &jobs_of(&cases)).await;
        let what = format!("{title}, block {block_size}, oracle");
        check_text(&what, &cases, &got);
        let stats = engine.stats();
        check_steps(&what, &family, &stats);
        assert_eq!(stats.accepts.len(), block_size, "{what}: {stats:?}");
        assert!(stats.accepts.iter().all(|n| *n > 0), "{what}: {stats:?}");
        println!("{what}: steps by accept length {:?}", stats.accepts);
    }
    let setup = Setup::dflash(&target.path, &drafter, Some(8));
    let prompt_taps = verify_passes_tap_what_one_pass_does(title, &setup, &cases).await;
    taps_are_layer_outputs(&family, &target, &prompt_taps).await;
}

/// Of the paged cache.
const PAGED_TOKENS: usize = 2048;

fn paged(setup: Setup) -> Setup {
    setup.on_paged(Some(PAGED_TOKENS))
}

/// One block size and fewer prompts, which the oracle answers in one batch.
async fn conforms_paged(title: &str) {
    const PROMPTS: usize = 8;
    let family = zoo::find(title);
    let folder = tempfile::tempdir().unwrap();
    let target = family.write_target(LAYERS, &folder.path().join("target"));
    let drafter = zoo::write_drafter(&folder.path().join("drafter"));

    let plain = paged(Setup::plain(&target.path));
    let plain = Engine::load(&plain).await.unwrap();
    let cases = first_texts_of(&plain, PROMPTS).await;
    let too_long = Job::greedy(Prompt::Tokens(vec![1; PAGED_TOKENS + 1]), 1);
    let refused = plain.generate(&too_long, |_| ()).await.err();
    let is_paged = refused.is_some_and(|error| error.to_string().contains("--pa-context-len"));
    let known = targets::find(family.host_name).unwrap();
    assert_eq!(is_paged, known.is_pageable, "{title}");

    // Quantized products round activations to 8 bits, so that the last bit of an attention can count.
    if !title.contains("(GGUF)") {
        let mut normal = Setup::plain(&target.path);
        normal.place.paged = None;
        let normal = Engine::load(&normal).await.unwrap();
        let want = first_texts_of(&normal, PROMPTS).await;
        let got: Vec<_> = cases.iter().map(|case| case.want.clone()).collect();
        check_text(&format!("{title}, paged, plain"), &want, &got);
    }

    let setup = paged(Setup::dflash(&target.path, &drafter, Some(8)));
    let method = DFlashMethod::new().with_drafts(oracle(cases.clone()));
    let engine = Engine::load_with(&setup, method).await.unwrap();
    let got = together(&engine, &jobs_of(&cases)).await;
    let what = format!("{title}, paged, oracle");
    check_text(&what, &cases, &got);
    let stats = engine.stats();
    check_steps(&what, &family, &stats);
    assert!(stats.accepts.iter().all(|n| *n > 0), "{what}: {stats:?}");
    println!("{what}: steps by accept length {:?}", stats.accepts);
    verify_passes_tap_what_one_pass_does(&what, &setup, &cases).await;
}

/// Of 24 tokens: with an answer of as many longer than a window and shorter than LongRoPE's first
/// stretch.
fn tapped_prompt() -> Vec<u32> {
    prompt(3)
}

/// Largest difference of taps that should be the same, relative to the largest value.
const MOST: f32 = 1e-3;

/// Returns what the pass over a prompt tapped, `[tokens, taps * hidden]`.
async fn verify_passes_tap_what_one_pass_does(
    title: &str,
    setup: &Setup,
    cases: &Arc<Vec<Case>>,
) -> Tensor {
    let taps: Arc<Mutex<Vec<Tensor>>> = Arc::default();
    let rounds: Arc<Mutex<Vec<Round>>> = Arc::default();
    let (taps_seen, rounds_seen) = (taps.clone(), rounds.clone());
    let method = DFlashMethod::new()
        .with_drafts(oracle(cases.clone()))
        .with_taps(Arc::new(move |tap| {
            taps_seen.lock().unwrap().push(tap.clone());
        }))
        .with_observer(Arc::new(move |round| {
            rounds_seen.lock().unwrap().push(round.clone());
        }));
    let engine = Engine::load_with(setup, method).await.unwrap();
    // The host tries the model out when it starts.
    taps.lock().unwrap().clear();
    rounds.lock().unwrap().clear();
    let prompt = tapped_prompt();
    let verified = run(&engine, prompt.clone(), 24).await;
    let taps_of_run = std::mem::take(&mut *taps.lock().unwrap());
    let rounds = std::mem::take(&mut *rounds.lock().unwrap());

    let prompt_taps = taps_of_run[0].squeeze(0).unwrap();
    assert_eq!(prompt_taps.dim(0).unwrap(), prompt.len());
    let text: Vec<u32> = [&prompt[..], &verified.tokens[..]].concat();
    run(&engine, text, 1).await;
    let whole = taps.lock().unwrap()[0].squeeze(0).unwrap();
    assert!(rounds.iter().any(|round| round.accepted > 3), "{title}");
    assert!(
        rounds.iter().any(|round| round.position > WINDOW),
        "{title}"
    );
    for (round, tapped) in rounds.iter().zip(&taps_of_run[1..]) {
        let rows = round.emitted.len();
        let got = tapped.squeeze(0).unwrap().narrow(0, 0, rows).unwrap();
        let want = whole.narrow(0, round.position, rows).unwrap();
        let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let differ = difference(&flat(&want), &flat(&got));
        assert!(differ < MOST, "{title}: verify pass: {round:?}: {differ}");
    }
    let width = whole.dim(D::Minus1).unwrap();
    assert_eq!(width, TAPS.len() * HIDDEN);
    prompt_taps
}

/// A model that ends after the tapped layer must have the logits that final norm and head give for
/// the tap.
async fn taps_are_layer_outputs(family: &Family, target: &zoo::Target, prompt_taps: &Tensor) {
    let title = family.title();
    let last = prompt_taps.dim(0).unwrap() - 1;
    let tap = |i: usize| {
        let row = prompt_taps.get(last).unwrap();
        row.narrow(0, i * HIDDEN, HIDDEN).unwrap()
    };
    for (i, layer) in TAPS.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let cut = family.write_target(layer + 1, folder.path());
        let engine = Engine::load(&Setup::plain(&cut.path)).await.unwrap();
        let want = run(&engine, tapped_prompt(), 1).await.first_logits;
        let differ = difference(&want, &target.logits(&tap(i)).unwrap());
        assert!(differ < MOST, "{title}: tap of layer {layer}: {differ}");
        let differ = difference(&want, &target.logits(&tap(1 - i)).unwrap());
        assert!(differ > 0.05, "{title}: all taps are alike: {differ}");
    }
}

/// Draft models of other trainers, in service: as many drafts a step as their blocks give.
#[tokio::test(flavor = "multi_thread")]
async fn draft_models_of_other_trainers_draft_and_keep_the_text() {
    let family = zoo::find("llama");
    let folder = tempfile::tempdir().unwrap();
    let target = family.write_target(LAYERS, &folder.path().join("target"));
    let cases = plain_text(&target).await;
    for (export, drafts) in [
        (Export::ZLab, 15),
        (Export::Speculators, 15),
        (Export::DeepSpec, 7),
    ] {
        let what = format!("{export:?}");
        let drafter = zoo::write_export(export, &folder.path().join(&what));
        let setup = Setup::dflash(&target.path, &drafter, None);
        let method = DFlashMethod::new().with_drafts(oracle(cases.clone()));
        for method in [DFlashMethod::new(), method] {
            let engine = Engine::load_with(&setup, method).await.unwrap();
            let got = one_by_one(&engine, &jobs_of(&cases[..5])).await;
            check_text(&what, &cases, &got);
            let stats = engine.stats();
            check_steps(&what, &family, &stats);
            assert_eq!(stats.proposed, drafts * stats.drafts, "{what}: {stats:?}");
        }
    }
}

/// The oracle is a test of the accept rule only if a wrong one shows.
#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_accept_rule_shows() {
    let family = zoo::find("mistral, sliding window");
    let folder = tempfile::tempdir().unwrap();
    let target = family.write_target(LAYERS, &folder.path().join("target"));
    let drafter = zoo::write_drafter(&folder.path().join("drafter"));
    let cases = plain_text(&target).await;
    let method = DFlashMethod::new()
        .with_drafts(oracle(cases.clone()))
        .with_fault(Arc::new(|at| at == FaultPoint::Accept));
    let setup = Setup::dflash(&target.path, &drafter, Some(8));
    let engine = Engine::load_with(&setup, method).await.unwrap();
    let got = engine
        .generate(&cases[0].job(TOKENS), |_| ())
        .await
        .unwrap();
    assert_ne!(got.tokens, cases[0].want.tokens);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_hit_past_the_window_gives_the_same_text() {
    a_second_turn_gives_the_same_text(|setup| setup).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paged_prefix_hit_past_the_window_gives_the_same_text() {
    a_second_turn_gives_the_same_text(paged).await;
}

/// It continues from the first one's KV, which is longer than the window.
async fn a_second_turn_gives_the_same_text(at: fn(Setup) -> Setup) {
    for title in [
        "mistral, sliding window",
        "gemma2, sliding window in every second layer",
        "qwen3, sliding window in the last layers only",
        "gpt_oss, sliding window in every second layer",
        "gemma3, with images, sliding window in every second layer",
        "mistral3, sliding window",
    ] {
        let family = zoo::find(title);
        let folder = tempfile::tempdir().unwrap();
        let target = family.write_target(LAYERS, &folder.path().join("target"));
        let drafter = zoo::write_drafter(&folder.path().join("drafter"));
        let plain = at(Setup::plain(&target.path));
        let dflash = at(Setup::dflash(&target.path, &drafter, Some(8)));
        let without_cache = Engine::load(&plain).await.unwrap();
        let first = prompt(8);
        let answer = run(&without_cache, first.clone(), TOKENS).await;
        let second = [&first[..], &answer.tokens[..], &prompt(1)[..]].concat();
        let want = run(&without_cache, second.clone(), TOKENS).await;
        for setup in [plain, dflash] {
            let setup = Setup {
                prefix_cache_n: 4,
                ..setup
            };
            let engine = Engine::load(&setup).await.unwrap();
            run(&engine, first.clone(), TOKENS).await;
            let got = run(&engine, second.clone(), TOKENS).await;
            let what = format!("{title}, draft model {}", setup.draft.is_some());
            compare_greedy(&what, &want.tokens, &want.gaps, &got.tokens).unwrap();
            if setup.draft.is_some() {
                let stats = engine.stats();
                assert_eq!(stats.restored, 1, "{what}: {stats:?}");
            }
        }
    }
}
