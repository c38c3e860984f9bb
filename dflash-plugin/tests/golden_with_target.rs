//! The trained draft model gives PyTorch's block outputs and logits, with the target's embedding.
//!
//! Needs the target: `cargo xtask model` makes it in its default place, `DFLASH_TEST_TARGET` names another folder.

mod common;

use candle_core::{DType, Device};
use common::{assert_close, golden, materialize, smollm2_drafter, smollm2_embedding};
use dflash_plugin::checkpoint::Checkpoint;

/// Allowed absolute error of a logit (they are around 10 to 30).
const LOGIT_TOLERANCE: f32 = 2e-3;

fn check_prompt(prompt: &str) {
    let golden = golden();
    let checkpoint = Checkpoint::open(&smollm2_drafter()).unwrap();
    let model = checkpoint.load(DType::F32, &Device::Cpu).unwrap();
    let embedding = smollm2_embedding();
    let mut kv = model.new_kv().unwrap();
    materialize(&model, &mut kv, &golden[&format!("{prompt}.target_hidden")]);
    for block in [16, 8] {
        let at = |key: &str| &golden[&format!("{prompt}.block{block}.{key}")];
        let ids = at("ids").to_dtype(DType::U32).unwrap();
        let embeds = embedding.index_select(&ids, 0).unwrap();
        let hidden = model
            .forward_block(&embeds.unsqueeze(0).unwrap(), &[&kv])
            .unwrap()
            .squeeze(0)
            .unwrap();
        assert_close(&format!("{prompt} block {block}"), &hidden, at("hidden"));

        let drafts = hidden.narrow(0, 1, block - 1).unwrap();
        let logits = embedding.matmul(&drafts.t().unwrap()).unwrap().t().unwrap();
        let logits = logits.contiguous().unwrap();
        let top_ids = at("top20_ids").to_dtype(DType::U32).unwrap();
        let found: Vec<Vec<f32>> = logits.gather(&top_ids, 1).unwrap().to_vec2().unwrap();
        let expected: Vec<Vec<f32>> = at("top20_logits").to_vec2().unwrap();
        let best: Vec<u32> = logits.argmax(1).unwrap().to_vec1().unwrap();
        let top_ids: Vec<Vec<u32>> = top_ids.to_vec2().unwrap();
        for row in 0..block - 1 {
            for (found, expected) in found[row].iter().zip(&expected[row]) {
                assert!(
                    (found - expected).abs() < LOGIT_TOLERANCE,
                    "{prompt} block {block} row {}: logit {found}, expected {expected}",
                    row + 1
                );
            }
            // Closer than twice the error, either of the two may win.
            if expected[row][0] - expected[row][1] > 2.0 * LOGIT_TOLERANCE {
                assert_eq!(best[row], top_ids[row][0], "{prompt} row {}", row + 1);
            }
        }
    }
}

#[test]
fn blocks_after_the_short_prompt_are_pytorchs() {
    check_prompt("short");
}

#[test]
fn blocks_after_the_medium_prompt_are_pytorchs() {
    check_prompt("medium");
}
