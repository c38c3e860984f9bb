//! A prefix-cache hit brings the draft KV with it, and the text stays what it is without a hit.

use dflash_bench::engine::{Engine, Job, Place, Prompt, Setup};
use dflash_tests::{drafter, golden, target, GreedyFile};

fn turns(list: &[(&str, &str)]) -> Prompt {
    Prompt::Turns(
        list.iter()
            .map(|(r, c)| (r.to_string(), c.to_string()))
            .collect(),
    )
}

/// With the entries of the normal KV cache, which are counted here; `paged.rs` is about the other.
fn entries(setup: Setup) -> Setup {
    Setup {
        place: Place::default(),
        ..cached(setup)
    }
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

/// A shared prefix with another tail: the hit covers a prompt and half of its answer.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_hit_the_draft_model_drafts_as_well_as_cold() {
    let file: GreedyFile = golden("greedy.json");
    let first = &file.prompts[1];
    let tail = &file.prompts[3].input_ids;
    let mut continued = first.input_ids.clone();
    continued.extend(&first.greedy_ids[..40]);
    continued.push(2);
    continued.extend(tail);
    let job = Job::greedy(Prompt::Tokens(continued), 96).recorded();

    let cold = Engine::load(&Setup::dflash(&target(), &drafter(), Some(8)))
        .await
        .unwrap();
    let want = cold.generate(&job, |_| ()).await.unwrap();
    let cold = cold.stats();

    let warm = Engine::load(&cached(Setup::dflash(&target(), &drafter(), Some(8))))
        .await
        .unwrap();
    let fill = Job::greedy(Prompt::Tokens(first.input_ids.clone()), 64).recorded();
    warm.generate(&fill, |_| ()).await.unwrap();
    let before = warm.stats();
    let got = warm.generate(&job, |_| ()).await.unwrap();
    let hit = warm.stats().since(&before);

    assert_eq!(hit.restored, 1, "no hit brought draft KV: {hit:?}");
    assert_eq!(cold.restored, 0);
    assert_eq!(got.tokens, want.tokens);
    assert!(hit.fallbacks.is_empty(), "{hit:?}");
    let (cold, hit) = (cold.tau().unwrap(), hit.tau().unwrap());
    assert!(
        (hit / cold - 1.0).abs() < 0.02,
        "tau {cold} cold, {hit} after a hit"
    );
}

/// Concurrent hits whose answers end at different times: the ones that are left are parked by the
/// host's scheduler in between and must go on, not start again.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_requests_after_hits_each_give_their_own_tokens() {
    let questions = [
        "Name three fruits.",
        "What is the capital of France, and why is it famous?",
    ];
    let cold = Engine::load(&Setup::plain(&target())).await.unwrap();
    let jobs = questions.map(|text| Job::greedy(Prompt::Chat(text.into()), 40).recorded());
    let mut want = Vec::new();
    for job in &jobs {
        want.push(cold.generate(job, |_| ()).await.unwrap());
    }
    for (name, setup) in [
        ("plain", Setup::plain(&target())),
        ("DFlash", Setup::dflash(&target(), &drafter(), Some(8))),
    ] {
        let warm = Engine::load(&entries(setup)).await.unwrap();
        // All three share the chat template's system prompt.
        let fill = Job::greedy(Prompt::Chat("Hello!".into()), 8);
        warm.generate(&fill, |_| ()).await.unwrap();
        let running = jobs.iter().map(|job| warm.generate(job, |_| ()));
        let got = futures_util::future::join_all(running).await;
        for ((got, want), question) in got.into_iter().zip(&want).zip(questions) {
            assert_eq!(got.unwrap().tokens, want.tokens, "{name}: {question}");
        }
        assert!(
            warm.stats().fallbacks.is_empty(),
            "{name}: {:?}",
            warm.stats()
        );
        assert_eq!(
            warm.stats().restored,
            if name == "plain" { 0 } else { 2 },
            "{name}"
        );
        let logger = warm.host().get_logger(None).unwrap();
        assert_eq!(
            logger.prefix_cache_stats(),
            (2, 3),
            "{name}: hits, requests"
        );
    }
}

/// The host keeps 16 entries here; their draft KV goes with them.
#[tokio::test(flavor = "multi_thread")]
async fn the_prefix_cache_and_its_draft_kv_are_bounded() {
    let setup = entries(Setup::dflash(&target(), &drafter(), Some(4)));
    let engine = Engine::load(&setup).await.unwrap();
    for first in 0..20 {
        let ids = vec![300 + first, 504, 1463, 282];
        let job = Job::greedy(Prompt::Tokens(ids), 2);
        engine.generate(&job, |_| ()).await.unwrap();
    }
    let live = engine.stats().live;
    assert!((16..=17).contains(&live), "{live} owners of draft KV");
}
