//! Invariants I1 and I6: drafts, accept lengths and bonus tokens round by round, against traces
//! that a PyTorch reference made.

use std::sync::{Arc, Mutex};

use dflash_bench::engine::{Engine, Job, Prompt, Setup};
use dflash_plugin::trace::Round;
use dflash_plugin::DFlashMethod;
use dflash_tests::{drafter, golden, target, Trace, TracesFile};

/// A draft may differ from the reference's only where the reference's own two best logits were
/// closer than this.
const DRAFT_NEAR_TIE: f32 = 2e-3;

async fn traces_are_equal(block_size: usize) {
    let rounds = Arc::new(Mutex::new(Vec::<Round>::new()));
    let seen = rounds.clone();
    let method = DFlashMethod::new().with_observer(Arc::new(move |round| {
        seen.lock().unwrap().push(round.clone());
    }));
    let setup = Setup::dflash(&target(), &drafter(), Some(block_size));
    let engine = Engine::load_with(&setup, method).await.unwrap();
    let file: TracesFile = golden("traces.json");
    let traces: Vec<&Trace> = file
        .traces
        .iter()
        .filter(|t| t.block_size == block_size)
        .collect();
    assert_eq!(traces.len(), 3, "short, medium and long");
    for trace in traces {
        rounds.lock().unwrap().clear();
        let job = Job::greedy(Prompt::Tokens(trace.input_ids.clone()), file.max_new_tokens);
        let generation = engine.generate(&job.recorded(), |_| ()).await.unwrap();
        assert_eq!(
            generation.tokens, trace.output_ids,
            "{} output",
            trace.prompt
        );
        let rounds = std::mem::take(&mut *rounds.lock().unwrap());
        rounds_match(trace, &rounds);
    }
}

fn rounds_match(trace: &Trace, rounds: &[Round]) {
    assert_eq!(rounds.len(), trace.rounds.len(), "{}: rounds", trace.prompt);
    let mut near_ties = 0;
    for (number, (got, want)) in rounds.iter().zip(&trace.rounds).enumerate() {
        let what = format!("{} block {} round {number}", trace.prompt, trace.block_size);
        assert_eq!(
            got.position, want.anchor_position,
            "{what}: anchor position"
        );
        assert_eq!(got.anchor, want.anchor_id, "{what}: anchor");
        assert_eq!(got.drafts.len(), want.draft_ids.len(), "{what}: drafts");
        for (i, (got, wanted)) in got.drafts.iter().zip(&want.draft_ids).enumerate() {
            if got != wanted {
                let gap = want.draft_gaps[i];
                assert!(
                    gap < DRAFT_NEAR_TIE,
                    "{what}: draft {i} is {got}, not {wanted} (gap {gap})"
                );
                near_ties += 1;
            }
        }
        let last = number + 1 == rounds.len();
        if last && got.emitted.len() <= want.accepted {
            // The reference's last round runs past the token limit; ours stops at it.
            assert_eq!(
                got.emitted[..],
                want.draft_ids[..got.emitted.len()],
                "{what}: last tokens"
            );
        } else {
            assert_eq!(got.accepted, want.accepted, "{what}: accepted");
            assert_eq!(got.emitted.last(), Some(&want.bonus_id), "{what}: bonus");
        }
    }
    println!(
        "{} block {}: {near_ties} drafts at near ties",
        trace.prompt, trace.block_size
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn rounds_of_block_16_equal_the_reference() {
    traces_are_equal(16).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rounds_of_block_8_equal_the_reference() {
    traces_are_equal(8).await;
}
