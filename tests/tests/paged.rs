//! The host's paged KV cache: blocks that are shared, taken back and given out again, with the draft K/V
//! in the same blocks. On the CPU here; `DFLASH_GPU=1` runs it on a GPU.
//!
//! The host's own faults that these found are told in `docs/host-patches.md`; each case is run without a
//! draft model, too.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use dflash_bench::engine::{Engine, Generation, Job, Prompt, Setup};
use dflash_plugin::fault::FaultPoint;
use dflash_plugin::stats::Fallback;
use dflash_plugin::DFlashMethod;
use dflash_tests::oracle::together;
use dflash_tests::{compare_greedy, drafter, golden, target, GreedyFile, GreedyPrompt};
use futures_util::future::join_all;

/// Positions of a block, the host's default.
const BLOCK: usize = 32;
const TOKENS: usize = 40;

fn paged(setup: Setup, tokens: usize) -> Setup {
    Setup {
        prefix_cache_n: 16,
        ..setup.on_paged(Some(tokens))
    }
}

fn plain(tokens: usize) -> Setup {
    paged(Setup::plain(&target()), tokens)
}

fn dflash(tokens: usize) -> Setup {
    paged(Setup::dflash(&target(), &drafter(), Some(8)), tokens)
}

fn job(ids: &[u32]) -> Job {
    Job::greedy(Prompt::Tokens(ids.to_vec()), TOKENS).recorded()
}

async fn answers(engine: &Engine, prompts: &[&GreedyPrompt]) -> Vec<Generation> {
    let jobs: Vec<Job> = prompts.iter().map(|p| job(&p.input_ids)).collect();
    together(engine, &jobs).await
}

fn assert_golden(what: &str, got: &[Generation], want: &[&GreedyPrompt]) {
    for (got, want) in got.iter().zip(want) {
        let reference = &want.greedy_ids[..TOKENS.min(want.greedy_ids.len())];
        compare_greedy(&want.id, reference, &want.gaps, &got.tokens)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
    }
}

/// Prompts of more than one block, all of different lengths, that arrive at once: those that cannot be in
/// the first batch wait. (The host took their blocks for computed and shared them, so the prompts hit
/// their own unwritten blocks.)
#[tokio::test(flavor = "multi_thread")]
async fn prompts_of_unequal_length_at_once_are_each_computed() {
    let file: GreedyFile = golden("greedy.json");
    let mut chosen: Vec<&GreedyPrompt> = file
        .prompts
        .iter()
        .filter(|p| p.input_ids.len() > BLOCK)
        .collect();
    chosen.sort_by_key(|p| p.input_ids.len());
    chosen.dedup_by_key(|p| p.input_ids.len());
    chosen.truncate(6);
    assert!(chosen.len() >= 4, "too few prompts of several blocks");
    for (what, setup) in [("plain", plain(8192)), ("DFlash", dflash(8192))] {
        let engine = Engine::load(&setup).await.unwrap();
        assert_golden(what, &answers(&engine, &chosen).await, &chosen);
        assert!(
            engine.stats().fallbacks.is_empty(),
            "{what}: {:?}",
            engine.stats()
        );
    }
}

/// A hit on all blocks but the last token's: the prompt has one new token, which takes the decode path of
/// the host. And one that ends within a block.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_hit_the_text_and_the_accept_length_are_those_of_a_cold_start() {
    let file: GreedyFile = golden("greedy.json");
    let first = &file.prompts[1];
    let mut all = first.input_ids.clone();
    all.extend(&first.greedy_ids);
    for len in [2 * BLOCK + 1, 2 * BLOCK + 9] {
        let ids = &all[..len];
        let want = Engine::load(&plain(4096)).await.unwrap();
        let want = want.generate(&job(ids), |_| ()).await.unwrap();
        let engine = Engine::load(&dflash(4096)).await.unwrap();
        let cold = engine.generate(&job(ids), |_| ()).await.unwrap();
        let cold_stats = engine.stats();
        let hit = engine.generate(&job(ids), |_| ()).await.unwrap();
        let hit_stats = engine.stats().since(&cold_stats);
        assert_eq!(cold.tokens, want.tokens, "cold, {len} tokens");
        assert_eq!(hit.tokens, want.tokens, "after a hit, {len} tokens");
        assert_eq!(
            (cold_stats.restored, hit_stats.restored),
            (0, 1),
            "{len} tokens"
        );
        let (cold, hit) = (cold_stats.tau().unwrap(), hit_stats.tau().unwrap());
        assert!(
            (hit / cold - 1.0).abs() < 0.02,
            "tau {cold} cold, {hit} after a hit"
        );
        assert!(hit_stats.fallbacks.is_empty(), "{hit_stats:?}");
    }
}

