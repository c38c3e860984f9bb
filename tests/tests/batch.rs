//! Invariant I4: requests that run together do not touch each other.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use dflash_bench::engine::{Engine, Generation, Job, Place, Prompt, Setup};
use dflash_plugin::stats::Fallback;
use dflash_plugin::DFlashMethod;
use dflash_tests::oracle::{check_text, jobs_of, plain_text, right_up_to, together};
use dflash_tests::tiny::{self, TinyPair};
use dflash_tests::zoo;
use dflash_tests::{
    assert_no_draft_kv, compare_greedy, drafter, gguf, golden, target, GreedyFile, GreedyPrompt,
};

const TOKENS: usize = 48;

async fn answers(engine: &Engine, prompts: &[Vec<u32>]) -> Vec<Generation> {
    let jobs: Vec<Job> = prompts
        .iter()
        .map(|ids| Job::greedy(Prompt::Tokens(ids.clone()), TOKENS).recorded())
        .collect();
    together(engine, &jobs).await
}

/// Every answer has the recorded tokens of its prompt.
fn assert_golden(got: &[Generation], want: &[&GreedyPrompt]) {
    for (got, want) in got.iter().zip(want) {
        let reference = &want.greedy_ids[..TOKENS.min(want.greedy_ids.len())];
        compare_greedy(&want.id, reference, &want.gaps, &got.tokens).unwrap();
    }
}

