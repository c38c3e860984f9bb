//! What the draft model promises beside its numbers: batches, views, limits, options.

mod common;

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use common::{assert_close, fixtures, load, materialize, worst_row_error};
use dflash_plugin::checkpoint::Checkpoint;
use dflash_plugin::config::DraftConfig;
use dflash_plugin::draft::DraftModel;
use dflash_plugin::kv::SequenceKv;

const CPU: Device = Device::Cpu;

fn dialect(name: &str) -> DraftModel {
    let checkpoint = Checkpoint::open(&fixtures().join("dialects").join(name)).unwrap();
    checkpoint.load(DType::F32, &CPU).unwrap()
}

/// The dialect's weights under its config with `edit` applied.
fn dialect_with(name: &str, edit: impl FnOnce(&mut serde_json::Value)) -> DraftModel {
    let dir = fixtures().join("dialects").join(name);
    let weights = load(&dir.join("model.safetensors"));
    with_weights(name, weights, edit)
}

fn with_weights(
    name: &str,
    weights: HashMap<String, Tensor>,
    edit: impl FnOnce(&mut serde_json::Value),
) -> DraftModel {
    let file = fixtures().join("dialects").join(name).join("config.json");
    let mut json = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    edit(&mut json);
    let config = DraftConfig::from_json(&json.to_string()).unwrap();
    let vb = VarBuilder::from_tensors(weights, DType::F32, &CPU);
    DraftModel::new(&config, config.num_taps(), vb).unwrap()
}

/// A repeatable context of `rows` random rows.
fn context(model: &DraftModel, rows: usize) -> SequenceKv {
    let mut kv = model.new_kv().unwrap();
    if rows > 0 {
        let taps = Tensor::randn(0f32, 1.0, (rows, model.taps_width()), &CPU).unwrap();
        materialize(model, &mut kv, &taps);
    }
    kv
}

fn blocks(model: &DraftModel, batch: usize, block: usize) -> Tensor {
    Tensor::randn(0f32, 1.0, (batch, block, model.hidden_size()), &CPU).unwrap()
}

#[test]
fn a_batch_of_ragged_contexts_gives_what_each_sequence_gives_alone() {
    for name in ["mixed_sliding", "bias_yarn", "all_sliding_not_causal"] {
        let model = dialect(name);
        let kvs: Vec<SequenceKv> = [0, 5, 40, 11].map(|n| context(&model, n)).into();
        let embeds = blocks(&model, kvs.len(), 8);
        let together = model
            .forward_block(&embeds, &kvs.iter().collect::<Vec<_>>())
            .unwrap();
        for (b, kv) in kvs.iter().enumerate() {
            let alone = model
                .forward_block(&embeds.narrow(0, b, 1).unwrap(), &[kv])
                .unwrap();
            assert_close(name, &together.narrow(0, b, 1).unwrap(), &alone);
        }
    }
}

#[test]
fn materializing_rows_one_by_one_or_with_gaps_gives_the_same_rows() {
    let model = dialect("mixed_sliding");
    let taps = Tensor::randn(0f32, 1.0, (9, model.taps_width()), &CPU).unwrap();
    let fused = model.fuse(&taps).unwrap();
    let all = model
        .context_kv(&fused, &(20..29).collect::<Vec<_>>())
        .unwrap();
    for rows in [vec![3usize], vec![0, 4, 8], vec![7, 2]] {
        let ids = Tensor::new(rows.iter().map(|r| *r as u32).collect::<Vec<_>>(), &CPU).unwrap();
        let positions: Vec<usize> = rows.iter().map(|row| 20 + row).collect();
        let some = model
            .context_kv(&fused.index_select(&ids, 0).unwrap(), &positions)
            .unwrap();
        for (some, all) in some.iter().zip(&all) {
            assert_close("K", &some.0, &all.0.index_select(&ids, 1).unwrap());
            assert_close("V", &some.1, &all.1.index_select(&ids, 1).unwrap());
        }
    }
}

#[test]
fn a_causal_block_is_a_prefix_of_a_longer_one_and_a_bidirectional_one_is_not() {
    let model = dialect_with("v1_top_level", |json| json["is_causal"] = true.into());
    let kv = context(&model, 17);
    let long = blocks(&model, 1, 8);
    let short = long.narrow(1, 0, 3).unwrap();
    let prefix = |model: &DraftModel| {
        let long = model.forward_block(&long, &[&kv]).unwrap();
        let short = model.forward_block(&short, &[&kv]).unwrap();
        worst_row_error(&long.narrow(1, 0, 3).unwrap(), &short)
    };
    assert!(prefix(&model) < 1e-4);
    assert!(prefix(&dialect("v1_top_level")) > 1e-2);
}

#[test]
fn context_outside_the_window_does_not_matter() {
    let model = dialect("all_sliding_not_causal");
    let (far, near) = (context(&model, 30), context(&model, 11));
    // Two contexts of 41 rows that differ in the first 30; the window holds 12 with the current token.
    let joined = |first: &SequenceKv| {
        let mut kv = first.deep_clone_prefix(30).unwrap();
        kv.append((0..2).map(|i| near.layer(i).unwrap()).collect())
            .unwrap();
        kv
    };
    let (a, b) = (joined(&far), joined(&context(&model, 30)));
    let embeds = blocks(&model, 1, 8);
    let with_a = model.forward_block(&embeds, &[&a]).unwrap();
    let with_b = model.forward_block(&embeds, &[&b]).unwrap();
    assert_eq!(worst_row_error(&with_a, &with_b), 0.0);
}

