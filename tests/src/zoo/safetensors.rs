//! Families in Hugging Face format: config and tensors as their published checkpoints have them.

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

fn llama_weights(w: &mut Weights, layers: usize) {
    ends(w);
    each_layer(w, layers, |w, layer, _| {
        norms(w, layer);
        attention(w, layer, NO_BIAS);
        mlp(w, &format!("{layer}.mlp"), INTER);
    });
}

fn qwen3_weights(w: &mut Weights, layers: usize) {
    embedding(w);
    w.norm("model.norm", HIDDEN);
    each_layer(w, layers, |w, layer, _| {
        norms(w, layer);
        attention(w, layer, NO_BIAS);
        qk_norm(w, layer);
        mlp(w, &format!("{layer}.mlp"), INTER);
    });
}

fn qwen3_config(layers: usize, more: Value) -> Value {
    let mut config = config("Qwen3ForCausalLM", "qwen3", layers, more);
    config["head_dim"] = json!(HEAD_DIM);
    config["tie_word_embeddings"] = json!(true);
    config
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

fn phi3_weights(w: &mut Weights, layers: usize) {
    ends(w);
    each_layer(w, layers, |w, layer, _| {
        norms(w, layer);
        let rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
        w.matrix(&format!("{layer}.self_attn.qkv_proj"), rows, HIDDEN);
        w.matrix(&format!("{layer}.self_attn.o_proj"), HIDDEN, HIDDEN);
        w.matrix(&format!("{layer}.mlp.gate_up_proj"), 2 * INTER, HIDDEN);
        w.matrix(&format!("{layer}.mlp.down_proj"), HIDDEN, INTER);
    });
}

fn phi3_config(layers: usize, more: Value) -> Value {
    config("Phi3ForCausalLM", "phi3", layers, more)
}

/// LongRoPE with other factors from position 56 on.
fn long_rope() -> Value {
    let factors = |from: f64| {
        let factors = (0..HEAD_DIM / 2).map(|i| from + 0.25 * i as f64);
        factors.collect::<Vec<_>>()
    };
    json!({
        "original_max_position_embeddings": 56, "sliding_window": null,
        "rope_scaling": {
            "type": "longrope", "short_factor": factors(1.0), "long_factor": factors(2.0)
        }
    })
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
    let mut families = dense();
    families.extend(gemmas());
    families.extend(with_layer_norm());
    families.extend(mixtures());
    families
}

fn dense() -> Vec<Family> {
    vec![
        family(
            "llama",
            |layers| config("LlamaForCausalLM", "llama", layers, json!({})),
            llama_weights,
        ),
        Family {
            variant: "sliding window",
            ..family(
                "mistral",
                |layers| {
                    let more = json!({ "sliding_window": WINDOW });
                    config("MistralForCausalLM", "mistral", layers, more)
                },
                llama_weights,
            )
        },
        family(
            "qwen2",
            |layers| {
                // Not used, as in most checkpoints that name one.
                let more = json!({ "sliding_window": WINDOW, "use_sliding_window": false });
                config("Qwen2ForCausalLM", "qwen2", layers, more)
            },
            qwen2_weights,
        ),
        Family {
            variant: "sliding window in the last layers only",
            ..family(
                "qwen2",
                |layers| {
                    let more = json!({
                        "sliding_window": WINDOW, "use_sliding_window": true,
                        "max_window_layers": 2
                    });
                    config("Qwen2ForCausalLM", "qwen2", layers, more)
                },
                qwen2_weights,
            )
        },
        tied(family(
            "qwen3",
            |layers| {
                let more = json!({
                    "sliding_window": null, "use_sliding_window": false,
                    "max_window_layers": layers
                });
                qwen3_config(layers, more)
            },
            qwen3_weights,
        )),
        tied(Family {
            variant: "sliding window",
            ..family(
                "qwen3",
                |layers| {
                    let more = json!({
                        "sliding_window": WINDOW, "use_sliding_window": true,
                        "max_window_layers": 0
                    });
                    qwen3_config(layers, more)
                },
                qwen3_weights,
            )
        }),
        tied(Family {
            variant: "sliding window in the last layers only",
            ..family(
                "qwen3",
                |layers| {
                    let more = json!({
                        "sliding_window": WINDOW, "use_sliding_window": true,
                        "max_window_layers": 2
                    });
                    qwen3_config(layers, more)
                },
                qwen3_weights,
            )
        }),
        Family {
            variant: "sliding window",
            ..family(
                "phi3",
                |layers| {
                    let more = json!({
                        "original_max_position_embeddings": POSITIONS, "sliding_window": WINDOW,
                        "rope_scaling": null
                    });
                    phi3_config(layers, more)
                },
                phi3_weights,
            )
        },
        Family {
            variant: "LongRoPE",
            has_plain_steps: true,
            ..family(
                "phi3",
                |layers| phi3_config(layers, long_rope()),
                phi3_weights,
            )
        },
        family(
            "glm4",
            |layers| {
                let more = json!({
                    "sliding_window": null, "partial_rotary_factor": 0.5, "attention_bias": true,
                    "head_dim": HEAD_DIM
                });
                config("Glm4ForCausalLM", "glm4", layers, more)
            },
            |w, layers| {
                ends(w);
                each_layer(w, layers, |w, layer, _| {
                    norms(w, layer);
                    w.norm(&format!("{layer}.post_self_attn_layernorm"), HIDDEN);
                    w.norm(&format!("{layer}.post_mlp_layernorm"), HIDDEN);
                    attention(w, layer, QKV_BIAS);
                    w.matrix(&format!("{layer}.mlp.gate_up_proj"), 2 * INTER, HIDDEN);
                    w.matrix(&format!("{layer}.mlp.down_proj"), HIDDEN, INTER);
                });
            },
        ),
        family(
            "smollm3",
            |layers| {
                // Every second layer without rotation.
                let more = json!({
                    "rope_scaling": null, "no_rope_layers": null, "no_rope_layer_interval": 2
                });
                config("SmolLM3ForCausalLM", "smollm3", layers, more)
            },
            llama_weights,
        ),
    ]
}

fn qwen2_weights(w: &mut Weights, layers: usize) {
    ends(w);
    each_layer(w, layers, |w, layer, _| {
        norms(w, layer);
        attention(w, layer, QKV_BIAS);
        mlp(w, &format!("{layer}.mlp"), INTER);
    });
}

fn gemmas() -> Vec<Family> {
    let gemma = |family: Family| {
        tied(Family {
            norm: ("model.norm", Norm::RmsPlusOne),
            ..family
        })
    };
    vec![
        gemma(family(
            "gemma",
            |layers| gemma_config("GemmaForCausalLM", "gemma", layers, json!({})),
            |w, layers| {
                embedding(w);
                gemma_norms(w, "model", &["norm"]);
                each_layer(w, layers, |w, layer, _| {
                    gemma_norms(w, layer, &["input_layernorm", "post_attention_layernorm"]);
                    attention(w, layer, NO_BIAS);
                    mlp(w, &format!("{layer}.mlp"), INTER);
                });
            },
        )),
        gemma(Family {
            variant: "sliding window in every second layer",
            cap: Some(30.0),
            ..family(
                "gemma2",
                |layers| {
                    let more = json!({
                        "sliding_window": WINDOW, "attn_logit_softcapping": 50.0,
                        "final_logit_softcapping": 30.0, "query_pre_attn_scalar": HEAD_DIM
                    });
                    gemma_config("Gemma2ForCausalLM", "gemma2", layers, more)
                },
                |w, layers| {
                    embedding(w);
                    gemma_norms(w, "model", &["norm"]);
                    each_layer(w, layers, |w, layer, _| {
                        gemma_norms(w, layer, &GEMMA2_NORMS);
                        attention(w, layer, NO_BIAS);
                        mlp(w, &format!("{layer}.mlp"), INTER);
                    });
                },
            )
        }),
    ]
}

fn with_layer_norm() -> Vec<Family> {
    vec![
        Family {
            norm: ("model.final_layernorm", Norm::Layer),
            ..family(
                "phi2",
                |layers| {
                    let more = json!({
                        "layer_norm_eps": 1e-6, "partial_rotary_factor": 0.5,
                        "qk_layernorm": false, "hidden_act": "gelu_new"
                    });
                    config("PhiForCausalLM", "phi", layers, more)
                },
                |w, layers| {
                    embedding(w);
                    w.layer_norm("model.final_layernorm", HIDDEN);
                    w.matrix("lm_head", VOCAB, HIDDEN);
                    each_layer(w, layers, |w, layer, _| {
                        w.layer_norm(&format!("{layer}.input_layernorm"), HIDDEN);
                        for name in QKV_BIAS {
                            let rows = match *name {
                                "q_proj" => HEADS * HEAD_DIM,
                                _ => KV_HEADS * HEAD_DIM,
                            };
                            w.linear(&format!("{layer}.self_attn.{name}"), rows, HIDDEN);
                        }
                        w.linear(&format!("{layer}.self_attn.dense"), HIDDEN, HIDDEN);
                        w.linear(&format!("{layer}.mlp.fc1"), INTER, HIDDEN);
                        w.linear(&format!("{layer}.mlp.fc2"), HIDDEN, INTER);
                    });
                },
            )
        },
        tied(Family {
            variant: "sliding window",
            norm: ("model.norm", Norm::Layer),
            ..family(
                "starcoder2",
                |layers| {
                    let more = json!({
                        "norm_epsilon": 1e-6, "use_bias": true, "sliding_window": WINDOW,
                        "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": true
                    });
                    config("Starcoder2ForCausalLM", "starcoder2", layers, more)
                },
                |w, layers| {
                    embedding(w);
                    w.layer_norm("model.norm", HIDDEN);
                    each_layer(w, layers, |w, layer, _| {
                        w.layer_norm(&format!("{layer}.input_layernorm"), HIDDEN);
                        w.layer_norm(&format!("{layer}.post_attention_layernorm"), HIDDEN);
                        attention(w, layer, ALL_BIAS);
                        w.linear(&format!("{layer}.mlp.c_fc"), INTER, HIDDEN);
                        w.linear(&format!("{layer}.mlp.c_proj"), HIDDEN, INTER);
                    });
                },
            )
        }),
        Family {
            variant: "bias of the head",
            norm: ("model.norm", Norm::Layer),
            ..family(
                "phi3.5moe",
                |layers| {
                    let more = json!({
                        "rope_scaling": null, "original_max_position_embeddings": POSITIONS,
                        "sliding_window": WINDOW, "lm_head_bias": true, "attention_bias": true,
                        "num_local_experts": EXPERTS, "router_jitter_noise": 0.01
                    });
                    config("PhiMoEForCausalLM", "phimoe", layers, more)
                },
                |w, layers| {
                    embedding(w);
                    w.layer_norm("model.norm", HIDDEN);
                    w.linear("lm_head", VOCAB, HIDDEN);
                    each_layer(w, layers, |w, layer, _| {
                        w.layer_norm(&format!("{layer}.input_layernorm"), HIDDEN);
                        w.layer_norm(&format!("{layer}.post_attention_layernorm"), HIDDEN);
                        attention(w, layer, ALL_BIAS);
                        sparse_block(w, layer);
                    });
                },
            )
        },
    ]
}

fn mixtures() -> Vec<Family> {
    vec![
        Family {
            variant: "sliding window",
            ..family(
                "mixtral",
                |layers| {
                    let more = json!({
                        "sliding_window": WINDOW, "num_experts_per_tok": 2,
                        "num_local_experts": EXPERTS
                    });
                    config("MixtralForCausalLM", "mixtral", layers, more)
                },
                |w, layers| {
                    ends(w);
                    each_layer(w, layers, |w, layer, _| {
                        norms(w, layer);
                        attention(w, layer, NO_BIAS);
                        sparse_block(w, layer);
                    });
                },
            )
        },
        family(
            "qwen3_moe",
            |layers| {
                let more = json!({
                    "sliding_window": null, "use_sliding_window": false,
                    "max_window_layers": layers, "head_dim": HEAD_DIM,
                    "moe_intermediate_size": EXPERT_INTER, "num_experts": EXPERTS,
                    "mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": true,
                    "num_experts_per_tok": 2
                });
                config("Qwen3MoeForCausalLM", "qwen3_moe", layers, more)
            },
            |w, layers| {
                ends(w);
                each_layer(w, layers, |w, layer, _| {
                    norms(w, layer);
                    attention(w, layer, NO_BIAS);
                    qk_norm(w, layer);
                    experts(w, &format!("{layer}.mlp"));
                });
            },
        ),
        family(
            "glm4_moe",
            |layers| {
                let more = json!({
                    "moe_intermediate_size": EXPERT_INTER, "partial_rotary_factor": 0.5,
                    "use_qk_norm": true, "attention_bias": true, "n_routed_experts": EXPERTS,
                    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
                    "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
                    "routed_scaling_factor": 1.0, "head_dim": HEAD_DIM
                });
                config("Glm4MoeForCausalLM", "glm4_moe", layers, more)
            },
            |w, layers| {
                ends(w);
                each_layer(w, layers, |w, layer, i| {
                    norms(w, layer);
                    attention(w, layer, QKV_BIAS);
                    qk_norm(w, layer);
                    let prefix = format!("{layer}.mlp");
                    if i == 0 {
                        mlp(w, &prefix, INTER);
                        return;
                    }
                    experts(w, &prefix);
                    w.small(
                        &format!("{prefix}.gate.e_score_correction_bias"),
                        &[EXPERTS],
                    );
                    mlp(w, &format!("{prefix}.shared_experts"), EXPERT_INTER);
                });
            },
        ),
        Family {
            variant: "sliding window in every second layer",
            ..family(
                "gpt_oss",
                |layers| {
                    let types = ["sliding_attention", "full_attention"];
                    let types: Vec<_> = types.into_iter().cycle().take(layers).collect();
                    let more = json!({
                        "sliding_window": WINDOW, "head_dim": HEAD_DIM, "layer_types": types,
                        "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
                        "attention_bias": true, "rope_scaling": null
                    });
                    config("GptOssForCausalLM", "gpt_oss", layers, more)
                },
                gpt_oss_weights,
            )
        },
        family(
            "deepseek2",
            |layers| {
                let more = json!({
                    "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": false
                });
                deepseek_config("DeepseekV2ForCausalLM", "deepseek_v2", layers, more)
            },
            |w, layers| deepseek_weights(w, layers, false),
        ),
        family(
            "deepseek3",
            |layers| {
                let more = json!({ "topk_method": "noaux_tc", "scoring_func": "sigmoid" });
                deepseek_config("DeepseekV3ForCausalLM", "deepseek_v3", layers, more)
            },
            |w, layers| deepseek_weights(w, layers, true),
        ),
    ]
}

/// Experts in MXFP4: blocks of 32 values of four bits with a common exponent.
fn gpt_oss_weights(w: &mut Weights, layers: usize) {
    /// 2^-4, for values of about 1 / sqrt(64).
    const EXPONENT: u8 = 123;
    ends(w);
    each_layer(w, layers, |w, layer, _| {
        norms(w, layer);
        attention(w, layer, ALL_BIAS);
        w.small(&format!("{layer}.self_attn.sinks"), &[HEADS]);
        w.linear(&format!("{layer}.mlp.router"), EXPERTS, HIDDEN);
        for (name, rows, columns) in [
            ("gate_up_proj", 2 * INTER, HIDDEN),
            ("down_proj", HIDDEN, INTER),
        ] {
            let name = format!("{layer}.mlp.experts.{name}");
            let blocks = columns / 32;
            w.bytes(&format!("{name}_blocks"), &[EXPERTS, rows, blocks, 16]);
            w.byte(
                &format!("{name}_scales"),
                &[EXPERTS, rows, blocks],
                EXPONENT,
            );
            w.small(&format!("{name}_bias"), &[EXPERTS, rows]);
        }
    });
}

/// Families that the plugin refuses.
pub fn refused() -> Vec<Family> {
    vec![
        tied(family(
            "qwen3_next",
            |layers| {
                let more = json!({
                    "tie_word_embeddings": true, "head_dim": HEAD_DIM,
                    "partial_rotary_factor": 0.5, "linear_conv_kernel_dim": 4,
                    "linear_key_head_dim": HEAD_DIM, "linear_value_head_dim": HEAD_DIM,
                    "linear_num_key_heads": KV_HEADS, "linear_num_value_heads": HEADS,
                    "moe_intermediate_size": EXPERT_INTER,
                    "shared_expert_intermediate_size": EXPERT_INTER,
                    "num_experts_per_tok": 2, "num_experts": EXPERTS,
                    "full_attention_interval": layers
                });
                config("Qwen3NextForCausalLM", "qwen3_next", layers, more)
            },
            qwen3_next_weights,
        )),
        family(
            "glm4_moe_lite",
            |layers| {
                let architecture = "Glm4MoeLiteForCausalLM";
                let mut config = deepseek_config(architecture, "glm4_moe_lite", layers, json!({}));
                config["q_lora_rank"] = json!(KV_RANK);
                config
            },
            |w, layers| {
                deepseek_weights(w, layers, true);
                each_layer(w, layers, |w, layer, _| {
                    let attention = |name: &str| format!("{layer}.self_attn.{name}");
                    w.matrix(&attention("q_a_proj"), KV_RANK, HIDDEN);
                    w.norm(&attention("q_a_layernorm"), KV_RANK);
                    w.matrix(&attention("q_b_proj"), HEADS * (NOPE + ROPE), KV_RANK);
                });
            },
        ),
        tied(family(
            "gemma3",
            |layers| {
                let more = json!({
                    "sliding_window": WINDOW, "query_pre_attn_scalar": HEAD_DIM,
                    "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0,
                    "hidden_activation": "gelu_pytorch_tanh"
                });
                gemma_config("Gemma3ForCausalLM", "gemma3_text", layers, more)
            },
            |w, layers| {
                embedding(w);
                gemma_norms(w, "model", &["norm"]);
                each_layer(w, layers, |w, layer, _| {
                    gemma_norms(w, layer, &GEMMA2_NORMS);
                    attention(w, layer, NO_BIAS);
                    for name in ["q_norm", "k_norm"] {
                        w.small(&format!("{layer}.self_attn.{name}.weight"), &[HEAD_DIM]);
                    }
                    mlp(w, &format!("{layer}.mlp"), INTER);
                });
            },
        )),
    ]
}

/// All layers but the last are recurrent.
fn qwen3_next_weights(w: &mut Weights, layers: usize) {
    let (keys, values) = (KV_HEADS * HEAD_DIM, HEADS * HEAD_DIM);
    embedding(w);
    gemma_norms(w, "model", &["norm"]);
    each_layer(w, layers, |w, layer, i| {
        gemma_norms(w, layer, &["input_layernorm", "post_attention_layernorm"]);
        if i + 1 == layers {
            w.matrix(&format!("{layer}.self_attn.q_proj"), 2 * values, HIDDEN);
            w.matrix(&format!("{layer}.self_attn.k_proj"), keys, HIDDEN);
            w.matrix(&format!("{layer}.self_attn.v_proj"), keys, HIDDEN);
            w.matrix(&format!("{layer}.self_attn.o_proj"), HIDDEN, values);
            qk_norm(w, layer);
        } else {
            let linear = |name: &str| format!("{layer}.linear_attn.{name}");
            w.matrix(&linear("in_proj_qkvz"), 2 * keys + 2 * values, HIDDEN);
            w.matrix(&linear("in_proj_ba"), 2 * HEADS, HIDDEN);
            w.stacked(&linear("conv1d.weight"), &[2 * keys + values, 1, 4]);
            w.small(&linear("dt_bias"), &[HEADS]);
            w.small(&linear("A_log"), &[HEADS]);
            w.norm(&linear("norm"), HEAD_DIM);
            w.matrix(&linear("out_proj"), HIDDEN, values);
        }
        let prefix = format!("{layer}.mlp");
        experts(w, &prefix);
        mlp(w, &format!("{prefix}.shared_expert"), EXPERT_INTER);
        w.matrix(&format!("{prefix}.shared_expert_gate"), 1, HIDDEN);
    });
}