/// Rounds that were verified in one pass with those of other sequences.
fn shared(batches: &Mutex<Vec<usize>>) -> usize {
    batches
        .lock()
        .unwrap()
        .iter()
        .filter(|batch| **batch > 1)
        .count()
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
    let got = answers(&engine, &prompts).await;
    assert_golden(&got, &chosen);
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
    let got = answers(&engine, &prompts).await;
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

/// Different prompts of one length: rows of different sequences share a verify pass.
#[tokio::test(flavor = "multi_thread")]
async fn different_prompts_verified_in_one_pass_each_give_their_own_tokens() {
    let file: GreedyFile = golden("greedy.json");
    let batches = Arc::new(Mutex::new(Vec::new()));
    let seen = batches.clone();
    let method = DFlashMethod::new().with_observer(Arc::new(move |round| {
        seen.lock().unwrap().push(round.batch);
    }));
    let setup = Setup::dflash(&target(), &drafter(), Some(4));
    let engine = Engine::load_with(&setup, method).await.unwrap();
    let of_length = |len: usize| {
        file.prompts
            .iter()
            .filter(move |p| p.input_ids.len() == len)
    };
    let mut lengths: Vec<usize> = file.prompts.iter().map(|p| p.input_ids.len()).collect();
    lengths.sort_by_key(|len| std::cmp::Reverse(of_length(*len).count()));
    let chosen: Vec<_> = of_length(lengths[0]).collect();
    assert!(chosen.len() >= 3, "{} prompts of one length", chosen.len());
    let prompts: Vec<Vec<u32>> = chosen.iter().map(|p| p.input_ids.clone()).collect();
    let got = answers(&engine, &prompts).await;
    assert_golden(&got, &chosen);
    let together = shared(&batches);
    println!(
        "{together} of {} rounds shared a pass",
        batches.lock().unwrap().len()
    );
    assert!(
        together > 1,
        "no two different sequences were verified together"
    );
    assert!(engine.stats().fallbacks.is_empty(), "{:?}", engine.stats());
}

/// KV buffers grow by 512 rows, so sequences of equal length can have buffers of unequal capacity:
/// here two prefix-cache hits of one length, on an entry that has grown and on one that has not.
#[tokio::test(flavor = "multi_thread")]
async fn sequences_with_buffers_of_unequal_capacity_are_batched() {
    let file: GreedyFile = golden("greedy.json");
    let text: Vec<u32> = file
        .prompts
        .iter()
        .flat_map(|p| &p.greedy_ids)
        .copied()
        .collect();
    // No two of these begin with the same token, so each new prompt hits its own entry.
    let prompt = |first: u32, len: usize| [&[first], &text[..len - 1]].concat();
    let (grown, small) = (prompt(300, 505), prompt(301, 40));
    let tail = &text[600..610];
    let hits = [[&small[..20], tail].concat(), [&grown[..20], tail].concat()];
    let job = |ids: &[u32]| Job::greedy(Prompt::Tokens(ids.to_vec()), 12).recorded();

    let setup = Setup {
        place: Place::default(), // It is about the buffers of the normal KV cache.
        ..Setup::dflash(&target(), &drafter(), Some(8))
    };
    let cold = Engine::load(&setup).await.unwrap();
    let mut want = Vec::new();
    for ids in &hits {
        want.push(cold.generate(&job(ids), |_| ()).await.unwrap());
    }
    let batches = Arc::new(Mutex::new(Vec::new()));
    let seen = batches.clone();
    let method = DFlashMethod::new().with_observer(Arc::new(move |round| {
        seen.lock().unwrap().push(round.batch);
    }));
    let setup = Setup {
        prefix_cache_n: 16,
        ..setup
    };
    let warm = Engine::load_with(&setup, method).await.unwrap();
    warm.generate(&job(&grown), |_| ()).await.unwrap();
    warm.generate(&job(&small), |_| ()).await.unwrap();
    // A long prompt keeps the engine busy while both hits arrive, so they are scheduled together.
    let busy = job(&prompt(302, 400));
    let jobs = hits.map(|ids| job(&ids));
    let (_, got) = futures_util::future::join(warm.generate(&busy, |_| ()), async {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        futures_util::future::join_all(jobs.iter().map(|job| warm.generate(job, |_| ()))).await
    })
    .await;
    for (got, want) in got.into_iter().zip(&want) {
        assert_eq!(got.unwrap().tokens, want.tokens);
    }
    assert_eq!(warm.stats().restored, 2, "{:?}", warm.stats());
    let together = shared(&batches);
    assert!(together > 0, "the two hits never met");
}

/// I1 at T > 0: with bit-equal logits (quantized products treat rows alone) and one draw a token,
/// the same random stream gives the same tokens, penalties included.
#[tokio::test(flavor = "multi_thread")]
async fn sampling_gives_the_same_tokens_with_and_without_dflash() {
    for paged in [None, Some(4096)] {
        let plain = Setup::plain(&gguf()).on_paged(paged);
        let plain = Engine::load(&plain).await.unwrap();
        let dflash = Setup::dflash(&gguf(), &drafter(), Some(4)).on_paged(paged);
        let dflash = Engine::load(&dflash).await.unwrap();
        for repetition_penalty in [None, Some(1.3)] {
            let mut job = Job::greedy(Prompt::Chat("Tell me about rivers.".into()), 32);
            job.temperature = 0.8;
            job.repetition_penalty = repetition_penalty;
            let want = plain.generate(&job, |_| ()).await.unwrap();
            let got = dflash.generate(&job, |_| ()).await.unwrap();
            let what = format!("penalty {repetition_penalty:?}, paged {paged:?}");
            assert_eq!(got.text, want.text, "{what}");
            assert_eq!(got.completion_tokens, want.completion_tokens, "{what}");
        }
        let stats = dflash.stats();
        assert!(
            stats.accepted > 0 && stats.accepted < stats.proposed,
            "{stats:?}"
        );
    }
}

/// Requests of unequal length: all of them in every pass, from the first token to the last.
#[tokio::test(flavor = "multi_thread")]
async fn eight_requests_of_unequal_length_share_their_passes_and_none_waits_for_another() {
    let file: GreedyFile = golden("greedy.json");
    let rounds = Arc::new(Mutex::new(Vec::new()));
    let seen = rounds.clone();
    let method = DFlashMethod::new().with_observer(Arc::new(move |round| {
        seen.lock().unwrap().push((round.sequence, round.batch));
    }));
    let setup = Setup::dflash(&target(), &drafter(), Some(8));
    let engine = Engine::load_with(&setup, method).await.unwrap();
    let chosen: Vec<_> = file.prompts.iter().step_by(2).take(8).collect();
    let prompts: Vec<Vec<u32>> = chosen.iter().map(|p| p.input_ids.clone()).collect();
    let mut lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
    lengths.sort_unstable();
    lengths.dedup();
    assert!(lengths.len() > 4, "the prompts are of {lengths:?} tokens");
    let got = answers(&engine, &prompts).await;
    assert_golden(&got, &chosen);
    assert!(engine.stats().fallbacks.is_empty(), "{:?}", engine.stats());
    let rounds = rounds.lock().unwrap();
    let alone = rounds.iter().filter(|(_, batch)| *batch == 1).count();
    println!("{alone} of {} rounds were alone", rounds.len());
    assert!(alone * 5 < rounds.len(), "{alone} of {}", rounds.len());
    // Between two rounds of the first request, every other one has at most one of its own.
    let first = rounds[0].0;
    let last = rounds.iter().rposition(|(id, _)| *id == first).unwrap();
    let mut since = HashSet::new();
    for (sequence, _) in &rounds[..=last] {
        if *sequence == first {
            since.clear();
        } else {
            assert!(
                since.insert(*sequence),
                "sequence {sequence} had two rounds while {first} waited"
            );
        }
    }
}

/// A request that turned speculation off, next to two that did not.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_speculation_decodes_plainly_and_its_neighbours_draft() {
    let file: GreedyFile = golden("greedy.json");
    let sequences = Arc::new(Mutex::new(HashSet::new()));
    let seen = sequences.clone();
    let method = DFlashMethod::new().with_observer(Arc::new(move |round| {
        seen.lock().unwrap().insert(round.sequence);
    }));
    let setup = Setup::dflash(&target(), &drafter(), Some(8));
    let engine = Engine::load_with(&setup, method).await.unwrap();
    let chosen: Vec<_> = file.prompts.iter().step_by(7).take(3).collect();
    let jobs: Vec<Job> = chosen
        .iter()
        .enumerate()
        .map(|(i, p)| Job {
            speculative: i != 1,
            ..Job::greedy(Prompt::Tokens(p.input_ids.clone()), TOKENS).recorded()
        })
        .collect();
    let got = together(&engine, &jobs).await;
    assert_golden(&got, &chosen);
    let stats = engine.stats();
    assert_eq!(sequences.lock().unwrap().len(), 2, "sequences that drafted");
    let reasons: Vec<_> = stats.fallbacks.keys().collect();
    assert_eq!(reasons, [&Fallback::DisabledByRequest], "{stats:?}");
    assert_no_draft_kv(&engine).await;
}

