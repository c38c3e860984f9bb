//! Models with other norms: Gemma, and those with layer norms.

use super::*;

pub fn gemmas() -> Vec<Family> {
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
        gemma(Family {
            variant: "sliding window in every second layer",
            ..family("gemma3", gemma3_config, gemma3_text)
        }),
    ]
}

pub fn gemma3_config(layers: usize) -> Value {
    let more = json!({
        "sliding_window": WINDOW, "query_pre_attn_scalar": HEAD_DIM, "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0, "hidden_activation": "gelu_pytorch_tanh"
    });
    gemma_config("Gemma3ForCausalLM", "gemma3_text", layers, more)
}

pub fn gemma3_text(w: &mut Weights, layers: usize) {
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
}

pub fn with_layer_norm() -> Vec<Family> {
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
