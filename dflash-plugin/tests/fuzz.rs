//! Files from outside: whatever they contain, an error that names a key, a tensor or a file, and
//! never a panic, a loop without end or memory out of proportion (docs/reliability.md).

mod common;
mod fuzzing;

use std::fs;
use std::path::Path;

use candle_core::{DType, Device};
use common::allocation::Counting;
use common::fuzz::{fuzz, scratch, Outcome};
use dflash_plugin::checkpoint::{Checkpoint, CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE};
use dflash_plugin::config::DraftConfig;
use fuzzing::accepted::check_config;
use fuzzing::json::{self, apply, apply_to_text, edits, text_edits};
use fuzzing::lie::lie;
use fuzzing::{configs, corpus, named, tiny};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::Value;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const CONFIG_KEYS: &[&str] = &[
    "architectures",
    "attention_bias",
    "attention_factor",
    "attention_mode",
    "attention_sink_bias",
    "attention_value_scale",
    "beta_fast",
    "beta_slow",
    "block_size",
    "causal",
    "conv_kernel_size",
    "dflash_config",
    "draft_vocab_size",
    "factor",
    "final_logit_softcapping",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "high_freq_factor",
    "input_embedding_scale",
    "intermediate_size",
    "is_causal",
    "is_neox_style",
    "layer_types",
    "logit_scale",
    "low_freq_factor",
    "markov_rank",
    "mask_token",
    "mask_token_id",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "mscale",
    "mscale_all_dim",
    "num_attention_heads",
    "num_experts",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_target_layers",
    "original_max_position_embeddings",
    "output_multiplier",
    "partial_rotary_factor",
    "projector_type",
    "quantization_config",
    "rms_norm_eps",
    "rope_is_neox_style",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_type",
    "selector_rank",
    "shift_label",
    "sliding_window",
    "sliding_window_non_causal",
    "speculators_config",
    "target_hidden_size",
    "target_layer_ids",
    "truncate",
    "type",
    "swa_window_size",
    "use_swa",
    "use_sliding_window",
    "vocab_size",
];

const HEADER_KEYS: &[&str] = &[
    "__metadata__",
    "dtype",
    "shape",
    "data_offsets",
    "fc.weight",
    "model.fc.weight",
    "norm.weight",
    "lm_head.weight",
    "embed_tokens.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.1.mlp.up_proj.weight",
    "layers.0.self_attn.q_proj.bias",
    "candidate_selector.weight",
    "d2t",
    "mask_embedding",
];

const INDEX_KEYS: &[&str] = &[
    "metadata",
    "weight_map",
    "total_size",
    "fc.weight",
    "norm.weight",
];

/// Names of shards that must not be followed, or are no weights.
const SHARDS: &[&str] = &[
    "",
    ".",
    "..",
    "/",
    "a.safetensors",
    "b.safetensors",
    "./a.safetensors",
    "a.safetensors/",
    "../config.json",
    "/etc/passwd",
    "config.json",
    "empty",
    "folder",
    "folder/a.safetensors",
    "a.safetensors\0",
    "missing.safetensors",
    "model.safetensors.index.json",
];

#[test]
fn any_config_is_parsed_or_refused_with_its_key() {
    let corpus = corpus("config", "json");
    let mut bases: Vec<Value> = configs()
        .iter()
        .map(|file| parsed(&fs::read(file).unwrap()))
        .collect();
    bases.extend(corpus.inputs().iter().map(|(_, text)| parsed(text)));
    bases.retain(Value::is_object);
    let structured = (select(bases), edits(CONFIG_KEYS), text_edits()).prop_map(
        |(mut root, edits, text_edits)| {
            apply(&mut root, &edits);
            edited_text(&root, &text_edits)
        },
    );
    let folder = scratch();
    let (header, data) = tiny::weights("F32", 4, "", |_| true);
    let weights = tiny::file(header.to_string().as_bytes(), &data, 0);
    fs::write(folder.path().join(WEIGHTS_FILE), weights).unwrap();
    fuzz("config", &corpus, with_noise(structured), |input| {
        let file = folder.path().join(CONFIG_FILE);
        fs::write(&file, input).unwrap();
        let opened = match Checkpoint::open(folder.path()) {
            Ok(_) => "opened".to_string(),
            Err(error) => named(&error)?,
        };
        match DraftConfig::from_file(&file) {
            Ok(config) => Ok(format!("{}; {opened}", check_config(&config)?)),
            Err(error) => named(&error),
        }
    });
}

