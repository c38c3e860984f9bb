//! Families that the plugin refuses.

use super::*;

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