#[test]
fn interleaved_rope_is_the_usual_one_with_the_head_dimensions_permuted() {
    let name = "v1_top_level";
    let dir = fixtures().join("dialects").join(name);
    let mut weights = load(&dir.join("model.safetensors"));
    let (head_dim, half) = (16u32, 8u32);
    // Interleaved dimension 2i is the usual i, and 2i + 1 is i + half.
    let order: Vec<u32> = (0..head_dim).map(|d| d / 2 + (d % 2) * half).collect();
    for (weight, tensor) in weights.iter_mut() {
        let is_qk = ["q_proj", "k_proj", "q_norm", "k_norm"]
            .iter()
            .any(|part| weight.contains(part));
        if is_qk {
            let rows = tensor.dim(0).unwrap() as u32;
            let ids: Vec<u32> = (0..rows)
                .map(|row| row / head_dim * head_dim + order[(row % head_dim) as usize])
                .collect();
            *tensor = tensor
                .index_select(&Tensor::new(ids, &CPU).unwrap(), 0)
                .unwrap();
        }
    }
    let usual = dialect(name);
    let interleaved = with_weights(name, weights, |json| json["is_neox_style"] = false.into());
    let taps = Tensor::randn(0f32, 1.0, (13, usual.taps_width()), &CPU).unwrap();
    let embeds = blocks(&usual, 1, 8);
    let outputs = [usual, interleaved].map(|model| {
        let mut kv = model.new_kv().unwrap();
        materialize(&model, &mut kv, &taps);
        model.forward_block(&embeds, &[&kv]).unwrap()
    });
    assert_close("interleaved", &outputs[1], &outputs[0]);
}

#[test]
fn the_embedding_scale_is_applied_to_the_block() {
    let plain = dialect("v1_top_level");
    let scaled = dialect_with("v1_top_level", |json| {
        json["dflash_config"]["input_embedding_scale"] = 3.0.into()
    });
    let kv = context(&plain, 6);
    let embeds = blocks(&plain, 1, 4);
    let expected = plain
        .forward_block(&(&embeds * 3.0).unwrap(), &[&kv])
        .unwrap();
    let found = scaled.forward_block(&embeds, &[&kv]).unwrap();
    assert_close("scaled", &found, &expected);
}

#[test]
fn positions_up_to_the_last_one_are_allowed_and_no_further() {
    let model = dialect("v1_top_level"); // 512 positions
    assert_eq!(model.max_positions(), 512);
    let kv = context(&model, 500);
    assert!(model.forward_block(&blocks(&model, 1, 12), &[&kv]).is_ok());
    let error = model
        .forward_block(&blocks(&model, 1, 13), &[&kv])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("below `max_position_embeddings` 512, found 512"),
        "{error}"
    );
}

#[test]
fn wrong_shapes_are_refused_with_the_shape_that_is_expected() {
    let model = dialect("v1_top_level");
    let kv = context(&model, 4);
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &CPU).unwrap();
    let fuse = model.fuse(&zeros(&[5, 64])).unwrap_err().to_string();
    assert!(
        fuse.contains("expected [rows, 192], found [5, 64]"),
        "{fuse}"
    );
    let count = model.context_kv(&zeros(&[5, 64]), &[1]).unwrap_err();
    assert!(count.to_string().contains("expected 5, found 1"), "{count}");
    let width = model
        .forward_block(&zeros(&[1, 8, 63]), &[&kv])
        .unwrap_err();
    let width = width.to_string();
    assert!(width.contains("[batch, block, 64]"), "{width}");
    let batch = model
        .forward_block(&zeros(&[2, 8, 64]), &[&kv])
        .unwrap_err();
    assert!(batch.to_string().contains("expected 2, found 1"), "{batch}");
    let other = dialect("wide_heads").new_kv().unwrap();
    let layers = model
        .forward_block(&zeros(&[1, 8, 64]), &[&other])
        .unwrap_err();
    assert!(
        layers.to_string().contains("layers of the draft K/V"),
        "{layers}"
    );
}

#[test]
fn half_precision_is_close_and_bf16_on_the_cpu_is_refused() {
    let dir = fixtures().join("dialects/mixed_sliding");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let error = checkpoint.load(DType::BF16, &CPU).err().unwrap();
    assert!(error.to_string().contains("--dtype f32"), "{error}");

    let (single, half) = (
        dialect("mixed_sliding"),
        checkpoint.load(DType::F16, &CPU).unwrap(),
    );
    let taps = Tensor::randn(0f32, 1.0, (13, single.taps_width()), &CPU).unwrap();
    let embeds = blocks(&single, 1, 8);
    let outputs = [single, half].map(|model| {
        let mut kv = model.new_kv().unwrap();
        materialize(&model, &mut kv, &taps);
        model.forward_block(&embeds, &[&kv]).unwrap()
    });
    assert!(worst_row_error(&outputs[1], &outputs[0]) < 1e-2);
}
