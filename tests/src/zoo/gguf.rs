//! Families in GGUF: layers in Q8_0, embedding, head and norms in f32.

use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};

use super::{Family, Format, Norm, HIDDEN, INTER, POSITIONS, VOCAB};
use crate::tokenizer;
use crate::weights::Weights;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const EXPERTS: usize = 4;
const EXPERT_INTER: usize = 64;

/// The host's phi2 has as many of them as heads.
fn kv_heads(architecture: &str) -> usize {
    match architecture {
        "phi2" => HEADS,
        _ => KV_HEADS,
    }
}

/// Rows of queries, keys and values in one matrix.
fn qkv(architecture: &str) -> usize {
    (HEADS + 2 * kv_heads(architecture)) * HEAD_DIM
}

/// Write `model.gguf` below `folder`.
pub fn save(weights: &Weights, architecture: &str, layers: usize, folder: &Path) -> PathBuf {
    let own = |key: &str| format!("{architecture}.{key}");
    let number = |value: usize| Value::U32(value as u32);
    let strings = |texts: Vec<String>| Value::Array(texts.into_iter().map(Value::String).collect());
    let mut words = tokenizer::tokens(VOCAB);
    words.push(tokenizer::END.into());
    let mut metadata = vec![
        (
            "general.architecture".into(),
            Value::String(architecture.into()),
        ),
        ("tokenizer.ggml.model".into(), Value::String("gpt2".into())),
        ("tokenizer.ggml.tokens".into(), strings(words)),
        ("tokenizer.ggml.merges".into(), strings(vec!["a a".into()])),
        ("tokenizer.ggml.eos_token_id".into(), number(VOCAB)),
    ];
    for (key, value) in [
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", kv_heads(architecture)),
        ("block_count", layers),
        ("embedding_length", HIDDEN),
        ("feed_forward_length", INTER),
        ("rope.dimension_count", HEAD_DIM),
        ("context_length", POSITIONS),
    ] {
        metadata.push((own(key), number(value)));
    }
    if architecture == "qwen3moe" {
        for (key, value) in [
            ("expert_count", EXPERTS),
            ("expert_used_count", 2),
            ("expert_feed_forward_length", EXPERT_INTER),
        ] {
            metadata.push((own(key), number(value)));
        }
    }
    for key in ["layer_norm_rms_epsilon", "layer_norm_epsilon"] {
        metadata.push((own(&format!("attention.{key}")), Value::F32(1e-6)));
    }
    let tensors: Vec<(&String, QTensor)> = weights
        .tensors
        .iter()
        .map(|(name, tensor)| {
            let is_router = name.ends_with("ffn_gate_inp.weight");
            let is_matrix = name.starts_with("blk.") && tensor.rank() > 1 && !is_router;
            let kind = match is_matrix {
                true => GgmlDType::Q8_0,
                false => GgmlDType::F32,
            };
            (name, QTensor::quantize(tensor, kind).unwrap())
        })
        .collect();
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let path = folder.join("model.gguf");
    let mut file = std::fs::File::create(&path).unwrap();
    gguf_file::write(&mut file, &metadata, &tensors).unwrap();
    path
}

fn each_layer(
    w: &mut Weights,
    layers: usize,
    mut fill: impl FnMut(&mut Weights, &dyn Fn(&str) -> String),
) {
    for i in 0..layers {
        fill(w, &|name| format!("blk.{i}.{name}"));
    }
}

fn ends(w: &mut Weights) {
    w.matrix("token_embd", VOCAB, HIDDEN);
    w.norm("output_norm", HIDDEN);
    w.matrix("output", VOCAB, HIDDEN);
}

/// Attention and gated MLP as llama, qwen2 and qwen3 have them.
fn gated_layer(w: &mut Weights, name: &dyn Fn(&str) -> String, has_bias: bool) {
    attention(w, name, has_bias);
    w.matrix(&name("ffn_gate"), INTER, HIDDEN);
    w.matrix(&name("ffn_up"), INTER, HIDDEN);
    w.matrix(&name("ffn_down"), HIDDEN, INTER);
}

fn attention(w: &mut Weights, name: &dyn Fn(&str) -> String, has_bias: bool) {
    w.norm(&name("attn_norm"), HIDDEN);
    w.norm(&name("ffn_norm"), HIDDEN);
    for (part, rows) in [
        ("attn_q", HEADS * HEAD_DIM),
        ("attn_k", KV_HEADS * HEAD_DIM),
        ("attn_v", KV_HEADS * HEAD_DIM),
    ] {
        match has_bias {
            true => w.linear(&name(part), rows, HIDDEN),
            false => w.matrix(&name(part), rows, HIDDEN),
        }
    }
    w.matrix(&name("attn_output"), HIDDEN, HEADS * HEAD_DIM);
}

