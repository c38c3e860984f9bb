//! Families in Hugging Face format: config and tensors as their published checkpoints have them.

mod dense;
mod mixtures;
mod multimodal;
mod norms;
mod qwen3_5;
mod recurrent;
mod refused;
mod vision;

pub use refused::refused;
use serde_json::{json, Value};

use super::{Family, Format, Norm, HIDDEN, INTER, POSITIONS, VOCAB, WINDOW};
use crate::weights::Weights;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const EXPERTS: usize = 4;
const EXPERT_INTER: usize = 64;

/// DeepSeek's heads: keys with and without rotation, and values of another width.
const NOPE: usize = 16;
const ROPE: usize = 16;
const KV_RANK: usize = 24;

/// What all configs have, and `more`.
fn config(architecture: &str, model_type: &str, layers: usize, more: Value) -> Value {
    let mut config = json!({
        "architectures": [architecture], "model_type": model_type, "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": INTER, "vocab_size": VOCAB,
        "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": false
    });
    if let (Some(config), Value::Object(more)) = (config.as_object_mut(), more) {
        config.extend(more);
    }
    config
}

fn embedding(w: &mut Weights) {
    w.matrix("model.embed_tokens", VOCAB, HIDDEN);
}

/// Embedding, final norm and a head of its own.
fn ends(w: &mut Weights) {
    embedding(w);
    w.norm("model.norm", HIDDEN);
    w.matrix("lm_head", VOCAB, HIDDEN);
}

/// The norms around attention and MLP.
fn norms(w: &mut Weights, layer: &str) {
    w.norm(&format!("{layer}.input_layernorm"), HIDDEN);
    w.norm(&format!("{layer}.post_attention_layernorm"), HIDDEN);
}

/// Queries, keys, values and output; the first three with a bias, or all, or none.
fn attention(w: &mut Weights, layer: &str, bias: &[&str]) {
    for (name, rows) in [
        ("q_proj", HEADS * HEAD_DIM),
        ("k_proj", KV_HEADS * HEAD_DIM),
        ("v_proj", KV_HEADS * HEAD_DIM),
        ("o_proj", HIDDEN),
    ] {
        let columns = match name {
            "o_proj" => HEADS * HEAD_DIM,
            _ => HIDDEN,
        };
        let full = format!("{layer}.self_attn.{name}");
        match bias.contains(&name) {
            true => w.linear(&full, rows, columns),
            false => w.matrix(&full, rows, columns),
        }
    }
}

const NO_BIAS: &[&str] = &[];
const QKV_BIAS: &[&str] = &["q_proj", "k_proj", "v_proj"];
const ALL_BIAS: &[&str] = &["q_proj", "k_proj", "v_proj", "o_proj"];

fn qk_norm(w: &mut Weights, layer: &str) {
    w.norm(&format!("{layer}.self_attn.q_norm"), HEAD_DIM);
    w.norm(&format!("{layer}.self_attn.k_norm"), HEAD_DIM);
}

fn mlp(w: &mut Weights, prefix: &str, inter: usize) {
    w.matrix(&format!("{prefix}.gate_proj"), inter, HIDDEN);
    w.matrix(&format!("{prefix}.up_proj"), inter, HIDDEN);
    w.matrix(&format!("{prefix}.down_proj"), HIDDEN, inter);
}

/// A router and experts.
fn experts(w: &mut Weights, prefix: &str) {
    w.matrix(&format!("{prefix}.gate"), EXPERTS, HIDDEN);
    for i in 0..EXPERTS {
        mlp(w, &format!("{prefix}.experts.{i}"), EXPERT_INTER);
    }
}

/// The same with the older names.
fn sparse_block(w: &mut Weights, layer: &str) {
    let prefix = format!("{layer}.block_sparse_moe");
    w.matrix(&format!("{prefix}.gate"), EXPERTS, HIDDEN);
    for i in 0..EXPERTS {
        let expert = format!("{prefix}.experts.{i}");
        w.matrix(&format!("{expert}.w1"), INTER, HIDDEN);
        w.matrix(&format!("{expert}.w2"), HIDDEN, INTER);
        w.matrix(&format!("{expert}.w3"), INTER, HIDDEN);
    }
}