/// Sequences that share the blocks of a prefix, all at once, with a prefix that ends just before, at and
/// behind the end of a block: what each verifies past its own end goes into blocks of its own, and leaves
/// text and accept length of later hits on the shared ones as they were.
#[tokio::test(flavor = "multi_thread")]
async fn sequences_that_share_blocks_do_not_write_into_them() {
    let file: GreedyFile = golden("greedy.json");
    let first = &file.prompts[1];
    let mut all = first.input_ids.clone();
    all.extend(&first.greedy_ids);
    let short = |ids: &[u32]| Job::greedy(Prompt::Tokens(ids.to_vec()), 24).recorded();
    let cold = Engine::load(&Setup::plain(&target())).await.unwrap();
    for end in [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1] {
        let shared = all[..end].to_vec();
        let with_tail = |tail: &[u32]| [&shared[..], tail].concat();
        let prompts = [
            shared.clone(),
            with_tail(&all[end..end + 3]),
            with_tail(&file.prompts[3].input_ids[..9]),
            with_tail(&file.prompts[5].input_ids[..9]),
        ];
        let mut want = Vec::new();
        for ids in &prompts {
            want.push(cold.generate(&short(ids), |_| ()).await.unwrap());
        }
        for (what, setup) in [("plain", plain(8192)), ("DFlash", dflash(8192))] {
            let engine = Engine::load(&setup).await.unwrap();
            let what = format!("{what}, {end} tokens");
            let check = |got: &Generation, want: &Generation| {
                compare_greedy(&what, &want.tokens, &want.gaps, &got.tokens).unwrap();
            };
            let mut taus = Vec::new();
            for turn in 0..3 {
                let before = engine.stats();
                let again = engine.generate(&short(&prompts[0]), |_| ()).await.unwrap();
                check(&again, &want[0]);
                taus.extend(engine.stats().since(&before).tau());
                if turn < 2 {
                    let jobs: Vec<Job> = prompts.iter().map(|ids| short(ids)).collect();
                    for (got, want) in together(&engine, &jobs).await.iter().zip(&want) {
                        check(got, want);
                    }
                }
            }
            let stats = engine.stats();
            assert!(stats.fallbacks.is_empty(), "{what}: {stats:?}");
            if setup.draft.is_some() {
                assert!(stats.restored >= 8, "{what}: {stats:?}");
                // The first is a cold start, the others are hits.
                assert_eq!(taus[1], taus[2], "{what}");
                assert!((taus[1] / taus[0] - 1.0).abs() < 0.02, "{what}: {taus:?}");
            }
        }
    }
}

/// A prompt whose draft K/V could not be written, in blocks that held another sequence's before: a hit on
/// them brings text and no draft context.
#[tokio::test(flavor = "multi_thread")]
async fn a_hit_on_blocks_without_draft_rows_decodes_plainly() {
    let file: GreedyFile = golden("greedy.json");
    let prompt = file.prompts.iter().find(|p| p.input_ids.len() > 2 * BLOCK);
    let prompt = prompt.expect("a prompt of several blocks");
    let fails = Arc::new(AtomicBool::new(false));
    let now = fails.clone();
    let method = DFlashMethod::new().with_fault(Arc::new(move |at| {
        at == FaultPoint::Materialize && now.load(Ordering::Relaxed)
    }));
    let engine = Engine::load_with(&dflash(512), method).await.unwrap();
    // Backwards, so that it shares no prefix with the prompt.
    let others: Vec<u32> = file
        .prompts
        .iter()
        .flat_map(|p| p.input_ids.iter().rev().copied())
        .collect();
    // Nearly all blocks there are: the draft K/V takes its share of the memory for 512 tokens.
    let fill = Job::greedy(Prompt::Tokens(others[..420].to_vec()), 2);
    engine.generate(&fill, |_| ()).await.unwrap();
    for turn in ["draft rows missing", "a hit on them"] {
        let before = engine.stats();
        fails.store(turn == "draft rows missing", Ordering::Relaxed);
        let got = engine.generate(&job(&prompt.input_ids), |_| ()).await;
        assert_golden(turn, &[got.unwrap()], &[prompt]);
        let stats = engine.stats().since(&before);
        assert_eq!((stats.drafts, stats.restored), (0, 0), "{turn}: {stats:?}");
        let reasons: Vec<_> = stats.fallbacks.keys().collect();
        assert_eq!(reasons, [&Fallback::NoDraftContext], "{turn}: {stats:?}");
    }
}