#[test]
fn any_weight_file_is_loaded_or_refused_with_its_tensor() {
    let corpus = corpus("safetensors", "safetensors");
    let mut bases: Vec<(Value, Vec<u8>)> = [("F32", 4, ""), ("F16", 2, "model."), ("BF16", 2, "")]
        .map(|(dtype, width, prefix)| tiny::weights(dtype, width, prefix, |_| true))
        .to_vec();
    bases.extend(corpus.inputs().iter().filter_map(|(_, file)| {
        let (header, data) = tiny::split(file);
        Some((header.filter(Value::is_object)?, data))
    }));
    // Mostly one lie at a time: the first one found hides the others.
    let edits = prop_oneof![2 => Just(Vec::new()), 1 => edits(HEADER_KEYS)];
    let structured = (select(bases), edits, lie(), text_edits()).prop_map(
        |((mut header, mut data), edits, lie, text_edits)| {
            apply(&mut header, &edits);
            if header.is_object() {
                lie.tell(&mut header, &mut data);
            }
            tiny::file(&edited_text(&header, &text_edits), &data, lie.length())
        },
    );
    let folder = scratch();
    fs::write(folder.path().join(CONFIG_FILE), tiny::config().to_string()).unwrap();
    fuzz("safetensors", &corpus, with_noise(structured), |input| {
        fs::write(folder.path().join(WEIGHTS_FILE), input).unwrap();
        open_and_load(folder.path())
    });
}

#[test]
fn any_index_of_shards_is_followed_or_refused_with_its_entry() {
    let corpus = corpus("index", "json");
    let map: serde_json::Map<String, Value> = tiny::TENSORS
        .iter()
        .map(|(name, _)| (name.to_string(), shard_of(name).into()))
        .collect();
    let mut bases = vec![serde_json::json!({"metadata": {"total_size": 700}, "weight_map": map})];
    bases.extend(corpus.inputs().iter().map(|(_, text)| parsed(text)));
    bases.retain(Value::is_object);
    let shard = prop_oneof![
        6 => select(SHARDS).prop_map(str::to_string),
        1 => json::name(),
        1 => Just("n".repeat(5_000)),
    ];
    let lies = prop::collection::vec((0usize..16, shard), 0..3);
    let edits = prop_oneof![1 => Just(Vec::new()), 1 => edits(INDEX_KEYS)];
    let structured = (select(bases), lies, edits, text_edits()).prop_map(
        |(mut root, lies, edits, text_edits)| {
            for (i, shard) in lies {
                if let Some(map) = root.get_mut("weight_map").and_then(Value::as_object_mut) {
                    let index = i % map.len().max(1);
                    map.values_mut()
                        .skip(index)
                        .take(1)
                        .for_each(|value| *value = shard.clone().into());
                }
            }
            apply(&mut root, &edits);
            edited_text(&root, &text_edits)
        },
    );
    let folder = scratch();
    let path = folder.path();
    fs::write(path.join(CONFIG_FILE), tiny::config().to_string()).unwrap();
    for shard in ["a.safetensors", "b.safetensors"] {
        let (header, data) = tiny::weights("F32", 4, "", |name| shard_of(name) == shard);
        fs::write(
            path.join(shard),
            tiny::file(header.to_string().as_bytes(), &data, 0),
        )
        .unwrap();
    }
    fs::write(path.join("empty"), "").unwrap();
    fs::create_dir(path.join("folder")).unwrap();
    fs::copy(
        path.join("a.safetensors"),
        path.join("folder/a.safetensors"),
    )
    .unwrap();
    fuzz("index", &corpus, with_noise(structured), |input| {
        fs::write(path.join(INDEX_FILE), input).unwrap();
        open_and_load(path)
    });
}

fn shard_of(tensor: &str) -> &'static str {
    match tensor.contains("self_attn") {
        true => "b.safetensors",
        false => "a.safetensors",
    }
}

fn open_and_load(folder: &Path) -> Result<Outcome, String> {
    let loaded = Checkpoint::open(folder).and_then(|checkpoint| {
        checkpoint.num_parameters();
        checkpoint.bytes(DType::F16, None);
        checkpoint.load(DType::F32, &Device::Cpu).map(drop)
    });
    match loaded {
        Ok(()) => Ok("loaded".into()),
        Err(error) => named(&error),
    }
}

fn parsed(text: &[u8]) -> Value {
    serde_json::from_slice(text).unwrap_or_default()
}

fn edited_text(root: &Value, edits: &[json::TextEdit]) -> Vec<u8> {
    let mut text = root.to_string().into_bytes();
    apply_to_text(&mut text, edits);
    text
}

/// Structured inputs, and a few of random bytes.
fn with_noise(structured: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        50 => structured,
        1 => prop::collection::vec(any::<u8>(), 0..200),
    ]
}
