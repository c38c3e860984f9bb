//! Qwen3.5 and Qwen3.6: recurrent layers as Qwen3-Next's, of which the checkpoints have the projections
//! apart, M-RoPE and a vision tower.

use super::multimodal::{qwen_images, qwen_tokens};
use super::*;

const KEYS: usize = KV_HEADS * HEAD_DIM;
const VALUES: usize = HEADS * HEAD_DIM;

fn qwen3_5_config(architecture: &str, model_type: &str, layers: usize, more: Value) -> Value {
    let types = ["linear_attention", "full_attention"];
    let types: Vec<_> = types.into_iter().cycle().take(layers).collect();
    let mut text = config("", &format!("{model_type}_text"), layers, more);
    let own = json!({
        "head_dim": HEAD_DIM, "layer_types": types, "full_attention_interval": 2,
        "attn_output_gate": true, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": HEAD_DIM, "linear_value_head_dim": HEAD_DIM,
        "linear_num_key_heads": KV_HEADS, "linear_num_value_heads": HEADS,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "mrope_interleaved": true, "mrope_section": [2, 1, 1], "rope_type": "default",
            "rope_theta": 10000.0, "partial_rotary_factor": 0.5
        }
    });
    if let (Some(text), Value::Object(own)) = (text.as_object_mut(), own) {
        text.remove("architectures");
        text.remove("rope_theta");
        text.extend(own);
    }
    qwen_tokens(json!({
        "architectures": [architecture], "model_type": model_type, "text_config": text,
        "tie_word_embeddings": false, "vision_config": vision::qwen3_config(0)
    }))
}

fn qwen3_5_weights(w: &mut Weights, layers: usize, mlp: fn(&mut Weights, &str)) {
    let text = "model.language_model";
    vision::qwen3(w, "model.visual", 0);
    w.matrix("lm_head", VOCAB, HIDDEN);
    w.matrix(&format!("{text}.embed_tokens"), VOCAB, HIDDEN);
    gemma_norms(w, text, &["norm"]);
    for i in 0..layers {
        let layer = &format!("{text}.layers.{i}");
        gemma_norms(w, layer, &["input_layernorm", "post_attention_layernorm"]);
        if i % 2 == 1 {
            w.matrix(&format!("{layer}.self_attn.q_proj"), 2 * VALUES, HIDDEN);
            w.matrix(&format!("{layer}.self_attn.k_proj"), KEYS, HIDDEN);
            w.matrix(&format!("{layer}.self_attn.v_proj"), KEYS, HIDDEN);
            w.matrix(&format!("{layer}.self_attn.o_proj"), HIDDEN, VALUES);
            qk_norm(w, layer);
        } else {
            let linear = |name: &str| format!("{layer}.linear_attn.{name}");
            w.matrix(&linear("in_proj_qkv"), 2 * KEYS + VALUES, HIDDEN);
            w.matrix(&linear("in_proj_z"), VALUES, HIDDEN);
            w.matrix(&linear("in_proj_b"), HEADS, HIDDEN);
            w.matrix(&linear("in_proj_a"), HEADS, HIDDEN);
            w.stacked(&linear("conv1d.weight"), &[2 * KEYS + VALUES, 1, 4]);
            w.small(&linear("dt_bias"), &[HEADS]);
            w.small(&linear("A_log"), &[HEADS]);
            w.norm(&linear("norm"), HEAD_DIM);
            w.matrix(&linear("out_proj"), HIDDEN, VALUES);
        }
        mlp(w, &format!("{layer}.mlp"));
    }
}

/// All experts in two tensors, each as a linear layer has it, and one that every token goes through.
fn mixture(w: &mut Weights, prefix: &str) {
    w.matrix(&format!("{prefix}.gate"), EXPERTS, HIDDEN);
    for (name, shape) in [
        ("gate_up_proj", [EXPERTS, 2 * EXPERT_INTER, HIDDEN]),
        ("down_proj", [EXPERTS, HIDDEN, EXPERT_INTER]),
    ] {
        w.stacked(&format!("{prefix}.experts.{name}"), &shape);
    }
    mlp(w, &format!("{prefix}.shared_expert"), EXPERT_INTER);
    w.matrix(&format!("{prefix}.shared_expert_gate"), 1, HIDDEN);
}

pub fn families() -> Vec<Family> {
    let qwen3_5 = |family| Family {
        images: Some(qwen_images()),
        norm: ("model.language_model.norm", Norm::RmsPlusOne),
        ..family
    };
    vec![
        qwen3_5(family(
            "qwen3_5",
            |layers| {
                let architecture = "Qwen3_5ForConditionalGeneration";
                let mut config = qwen3_5_config(architecture, "qwen3_5", layers, json!({}));
                // As tools write it to whom the key means nothing here.
                if let Some(vision) = config["vision_config"].as_object_mut() {
                    vision.remove("deepstack_visual_indexes");
                }
                config
            },
            |w, layers| qwen3_5_weights(w, layers, |w, prefix| mlp(w, prefix, INTER)),
        )),
        qwen3_5(family(
            "qwen3_5moe",
            |layers| {
                let more = json!({
                    "moe_intermediate_size": EXPERT_INTER, "num_experts": EXPERTS,
                    "shared_expert_intermediate_size": EXPERT_INTER, "num_experts_per_tok": 2
                });
                let architecture = "Qwen3_5MoeForConditionalGeneration";
                qwen3_5_config(architecture, "qwen3_5_moe", layers, more)
            },
            |w, layers| qwen3_5_weights(w, layers, mixture),
        )),
    ]
}
