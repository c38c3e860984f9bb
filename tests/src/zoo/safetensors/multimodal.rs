//! Models that see images: a text model under another prefix, and a vision tower of two layers.

use super::norms::{gemma3_config, gemma3_text};
use super::vision::{self, IMAGE_TOKENS};
use super::*;
use crate::zoo::Images;

/// Tokens of images, in place of the vocabulary's last letters but one, which masks drafts.
const GEMMA: &[(&str, usize)] = &[
    ("<start_of_image>", 250),
    ("<end_of_image>", 251),
    ("<image_soft_token>", 252),
];
const MISTRAL: &[(&str, usize)] = &[("[IMG]", 250), ("[IMG_BREAK]", 251), ("[IMG_END]", 252)];
const QWEN: &[(&str, usize)] = &[
    ("<|vision_start|>", 250),
    ("<|vision_end|>", 251),
    ("<|image_pad|>", 252),
    ("<|video_pad|>", 253),
];

/// Layers of Qwen3-VL's tower whose outputs the text model gets, too.
const DEEPSTACK: usize = 2;

/// `preprocessor_config.json` with `more`.
fn preprocessor(more: Value) -> Value {
    let mut config = json!({
        "do_resize": true, "do_rescale": true, "rescale_factor": 1.0 / 255.0, "resample": 2,
        "do_normalize": true, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]
    });
    if let (Some(config), Value::Object(more)) = (config.as_object_mut(), more) {
        config.extend(more);
    }
    config
}

pub fn qwen_images() -> Images {
    Images {
        tokens: QWEN,
        prompt: "<|vision_start|><|image_pad|><|vision_end|>",
        preprocessor: preprocessor(json!({
            "patch_size": vision::PATCH, "merge_size": vision::MERGE, "temporal_patch_size": 2,
            "min_pixels": vision::PATCH * vision::PATCH, "max_pixels": vision::SIDE * vision::SIDE
        })),
        processor: None,
    }
}

/// Put what `fill` adds under `prefix`.
fn below(w: &mut Weights, prefix: &str, fill: impl FnOnce(&mut Weights)) {
    let others = std::mem::take(&mut w.tensors);
    fill(w);
    let added = std::mem::replace(&mut w.tensors, others);
    let added = added.into_iter();
    w.tensors
        .extend(added.map(|(name, tensor)| (format!("{prefix}{name}"), tensor)));
}

/// The tokens of Qwen's images and `more`.
pub fn qwen_tokens(more: Value) -> Value {
    let mut config = json!({
        "image_token_id": 252, "video_token_id": 253, "vision_start_token_id": 250,
        "vision_end_token_id": 251
    });
    if let (Some(config), Value::Object(more)) = (config.as_object_mut(), more) {
        config.extend(more);
    }
    config
}

/// Qwen2-VL and Qwen2.5-VL: the text model's keys and names at the top.
fn qwen2_config(architecture: &str, layers: usize, vision: Value) -> Value {
    let more = qwen_tokens(json!({
        // Named, but not used, as in the published checkpoints.
        "use_sliding_window": false, "sliding_window": WINDOW, "max_window_layers": layers,
        "rope_scaling": { "type": "mrope", "mrope_section": [2, 3, 3] },
        "vision_config": vision
    }));
    config(architecture, "qwen2_vl", layers, more)
}

fn qwen3_config(architecture: &str, layers: usize, more: Value) -> Value {
    let mut text = config("", "qwen3_vl_text", layers, more);
    text["head_dim"] = json!(HEAD_DIM);
    text["rope_scaling"] = json!({ "mrope_interleaved": true, "mrope_section": [4, 2, 2] });
    qwen_tokens(json!({
        "architectures": [architecture], "text_config": text, "tie_word_embeddings": false,
        "vision_config": vision::qwen3_config(DEEPSTACK)
    }))
}

fn qwen3_weights(w: &mut Weights, layers: usize, mlp: fn(&mut Weights, &str)) {
    vision::qwen3(w, "model.visual", DEEPSTACK);
    w.matrix("lm_head", VOCAB, HIDDEN);
    w.matrix("model.language_model.embed_tokens", VOCAB, HIDDEN);
    w.norm("model.language_model.norm", HIDDEN);
    for i in 0..layers {
        let layer = format!("model.language_model.layers.{i}");
        norms(w, &layer);
        attention(w, &layer, NO_BIAS);
        qk_norm(w, &layer);
        mlp(w, &format!("{layer}.mlp"));
    }
}