fn each_layer(w: &mut Weights, layers: usize, mut fill: impl FnMut(&mut Weights, &str, usize)) {
    for i in 0..layers {
        fill(w, &format!("model.layers.{i}"), i);
    }
}
/// Norms whose weights are added to 1.
fn gemma_norms(w: &mut Weights, layer: &str, names: &[&str]) {
    for name in names {
        w.small(&format!("{layer}.{name}.weight"), &[HIDDEN]);
    }
}

const GEMMA2_NORMS: [&str; 4] = [
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
];

fn gemma_config(architecture: &str, model_type: &str, layers: usize, more: Value) -> Value {
    let mut config = config(architecture, model_type, layers, more);
    config["attention_bias"] = json!(false);
    config["head_dim"] = json!(HEAD_DIM);
    config["hidden_act"] = json!("gelu_pytorch_tanh");
    config["tie_word_embeddings"] = json!(true);
    config
}

fn deepseek_weights(w: &mut Weights, layers: usize, has_bias: bool) {
    ends(w);
    each_layer(w, layers, |w, layer, i| {
        norms(w, layer);
        let attention = |name: &str| format!("{layer}.self_attn.{name}");
        w.matrix(&attention("q_proj"), HEADS * (NOPE + ROPE), HIDDEN);
        w.matrix(&attention("kv_a_proj_with_mqa"), KV_RANK + ROPE, HIDDEN);
        w.norm(&attention("kv_a_layernorm"), KV_RANK);
        w.matrix(&attention("kv_b_proj"), HEADS * (NOPE + HEAD_DIM), KV_RANK);
        w.matrix(&attention("o_proj"), HIDDEN, HEADS * HEAD_DIM);
        let prefix = format!("{layer}.mlp");
        if i == 0 {
            mlp(w, &prefix, INTER);
            return;
        }
        experts(w, &prefix);
        mlp(w, &format!("{prefix}.shared_experts"), EXPERT_INTER);
        if has_bias {
            w.small(
                &format!("{prefix}.gate.e_score_correction_bias"),
                &[EXPERTS],
            );
        }
    });
}

fn deepseek_config(architecture: &str, model_type: &str, layers: usize, more: Value) -> Value {
    let mut config = config(architecture, model_type, layers, more);
    let own = json!({
        "num_key_value_heads": HEADS, "moe_intermediate_size": EXPERT_INTER,
        "n_shared_experts": 1, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0, "moe_layer_freq": 1, "first_k_dense_replace": 1,
        "attention_bias": false, "q_lora_rank": null, "qk_rope_head_dim": ROPE,
        "kv_lora_rank": KV_RANK, "v_head_dim": HEAD_DIM, "qk_nope_head_dim": NOPE,
        "n_group": 1, "topk_group": 1, "rope_scaling": null
    });
    if let (Some(config), Value::Object(own)) = (config.as_object_mut(), own) {
        config.extend(own);
    }
    config
}

fn family(
    host_name: &'static str,
    config: fn(usize) -> Value,
    weights: fn(&mut Weights, usize),
) -> Family {
    Family {
        host_name,
        variant: "",
        format: Format::Safetensors { config, weights },
        norm: ("model.norm", Norm::Rms),
        head: "lm_head",
        cap: None,
        has_plain_steps: false,
        images: None,
    }
}

/// With embedding and head in one.
fn tied(family: Family) -> Family {
    Family {
        head: "model.embed_tokens",
        ..family
    }
}

pub fn families() -> Vec<Family> {
    let mut families = dense::families();
    families.extend(norms::gemmas());
    families.extend(norms::with_layer_norm());
    families.extend(mixtures::families());
    families.extend(recurrent::families());
    families.extend(multimodal::families());
    families.extend(qwen3_5::families());
    families
}
