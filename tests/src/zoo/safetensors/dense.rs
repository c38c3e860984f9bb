//! Models with one MLP a layer and RMS norms.

use super::*;

pub fn llama_weights(w: &mut Weights, layers: usize) {
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

pub fn families() -> Vec<Family> {
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

pub fn qwen2_weights(w: &mut Weights, layers: usize) {
    ends(w);
    each_layer(w, layers, |w, layer, _| {
        norms(w, layer);
        attention(w, layer, QKV_BIAS);
        mlp(w, &format!("{layer}.mlp"), INTER);
    });
}
