//! What the end-to-end tests share: where the models are, golden data, engines.
//!
//! `cargo xtask test` makes the models and sets the variables; without it the default places in
//! the repository are used, and a test whose model is missing fails and says so.

pub mod oracle;
pub mod server;
pub mod tiny;
mod tokenizer;
pub mod weights;
pub mod zoo;

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the tests crate is in the repository's root")
        .into()
}

fn model_path(variable: &str, default: &str) -> PathBuf {
    let path = std::env::var_os(variable).map_or_else(|| root().join(default), PathBuf::from);
    assert!(
        path.exists(),
        "{} does not exist: run `cargo xtask model`, or set {variable}",
        path.display()
    );
    path
}

/// SmolLM2-135M-Instruct as a Hugging Face folder.
pub fn target() -> PathBuf {
    model_path("DFLASH_TEST_TARGET", ".cache/smollm2-135m")
}

/// The same as the GGUF file it was made from.
pub fn gguf() -> PathBuf {
    model_path(
        "DFLASH_TEST_GGUF",
        ".cache/smollm2-135m-gguf/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}

/// Resolved prompt files (`id`, `kind`, `prompt`).
pub fn prompts() -> PathBuf {
    model_path("DFLASH_TEST_PROMPTS", ".cache/prompts")
}

/// The trained draft model in this repository.
pub fn drafter() -> PathBuf {
    root().join("models/smollm2-135m-dflash")
}

/// Whether the long versions of the tests are asked for (`cargo xtask test --full`).
pub fn full() -> bool {
    std::env::var_os("DFLASH_TEST_FULL").is_some_and(|value| value == "1")
}

/// `golden/greedy.json`: plain greedy decoding of held-out prompts.
#[derive(Debug, Deserialize)]
pub struct GreedyFile {
    pub max_new_tokens: usize,
    pub prompts: Vec<GreedyPrompt>,
}

#[derive(Debug, Deserialize)]
pub struct GreedyPrompt {
    pub id: String,
    pub input_ids: Vec<u32>,
    pub greedy_ids: Vec<u32>,
    pub gaps: Vec<f32>,
    rounds_block16: u64,
    rounds_block8: u64,
    rounds_block4: u64,
}

impl GreedyPrompt {
    /// Verify rounds that the reference took at this block size (16, 8 or 4).
    pub fn rounds(&self, block_size: usize) -> u64 {
        match block_size {
            16 => self.rounds_block16,
            8 => self.rounds_block8,
            4 => self.rounds_block4,
            _ => panic!("no recorded rounds at block {block_size}"),
        }
    }
}

/// `golden/traces.json`: speculative decoding, round by round.
#[derive(Debug, Deserialize)]
pub struct TracesFile {
    pub max_new_tokens: usize,
    pub traces: Vec<Trace>,
}

#[derive(Debug, Deserialize)]
pub struct Trace {
    pub prompt: String,
    pub block_size: usize,
    pub input_ids: Vec<u32>,
    pub output_ids: Vec<u32>,
    pub rounds: Vec<GoldenRound>,
}

#[derive(Debug, Deserialize)]
pub struct GoldenRound {
    pub anchor_position: usize,
    pub anchor_id: u32,
    pub draft_ids: Vec<u32>,
    pub accepted: usize,
    pub bonus_id: u32,
    pub draft_gaps: Vec<f32>,
}

/// Read one of the golden JSON files.
pub fn golden<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let path = golden_dir().join(name);
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Golden data; its README says what each value is and how it was made.
pub fn golden_dir() -> PathBuf {
    root().join("tests/fixtures/golden")
}

/// Positions at which two greedy runs may differ: where the target's own two best logits are
/// closer than this, another summation order may pick the other.
pub const NEAR_TIE: f32 = 1e-3;

/// Compare two recorded greedy runs of one prompt. `Ok(Some(position))` is the first difference,
/// if it is at a near tie of the reference; a difference elsewhere is an error.
pub fn compare_greedy(
    what: &str,
    reference: &[u32],
    gaps: &[f32],
    got: &[u32],
) -> Result<Option<usize>, String> {
    let differ = reference.iter().zip(got).position(|(a, b)| a != b);
    match differ {
        None if reference.len() == got.len() => Ok(None),
        None => Err(format!(
            "{what}: {} tokens instead of {}",
            got.len(),
            reference.len()
        )),
        Some(at) if gaps.get(at).is_some_and(|gap| *gap < NEAR_TIE) => Ok(Some(at)),
        Some(at) => Err(format!(
            "{what}: token {at} is {} instead of {} (gap {:?})",
            got[at],
            reference[at],
            gaps.get(at)
        )),
    }
}

/// Wait until no draft KV is left: the host drops a sequence that has ended with its next step.
pub async fn assert_no_draft_kv(engine: &dflash_bench::engine::Engine) {
    for _ in 0..100 {
        if engine.stats().live == 0 {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("draft KV outlives its sequence: {:?}", engine.stats());
}
