//! The trained draft model gives PyTorch's context features and K/V on three prompts.
//! See `tests/fixtures/golden/README.md` in the repository's root; block outputs need the target and are in `golden_with_target.rs`.

mod common;

use candle_core::{DType, Device, Tensor};
use common::{assert_close, golden, smollm2_drafter};
use dflash_plugin::checkpoint::Checkpoint;

fn positions(tensor: &Tensor) -> Vec<usize> {
    let ids: Vec<i32> = tensor.to_vec1().unwrap();
    ids.into_iter().map(|id| id as usize).collect()
}

fn check_prompt(prompt: &str) {
    let golden = golden();
    let at = |key: &str| &golden[&format!("{prompt}.{key}")];
    let checkpoint = Checkpoint::open(&smollm2_drafter()).unwrap();
    let model = checkpoint.load(DType::F32, &Device::Cpu).unwrap();
    let rows = positions(at("rows"));
    let fused = model.fuse(at("target_hidden")).unwrap();
    assert_close("context", &fused, at("context"));

    let kv = model.context_kv(&fused, &rows).unwrap();
    let kv_rows: Vec<u32> = positions(at("kv_rows"))
        .into_iter()
        .map(|row| rows.iter().position(|r| *r == row).unwrap() as u32)
        .collect();
    let kv_rows = Tensor::new(kv_rows, &Device::Cpu).unwrap();
    for layer in [0, 4] {
        let (k, v) = &kv[layer];
        for (which, found) in [("context_k", k), ("context_v", v)] {
            // [kv_heads, rows, head_dim] -> [kv rows, kv_heads, head_dim]
            let found = found.index_select(&kv_rows, 1).unwrap();
            let found = found.transpose(0, 1).unwrap();
            let key = format!("layer{layer}.{which}");
            assert_close(&key, &found, at(&key));
        }
    }
}

#[test]
fn the_context_of_the_short_prompt_is_pytorchs() {
    check_prompt("short");
}

#[test]
fn the_context_of_the_medium_prompt_is_pytorchs() {
    check_prompt("medium");
}

#[test]
fn rows_from_both_ends_of_the_long_prompt_are_pytorchs() {
    check_prompt("long");
}

#[test]
fn the_checkpoint_counts_its_parameters_and_bytes() {
    let checkpoint = Checkpoint::open(&smollm2_drafter()).unwrap();
    // fc, two norms, and in each of 5 layers q and o, k and v, the MLP, two norms, two head norms.
    let layer = 2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576 + 2 * 576 + 2 * 64;
    let parameters = 576 * 2880 + 2 * 576 + 5 * layer;
    assert_eq!(checkpoint.num_parameters(), parameters);
    // K and V projections are held twice.
    let stacked = 5 * 2 * 192 * 576;
    assert_eq!(
        checkpoint.bytes(DType::F32, None),
        (parameters + stacked) * 4
    );
    let ids = checkpoint.config().target_layer_ids(30).unwrap();
    assert_eq!(ids, [1, 8, 14, 20, 27]);
}