/// What a sequence leaves in the cache is what it has computed: the next one continues it, with a prompt
/// that ends where the first one's text filled a block.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_the_last_token_fills_is_not_shared_before_it_is_written() {
    let file: GreedyFile = golden("greedy.json");
    let first = &file.prompts[1];
    // The text ends exactly at the end of a block.
    let end = (first.input_ids.len() + 8).next_multiple_of(BLOCK);
    let tokens = end - first.input_ids.len();
    for (what, setup) in [("plain", plain(4096)), ("DFlash", dflash(4096))] {
        let engine = Engine::load(&setup).await.unwrap();
        let fill = Job::greedy(Prompt::Tokens(first.input_ids.clone()), tokens).recorded();
        let filled = engine.generate(&fill, |_| ()).await.unwrap();
        assert_eq!(filled.tokens.len(), tokens, "{what}");
        let mut longer = first.input_ids.clone();
        longer.extend(&filled.tokens);
        longer.extend(&file.prompts[3].input_ids);
        let got = engine.generate(&job(&longer), |_| ()).await.unwrap();
        let cold = Engine::load(&setup).await.unwrap();
        let want = cold.generate(&job(&longer), |_| ()).await.unwrap();
        assert_eq!(got.tokens, want.tokens, "{what}");
    }
}

/// More sequences than the cache has room for: some are put off and prefilled again, none is lost, and
/// none gets another one's text.
#[tokio::test(flavor = "multi_thread")]
async fn a_cache_that_is_too_small_costs_time_and_no_text() {
    let file: GreedyFile = golden("greedy.json");
    let mut chosen: Vec<&GreedyPrompt> = file
        .prompts
        .iter()
        .filter(|p| p.input_ids.len() < 3 * BLOCK)
        .take(6)
        .collect();
    chosen.sort_by_key(|p| p.input_ids.len());
    let longest = chosen.iter().map(|p| p.input_ids.len()).max().unwrap();
    // Two of them fit at the end, not six.
    let room = (2 * (longest + TOKENS + BLOCK)).next_multiple_of(BLOCK);
    for (what, setup) in [("plain", plain(room)), ("DFlash", dflash(room))] {
        let engine = Engine::load(&setup).await.unwrap();
        assert_golden(what, &answers(&engine, &chosen).await, &chosen);
        let stats = engine.stats();
        let others = stats
            .fallbacks
            .keys()
            .filter(|reason| **reason != Fallback::NoBlocks);
        assert_eq!(others.count(), 0, "{what}: {stats:?}");
        // And it goes on.
        assert_golden(what, &answers(&engine, &chosen[..1]).await, &chosen[..1]);
    }
}

/// A prompt that can never fit is refused with what to do, and the engine serves on.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_longer_than_the_cache_is_refused() {
    let file: GreedyFile = golden("greedy.json");
    let short = &file.prompts[0];
    for (what, setup) in [("plain", plain(512)), ("DFlash", dflash(512))] {
        let engine = Engine::load(&setup).await.unwrap();
        let long: Vec<u32> = short.input_ids.iter().copied().cycle().take(700).collect();
        let error = engine.generate(&job(&long), |_| ()).await.unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("700 tokens") && text.contains("--pa-context-len"),
            "{what}: {text}"
        );
        assert_golden(what, &answers(&engine, &[short]).await, &[short]);
    }
}

/// Clients that go away in the middle leave no blocks behind: as many again fit.
#[tokio::test(flavor = "multi_thread")]
async fn an_abort_storm_leaves_the_cache_as_it_was() {
    let file: GreedyFile = golden("greedy.json");
    let chosen: Vec<&GreedyPrompt> = file.prompts.iter().step_by(5).take(5).collect();
    let engine = Engine::load(&dflash(2048)).await.unwrap();
    for round in 0..4 {
        let jobs: Vec<Job> = chosen.iter().map(|p| job(&p.input_ids)).collect();
        let running = jobs.iter().map(|job| engine.generate(job, |_| ()));
        // Dropping the futures closes their channels.
        let aborted = tokio::time::timeout(
            std::time::Duration::from_millis(150 + 100 * round),
            join_all(running),
        );
        let _ = aborted.await;
    }
    assert_golden("after the storm", &answers(&engine, &chosen).await, &chosen);
}
