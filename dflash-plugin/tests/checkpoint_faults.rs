//! A damaged or mismatched checkpoint is refused with the file, the tensor and what to do.

mod common;

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use common::{fixtures, load};
use dflash_plugin::checkpoint::Checkpoint;
use dflash_plugin::error::DFlashError;
use serde_json::{json, Value};
use tempfile::TempDir;

const CPU: Device = Device::Cpu;
const WEIGHTS: &str = "model.safetensors";

fn dialect() -> std::path::PathBuf {
    fixtures().join("dialects/v1_top_level")
}

/// A copy of a good checkpoint, with weights and config edited.
fn edited(
    weights: impl FnOnce(&mut HashMap<String, Tensor>),
    config: impl FnOnce(&mut Value),
) -> TempDir {
    let dir = TempDir::new().unwrap();
    let mut tensors = load(&dialect().join(WEIGHTS));
    weights(&mut tensors);
    candle_core::safetensors::save(&tensors, dir.path().join(WEIGHTS)).unwrap();
    let text = fs::read_to_string(dialect().join("config.json")).unwrap();
    let mut json = serde_json::from_str(&text).unwrap();
    config(&mut json);
    fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
    dir
}

fn with_weights(edit: impl FnOnce(&mut HashMap<String, Tensor>)) -> TempDir {
    edited(edit, |_| ())
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &CPU).unwrap()
}

/// The message of opening and loading, which must contain all of `parts`.
#[track_caller]
fn assert_refused(dir: &Path, parts: &[&str]) {
    let error = Checkpoint::open(dir)
        .and_then(|checkpoint| checkpoint.load(DType::F32, &CPU))
        .err()
        .expect("the checkpoint was accepted");
    assert!(!matches!(error, DFlashError::Candle(_)), "{error}");
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

/// Writes a weight file of a given header and data.
fn write_raw(dir: &Path, header: &str, data: &[u8]) {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    fs::write(dir.join(WEIGHTS), file).unwrap();
}

#[test]
fn an_unedited_copy_loads() {
    let dir = with_weights(|_| ());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.dir(), dir.path());
    assert!(checkpoint.load(DType::F32, &CPU).is_ok());
}

#[test]
fn names_with_the_model_prefix_load() {
    let dir = with_weights(|tensors| {
        *tensors = tensors
            .drain()
            .map(|(name, tensor)| (format!("model.{name}"), tensor))
            .collect();
    });
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.load(DType::F32, &CPU).is_ok());
}

#[test]
fn a_name_with_and_without_prefix_is_stored_twice() {
    let dir = with_weights(|tensors| {
        let norm = tensors["norm.weight"].clone();
        tensors.insert("model.norm.weight".into(), norm);
    });
    assert_refused(dir.path(), &["norm.weight", "stored twice"]);
}

#[test]
fn a_file_cut_off_in_its_data_names_a_tensor() {
    let dir = with_weights(|_| ());
    let file = dir.path().join(WEIGHTS);
    let data = fs::read(&file).unwrap();
    fs::write(&file, &data[..data.len() - 10]).unwrap();
    assert_refused(
        dir.path(),
        &[WEIGHTS, "tensor `", "cut off", "fetch the file again"],
    );
}

#[test]
fn a_file_cut_off_in_its_header_is_refused() {
    let dir = with_weights(|_| ());
    let file = dir.path().join(WEIGHTS);
    let data = fs::read(&file).unwrap();
    for (len, part) in [(100, "cut off inside its header"), (5, "only 5 bytes long")] {
        fs::write(&file, &data[..len]).unwrap();
        assert_refused(dir.path(), &[WEIGHTS, part]);
    }
}

#[test]
fn a_file_that_is_no_safetensors_is_refused() {
    let dir = with_weights(|_| ());
    fs::write(
        dir.path().join(WEIGHTS),
        "version https://git-lfs.github.com/spec/v1",
    )
    .unwrap();
    assert_refused(dir.path(), &[WEIGHTS, "not a safetensors file"]);
}

