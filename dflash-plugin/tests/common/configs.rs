//! Small configs to edit, and what must happen to them.

use dflash_plugin::config::DraftConfig;
use dflash_plugin::error::DFlashError;
use serde_json::{json, Value};

pub fn base() -> Value {
    json!({
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-6, "vocab_size": 160, "max_position_embeddings": 512,
        "rope_theta": 10000.0, "num_target_layers": 12,
        "dflash_config": {"mask_token_id": 150, "target_layer_ids": [1, 9]}
    })
}

/// The base config with top-level keys set (`null` removes one).
pub fn with(edits: Value) -> Value {
    let mut json = base();
    for (key, value) in edits.as_object().unwrap() {
        json[key] = value.clone();
    }
    json
}

/// The base config with `dflash_config` keys set.
pub fn nested(edits: Value) -> Value {
    let mut json = base();
    for (key, value) in edits.as_object().unwrap() {
        json["dflash_config"][key] = value.clone();
    }
    json
}

#[track_caller]
pub fn parse(json: &Value) -> DraftConfig {
    DraftConfig::from_json(&json.to_string()).unwrap()
}

#[track_caller]
pub fn assert_refused(json: Value, parts: &[&str]) {
    let error = DraftConfig::from_json(&json.to_string())
        .expect_err("the config was accepted")
        .to_string();
    for part in parts {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

/// Refused as not implemented, not as wrong.
#[track_caller]
pub fn assert_unsupported(json: Value, parts: &[&str]) {
    let error = DraftConfig::from_json(&json.to_string()).unwrap_err();
    assert!(matches!(error, DFlashError::Unsupported { .. }), "{error}");
    assert_refused(json, parts);
}
