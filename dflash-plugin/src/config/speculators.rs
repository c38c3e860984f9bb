//! The config of the speculators library, rewritten to z-lab's keys.
//!
//! Its keys say the same things by other names: the layers' own settings are in
//! `transformer_layer_config`, and `aux_hidden_state_layer_ids` counts the embedding as the first
//! output, so its ids are those of z-lab plus one.

use serde_json::{json, Map, Value};

use super::keys::describe;
use crate::error::{DFlashError, Result};

/// Its default, unlike z-lab's.
const DEFAULT_BLOCK_SIZE: usize = 8;
const LAYERS: &str = "transformer_layer_config";
const LAYER_IDS: &str = "aux_hidden_state_layer_ids";

/// `root` as it is, or with z-lab's keys if it is a speculators config.
///
/// # Errors
/// [`DFlashError::Unsupported`] for its other kinds of draft models, [`DFlashError::Config`] where a
/// key that it must have is missing or impossible.
pub(super) fn rewrite(root: Value) -> Result<Value> {
    let Some(kind) = present(&root, "speculators_model_type") else {
        return Ok(root);
    };
    let only = |key: &str, found: &Value, allowed: &str| match found.as_str() {
        Some(text) if text == allowed => Ok(()),
        _ => Err(DFlashError::unsupported(
            key,
            format!("expected \"{allowed}\", found {}", describe(found)),
        )),
    };
    only("speculators_model_type", kind, "dflash")?;
    if let Some(projector) = present(&root, "projector_type") {
        only("projector_type", projector, "dflash")?;
    }
    if present(&root, "shift_label").is_some_and(|value| value != &json!(false)) {
        return Err(DFlashError::unsupported(
            "shift_label",
            "labels shifted by another rule than `sample_from_anchor`; expected false",
        ));
    }
    let Some(Value::Object(layers)) = present(&root, LAYERS) else {
        return Err(DFlashError::config(
            LAYERS,
            "missing; expected an object with the sizes of the draft layers",
        ));
    };
    let mut native: Map<String, Value> = layers.clone();
    add_qwen3_defaults(&mut native);
    // Names of the target's architecture, and of nothing that the draft model has.
    for key in ["architectures", "num_target_layers"] {
        native.remove(key);
    }
    for key in [
        "draft_vocab_size",
        "sample_from_anchor",
        "target_hidden_size",
    ] {
        if let Some(value) = present(&root, key) {
            native.insert(key.into(), value.clone());
        }
    }
    if present(&root, "sliding_window_non_causal") == Some(&json!(true)) {
        native.insert("is_causal".into(), json!(false));
    }
    let block_size = present(&root, "block_size").cloned();
    native.insert(
        "dflash_config".into(),
        json!({
            "block_size": block_size.unwrap_or_else(|| json!(DEFAULT_BLOCK_SIZE)),
            "mask_token_id": present(&root, "mask_token_id"),
            "target_layer_ids": layer_ids(&root)?,
        }),
    );
    Ok(Value::Object(native))
}

/// The library leaves out what equals the default of transformers' `Qwen3Config`.
fn add_qwen3_defaults(layers: &mut Map<String, Value>) {
    let model_type = layers.get("model_type").and_then(Value::as_str);
    if !matches!(model_type, None | Some("qwen3")) {
        return;
    }
    for (key, value) in [
        ("hidden_size", json!(4096)),
        ("intermediate_size", json!(22_016)),
        ("num_hidden_layers", json!(32)),
        ("num_attention_heads", json!(32)),
        ("num_key_value_heads", json!(32)),
        ("head_dim", json!(128)),
        ("max_position_embeddings", json!(32_768)),
        ("rms_norm_eps", json!(1e-6)),
        ("vocab_size", json!(151_936)),
    ] {
        layers.entry(key).or_insert(value);
    }
    if !["rope_theta", "rope_parameters"]
        .iter()
        .any(|key| layers.contains_key(*key))
    {
        layers.insert("rope_theta".into(), json!(10_000.0));
    }
}

fn present<'a>(root: &'a Value, key: &str) -> Option<&'a Value> {
    root.get(key).filter(|value| !value.is_null())
}

/// The tapped layers by z-lab's numbers.
fn layer_ids(root: &Value) -> Result<Vec<u64>> {
    let ids = present(root, LAYER_IDS).and_then(Value::as_array);
    let ids = ids.ok_or_else(|| {
        DFlashError::config(
            LAYER_IDS,
            "missing; add the layers whose outputs were tapped in training, plus one each",
        )
    })?;
    ids.iter()
        .map(|id| {
            let layer = id.as_u64().and_then(|id| id.checked_sub(1));
            layer.ok_or_else(|| {
                DFlashError::config(
                    LAYER_IDS,
                    format!(
                        "expected layers plus one, so 1 or more, found {}; 0 would be the \
                         embedding, which cannot be tapped",
                        describe(id)
                    ),
                )
            })
        })
        .collect()
}