/// A sequence at the end of the target's context, next to one with room.
#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_without_room_does_not_stop_its_neighbour_from_drafting() {
    let folder = tempfile::tempdir().unwrap();
    let pair = TinyPair {
        drafter_positions: 1024,
        ..TinyPair::default()
    };
    let (target, drafter) = tiny::write(&pair, folder.path());
    let plain = Engine::load(&Setup::plain(&target)).await.unwrap();
    let setup = Setup::dflash(&target, &drafter, Some(16));
    let dflash = Engine::load(&setup).await.unwrap();
    let jobs: Vec<Job> = [(500, 13), (100, 60)]
        .into_iter()
        .map(|(len, tokens)| {
            let ids = (0..len).map(|i| 100 + i * 7 % 900).collect();
            Job::greedy(Prompt::Tokens(ids), tokens).recorded()
        })
        .collect();
    let mut want = Vec::new();
    for job in &jobs {
        want.push(plain.generate(job, |_| ()).await.unwrap());
    }
    for (got, want) in together(&dflash, &jobs).await.iter().zip(want) {
        assert_eq!(got.tokens, want.tokens);
    }
    let stats = dflash.stats();
    assert!(stats.fallbacks[&Fallback::NoRoom] <= 13, "{stats:?}");
    assert!(stats.drafts >= 30, "{stats:?}");
}

/// In one pass one sequence accepts nothing, another its whole block, and the others what is between.
#[tokio::test(flavor = "multi_thread")]
async fn accept_lengths_that_differ_in_one_pass_leave_each_its_own_text() {
    const BLOCK: usize = 8;
    let folder = tempfile::tempdir().unwrap();
    let target = zoo::find("llama").write_target(zoo::LAYERS, &folder.path().join("target"));
    let drafter = zoo::write_drafter(&folder.path().join("drafter"));
    let cases = plain_text(&target).await;
    let setup = Setup::dflash(&target.path, &drafter, Some(BLOCK));
    for paged in [None, Some(8192)] {
        let rounds = Arc::new(Mutex::new(Vec::new()));
        let seen = rounds.clone();
        let method = DFlashMethod::new()
            .with_drafts(right_up_to(|case| case % BLOCK, cases.clone()))
            .with_observer(Arc::new(move |round| {
                seen.lock().unwrap().push((round.batch, round.accepted));
            }));
        let mut setup = setup.clone();
        setup.place.paged = paged;
        let engine = Engine::load_with(&setup, method).await.unwrap();
        let got = together(&engine, &jobs_of(&cases)).await;
        check_text(&format!("paged {paged:?}"), &cases, &got);
        assert!(engine.stats().fallbacks.is_empty(), "{:?}", engine.stats());
        // A pass reports its sequences one after another.
        let rounds = rounds.lock().unwrap();
        let mut rest = &rounds[..];
        let mut both = 0;
        while let Some((batch, _)) = rest.first() {
            let (pass, later) = rest.split_at(*batch);
            let has = |length: usize| pass.iter().any(|(_, accepted)| *accepted == length);
            both += usize::from(has(0) && has(BLOCK - 1));
            rest = later;
        }
        assert!(both > 2, "{both} passes with none and with all accepted");
    }
}