#[test]
fn an_unreadable_header_is_refused() {
    let dir = with_weights(|_| ());
    write_raw(dir.path(), "{nonsense", b"");
    assert_refused(dir.path(), &[WEIGHTS, "unreadable header"]);
    write_raw(dir.path(), r#"{"fc.weight": {"shape": [2]}}"#, b"");
    assert_refused(
        dir.path(),
        &["fc.weight", "unreadable header entry", "dtype"],
    );
}

#[test]
fn a_header_that_lies_about_its_data_is_refused() {
    let dir = with_weights(|_| ());
    let entry = |offsets: &str, shape: &str| {
        format!(r#"{{"fc.weight":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    write_raw(dir.path(), &entry("[0,8]", "[3]"), &[0; 8]);
    assert_refused(dir.path(), &["fc.weight", "takes 12 bytes", "0..8"]);
    write_raw(dir.path(), &entry("[8,0]", "[2]"), &[0; 8]);
    assert_refused(dir.path(), &["fc.weight", "8..0"]);
    write_raw(
        dir.path(),
        &entry("[0,8]", "[9223372036854775807, 4]"),
        &[0; 8],
    );
    assert_refused(dir.path(), &["fc.weight", "too large"]);
    write_raw(dir.path(), &entry("[0,8]", "[2]"), &[0; 11]);
    assert_refused(dir.path(), &["3 bytes follow the last tensor"]);
}

#[test]
fn tensors_that_overlap_are_refused() {
    let dir = with_weights(|_| ());
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                     "b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    write_raw(dir.path(), header, &[0; 12]);
    assert_refused(dir.path(), &["tensor `b`", "overlaps that of `a`"]);
}

#[test]
fn random_damage_to_the_header_never_panics() {
    let dir = with_weights(|_| ());
    let good = fs::read(dir.path().join(WEIGHTS)).unwrap();
    let header_len = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize + 8;
    let mut state = 7u64; // a linear congruential generator: the same damage on every run
    let mut next = |below: usize| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let mut refused = 0;
    for _ in 0..400 {
        let mut data = good.clone();
        for _ in 0..1 + next(3) {
            data[next(header_len)] = next(256) as u8;
        }
        fs::write(dir.path().join(WEIGHTS), data).unwrap();
        let outcome =
            Checkpoint::open(dir.path()).and_then(|checkpoint| checkpoint.load(DType::F32, &CPU));
        refused += usize::from(outcome.is_err());
    }
    assert!(refused > 350, "only {refused} of 400 were refused");
}

#[test]
fn a_missing_tensor_is_named_with_its_shape() {
    let dir = with_weights(|tensors| {
        tensors.remove("layers.1.mlp.up_proj.weight");
    });
    assert_refused(
        dir.path(),
        &["layers.1.mlp.up_proj.weight", "missing;", "[96, 64]"],
    );
}

#[test]
fn a_missing_layer_points_to_the_layer_count() {
    let dir = edited(
        |_| (),
        |json| {
            json["num_hidden_layers"] = 4.into();
            json["layer_types"] = vec!["full_attention"; 4].into();
        },
    );
    assert_refused(
        dir.path(),
        &[
            "layers.3.",
            "as are 10 others",
            "announces 4 layers (`num_hidden_layers`)",
        ],
    );
}

#[test]
fn a_layer_too_many_points_to_the_layer_count() {
    let dir = edited(
        |_| (),
        |json| {
            json["num_hidden_layers"] = 2.into();
            json["layer_types"] = vec!["full_attention"; 2].into();
        },
    );
    assert_refused(
        dir.path(),
        &["belongs to layer 2", "`num_hidden_layers` is 2"],
    );
}

#[test]
fn extra_tensors_are_refused_with_their_reason() {
    let cases = [
        (
            "embed_tokens.weight",
            "embedding and lm_head are the target's",
        ),
        ("lm_head.weight", "embedding and lm_head are the target's"),
        ("candidate_selector.hidden_projection.weight", "DFlash 2"),
        ("layers.0.attention_conv.base_kernel", "DFlash 2"),
        ("d2t", "reduced draft vocabulary"),
        ("mask_hidden", "trained mask embedding"),
        (
            "layers.0.self_attn.q_proj.bias",
            "`attention_bias` is not set",
        ),
        (
            "layers.0.self_attn.g_proj.weight",
            "not a tensor of a DFlash draft model",
        ),
    ];
    for (name, reason) in cases {
        let dir = with_weights(|tensors| {
            tensors.insert(name.into(), zeros(&[4]));
        });
        assert_refused(dir.path(), &[name, reason]);
    }
}

#[test]
fn a_missing_bias_points_to_attention_bias() {
    let dir = edited(|_| (), |json| json["attention_bias"] = true.into());
    assert_refused(
        dir.path(),
        &["_proj.bias", "missing", "`attention_bias` is true"],
    );
}

#[test]
fn a_wrong_shape_names_both_shapes_and_the_keys() {
    let dir = with_weights(|tensors| {
        tensors.insert("layers.2.self_attn.k_proj.weight".into(), zeros(&[64, 64]));
    });
    assert_refused(
        dir.path(),
        &[
            "layers.2.self_attn.k_proj.weight",
            "expected shape [32, 64], found [64, 64]",
            "`num_key_value_heads`",
        ],
    );
}

#[test]
fn taps_that_do_not_fit_fc_point_to_the_layer_ids() {
    let dir = edited(
        |_| (),
        |json| json["dflash_config"]["target_layer_ids"] = json!([1, 9]),
    );
    assert_refused(
        dir.path(),
        &[
            "fc.weight",
            "[64, 128]",
            "[64, 192]",
            "2 taps of 64",
            "target_layer_ids",
        ],
    );
}

#[test]
fn a_type_that_is_no_float_is_refused() {
    let dir = with_weights(|tensors| {
        let norm = zeros(&[64]).to_dtype(DType::I64).unwrap();
        tensors.insert("norm.weight".into(), norm);
    });
    assert_refused(
        dir.path(),
        &["norm.weight", "F32, F16 or BF16", "found I64"],
    );
}

#[test]
fn weights_that_are_not_finite_are_refused_in_every_type() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (value, shown) in [(f64::NAN, "NaN"), (f64::NEG_INFINITY, "-inf")] {
            let dir = with_weights(|tensors| {
                for tensor in tensors.values_mut() {
                    *tensor = tensor.to_dtype(dtype).unwrap();
                }
                let norm = Tensor::full(value as f32, 64, &CPU).unwrap();
                let norm = norm.to_dtype(dtype).unwrap();
                tensors.insert("layers.1.self_attn.o_proj.weight".into(), {
                    let good = tensors["layers.1.self_attn.o_proj.weight"].clone();
                    good.slice_set(&norm.unsqueeze(0).unwrap(), 0, 2).unwrap();
                    good
                });
            });
            assert_refused(
                dir.path(),
                &[
                    "layers.1.self_attn.o_proj.weight",
                    "element 128 is",
                    shown,
                    "finite",
                ],
            );
        }
    }
}

#[test]
fn values_beyond_f16_are_refused_when_loaded_as_f16() {
    let dir = with_weights(|tensors| {
        tensors.insert(
            "norm.weight".into(),
            Tensor::full(1e6f32, 64, &CPU).unwrap(),
        );
    });
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.load(DType::F32, &CPU).is_ok());
    let error = checkpoint.load(DType::F16, &CPU).err().unwrap().to_string();
    assert!(
        error.contains("norm.weight") && error.contains("range of f16"),
        "{error}"
    );
}