/// All experts in two tensors.
fn stacked_experts(w: &mut Weights, prefix: &str) {
    w.matrix(&format!("{prefix}.gate"), EXPERTS, HIDDEN);
    let shape = [EXPERTS, HIDDEN, 2 * EXPERT_INTER];
    w.stacked(&format!("{prefix}.experts.gate_up_proj"), &shape);
    let shape = [EXPERTS, EXPERT_INTER, HIDDEN];
    w.stacked(&format!("{prefix}.experts.down_proj"), &shape);
}

fn gemma3_family() -> Family {
    Family {
        norm: ("language_model.model.norm", Norm::RmsPlusOne),
        head: "language_model.model.embed_tokens",
        images: Some(Images {
            tokens: GEMMA,
            prompt: "<start_of_image>",
            preprocessor: preprocessor(json!({
                "size": { "height": vision::SIDE, "width": vision::SIDE }
            })),
            processor: Some(json!({ "image_seq_length": IMAGE_TOKENS })),
        }),
        variant: "with images, sliding window in every second layer",
        ..family(
            "gemma3",
            |layers| {
                json!({
                    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                    "text_config": gemma3_config(layers), "vision_config": vision::siglip_config(),
                    "image_token_index": 252, "mm_tokens_per_image": IMAGE_TOKENS
                })
            },
            |w, layers| {
                vision::siglip(w, "vision_tower.vision_model");
                let projector = "multi_modal_projector";
                w.stacked(
                    &format!("{projector}.mm_input_projection_weight"),
                    &[vision::HIDDEN, HIDDEN],
                );
                w.small(
                    &format!("{projector}.mm_soft_emb_norm.weight"),
                    &[vision::HIDDEN],
                );
                below(w, "language_model.", |w| gemma3_text(w, layers));
            },
        )
    }
}

fn mistral3_family() -> Family {
    Family {
        variant: "sliding window",
        norm: ("language_model.model.norm", Norm::Rms),
        head: "language_model.lm_head",
        images: Some(Images {
            tokens: MISTRAL,
            prompt: "[IMG]",
            preprocessor: preprocessor(json!({
                "size": { "longest_edge": vision::SIDE }, "default_to_square": true,
                "patch_size": vision::PATCH * vision::MERGE
            })),
            processor: Some(json!({
                "image_token": "[IMG]", "image_break_token": "[IMG_BREAK]",
                "image_end_token": "[IMG_END]", "patch_size": vision::PATCH,
                "spatial_merge_size": vision::MERGE
            })),
        }),
        ..family(
            "mistral3",
            |layers| {
                let more = json!({ "sliding_window": WINDOW });
                json!({
                    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
                    "text_config": config("", "mistral", layers, more),
                    "vision_config": vision::pixtral_config(), "image_token_index": 250,
                    "multimodal_projector_bias": false, "projector_hidden_act": "gelu",
                    "spatial_merge_size": vision::MERGE, "vision_feature_layer": -1
                })
            },
            |w, layers| {
                vision::pixtral(w, "vision_tower", "multi_modal_projector");
                below(w, "language_model.", |w| dense::llama_weights(w, layers));
            },
        )
    }
}

pub fn families() -> Vec<Family> {
    vec![
        gemma3_family(),
        mistral3_family(),
        Family {
            images: Some(qwen_images()),
            ..family(
                "qwen2vl",
                |layers| {
                    let architecture = "Qwen2VLForConditionalGeneration";
                    qwen2_config(architecture, layers, vision::qwen2_config())
                },
                |w, layers| {
                    vision::qwen2(w, "visual");
                    dense::qwen2_weights(w, layers);
                },
            )
        },
        Family {
            images: Some(qwen_images()),
            ..family(
                "qwen2_5vl",
                |layers| {
                    let architecture = "Qwen2_5_VLForConditionalGeneration";
                    qwen2_config(architecture, layers, vision::qwen2_5_config())
                },
                |w, layers| {
                    vision::qwen2_5(w, "visual");
                    dense::qwen2_weights(w, layers);
                },
            )
        },
        Family {
            images: Some(qwen_images()),
            norm: ("model.language_model.norm", Norm::Rms),
            ..family(
                "qwen3vl",
                |layers| qwen3_config("Qwen3VLForConditionalGeneration", layers, json!({})),
                |w, layers| qwen3_weights(w, layers, |w, prefix| mlp(w, prefix, INTER)),
            )
        },
        Family {
            images: Some(qwen_images()),
            norm: ("model.language_model.norm", Norm::Rms),
            ..family(
                "qwen3vlmoe",
                |layers| {
                    let more = json!({
                        "moe_intermediate_size": EXPERT_INTER, "num_experts": EXPERTS,
                        "num_experts_per_tok": 2
                    });
                    qwen3_config("Qwen3VLMoeForConditionalGeneration", layers, more)
                },
                |w, layers| qwen3_weights(w, layers, stacked_experts),
            )
        },
    ]
}
