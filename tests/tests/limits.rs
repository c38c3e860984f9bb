//! Invariant I3: nothing past a limit is emitted or counted, at every offset inside a block.

use dflash_bench::engine::{Engine, Job, Prompt, Setup};
use dflash_tests::{drafter, golden, target, GreedyFile};

#[tokio::test(flavor = "multi_thread")]
async fn every_token_limit_from_1_to_17_is_met_exactly() {
    let file: GreedyFile = golden("greedy.json");
    let prompt = &file.prompts[0];
    let engine = Engine::load(&Setup::dflash(&target(), &drafter(), Some(16)))
        .await
        .unwrap();
    for limit in 1..=17 {
        let job = Job::greedy(Prompt::Tokens(prompt.input_ids.clone()), limit).recorded();
        let got = engine.generate(&job, |_| ()).await.unwrap();
        assert_eq!(got.tokens, prompt.greedy_ids[..limit], "limit {limit}");
        assert_eq!(got.completion_tokens, limit, "limit {limit}");
        assert_eq!(got.finish_reason, "length", "limit {limit}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_string_ends_the_text_as_without_dflash_wherever_it_falls() {
    let file: GreedyFile = golden("greedy.json");
    let prompt = &file.prompts[0];
    let plain = Engine::load(&Setup::plain(&target())).await.unwrap();
    let dflash = Engine::load(&Setup::dflash(&target(), &drafter(), Some(16)))
        .await
        .unwrap();
    // Each of these first occurs at another token of the recorded answer.
    for stop in [
        "find", " total", " number", " rolls", " left", " baked", "subtract", " tray",
    ] {
        let mut job = Job::greedy(Prompt::Tokens(prompt.input_ids.clone()), 48).recorded();
        job.stop = vec![stop.into()];
        let want = plain.generate(&job, |_| ()).await.unwrap();
        let got = dflash.generate(&job, |_| ()).await.unwrap();
        assert_eq!(got.tokens, want.tokens, "stop {stop:?}");
        assert_eq!(got.text, want.text, "stop {stop:?}");
        assert_eq!(got.finish_reason, want.finish_reason, "stop {stop:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_text_token_inside_a_block_ends_the_request() {
    let file: GreedyFile = golden("greedy.json");
    let engine = Engine::load(&Setup::dflash(&target(), &drafter(), Some(16)))
        .await
        .unwrap();
    let ended: Vec<_> = file
        .prompts
        .iter()
        .filter(|p| p.greedy_ids.last() == Some(&2) && p.greedy_ids.len() < file.max_new_tokens)
        .take(3)
        .collect();
    assert!(!ended.is_empty(), "no recorded answer ends by itself");
    for prompt in ended {
        let job = Job::greedy(
            Prompt::Tokens(prompt.input_ids.clone()),
            file.max_new_tokens,
        );
        let got = engine.generate(&job.recorded(), |_| ()).await.unwrap();
        assert_eq!(got.tokens, prompt.greedy_ids, "{}", prompt.id);
        assert_eq!(got.finish_reason, "stop", "{}", prompt.id);
    }
}

/// A character of several tokens whose last ones are not written any more: the piece that says why the
/// answer has ended must come all the same.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_cut_inside_a_character_ends_with_its_finish_reason() {
    let prompt = "🌍🌍🌍🌍🌍🌍🌍🌍🌍🌍🌍🌍";
    for (what, setup) in [
        ("plain", Setup::plain(&target())),
        ("DFlash", Setup::dflash(&target(), &drafter(), Some(8))),
    ] {
        let engine = Engine::load(&setup).await.unwrap();
        let mut cut = 0;
        for limit in 1..=6 {
            let job = Job::greedy(Prompt::Text(prompt.into()), limit).recorded();
            let got = engine.generate(&job, |_| ()).await.unwrap();
            let what = format!("{what}, limit {limit}: {:?}", got.text);
            assert_eq!(got.finish_reason, "length", "{what}");
            assert_eq!(got.tokens.len(), limit, "{what}");
            cut += usize::from(got.text.ends_with(char::REPLACEMENT_CHARACTER));
        }
        assert!(cut > 1, "{what}: {cut} answers ended inside a character");
    }
}
