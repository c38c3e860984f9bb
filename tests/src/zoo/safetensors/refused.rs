//! Families that the plugin refuses.

use super::*;

/// Families that the plugin refuses.
pub fn refused() -> Vec<Family> {
    vec![family(
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
    )]
}
