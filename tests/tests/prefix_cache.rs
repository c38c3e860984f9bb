//! A prefix-cache hit brings the draft KV with it, and the text stays what it is without a hit.

use dflash_bench::engine::{Engine, Job, Prompt, Setup};
use dflash_tests::{drafter, target};

fn turns(list: &[(&str, &str)]) -> Prompt {
    Prompt::Turns(
        list.iter()
            .map(|(r, c)| (r.to_string(), c.to_string()))
            .collect(),
    )
}

fn cached(setup: Setup) -> Setup {
    Setup {
        prefix_cache_n: 16,
        ..setup
    }
}

/// Two turns: the second continues the tokens of the first, its last sampled token included.
#[tokio::test(flavor = "multi_thread")]
async fn the_second_turn_of_a_chat_is_the_same_with_and_without_a_hit() {
    let question = "Name three fruits.";
    let follow_up = "Now name three vegetables.";
    let cold = Engine::load(&Setup::plain(&target())).await.unwrap();
    let first = cold
        .generate(
            &Job::greedy(Prompt::Chat(question.into()), 64).recorded(),
            |_| (),
        )
        .await
        .unwrap();
    let second = turns(&[
        ("user", question),
        ("assistant", first.text.trim_start()),
        ("user", follow_up),
    ]);
    let want = cold
        .generate(&Job::greedy(second.clone(), 64).recorded(), |_| ())
        .await
        .unwrap();
    for (name, setup) in [
        ("plain", Setup::plain(&target())),
        ("DFlash", Setup::dflash(&target(), &drafter(), Some(8))),
    ] {
        let warm = Engine::load(&cached(setup)).await.unwrap();
        let again = warm
            .generate(
                &Job::greedy(Prompt::Chat(question.into()), 64).recorded(),
                |_| (),
            )
            .await
            .unwrap();
        assert_eq!(again.tokens, first.tokens, "{name}: first turn");
        let got = warm
            .generate(&Job::greedy(second.clone(), 64).recorded(), |_| ())
            .await
            .unwrap();
        assert_eq!(got.tokens, want.tokens, "{name}: second turn after a hit");
        assert!(
            warm.stats().fallbacks.is_empty(),
            "{name}: {:?}",
            warm.stats()
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_prompt_again_drafts_as_well_as_the_first_time() {
    let prompt = "List five things to check before a long bike ride, with one sentence each.";
    let engine = Engine::load(&cached(Setup::dflash(&target(), &drafter(), Some(8))))
        .await
        .unwrap();
    let job = Job::greedy(Prompt::Chat(prompt.into()), 96).recorded();
    let cold = engine.generate(&job, |_| ()).await.unwrap();
    let before = engine.stats();
    let hit = engine.generate(&job, |_| ()).await.unwrap();
    let after = engine.stats().since(&before);
    assert_eq!(hit.tokens, cold.tokens);
    assert!(after.fallbacks.is_empty(), "{after:?}");
    let (cold_tau, hit_tau) = (before.tau().unwrap(), after.tau().unwrap());
    assert!(
        (hit_tau / cold_tau - 1.0).abs() < 0.02,
        "tau {cold_tau} cold, {hit_tau} after a hit"
    );
}
