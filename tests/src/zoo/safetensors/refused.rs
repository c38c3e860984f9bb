//! Families that the plugin refuses.

use super::*;

/// Families that the plugin refuses.
pub fn refused() -> Vec<Family> {
    vec![
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
