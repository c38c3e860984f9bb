//! Mixtures of experts.

use super::*;

pub fn families() -> Vec<Family> {
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
