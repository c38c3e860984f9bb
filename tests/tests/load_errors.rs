//! What does not fit fails at load, with both numbers and the thing to change.

use std::path::Path;

use dflash_bench::engine::{Engine, Setup};
use dflash_tests::{drafter, root, target};
use serde_json::{json, Value};

async fn load_error(setup: &Setup) -> String {
    match Engine::load(setup).await {
        Ok(_) => panic!("loaded: {setup:?}"),
        Err(error) => format!("{error:#}"),
    }
}

/// A copy of the trained draft model whose config was changed.
fn drafter_with(change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(drafter().join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    change(&mut config);
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let weights = "model.safetensors";
    std::fs::copy(drafter().join(weights), folder.path().join(weights)).unwrap();
    folder
}

async fn error_with(change: impl FnOnce(&mut Value)) -> String {
    let folder = drafter_with(change);
    load_error(&Setup::dflash(&target(), folder.path(), None)).await
}

fn contains(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_model_for_another_hidden_size_is_refused_with_both() {
    let other = root().join("dflash-plugin/tests/fixtures/dialects/v1_top_level");
    let error = load_error(&Setup::dflash(&target(), &other, None)).await;
    contains(&error, &["hidden size", "64", "576"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_vocabulary_or_number_of_layers_is_refused_with_both() {
    let error = error_with(|config| config["vocab_size"] = json!(50_000)).await;
    contains(&error, &["vocab_size", "50000", "49152"]);
    let error = error_with(|config| config["num_target_layers"] = json!(32)).await;
    contains(&error, &["num_target_layers", "32", "30"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn taps_that_the_target_or_fc_do_not_have_are_refused_with_both() {
    let ids = |ids: &'static [u64]| {
        move |config: &mut Value| {
            config["dflash_config"]["target_layer_ids"] = json!(ids);
            config["num_target_layers"] = Value::Null;
        }
    };
    contains(
        &error_with(ids(&[1, 8, 14, 20, 30])).await,
        &["target_layer_ids", "30"],
    );
    // Its output passes no later layer, so it cannot be seen.
    contains(
        &error_with(ids(&[1, 8, 14, 20, 29])).await,
        &["layer 29", "30 layers"],
    );
    contains(
        &error_with(ids(&[1, 8, 14, 20])).await,
        &["fc.weight", "2880", "2304"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_size_outside_the_checkpoints_range_is_refused() {
    for (block_size, parts) in [(1, ["1", "2 or more"]), (17, ["17", "16"])] {
        let error = load_error(&Setup::dflash(&target(), &drafter(), Some(block_size))).await;
        contains(&error, &parts);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mask_token_outside_the_vocabulary_is_refused_with_both() {
    let error = error_with(|c| c["dflash_config"]["mask_token_id"] = json!(50_000)).await;
    contains(&error, &["mask_token_id", "50000", "49152"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_folder_is_named() {
    let error = load_error(&Setup::dflash(
        &target(),
        Path::new("./no/such/drafter"),
        None,
    ))
    .await;
    contains(&error, &["./no/such/drafter", "not a folder"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_weights_are_refused_and_name_the_file() {
    let folder = drafter_with(|_| ());
    let weights = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    let error = load_error(&Setup::dflash(&target(), folder.path(), None)).await;
    contains(&error, &["model.safetensors"]);
}

/// A tiny random model of a family that is not supported yet.
fn write_qwen3(folder: &Path) {
    use candle_core::{DType, Device, Tensor};
    let (hidden, inter, vocab) = (64, 96, 49_152);
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(target().join(file), folder.join(file)).unwrap();
    }
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": inter, "vocab_size": vocab,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "sliding_window": null,
        "use_sliding_window": false, "max_window_layers": 4, "attention_bias": false
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut tensors = std::collections::HashMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let tensor = Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
        tensors.insert(name, tensor);
    };
    add("model.embed_tokens.weight".into(), &[vocab, hidden]);
    add("model.norm.weight".into(), &[hidden]);
    for i in 0..4 {
        let layer = |name: &str| format!("model.layers.{i}.{name}.weight");
        add(layer("input_layernorm"), &[hidden]);
        add(layer("post_attention_layernorm"), &[hidden]);
        add(layer("self_attn.q_proj"), &[64, hidden]);
        add(layer("self_attn.k_proj"), &[32, hidden]);
        add(layer("self_attn.v_proj"), &[32, hidden]);
        add(layer("self_attn.o_proj"), &[hidden, 64]);
        add(layer("self_attn.q_norm"), &[16]);
        add(layer("self_attn.k_norm"), &[16]);
        add(layer("mlp.gate_proj"), &[inter, hidden]);
        add(layer("mlp.up_proj"), &[inter, hidden]);
        add(layer("mlp.down_proj"), &[hidden, inter]);
    }
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_of_another_family_is_refused_with_the_list_of_what_works() {
    let folder = tempfile::tempdir().unwrap();
    write_qwen3(folder.path());
    let error = load_error(&Setup::dflash(folder.path(), &drafter(), None)).await;
    contains(
        &error,
        &[
            "llama (safetensors)",
            "llama (GGUF)",
            &folder.path().display().to_string(),
        ],
    );
    // Without DFlash the same model loads.
    assert!(Engine::load(&Setup::plain(folder.path())).await.is_ok());
}
