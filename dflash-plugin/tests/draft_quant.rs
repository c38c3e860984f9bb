//! A quantized draft model beside the exact one. Needs the target, as `golden_with_target.rs` does.
#![cfg(feature = "host")]

mod common;

use candle_core::{DType, Device, Tensor};
use common::{golden, materialize, smollm2_drafter, smollm2_embedding, worst_row_error};
use dflash_plugin::checkpoint::Checkpoint;
use dflash_plugin::host::HostQuantizer;
use dflash_plugin::quantize::Quantizer;

const CPU: Device = Device::Cpu;
const LAYERS: usize = 5;

/// The final hidden states of the trained draft model, quantized, after a recorded prompt; beside
/// PyTorch's.
fn found_and_expected(prompt: &str, block: usize, quant: &str) -> (Tensor, Tensor) {
    let golden = golden();
    let quantizer = HostQuantizer::choose(Some(quant), None, &CPU).unwrap();
    let quantizer = quantizer
        .as_ref()
        .map(|quantizer| quantizer as &dyn Quantizer);
    let checkpoint = Checkpoint::open(&smollm2_drafter()).unwrap();
    let model = checkpoint
        .load_quantized(DType::F32, &CPU, quantizer)
        .unwrap();
    let mut kv = model.new_kv().unwrap();
    materialize(&model, &mut kv, &golden[&format!("{prompt}.target_hidden")]);
    let at = |key: &str| &golden[&format!("{prompt}.block{block}.{key}")];
    let ids = at("ids").to_dtype(DType::U32).unwrap();
    let embeds = smollm2_embedding().index_select(&ids, 0).unwrap();
    let embeds = embeds.unsqueeze(0).unwrap();
    let hidden = model.forward_block(&embeds, &[&kv]).unwrap();
    (hidden.squeeze(0).unwrap(), at("hidden").clone())
}

/// A number is off by half a step at most, which is 1/254 of its block's largest: so much of its
/// result each of the four products of a layer may add, all in the same direction.
#[test]
fn with_q8_0_every_row_is_within_half_a_step_for_each_product() {
    let allowed = (4 * LAYERS) as f64 * 0.5 / 127.0;
    for (prompt, block) in [("short", 16), ("medium", 16), ("medium", 8)] {
        let (found, expected) = found_and_expected(prompt, block, "q8_0");
        let error = worst_row_error(&found, &expected);
        println!("{prompt}, block {block}: {error:.4}, allowed {allowed:.4}");
        assert!(error < allowed, "{prompt}, block {block}: {error}");
        assert!(error > common::TOLERANCE, "nothing was quantized: {error}");
    }
}

#[test]
fn fewer_bits_are_further_off() {
    let error = |quant| {
        let (found, expected) = found_and_expected("medium", 16, quant);
        worst_row_error(&found, &expected)
    };
    let errors = ["none", "q8_0", "q4k", "q2k"].map(error);
    println!("none, q8_0, q4k, q2k: {errors:.4?}");
    assert!(errors.is_sorted(), "{errors:?}");
    assert!(
        errors[0] < common::TOLERANCE && errors[2] > 3.0 * errors[1],
        "{errors:?}"
    );
}

/// What is materialized is projected once and attended to ever after.
#[test]
fn the_context_is_not_quantized() {
    let golden = golden();
    let checkpoint = Checkpoint::open(&smollm2_drafter()).unwrap();
    let quantizer = HostQuantizer::choose(Some("q4_0"), None, &CPU).unwrap();
    let quantizer = quantizer
        .as_ref()
        .map(|quantizer| quantizer as &dyn Quantizer);
    let [exact, quantized] = [None, quantizer].map(|quantizer| {
        let model = checkpoint.load_quantized(DType::F32, &CPU, quantizer);
        let model = model.unwrap();
        let mut kv = model.new_kv().unwrap();
        materialize(&model, &mut kv, &golden["medium.target_hidden"]);
        kv
    });
    for layer in 0..LAYERS {
        let (exact, quantized) = (exact.layer(layer).unwrap(), quantized.layer(layer).unwrap());
        assert_eq!(worst_row_error(&quantized.0, &exact.0), 0.0);
        assert_eq!(worst_row_error(&quantized.1, &exact.1), 0.0);
    }
}

#[test]
fn the_memory_figure_is_that_of_the_quantized_weights() {
    let checkpoint = Checkpoint::open(&smollm2_drafter()).unwrap();
    let bytes = |quant: &str| {
        let quantizer = HostQuantizer::choose(Some(quant), None, &CPU).unwrap();
        let quantizer = quantizer
            .as_ref()
            .map(|quantizer| quantizer as &dyn Quantizer);
        checkpoint.bytes(DType::F32, quantizer)
    };
    let exact = bytes("none");
    // Of a layer: q, k and v, o, gate and up on 576 columns; down on 1536.
    let (narrow, wide) = ((576 + 2 * 192 + 576 + 2 * 1536) * 576, 576 * 1536);
    let saved = |narrow_bits: f64, wide_bits: f64| {
        let bits = narrow as f64 * (32.0 - narrow_bits) + wide as f64 * (32.0 - wide_bits);
        (LAYERS as f64 * bits / 8.0) as usize
    };
    assert_eq!(bytes("q8_0"), exact - saved(8.5, 8.5));
    assert_eq!(bytes("q4k"), exact - saved(5.0, 4.5)); // q4_1 where 256 does not divide the width
    assert_eq!(bytes("fp8"), exact - saved(8.0, 8.0));
}
