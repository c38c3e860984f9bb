//! Invariant I1: greedy output with and without DFlash is identical, token for token.

use dflash_bench::engine::{Engine, Generation, Job, Prompt, Setup};
use dflash_bench::prompts;
use dflash_tests::{compare_greedy, drafter, full, gguf, golden, prompts, target, GreedyFile};

const BLOCK_SIZES: [usize; 4] = [2, 4, 8, 16];

async fn run(engine: &Engine, prompt: Prompt, max_tokens: usize) -> Generation {
    let job = Job::greedy(prompt, max_tokens).recorded();
    engine.generate(&job, |_| ()).await.unwrap()
}

/// Held-out prompts: ten of each kind in the full version, one in the short one.
#[tokio::test(flavor = "multi_thread")]
async fn held_out_prompts_give_the_same_tokens_at_every_block_size() {
    let (per_kind, max_tokens) = if full() { (10, 128) } else { (1, 64) };
    let lines = prompts::load(&[prompts()], Some(per_kind)).unwrap();
    assert_eq!(lines.len(), 4 * per_kind);
    let plain = Engine::load(&Setup::plain(&target())).await.unwrap();
    let mut references = Vec::new();
    for line in &lines {
        references.push(run(&plain, Prompt::Chat(line.prompt.clone()), max_tokens).await);
    }
    recorded_prompts_are_reproduced_by_plain_decoding(&lines, &references);
    let mut near_ties = 0;
    for block_size in BLOCK_SIZES {
        let setup = Setup::dflash(&target(), &drafter(), Some(block_size));
        let engine = Engine::load(&setup).await.unwrap();
        for (line, reference) in lines.iter().zip(&references) {
            let got = run(&engine, Prompt::Chat(line.prompt.clone()), max_tokens).await;
            let what = format!("{} block {block_size}", line.id);
            let difference =
                compare_greedy(&what, &reference.tokens, &reference.gaps, &got.tokens).unwrap();
            match difference {
                None => {
                    assert_eq!(got.text, reference.text, "{what}: text");
                    assert_eq!(
                        got.finish_reason, reference.finish_reason,
                        "{what}: finish reason"
                    );
                }
                Some(at) => {
                    near_ties += 1;
                    println!("{what}: differs at token {at}, a near tie");
                }
            }
        }
        let stats = engine.stats();
        assert!(
            stats.accepted > 0,
            "block {block_size}: nothing was accepted: {stats:?}"
        );
        assert!(
            stats.fallbacks.is_empty(),
            "block {block_size}: plain steps: {stats:?}"
        );
    }
    println!(
        "identity: {} prompts x {max_tokens} tokens x blocks {BLOCK_SIZES:?}: {near_ties} near ties",
        lines.len()
    );
}

/// The chat template gives the reference's prompt, and the host alone the reference's answer.
fn recorded_prompts_are_reproduced_by_plain_decoding(
    lines: &[prompts::PromptLine],
    references: &[Generation],
) {
    let file: GreedyFile = golden("greedy.json");
    let mut found = 0;
    for (line, plain) in lines.iter().zip(references) {
        let Some(recorded) = file.prompts.iter().find(|p| p.id == line.id) else {
            continue;
        };
        found += 1;
        let recorded_ids = &recorded.greedy_ids;
        let wanted = &recorded_ids[..recorded_ids.len().min(plain.tokens.len())];
        let difference = compare_greedy(&line.id, wanted, &recorded.gaps, &plain.tokens).unwrap();
        assert_eq!(difference, None, "{}: plain decoding", line.id);
        assert_eq!(
            plain.prompt_tokens,
            recorded.input_ids.len(),
            "{}: prompt",
            line.id
        );
    }
    assert!(found >= 4, "only {found} of the prompts are recorded");
}

/// Recorded by a PyTorch reference in f32: tokens, and the verify rounds that they took.
#[tokio::test(flavor = "multi_thread")]
async fn recorded_greedy_ids_are_reproduced_in_as_many_rounds() {
    let file: GreedyFile = golden("greedy.json");
    let block_sizes: &[usize] = if full() { &[16, 8, 4] } else { &[8] };
    let step = if full() { 1 } else { 5 };
    for &block_size in block_sizes {
        let setup = Setup::dflash(&target(), &drafter(), Some(block_size));
        let engine = Engine::load(&setup).await.unwrap();
        let (mut near_ties, mut rounds, mut reference) = (0, 0, 0);
        for prompt in file.prompts.iter().step_by(step) {
            let before = engine.stats();
            let ids = Prompt::Tokens(prompt.input_ids.clone());
            let got = run(&engine, ids, file.max_new_tokens).await;
            let difference =
                compare_greedy(&prompt.id, &prompt.greedy_ids, &prompt.gaps, &got.tokens).unwrap();
            near_ties += usize::from(difference.is_some());
            rounds += engine.stats().since(&before).drafts;
            reference += prompt.rounds(block_size);
        }
        println!(
            "block {block_size}: {rounds} rounds, reference {reference}, {near_ties} near ties"
        );
        // A draft at a near tie may be another one: one round in a hundred.
        let allowed = (reference as f64 * 0.01).ceil() as u64;
        assert!(
            rounds.abs_diff(reference) <= allowed,
            "block {block_size}: {rounds} rounds"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gguf_target_gives_the_same_tokens() {
    let (per_kind, max_tokens) = if full() { (3, 64) } else { (1, 24) };
    let lines = prompts::load(&[prompts()], Some(per_kind)).unwrap();
    let plain = Engine::load(&Setup::plain(&gguf())).await.unwrap();
    let engine = Engine::load(&Setup::dflash(&gguf(), &drafter(), Some(8)))
        .await
        .unwrap();
    for line in &lines {
        let reference = run(&plain, Prompt::Chat(line.prompt.clone()), max_tokens).await;
        let got = run(&engine, Prompt::Chat(line.prompt.clone()), max_tokens).await;
        // Quantized products treat each row alone, and the host's attention is the same for one
        // row and for many: no near tie has to be allowed.
        assert_eq!(got.tokens, reference.tokens, "{}", line.id);
    }
    // The draft model was trained on these weights, so it must draft well here too (I6).
    let tau = engine.stats().tau().unwrap();
    assert!(tau > 1.8, "tau on the GGUF target is {tau}");
}
