//! `--speculative-draft-window`: the draft model sees only the last tokens of the context. The text is
//! that of the target alone, on the normal and on the paged cache, and after a prefix-cache hit.

use dflash_bench::engine::{Drafting, Engine, Generation, Job, Place, Prompt, Setup};
use dflash_plugin::stats::StatsSnapshot;
use dflash_tests::server::refusal_of_pair;
use dflash_tests::{compare_greedy, drafter, golden, target, GreedyFile, GreedyPrompt};

const TOKENS: usize = 64;

fn windowed(window: usize) -> Setup {
    Setup {
        drafting: Drafting {
            draft_window: Some(window),
            ..Drafting::default()
        },
        ..Setup::dflash(&target(), &drafter(), Some(8))
    }
}

fn job(ids: &[u32]) -> Job {
    Job::greedy(Prompt::Tokens(ids.to_vec()), TOKENS).recorded()
}

/// Prompts of the reference, the longest first.
fn recorded() -> Vec<GreedyPrompt> {
    let file: GreedyFile = golden("greedy.json");
    let mut prompts = file.prompts;
    prompts.sort_by_key(|prompt| std::cmp::Reverse(prompt.input_ids.len()));
    prompts.truncate(3);
    prompts
}

async fn run(setup: &Setup, prompts: &[GreedyPrompt]) -> (Vec<Generation>, StatsSnapshot) {
    let engine = Engine::load(setup).await.unwrap();
    let mut answers = Vec::new();
    for prompt in prompts {
        let job = job(&prompt.input_ids);
        answers.push(engine.generate(&job, |_| ()).await.unwrap());
    }
    (answers, engine.stats())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_window_changes_the_drafts_and_not_the_text() {
    let prompts = recorded();
    let shortest = prompts.iter().map(|prompt| prompt.input_ids.len()).min();
    assert!(shortest > Some(40), "longer than the windows");
    let (_, whole) = run(&windowed(0), &prompts).await;
    // As if there were no window: draft for draft.
    let (_, longer) = run(&windowed(4_000), &prompts).await;
    assert_eq!(longer.accepts, whole.accepts);
    for (paged, window) in [(None, 1), (None, 32), (Some(8192), 32)] {
        let mut setup = windowed(window);
        setup.place.paged = paged.or(setup.place.paged);
        let (answers, stats) = run(&setup, &prompts).await;
        let what = format!("window {window}, paged {paged:?}");
        for (prompt, got) in prompts.iter().zip(&answers) {
            let reference = &prompt.greedy_ids[..TOKENS.min(prompt.greedy_ids.len())];
            compare_greedy(&what, reference, &prompt.gaps, &got.tokens).unwrap();
        }
        assert!(stats.fallbacks.is_empty(), "{what}: {stats:?}");
        assert_ne!(stats.accepts, whole.accepts, "{what}: it has no effect");
    }
}

/// A text of this many tokens: recorded prompts one after another.
fn long_text(tokens: usize) -> Vec<u32> {
    let file: GreedyFile = golden("greedy.json");
    let ids: Vec<u32> = file
        .prompts
        .iter()
        .flat_map(|p| p.input_ids.clone())
        .collect();
    ids[..tokens].to_vec()
}

/// Over contexts so long that draft KV has been dropped: one that continues a cached text, and one that
/// parts from it where the draft KV is gone.
///
/// The target ends the parted text with its first token, so of that one the test says only that the hit
/// is taken and the text right; that its window fills again is tested in the plugin's `draft_window.rs`.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_prefix_cache_hit_a_window_drafts_as_well_as_cold() {
    let on_normal_cache = |setup: Setup, entries| Setup {
        place: Place::default(),
        prefix_cache_n: entries,
        ..setup
    };
    let first = long_text(900);
    let mut continued = first.clone();
    continued.extend(&long_text(40));
    let mut parted = first[..200].to_vec();
    parted.extend(&long_text(60));
    let plain = on_normal_cache(Setup::plain(&target()), 0);
    let plain = Engine::load(&plain).await.unwrap();
    let cold = Engine::load(&on_normal_cache(windowed(48), 0))
        .await
        .unwrap();
    let warm = Engine::load(&on_normal_cache(windowed(48), 16))
        .await
        .unwrap();
    let fill = Job::greedy(Prompt::Tokens(first), 2);
    warm.generate(&fill, |_| ()).await.unwrap();
    for (what, ids) in [("continued", continued), ("parted", parted)] {
        let job = job(&ids);
        let want = plain.generate(&job, |_| ()).await.unwrap();
        let (before_cold, before_warm) = (cold.stats(), warm.stats());
        let from_cold = cold.generate(&job, |_| ()).await.unwrap();
        let from_hit = warm.generate(&job, |_| ()).await.unwrap();
        for got in [&from_cold, &from_hit] {
            compare_greedy(what, &want.tokens, &want.gaps, &got.tokens).unwrap();
        }
        let cold = cold.stats().since(&before_cold);
        let hit = warm.stats().since(&before_warm);
        assert_eq!((cold.restored, hit.restored), (0, 1), "{what}: {hit:?}");
        assert!(hit.fallbacks.is_empty(), "{what}: {hit:?}");
        println!(
            "{what}: {} rounds cold, {} after a hit",
            cold.drafts, hit.drafts
        );
        // The new tokens are more than the window, so it is full again.
        assert!(
            cold.drafts.abs_diff(hit.drafts) <= 1,
            "{what}: {cold:?}, {hit:?}"
        );
    }
}

#[test]
fn a_window_that_is_no_number_is_refused_by_name() {
    let (target, drafter) = (target(), drafter());
    for wrong in ["-1", "many", "1.5", "99999999999999999999999"] {
        let window = format!("--speculative-draft-window={wrong}");
        let target = ["-m", target.to_str().unwrap()];
        let message = refusal_of_pair(&target, &drafter, &[&window]);
        for part in ["--speculative-draft-window", wrong] {
            assert!(message.contains(part), "`{part}` is not in: {message}");
        }
    }
}
