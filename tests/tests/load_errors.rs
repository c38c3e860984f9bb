//! What does not fit fails at load, with both numbers and the thing to change.

use std::path::{Path, PathBuf};

use dflash_bench::engine::{Engine, Setup};
use dflash_tests::server::{refusal, refusal_of_pair};
use dflash_tests::zoo::{self, Family};
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

/// A target that the plugin refuses, and a draft model of the right sizes for it.
struct Refused {
    folder: tempfile::TempDir,
    target: zoo::Target,
    drafter: PathBuf,
}

impl Refused {
    fn write(name: &str) -> Self {
        Self::of(&zoo::refused(name))
    }

    fn of(family: &Family) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let target = family.write_target(zoo::LAYERS, &folder.path().join("target"));
        let drafter = zoo::write_drafter(&folder.path().join("drafter"));
        Self {
            folder,
            target,
            drafter,
        }
    }

    async fn error(&self) -> String {
        load_error(&Setup::dflash(&self.target.path, &self.drafter, None)).await
    }

    /// What the program says, which loads more kinds of models.
    fn message(&self, model: &[&str]) -> String {
        refusal_of_pair(model, &self.drafter, &[])
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_of_another_family_is_refused_with_the_list_of_what_works() {
    let refused = Refused::write("glm4_moe_lite");
    let error = refused.error().await;
    let path = refused.folder.path().join("target").display().to_string();
    contains(&error, &["safetensors: llama,", "GGUF: llama,", &path]);
    contains(&error, &["not among those that are known to work"]);
    // Without DFlash the same model loads.
    assert!(Engine::load(&Setup::plain(&refused.target.path))
        .await
        .is_ok());
}

/// Make an embedding model of a text model: other names, and a description of what comes after it.
fn make_embedding_model(folder: &Path) {
    let file = folder.join("model.safetensors");
    let tensors = candle_core::safetensors::load(&file, &candle_core::Device::Cpu).unwrap();
    let tensors = tensors.into_iter();
    let tensors = tensors.map(|(name, tensor)| (name.replace("model.", ""), tensor));
    candle_core::safetensors::save(&tensors.collect(), file).unwrap();
    let modules = json!([
        { "idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer" },
        { "idx": 1, "name": "1", "path": "1", "type": "sentence_transformers.models.Normalize" }
    ]);
    for (name, value) in [
        ("modules.json", modules),
        ("config_sentence_transformers.json", json!({})),
    ] {
        std::fs::write(folder.join(name), value.to_string()).unwrap();
    }
}

#[test]
fn a_target_that_writes_no_text_is_refused() {
    let refused = Refused::of(&zoo::find("qwen3"));
    make_embedding_model(&refused.target.path);
    let path = refused.target.path.to_str().unwrap();
    let message = refused.message(&["-m", path]);
    contains(&message, &["does not write text", path]);
}

fn llama() -> Refused {
    Refused::of(&zoo::find("llama"))
}

/// An adapter for no layer at all, with its classifier, below `folder`; returns the ordering file.
fn write_xlora(base: &str, folder: &Path) -> PathBuf {
    use candle_core::{DType, Device, Tensor};
    std::fs::create_dir_all(folder).unwrap();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let save = |name: &str, tensors: &[(&str, Tensor)]| {
        let tensors = tensors.iter().cloned().collect();
        candle_core::safetensors::save(&tensors, folder.join(name)).unwrap();
    };
    let classifier = [
        ("last.weight", zeros(&[1, zoo::HIDDEN])),
        ("last.bias", zeros(&[1])),
    ];
    save("xlora_classifier.safetensors", &classifier);
    let unused = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    save(
        "adapter_1.safetensors",
        &[(unused, zeros(&[1, zoo::HIDDEN]))],
    );
    let adapter = json!({ "r": 1, "lora_alpha": 1.0, "lora_dropout": 0.0, "target_modules": [] });
    let config = json!({
        "hidden_size": zoo::HIDDEN, "base_model_id": base, "adapters": ["adapter_1"]
    });
    let order = json!({ "order": ["adapter_1"], "layers": {}, "base_model_id": base });
    for (name, value) in [
        ("adapter_1.json", adapter),
        ("xlora_config.json", config),
        ("order.json", order),
    ] {
        std::fs::write(folder.join(name), value.to_string()).unwrap();
    }
    folder.join("order.json")
}

#[test]
fn x_lora_is_refused() {
    let refused = llama();
    let path = refused.target.path.to_str().unwrap();
    let adapters = refused.folder.path().join("adapters");
    let order = write_xlora(path, &adapters);
    let (adapters, order) = (adapters.to_str().unwrap(), order.to_str().unwrap());
    let message = refused.message(&["-m", path, "--xlora", adapters, "--xlora-order", order]);
    contains(&message, &["X-LoRA runs the model twice", path]);
}

#[test]
fn a_lora_adapter_on_a_gguf_file_is_refused() {
    let refused = Refused::of(&zoo::find("llama (GGUF)"));
    let folder = refused.target.path.parent().unwrap().to_str().unwrap();
    let adapters = refused.folder.path().join("adapters");
    let order = write_xlora(folder, &adapters);
    let adapters = adapters.to_str().unwrap();
    let gguf = ["--format", "gguf", "-f", "model.gguf"];
    let message = refused.message(&[&["-m", folder, "--lora", adapters][..], &gguf].concat());
    contains(&message, &["needs an ordering file", "-m MODEL --lora"]);
    let entry = format!(
        "command = 'serve'\n[[models]]\nkind = 'text'\nmodel_id = '{folder}'\ndtype = 'f32'\n\
         device = {{ cpu = true }}\nformat = {{ format = 'gguf', quantized_file = 'model.gguf' }}\n\
         adapter = {{ lora = '{adapters}', xlora_order = '{}' }}\n\
         [models.speculative]\nmethod = 'dflash'\ndraft_model = '{}'\n",
        order.display(),
        refused.drafter.display()
    );
    let file = refused.folder.path().join("serve.toml");
    std::fs::write(&file, entry).unwrap();
    let message = refusal(&["from-config", "-f", file.to_str().unwrap()]);
    contains(&message, &["an adapter on a GGUF file", "-m MODEL --lora"]);
}

#[test]
fn a_target_without_kv_cache_is_refused() {
    let refused = llama();
    let path = refused.target.path.to_str().unwrap();
    let message = refused.message(&["-m", path, "--no-kv-cache"]);
    contains(&message, &["leave --no-kv-cache out", path]);
}