#[test]
fn a_file_that_shrinks_after_opening_is_an_error() {
    let dir = with_weights(|_| ());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let file = dir.path().join(WEIGHTS);
    fs::write(&file, b"short").unwrap();
    let error = checkpoint.load(DType::F32, &CPU).err().unwrap().to_string();
    assert!(
        error.contains("cannot read") && error.contains(WEIGHTS),
        "{error}"
    );
}

#[test]
fn missing_files_are_named() {
    let dir = TempDir::new().unwrap();
    assert_refused(dir.path(), &["no config.json"]);
    fs::copy(
        dialect().join("config.json"),
        dir.path().join("config.json"),
    )
    .unwrap();
    assert_refused(
        dir.path(),
        &["neither model.safetensors nor model.safetensors.index.json"],
    );
}

#[test]
fn a_trained_mask_embedding_beside_the_weights_is_refused() {
    let dir = with_weights(|_| ());
    fs::write(dir.path().join("mask_embedding.pt"), b"").unwrap();
    assert_refused(dir.path(), &["mask_embedding.pt", "not supported"]);
}

#[test]
fn shards_load_and_their_faults_name_the_index() {
    let dir = with_weights(|_| ());
    let single = dir.path().join(WEIGHTS);
    let tensors = load(&single);
    fs::remove_file(&single).unwrap();
    let mut shards = [HashMap::new(), HashMap::new()];
    let mut map = serde_json::Map::new();
    for (i, (name, tensor)) in tensors.into_iter().enumerate() {
        map.insert(name.clone(), format!("shard-{}.safetensors", i % 2).into());
        shards[i % 2].insert(name, tensor);
    }
    for (i, shard) in shards.iter().enumerate() {
        let file = dir.path().join(format!("shard-{i}.safetensors"));
        candle_core::safetensors::save(shard, file).unwrap();
    }
    let index = dir.path().join("model.safetensors.index.json");
    fs::write(&index, json!({ "weight_map": map }).to_string()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.load(DType::F32, &CPU).is_ok());

    for (shard, part) in [
        ("../outside.safetensors", "in the same folder"),
        ("gone.safetensors", "does not exist"),
    ] {
        let mut map = map.clone();
        map.insert("norm.weight".into(), shard.into());
        fs::write(&index, json!({ "weight_map": map }).to_string()).unwrap();
        assert_refused(dir.path(), &["index.json", "norm.weight", shard, part]);
    }
    fs::write(&index, "{}").unwrap();
    assert_refused(dir.path(), &["index.json", "weight_map"]);
}
