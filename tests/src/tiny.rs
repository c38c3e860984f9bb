//! A tiny llama with random weights and a matching random draft model, written as checkpoints.
//! It has SmolLM2's tokenizer and a vocabulary of that size, or letters for tokens and as many as a
//! test wants: few enough that even random drafts are often accepted.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::tokenizer;
use crate::weights::Weights;

const SMOLLM2_VOCAB: usize = 49_152;
const HIDDEN: usize = 64;
const INTER: usize = 96;
const TARGET_LAYERS: usize = 6;
const DRAFT_LAYERS: usize = 2;
const TAPS: [usize; 2] = [1, 4];

/// What may differ between tiny pairs.
pub struct TinyPair {
    /// `max_position_embeddings` of the target.
    pub positions: usize,
    /// `max_position_embeddings` of the draft model.
    pub drafter_positions: usize,
    /// Tokens, at most 26: `a`, `b` and so on with a tokenizer of their own, and an end of text
    /// that the model cannot choose. `None` for SmolLM2's tokenizer.
    pub letters: Option<usize>,
    pub seed: u64,
}

impl TinyPair {
    fn vocab(&self) -> usize {
        self.letters.unwrap_or(SMOLLM2_VOCAB)
    }

    /// Any token will do; with letters it is one that is generated too.
    fn mask_token(&self) -> usize {
        self.letters.map_or(16, |letters| letters - 1)
    }
}

impl Default for TinyPair {
    fn default() -> Self {
        Self {
            positions: 512,
            drafter_positions: 512,
            letters: None,
            seed: 1,
        }
    }
}

/// Attention and MLP of one layer, 4 heads over 2 KV heads of 16.
fn layer(weights: &mut Weights, prefix: &str) {
    weights.norm(&format!("{prefix}.input_layernorm"), HIDDEN);
    weights.norm(&format!("{prefix}.post_attention_layernorm"), HIDDEN);
    for (name, rows) in [("q_proj", 64), ("k_proj", 32), ("v_proj", 32)] {
        weights.matrix(&format!("{prefix}.self_attn.{name}"), rows, HIDDEN);
    }
    weights.matrix(&format!("{prefix}.self_attn.o_proj"), HIDDEN, 64);
    weights.matrix(&format!("{prefix}.mlp.gate_proj"), INTER, HIDDEN);
    weights.matrix(&format!("{prefix}.mlp.up_proj"), INTER, HIDDEN);
    weights.matrix(&format!("{prefix}.mlp.down_proj"), HIDDEN, INTER);
}

/// Write both models below `folder`; returns target and draft model.
pub fn write(pair: &TinyPair, folder: &Path) -> (PathBuf, PathBuf) {
    let (target, drafter) = (folder.join("target"), folder.join("drafter"));
    std::fs::create_dir_all(&target).unwrap();
    std::fs::create_dir_all(&drafter).unwrap();
    write_target(pair, &target);
    write_drafter(pair, &drafter);
    (target, drafter)
}

fn write_target(pair: &TinyPair, folder: &Path) {
    match pair.letters {
        Some(letters) => {
            assert!((2..=26).contains(&letters));
            tokenizer::write(letters, folder);
        }
        None => {
            for file in [
                "tokenizer.json",
                "tokenizer_config.json",
                "special_tokens_map.json",
            ] {
                std::fs::copy(crate::target().join(file), folder.join(file)).unwrap();
            }
        }
    }
    let mut weights = Weights::new(pair.seed);
    weights.matrix("model.embed_tokens", pair.vocab(), HIDDEN);
    weights.norm("model.norm", HIDDEN);
    for i in 0..TARGET_LAYERS {
        layer(&mut weights, &format!("model.layers.{i}"));
    }
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": INTER, "vocab_size": pair.vocab(),
        "num_hidden_layers": TARGET_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": pair.positions, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": true
    });
    weights.save(folder, &config);
}

fn write_drafter(pair: &TinyPair, folder: &Path) {
    let mut weights = Weights::new(pair.seed + 1000);
    weights.matrix("fc", HIDDEN, TAPS.len() * HIDDEN);
    weights.norm("hidden_norm", HIDDEN);
    weights.norm("norm", HIDDEN);
    for i in 0..DRAFT_LAYERS {
        layer(&mut weights, &format!("layers.{i}"));
        weights.norm(&format!("layers.{i}.self_attn.q_norm"), 16);
        weights.norm(&format!("layers.{i}.self_attn.k_norm"), 16);
    }
    let config = json!({
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": INTER, "vocab_size": pair.vocab(),
        "num_hidden_layers": DRAFT_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": pair.drafter_positions,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": false,
        "num_target_layers": TARGET_LAYERS, "block_size": 16,
        "dflash_config": { "mask_token_id": pair.mask_token(), "target_layer_ids": TAPS }
    });
    weights.save(folder, &config);
}
