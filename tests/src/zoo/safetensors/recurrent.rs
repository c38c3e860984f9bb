//! Models whose every second layer has attention; the others, the first among them, are recurrent.

use super::*;

/// Granite's recurrent layers.
const MAMBA_HEADS: usize = 8;
const MAMBA_GROUPS: usize = 2;
const MAMBA_STATE: usize = 8;

pub fn families() -> Vec<Family> {
    vec![
        tied(Family {
            norm: ("model.norm", Norm::RmsPlusOne),
            ..family(
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
                        "full_attention_interval": 2
                    });
                    config("Qwen3NextForCausalLM", "qwen3_next", layers, more)
                },
                qwen3_next_weights,
            )
        }),
        tied(family(
            "granitemoehybrid",
            |layers| {
                let types = ["mamba", "attention"];
                let types: Vec<_> = types.into_iter().cycle().take(layers).collect();
                let more = json!({
                    "tie_word_embeddings": true, "layer_types": types, "rope_scaling": null,
                    "shared_intermediate_size": INTER, "intermediate_size": EXPERT_INTER,
                    "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
                    "attention_multiplier": 0.25, "logits_scaling": 1.0, "mamba_n_heads": MAMBA_HEADS,
                    "mamba_n_groups": MAMBA_GROUPS, "mamba_d_state": MAMBA_STATE,
                    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": true,
                    "num_local_experts": EXPERTS, "num_experts_per_tok": 2
                });
                let architecture = "GraniteMoeHybridForCausalLM";
                config(architecture, "granitemoehybrid", layers, more)
            },
            granite_weights,
        )),
    ]
}

fn qwen3_next_weights(w: &mut Weights, layers: usize) {
    let (keys, values) = (KV_HEADS * HEAD_DIM, HEADS * HEAD_DIM);
    embedding(w);
    gemma_norms(w, "model", &["norm"]);
    each_layer(w, layers, |w, layer, i| {
        gemma_norms(w, layer, &["input_layernorm", "post_attention_layernorm"]);
        if i % 2 == 1 {
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

fn granite_weights(w: &mut Weights, layers: usize) {
    let inner = 2 * HIDDEN;
    let convolved = inner + 2 * MAMBA_GROUPS * MAMBA_STATE;
    embedding(w);
    w.norm("model.norm", HIDDEN);
    each_layer(w, layers, |w, layer, i| {
        norms(w, layer);
        if i % 2 == 1 {
            attention(w, layer, NO_BIAS);
        } else {
            let mamba = |name: &str| format!("{layer}.mamba.{name}");
            w.matrix(&mamba("in_proj"), inner + convolved + MAMBA_HEADS, HIDDEN);
            w.stacked(&mamba("conv1d.weight"), &[convolved, 1, 4]);
            w.small(&mamba("conv1d.bias"), &[convolved]);
            w.small(&mamba("dt_bias"), &[MAMBA_HEADS]);
            w.small(&mamba("A_log"), &[MAMBA_HEADS]);
            w.small(&mamba("D"), &[MAMBA_HEADS]);
            w.norm(&mamba("norm"), inner);
            w.matrix(&mamba("out_proj"), HIDDEN, inner);
        }
        let expert = |name: &str| format!("{layer}.block_sparse_moe.{name}");
        w.matrix(&expert("router.layer"), EXPERTS, HIDDEN);
        for (name, rows, columns) in [
            ("input_linear", 2 * EXPERT_INTER, HIDDEN),
            ("output_linear", HIDDEN, EXPERT_INTER),
        ] {
            w.stacked(
                &expert(&format!("{name}.weight")),
                &[EXPERTS, rows, columns],
            );
        }
        w.matrix(
            &format!("{layer}.shared_mlp.input_linear"),
            2 * INTER,
            HIDDEN,
        );
        w.matrix(&format!("{layer}.shared_mlp.output_linear"), HIDDEN, INTER);
    });
}