fn family(
    host_name: &'static str,
    architecture: &'static str,
    weights: fn(&mut Weights, usize),
) -> Family {
    Family {
        host_name,
        variant: "",
        format: Format::Gguf {
            architecture,
            weights,
        },
        norm: ("output_norm", Norm::Rms),
        head: "output",
        cap: None,
        has_plain_steps: false,
        images: None,
    }
}

pub fn families() -> Vec<Family> {
    vec![
        family("llama (GGUF)", "llama", |w, layers| {
            ends(w);
            each_layer(w, layers, |w, name| gated_layer(w, name, false));
        }),
        family("qwen2 (GGUF)", "qwen2", |w, layers| {
            ends(w);
            each_layer(w, layers, |w, name| gated_layer(w, name, true));
        }),
        family("qwen3 (GGUF)", "qwen3", |w, layers| {
            ends(w);
            each_layer(w, layers, |w, name| {
                gated_layer(w, name, false);
                w.norm(&name("attn_q_norm"), HEAD_DIM);
                w.norm(&name("attn_k_norm"), HEAD_DIM);
            });
        }),
        family("qwen3_moe (GGUF)", "qwen3moe", |w, layers| {
            ends(w);
            each_layer(w, layers, |w, name| {
                attention(w, name, false);
                w.norm(&name("attn_q_norm"), HEAD_DIM);
                w.norm(&name("attn_k_norm"), HEAD_DIM);
                w.matrix(&name("ffn_gate_inp"), EXPERTS, HIDDEN);
                for (part, rows, columns) in [
                    ("ffn_gate_exps", EXPERT_INTER, HIDDEN),
                    ("ffn_up_exps", EXPERT_INTER, HIDDEN),
                    ("ffn_down_exps", HIDDEN, EXPERT_INTER),
                ] {
                    let shape = [EXPERTS, rows, columns];
                    w.stacked(&format!("{}.weight", name(part)), &shape);
                }
            });
        }),
        family("phi3 (GGUF)", "phi3", |w, layers| {
            ends(w);
            each_layer(w, layers, |w, name| {
                w.norm(&name("attn_norm"), HIDDEN);
                w.norm(&name("ffn_norm"), HIDDEN);
                w.matrix(&name("attn_qkv"), qkv("phi3"), HIDDEN);
                w.matrix(&name("attn_output"), HIDDEN, HIDDEN);
                w.matrix(&name("ffn_up"), 2 * INTER, HIDDEN);
                w.matrix(&name("ffn_down"), HIDDEN, INTER);
            });
        }),
        Family {
            norm: ("output_norm", Norm::Layer),
            ..family("phi2 (GGUF)", "phi2", |w, layers| {
                w.matrix("token_embd", VOCAB, HIDDEN);
                w.layer_norm("output_norm", HIDDEN);
                w.linear("output", VOCAB, HIDDEN);
                each_layer(w, layers, |w, name| {
                    w.layer_norm(&name("attn_norm"), HIDDEN);
                    w.linear(&name("attn_qkv"), qkv("phi2"), HIDDEN);
                    w.linear(&name("attn_output"), HIDDEN, HIDDEN);
                    w.linear(&name("ffn_up"), INTER, HIDDEN);
                    w.linear(&name("ffn_down"), HIDDEN, INTER);
                });
            })
        },
        Family {
            norm: ("output_norm", Norm::Layer),
            ..family("starcoder2 (GGUF)", "starcoder2", |w, layers| {
                w.matrix("token_embd", VOCAB, HIDDEN);
                w.layer_norm("output_norm", HIDDEN);
                w.matrix("output", VOCAB, HIDDEN);
                each_layer(w, layers, |w, name| {
                    w.layer_norm(&name("attn_norm"), HIDDEN);
                    w.layer_norm(&name("ffn_norm"), HIDDEN);
                    for (part, rows) in [
                        ("attn_q", HEADS * HEAD_DIM),
                        ("attn_k", KV_HEADS * HEAD_DIM),
                        ("attn_v", KV_HEADS * HEAD_DIM),
                        ("attn_output", HIDDEN),
                        ("ffn_up", INTER),
                    ] {
                        w.linear(&name(part), rows, HIDDEN);
                    }
                    w.linear(&name("ffn_down"), HIDDEN, INTER);
                });
            })
        },
    ]
}
