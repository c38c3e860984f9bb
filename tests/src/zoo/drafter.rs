//! A random draft model for any of the targets, as several trainers would export it.

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use serde_json::{json, Value};

use super::{HIDDEN, INTER, LAYERS, POSITIONS, TAPS, VOCAB};
use crate::weights::Weights;

const DRAFT_LAYERS: usize = 2;
const MASK: usize = VOCAB - 1;
/// Tokens of the reduced vocabulary: every second one of the target's.
const DRAFT_VOCAB: usize = VOCAB / 2;

/// Who wrote a checkpoint.
#[derive(Debug, Clone, Copy)]
pub enum Export {
    ZLab,
    /// With a reduced vocabulary.
    Speculators,
    /// Block 7, drafting from the anchor.
    DeepSpec,
}

/// Write a draft model in z-lab's format below `folder`.
pub fn write_drafter(folder: &Path) -> PathBuf {
    write_export(Export::ZLab, folder)
}

/// Write it as `export` does.
pub fn write_export(export: Export, folder: &Path) -> PathBuf {
    std::fs::create_dir_all(folder).unwrap();
    let mut weights = layers();
    let mut config = sizes();
    let merge = |config: &mut Value, more: Value| {
        if let (Some(config), Value::Object(more)) = (config.as_object_mut(), more) {
            config.extend(more);
        }
    };
    match export {
        Export::ZLab => merge(
            &mut config,
            json!({
                "architectures": ["DFlashDraftModel"], "num_target_layers": LAYERS,
                "block_size": 16,
                "dflash_config": { "mask_token_id": MASK, "target_layer_ids": TAPS }
            }),
        ),
        Export::Speculators => {
            weights.matrix("lm_head", DRAFT_VOCAB, HIDDEN);
            let offsets: Vec<i64> = (0..DRAFT_VOCAB as i64).collect();
            let offsets = Tensor::from_vec(offsets, DRAFT_VOCAB, &Device::Cpu).unwrap();
            weights.tensors.insert("d2t".into(), offsets);
            config = json!({
                "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
                "transformer_layer_config": config, "block_size": 16, "mask_token_id": MASK,
                "aux_hidden_state_layer_ids": TAPS.map(|layer| layer + 1),
                "draft_vocab_size": DRAFT_VOCAB, "sample_from_anchor": false
            });
        }
        Export::DeepSpec => {
            weights.matrix("embed_tokens", VOCAB, HIDDEN);
            weights.matrix("lm_head", VOCAB, HIDDEN);
            merge(
                &mut config,
                json!({
                    "architectures": ["Qwen3DSparkModel"], "num_target_layers": LAYERS,
                    "block_size": 7, "mask_token_id": MASK, "target_layer_ids": TAPS,
                    "markov_rank": 0, "enable_confidence_head": false
                }),
            );
        }
    }
    weights.save(folder, &config);
    folder.into()
}

fn layers() -> Weights {
    let mut weights = Weights::new(1007);
    weights.matrix("fc", HIDDEN, TAPS.len() * HIDDEN);
    weights.norm("hidden_norm", HIDDEN);
    weights.norm("norm", HIDDEN);
    for i in 0..DRAFT_LAYERS {
        let layer = |name: &str| format!("layers.{i}.{name}");
        weights.norm(&layer("input_layernorm"), HIDDEN);
        weights.norm(&layer("post_attention_layernorm"), HIDDEN);
        for (name, rows) in [("q_proj", 64), ("k_proj", 32), ("v_proj", 32)] {
            weights.matrix(&layer(&format!("self_attn.{name}")), rows, HIDDEN);
        }
        weights.matrix(&layer("self_attn.o_proj"), HIDDEN, 64);
        weights.norm(&layer("self_attn.q_norm"), 16);
        weights.norm(&layer("self_attn.k_norm"), 16);
        weights.matrix(&layer("mlp.gate_proj"), INTER, HIDDEN);
        weights.matrix(&layer("mlp.up_proj"), INTER, HIDDEN);
        weights.matrix(&layer("mlp.down_proj"), HIDDEN, INTER);
    }
    weights
}

fn sizes() -> Value {
    json!({
        "model_type": "qwen3", "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": INTER, "vocab_size": VOCAB, "num_hidden_layers": DRAFT_LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "attention_bias": false
    })
}
