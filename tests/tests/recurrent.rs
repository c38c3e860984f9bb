//! Targets with recurrent layers, whose state cannot be set back as a KV cache can: what every accept
//! length, a fault, a prefix hit and a neighbour leave behind is what decoding token by token does.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use dflash_bench::engine::{Engine, Place, Setup};
use dflash_plugin::fault::FaultPoint;
use dflash_plugin::stats::Fallback;
use dflash_plugin::DFlashMethod;
use dflash_tests::compare_greedy;
use dflash_tests::oracle::{
    check_text, jobs_of, oracle, plain_text, prompt, right_up_to, run, together, TOKENS,
};
use dflash_tests::zoo::{self, LAYERS};
use futures_util::future::join_all;

const FAMILIES: [&str; 4] = ["qwen3_next", "granitemoehybrid", "qwen3_5", "qwen3_5moe"];
const BLOCK_SIZE: usize = 8;

/// A tiny pair on disk.
struct Pair {
    target: zoo::Target,
    plain: Setup,
    dflash: Setup,
    _folder: tempfile::TempDir,
}

impl Pair {
    fn write(title: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let target = zoo::find(title).write_target(LAYERS, &folder.path().join("target"));
        let drafter = zoo::write_drafter(&folder.path().join("drafter"));
        // Both kinds of cache are tested here.
        let unpaged = |setup: Setup| Setup {
            place: Place {
                paged: None,
                ..setup.place
            },
            ..setup
        };
        Self {
            plain: unpaged(Setup::plain(&target.path)),
            dflash: unpaged(Setup::dflash(&target.path, &drafter, Some(BLOCK_SIZE))),
            target,
            _folder: folder,
        }
    }
}

fn cached(setup: &Setup) -> Setup {
    Setup {
        prefix_cache_n: 4,
        ..setup.clone()
    }
}

fn paged(setup: &Setup) -> Setup {
    with_room(setup, 4096)
}

fn with_room(setup: &Setup, tokens: usize) -> Setup {
    setup.clone().on_paged(Some(tokens))
}

