//! The tensors that a config announces, compared with those that are there.

use std::collections::BTreeMap;
use std::path::Path;

use super::StoredTensor;
use crate::config::DraftConfig;
use crate::error::{DFlashError, Result};

/// Projections of a layer that have a bias when `attention_bias` is set.
const BIASED: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];

/// Names (without the prefix `model.`) and shapes of all tensors, linear weights as `[out, in]`.
pub(super) fn expected_tensors(cfg: &DraftConfig) -> BTreeMap<String, Vec<usize>> {
    let hidden = cfg.hidden_size;
    let q_width = cfg.num_attention_heads * cfg.head_dim;
    let kv_width = cfg.num_key_value_heads * cfg.head_dim;
    let mut tensors = BTreeMap::from([
        ("fc.weight".to_string(), vec![hidden, cfg.taps_width()]),
        ("hidden_norm.weight".to_string(), vec![hidden]),
        ("norm.weight".to_string(), vec![hidden]),
    ]);
    if let Some(size) = cfg.draft_vocab_size {
        tensors.insert("lm_head.weight".into(), vec![size, hidden]);
        tensors.insert("d2t".into(), vec![size]);
    }
    let in_layer = [
        ("input_layernorm", vec![hidden]),
        ("post_attention_layernorm", vec![hidden]),
        ("self_attn.q_proj", vec![q_width, hidden]),
        ("self_attn.k_proj", vec![kv_width, hidden]),
        ("self_attn.v_proj", vec![kv_width, hidden]),
        ("self_attn.o_proj", vec![hidden, q_width]),
        ("self_attn.q_norm", vec![cfg.head_dim]),
        ("self_attn.k_norm", vec![cfg.head_dim]),
        ("mlp.gate_proj", vec![cfg.intermediate_size, hidden]),
        ("mlp.up_proj", vec![cfg.intermediate_size, hidden]),
        ("mlp.down_proj", vec![hidden, cfg.intermediate_size]),
    ];
    for layer in 0..cfg.num_hidden_layers {
        for (name, shape) in &in_layer {
            tensors.insert(format!("layers.{layer}.{name}.weight"), shape.clone());
            let projection = name.rsplit('.').next().unwrap_or(name);
            if cfg.attention_bias && BIASED.contains(&projection) {
                tensors.insert(format!("layers.{layer}.{name}.bias"), vec![shape[0]]);
            }
        }
    }
    tensors
}

/// Tensors that other trainers write although they are the target's, or follow from others.
const COPIES: [&str; 6] = [
    "embed_tokens.weight",
    "lm_head.weight",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
    "t2d",
    "d2t",
];

/// Fails on the first tensor that is not expected, missing, or of the wrong shape. Copies of what is
/// the target's are taken out where they may be.
pub(super) fn check(
    cfg: &DraftConfig,
    dir: &Path,
    found: &mut BTreeMap<String, StoredTensor>,
) -> Result<()> {
    let expected = expected_tensors(cfg);
    found.retain(|name, _| {
        let is_copy = COPIES.contains(&name.as_str()) && !expected.contains_key(name);
        let is_inverse = name == "t2d" && cfg.draft_vocab_size.is_some();
        !(is_copy && (cfg.may_carry_copies || is_inverse))
    });
    // Unexpected ones first: they tell which variant of the format this is, while the tensors that
    // the variant lacks only tell that it is another one.
    if let Some((name, tensor)) = found.iter().find(|(name, _)| !expected.contains_key(*name)) {
        return Err(unexpected(cfg, name, tensor));
    }
    for (name, shape) in &expected {
        let Some(tensor) = found.get(name) else {
            return Err(missing(cfg, dir, name, shape, &expected, found));
        };
        if tensor.shape != *shape {
            return Err(wrong_shape(cfg, name, tensor, shape));
        }
    }
    Ok(())
}

fn unexpected(cfg: &DraftConfig, name: &str, tensor: &StoredTensor) -> DFlashError {
    let layer = name
        .strip_prefix("layers.")
        .and_then(|rest| rest.split('.').next())
        .and_then(|number| number.parse::<usize>().ok());
    let message = if name.contains("embed_tokens") || name.starts_with("lm_head") {
        "not expected: embedding and lm_head are the target's; remove the tensor from the checkpoint"
            .to_string()
    } else if name.starts_with("candidate_selector") || name.contains("_conv.") {
        "belongs to DFlash 2, which is not supported".to_string()
    } else if name == "d2t" || name == "t2d" {
        "maps a reduced draft vocabulary; add its size as `draft_vocab_size`".to_string()
    } else if name.contains("mask_hidden") || name.contains("mask_embedding") {
        "a trained mask embedding, which is not supported".to_string()
    } else if name.ends_with("_proj.bias") && !cfg.attention_bias {
        "not expected: `attention_bias` is not set; set it to true if q, k, v and o have biases"
            .to_string()
    } else if let Some(layer) = layer.filter(|layer| *layer >= cfg.num_hidden_layers) {
        format!(
            "belongs to layer {layer}, but `num_hidden_layers` is {}; correct the key or remove the \
             layer",
            cfg.num_hidden_layers
        )
    } else {
        "not a tensor of a DFlash draft model; remove it, or check `architectures`".to_string()
    };
    DFlashError::tensor(&tensor.file, &tensor.stored_name, message)
}

fn missing(
    cfg: &DraftConfig,
    dir: &Path,
    name: &str,
    shape: &[usize],
    expected: &BTreeMap<String, Vec<usize>>,
    found: &BTreeMap<String, StoredTensor>,
) -> DFlashError {
    let count = expected.keys().filter(|n| !found.contains_key(*n)).count();
    let hint = if let Some(size) = cfg
        .draft_vocab_size
        .filter(|_| !name.starts_with("layers."))
    {
        format!("`draft_vocab_size` {size} announces a reduced vocabulary")
    } else if name.ends_with(".bias") {
        "`attention_bias` is true; add the bias or set the key to false".to_string()
    } else {
        format!(
            "the config announces {} layers (`num_hidden_layers`)",
            cfg.num_hidden_layers
        )
    };
    let others = match count {
        1 => String::new(),
        _ => format!(", as are {} others", count - 1),
    };
    DFlashError::tensor(
        dir,
        name,
        format!("missing{others}; expected shape {shape:?}; {hint}"),
    )
}

fn wrong_shape(
    cfg: &DraftConfig,
    name: &str,
    tensor: &StoredTensor,
    shape: &[usize],
) -> DFlashError {
    let keys = if name == "d2t" || name == "lm_head.weight" {
        "`draft_vocab_size` and `hidden_size`".to_string()
    } else if name == "fc.weight" {
        format!(
            "[`hidden_size`, taps × `target_hidden_size`] with {} taps of {}; check \
             `dflash_config.target_layer_ids`",
            cfg.num_taps(),
            cfg.target_hidden_size
        )
    } else if name.contains("_norm.") && name.contains("self_attn") {
        "`head_dim`".to_string()
    } else if name.contains("self_attn") {
        "`hidden_size`, `num_attention_heads`, `num_key_value_heads` and `head_dim`".to_string()
    } else if name.contains("mlp") {
        "`hidden_size` and `intermediate_size`".to_string()
    } else {
        "`hidden_size`".to_string()
    };
    DFlashError::tensor(
        &tensor.file,
        &tensor.stored_name,
        format!(
            "expected shape {shape:?}, found {:?}; the expected shape comes from {keys}",
            tensor.shape
        ),
    )
}
