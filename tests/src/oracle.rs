//! Prompts with the text that a target gives them, and drafts made from it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use dflash_bench::engine::{Engine, Generation, Job, Prompt, Setup};
use dflash_plugin::fault::DraftHook;
use futures_util::future::try_join_all;

use crate::compare_greedy;
use crate::zoo::{Target, VOCAB};

/// Prompts of a test.
pub const PROMPTS: usize = 20;
/// Tokens of each answer.
pub const TOKENS: usize = 64;

/// A prompt, and the text that plain decoding gives it.
pub struct Case {
    pub prompt: Vec<u32>,
    pub want: Generation,
}

impl Case {
    /// The request.
    pub fn job(&self, max_tokens: usize) -> Job {
        Job::greedy(Prompt::Tokens(self.prompt.clone()), max_tokens).recorded()
    }
}

/// The requests of these, for whole texts.
pub fn jobs_of(cases: &[Case]) -> Vec<Job> {
    cases.iter().map(|case| case.job(TOKENS)).collect()
}

/// The answers to these requests, each by itself.
pub async fn one_by_one(engine: &Engine, jobs: &[Job]) -> Vec<Generation> {
    let mut got = Vec::new();
    for job in jobs {
        got.push(engine.generate(job, |_| ()).await.unwrap());
    }
    got
}

/// The answers to these requests, which come at the same time.
pub async fn together(engine: &Engine, jobs: &[Job]) -> Vec<Generation> {
    let running = jobs.iter().map(|job| engine.generate(job, |_| ()));
    try_join_all(running).await.unwrap()
}

/// A prompt of 3 to 40 tokens; no two of one length.
pub fn prompt(index: usize) -> Vec<u32> {
    let length = 3 + index * 7 % 38;
    (0..length)
        .map(|i| ((i * i * 31 + i * 17 + index * 101) % (VOCAB - 1)) as u32)
        .collect()
}

/// One greedy answer with its tokens.
pub async fn run(engine: &Engine, prompt: Vec<u32>, max_tokens: usize) -> Generation {
    let job = Job::greedy(Prompt::Tokens(prompt), max_tokens).recorded();
    engine.generate(&job, |_| ()).await.unwrap()
}

/// The texts of all prompts, decoded plainly.
pub async fn plain_text(target: &Target) -> Arc<Vec<Case>> {
    let plain = Engine::load(&Setup::plain(&target.path)).await.unwrap();
    texts_of(&plain).await
}

/// The texts that this engine gives.
pub async fn texts_of(plain: &Engine) -> Arc<Vec<Case>> {
    first_texts_of(plain, PROMPTS).await
}

/// The texts that this engine gives to the first prompts.
pub async fn first_texts_of(plain: &Engine, prompts: usize) -> Arc<Vec<Case>> {
    let mut cases = Vec::new();
    for prompt in (0..prompts).map(prompt) {
        let want = run(plain, prompt.clone(), TOKENS).await;
        assert_eq!(want.tokens.len(), TOKENS);
        cases.push(Case { prompt, want });
    }
    let mut seen: Vec<u32> = cases.iter().flat_map(|c| c.want.tokens.clone()).collect();
    seen.sort_unstable();
    seen.dedup();
    assert!(seen.len() > prompts, "only {} different tokens", seen.len());
    Arc::new(cases)
}

/// Drafts the plain text, with an error at an offset that differs from call to call: the accept
/// length is that offset.
pub fn oracle(cases: Arc<Vec<Case>>) -> DraftHook {
    let calls = AtomicUsize::new(0);
    Arc::new(move |tokens, drafts| {
        let known = cases.iter().find_map(|case| {
            let generated = tokens.strip_prefix(case.prompt.as_slice())?;
            case.want.tokens.strip_prefix(generated)
        });
        let Some(future) = known else {
            return;
        };
        for (draft, token) in drafts.iter_mut().zip(future) {
            *draft = *token;
        }
        let call = calls.fetch_add(1, Ordering::Relaxed) as u64 + 1;
        let wrong = (call.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) as usize % (drafts.len() + 1);
        if let Some(draft) = drafts.get_mut(wrong) {
            *draft = (*draft + 1) % VOCAB as u32;
        }
    })
}

/// Drafts of which exactly the first so many are right, by the index of the case.
pub fn right_up_to(
    accepted: impl Fn(usize) -> usize + Send + Sync + 'static,
    cases: Arc<Vec<Case>>,
) -> DraftHook {
    Arc::new(move |tokens, drafts| {
        let known = cases.iter().enumerate().find_map(|(i, case)| {
            let generated = tokens.strip_prefix(case.prompt.as_slice())?;
            Some((i, case.want.tokens.strip_prefix(generated)?))
        });
        let Some((case, future)) = known else {
            return;
        };
        for (i, (draft, token)) in drafts.iter_mut().zip(future).enumerate() {
            *draft = match i < accepted(case) {
                true => *token,
                false => (*token + 1) % VOCAB as u32,
            };
        }
    })
}

/// The same tokens as the plain ones, but for near ties.
pub fn check_text(what: &str, cases: &[Case], got: &[Generation]) {
    for (case, got) in cases.iter().zip(got) {
        let what = format!("{what}, prompt of {}", case.prompt.len());
        let differ = compare_greedy(&what, &case.want.tokens, &case.want.gaps, &got.tokens);
        if let Some(at) = differ.unwrap() {
            println!("{what}: differs at token {at}, a near tie");
        }
    }
}

/// Largest difference, relative to the largest value.
pub fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let largest = a.iter().fold(0f32, |most, x| most.max(x.abs()));
    let differ = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differ.fold(0f32, f32::max) / largest.max(1e-6)
}