/// The state after a step is seen in the logits of all later ones. A matrix product of more rows sums in
/// another order: in f32 that comes to 5e-5 after 64 tokens here, of logits of several units. A state
/// that is wrong by one row changes the text.
#[tokio::test(flavor = "multi_thread")]
async fn every_accept_length_leaves_the_state_of_sequential_decoding() {
    const MOST: f32 = 2e-4;
    for title in FAMILIES {
        let pair = Pair::write(title);
        let cases = plain_text(&pair.target).await;
        for accepted in 0..BLOCK_SIZE {
            let method =
                DFlashMethod::new().with_drafts(right_up_to(move |_| accepted, cases.clone()));
            let engine = Engine::load_with(&pair.dflash, method).await.unwrap();
            let mut largest = 0f32;
            for case in &cases[..5] {
                let got = engine.generate(&case.job(TOKENS), |_| ()).await.unwrap();
                let what = format!("{title}, accept length {accepted}");
                assert_eq!(got.tokens, case.want.tokens, "{what}");
                for (got, want) in got.gaps.iter().zip(&case.want.gaps) {
                    largest = largest.max((got - want).abs());
                }
            }
            println!("{title}, accept length {accepted}: gaps differ by up to {largest:e}");
            assert!(largest < MOST, "{title}, accept length {accepted}");
            let stats = engine.stats();
            assert!(stats.fallbacks.is_empty(), "{title}: {stats:?}");
            let steps = stats.accepts[accepted];
            // The last block of a request may end sooner.
            assert!(steps > 0 && stats.drafts - steps <= 5, "{title}: {stats:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_pass_leaves_the_states_as_they_were() {
    for title in FAMILIES {
        let pair = Pair::write(title);
        let cases = plain_text(&pair.target).await;
        for setup in [pair.dflash.clone(), paged(&pair.dflash)] {
            for point in [FaultPoint::Draft, FaultPoint::Verify] {
                for panics in [false, true] {
                    let passes = AtomicUsize::new(0);
                    let method = DFlashMethod::new()
                        .with_drafts(oracle(cases.clone()))
                        .with_fault(Arc::new(move |at| {
                            let fails =
                                at == point && passes.fetch_add(1, Ordering::Relaxed) % 3 == 1;
                            assert!(!(fails && panics), "injected panic");
                            fails
                        }));
                    let engine = Engine::load_with(&setup, method).await.unwrap();
                    let got = together(&engine, &jobs_of(&cases[..4])).await;
                    let what = format!("{title}, {point:?}, panic {panics}");
                    check_text(&what, &cases, &got);
                    let stats = engine.stats();
                    assert!(stats.fallbacks[&Fallback::Error] > 1, "{what}: {stats:?}");
                    assert!(stats.accepted > 10, "{what}: {stats:?}");
                }
            }
        }
    }
}

/// Requests of unequal length, whose prompts come while others are decoded.
#[tokio::test(flavor = "multi_thread")]
async fn requests_that_run_together_have_each_their_own_state() {
    for title in FAMILIES {
        let pair = Pair::write(title);
        let cases = plain_text(&pair.target).await;
        for setup in [&pair.plain, &pair.dflash] {
            for setup in [setup.clone(), paged(setup)] {
                let method = DFlashMethod::new().with_drafts(oracle(cases.clone()));
                let engine = Engine::load_with(&setup, method).await.unwrap();
                let got = together(&engine, &jobs_of(&cases)).await;
                let what = format!(
                    "{title}, draft model {}, paged {:?}",
                    setup.draft.is_some(),
                    setup.place.paged
                );
                check_text(&what, &cases, &got);
                if setup.draft.is_some() {
                    let stats = engine.stats();
                    assert!(stats.fallbacks.is_empty(), "{what}: {stats:?}");
                    assert!(stats.accepted > stats.drafts, "{what}: {stats:?}");
                }
            }
        }
    }
}

/// A second turn goes on from the state that the first one ended with, inside a block; a prompt that
/// shares only a part of it begins anew. One after the other, and both at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_hit_continues_from_the_state_at_its_end() {
    for title in FAMILIES {
        let pair = Pair::write(title);
        let cold = Engine::load(&pair.plain).await.unwrap();
        let first = prompt(8);
        let answer = run(&cold, first.clone(), TOKENS).await;
        let whole = [&first[..], &answer.tokens[..]].concat();
        let turn = [&whole[..], &prompt(1)[..]].concat();
        let part = [&whole[..whole.len() - 9], &prompt(2)[..]].concat();
        let mut want = Vec::new();
        for ids in [&turn, &part] {
            want.push(run(&cold, ids.clone(), TOKENS).await);
        }
        for setup in [&pair.plain, &pair.dflash] {
            let engine = Engine::load(&cached(setup)).await.unwrap();
            run(&engine, first.clone(), TOKENS).await;
            for (ids, want) in [&turn, &part].into_iter().zip(&want) {
                let got = run(&engine, ids.clone(), TOKENS).await;
                let what = format!("{title}, draft model {}", setup.draft.is_some());
                compare_greedy(&what, &want.tokens, &want.gaps, &got.tokens).unwrap();
            }
            if setup.draft.is_some() {
                let stats = engine.stats();
                assert_eq!(stats.restored, 1, "{title}: {stats:?}");
            }

            let engine = Engine::load(&cached(setup)).await.unwrap();
            run(&engine, first.clone(), TOKENS).await;
            let at_once = [&turn, &part].map(|ids| run(&engine, ids.clone(), TOKENS));
            for (got, want) in join_all(at_once).await.iter().zip(&want) {
                let what = format!("{title}, at once, draft model {}", setup.draft.is_some());
                compare_greedy(&what, &want.tokens, &want.gaps, &got.tokens).unwrap();
            }
        }
    }
}

/// The paged cache keeps states at the ends of blocks only.
#[tokio::test(flavor = "multi_thread")]
async fn a_paged_prefix_hit_gives_the_text_of_a_cold_start() {
    for title in FAMILIES {
        let pair = Pair::write(title);
        let cold = Engine::load(&pair.plain).await.unwrap();
        let first = prompt(8);
        let answer = run(&cold, first.clone(), TOKENS).await;
        let whole = [&first[..], &answer.tokens[..]].concat();
        for setup in [&pair.plain, &pair.dflash] {
            let engine = Engine::load(&cached(&paged(setup))).await.unwrap();
            let what = format!("{title}, draft model {}", setup.draft.is_some());
            run(&engine, first.clone(), TOKENS).await;
            for end in [whole.len(), 64, 65, 70] {
                let ids = [&whole[..end], &prompt(1)[..]].concat();
                let want = run(&cold, ids.clone(), TOKENS).await;
                let got = run(&engine, ids, TOKENS).await;
                let what = format!("{what}, {end} tokens");
                compare_greedy(&what, &want.tokens, &want.gaps, &got.tokens).unwrap();
            }
            println!("{what}: {:?}", engine.stats());
        }
    }
}

/// More sequences than the paged cache has room for: one that is put off begins its prompt again, and
/// without the state that it had got to.
#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_that_is_put_off_begins_anew() {
    /// A megabyte, the least that the host takes: about half of what all of them need at the end.
    const ROOM: usize = 1100;
    for title in FAMILIES {
        let pair = Pair::write(title);
        let cases = plain_text(&pair.target).await;
        for setup in [&pair.plain, &pair.dflash] {
            for setup in [with_room(setup, ROOM), cached(&with_room(setup, ROOM))] {
                let prompts = Arc::new(AtomicUsize::new(0));
                let seen = prompts.clone();
                let method = DFlashMethod::new().with_taps(Arc::new(move |taps| {
                    let (sequences, rows, _) = taps.dims3().unwrap();
                    if rows != 1 && rows != BLOCK_SIZE {
                        seen.fetch_add(sequences, Ordering::Relaxed);
                    }
                }));
                let engine = Engine::load_with(&setup, method).await.unwrap();
                // The host tries the model out when it starts.
                prompts.store(0, Ordering::Relaxed);
                let what = format!("{title}, draft model {}", setup.draft.is_some());
                check_text(&what, &cases, &together(&engine, &jobs_of(&cases)).await);
                let prompts = prompts.load(Ordering::Relaxed);
                println!("{what}: {prompts} prompts of {}", cases.len());
                assert!(setup.draft.is_none() || prompts > cases.len(), "{what}");
                let stats = engine.stats();
                let mut reasons = stats.fallbacks.keys();
                assert!(
                    reasons.all(|reason| *reason == Fallback::NoBlocks),
                    "{what}: {stats:?}"
                );
            }
        }
    }
}
