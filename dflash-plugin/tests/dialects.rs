//! Every config dialect gives the numbers of the public reference code over three steps that share one
//! context: a prompt of 29 rows, then 3, then 1. See `fixtures/dialects/README.md`.

mod common;

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use common::{assert_close, fixtures, load, materialize};
use dflash_plugin::checkpoint::Checkpoint;

const STEPS: usize = 3;

fn check_dialect(name: &str) {
    let dir = fixtures().join("dialects").join(name);
    let io = load(&dir.join("io.safetensors"));
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let model = checkpoint.load(DType::F32, &Device::Cpu).unwrap();
    let n_target = checkpoint.config().num_target_layers.unwrap();
    let ids: Vec<i64> = io["target_layer_ids"].to_vec1().unwrap();
    let found = checkpoint.config().target_layer_ids(n_target).unwrap();
    assert!(
        found.iter().map(|id| *id as i64).eq(ids.iter().copied()),
        "{name}: ids {found:?}, expected {ids:?}"
    );
    let mut kv = model.new_kv().unwrap();
    for step in 0..STEPS {
        let at = |key: &str| &io[&format!("step{step}.{key}")];
        let fused = materialize(&model, &mut kv, at("target_hidden"));
        assert_close(&format!("{name} step {step} fused"), &fused, at("fused"));
        check_context(name, step, &io, &kv);
        let block = at("noise_embedding").unsqueeze(0).unwrap();
        let hidden = model.forward_block(&block, &[&kv]).unwrap();
        let hidden = hidden.squeeze(0).unwrap();
        assert_close(&format!("{name} step {step} hidden"), &hidden, at("hidden"));
        check_context(name, step, &io, &kv); // the block left no trace
    }
}

fn check_context(
    name: &str,
    step: usize,
    io: &HashMap<String, Tensor>,
    kv: &dflash_plugin::kv::SequenceKv,
) {
    for layer in [0, kv.num_layers() - 1] {
        let (k, v) = kv.layer(layer).unwrap();
        for (which, found) in [("context_k", k), ("context_v", v)] {
            let key = format!("step{step}.layer{layer}.{which}");
            assert_close(&format!("{name} {key}"), &found, &io[&key]);
        }
    }
}

#[test]
fn keys_at_the_top_level() {
    check_dialect("v1_top_level");
}

#[test]
fn nested_keys_with_more_taps_than_layers() {
    check_dialect("nested_taps_ne_layers");
}

#[test]
fn default_layer_ids_round_ties_to_even() {
    check_dialect("default_ids_ties_to_even");
}

#[test]
fn attention_biases_with_yarn() {
    check_dialect("bias_yarn");
}

#[test]
fn llama3_rope() {
    check_dialect("llama3_rope");
}

#[test]
fn linear_rope() {
    check_dialect("linear_rope");
}

#[test]
fn heads_wider_than_the_model_with_taps_in_descending_order() {
    check_dialect("wide_heads");
}

#[test]
fn sliding_layers_causal_in_the_block_beside_a_full_one() {
    check_dialect("mixed_sliding");
}

#[test]
fn all_layers_sliding_and_declared_not_causal() {
    check_dialect("all_sliding_not_causal");
}
