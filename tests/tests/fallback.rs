//! Invariant I5: a fault in speculation falls back to plain decoding; the text stays the same and
//! speculation goes on afterwards. I2 is asserted inside every step of these runs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use dflash_bench::engine::{Engine, Job, Prompt, Setup};
use dflash_plugin::fault::FaultPoint;
use dflash_plugin::stats::{Fallback, StatsSnapshot};
use dflash_plugin::DFlashMethod;
use dflash_tests::tiny::{self, TinyPair};
use dflash_tests::{drafter, golden, target, GreedyFile};

/// How a pass fails.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Error,
    Panic,
}

/// Decode a recorded prompt while every third pass of `point` fails.
async fn with_faults_at(point: FaultPoint, kind: Kind) -> StatsSnapshot {
    let file: GreedyFile = golden("greedy.json");
    let prompt = &file.prompts[5];
    let passes = AtomicUsize::new(0);
    let method = DFlashMethod::new().with_fault(Arc::new(move |at| {
        let fails = at == point && passes.fetch_add(1, Ordering::Relaxed) % 3 == 1;
        match kind {
            Kind::Panic if fails => panic!("injected panic at {at:?}"),
            _ => fails,
        }
    }));
    let setup = Setup::dflash(&target(), &drafter(), Some(8));
    let engine = Engine::load_with(&setup, method).await.unwrap();
    let job = Job::greedy(Prompt::Tokens(prompt.input_ids.clone()), 64).recorded();
    for _ in 0..2 {
        let got = engine.generate(&job, |_| ()).await.unwrap();
        assert_eq!(got.tokens, prompt.greedy_ids[..64], "{point:?}");
    }
    engine.stats()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_draft_or_verify_pass_costs_one_plain_step_each() {
    for point in [FaultPoint::Draft, FaultPoint::Verify] {
        for kind in [Kind::Error, Kind::Panic] {
            let stats = with_faults_at(point, kind).await;
            let what = format!("{kind:?} at {point:?}: {stats:?}");
            assert!(stats.fallbacks[&Fallback::Error] > 1, "{what}");
            assert!(stats.accepted > 10, "drafting did not go on: {what}");
        }
    }
}

/// NaN spoils a sequence's draft KV for good: its drafts are worthless, its text is not.
#[tokio::test(flavor = "multi_thread")]
async fn nan_features_cost_drafts_and_no_text() {
    let stats = with_faults_at(FaultPoint::NanFeatures, Kind::Error).await;
    assert!(stats.fallbacks.is_empty(), "{stats:?}");
    assert!(stats.accepts[0] > stats.drafts / 2, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_whose_prompt_was_not_materialized_decodes_plainly() {
    // The second request's prompt is the second pass.
    for kind in [Kind::Error, Kind::Panic] {
        let stats = with_faults_at(FaultPoint::Materialize, kind).await;
        assert!(stats.fallbacks[&Fallback::NoDraftContext] > 50, "{stats:?}");
        assert!(stats.accepted > 10, "the first request drafted: {stats:?}");
    }
}

/// The target ends at 512 positions, the draft model before or after it.
#[tokio::test(flavor = "multi_thread")]
async fn near_the_end_of_the_context_the_block_shrinks_and_the_text_stays_the_same() {
    for paged in [None, Some(1024)] {
        near_the_end_of_the_context(paged).await;
    }
}

async fn near_the_end_of_the_context(paged: Option<usize>) {
    for drafter_positions in [506, 1024] {
        let pair = TinyPair {
            drafter_positions,
            ..TinyPair::default()
        };
        let folder = tempfile::tempdir().unwrap();
        let (target, drafter) = tiny::write(&pair, folder.path());
        let plain = Setup::plain(&target).on_paged(paged);
        let plain = Engine::load(&plain).await.unwrap();
        let setup = Setup::dflash(&target, &drafter, Some(16)).on_paged(paged);
        let dflash = Engine::load(&setup).await.unwrap();
        for prompt_len in [480, 495, 500, 511] {
            let what = format!("{prompt_len} of 512, drafter {drafter_positions}, paged {paged:?}");
            let prompt = Prompt::Tokens((0..prompt_len).map(|i| 100 + i * 7 % 900).collect());
            // Up to the very last position that plain decoding reaches.
            let job = Job::greedy(prompt, 513 - prompt_len as usize).recorded();
            let want = plain.generate(&job, |_| ()).await.unwrap();
            let got = dflash.generate(&job, |_| ()).await.unwrap();
            assert_eq!(got.tokens, want.tokens, "{what}");
            assert_eq!(got.finish_reason, want.finish_reason, "{what}");
        }
        let stats = dflash.stats();
        let expected = match drafter_positions {
            506 => Fallback::DraftContextEnd,
            _ => Fallback::NoRoom,
        };
        assert!(
            stats.fallbacks.contains_key(&expected),
            "{drafter_positions}, paged {paged:?}: {stats:?}"
        );
        // Nothing was tried that does not fit.
        assert!(
            !stats.fallbacks.contains_key(&Fallback::Error),
            "{drafter_positions}, paged {paged:?}: {stats:?}"
        );
        assert!(stats.drafts > 0, "{drafter_positions}: {stats:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_of_one_token_and_shorter_than_a_block_draft_too() {
    let plain = Engine::load(&Setup::plain(&target())).await.unwrap();
    let dflash = Engine::load(&Setup::dflash(&target(), &drafter(), Some(16)))
        .await
        .unwrap();
    for ids in [
        vec![504],
        vec![504, 1463],
        vec![504, 1463, 282, 5530, 2585, 351],
    ] {
        let job = Job::greedy(Prompt::Tokens(ids.clone()), 40).recorded();
        let want = plain.generate(&job, |_| ()).await.unwrap();
        let got = dflash.generate(&job, |_| ()).await.unwrap();
        assert_eq!(got.tokens, want.tokens, "{ids:?}");
    }
    assert!(dflash.stats().fallbacks.is_empty(), "{:?}", dflash.stats());
}
