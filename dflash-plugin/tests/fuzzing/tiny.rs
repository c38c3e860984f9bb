//! A complete checkpoint of a few kilobytes.

use serde_json::{json, Map, Value};

pub fn config() -> Value {
    json!({
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2,
        "rms_norm_eps": 1e-6, "vocab_size": 16, "max_position_embeddings": 32,
        "rope_theta": 10000.0, "block_size": 4, "num_target_layers": 6,
        "dflash_config": {"mask_token_id": 15, "target_layer_ids": [1, 3]}
    })
}

/// Names and shapes.
pub const TENSORS: [(&str, &[u64]); 14] = [
    ("fc.weight", &[4, 8]),
    ("hidden_norm.weight", &[4]),
    ("layers.0.input_layernorm.weight", &[4]),
    ("layers.0.mlp.down_proj.weight", &[4, 6]),
    ("layers.0.mlp.gate_proj.weight", &[6, 4]),
    ("layers.0.mlp.up_proj.weight", &[6, 4]),
    ("layers.0.post_attention_layernorm.weight", &[4]),
    ("layers.0.self_attn.k_norm.weight", &[2]),
    ("layers.0.self_attn.k_proj.weight", &[2, 4]),
    ("layers.0.self_attn.o_proj.weight", &[4, 4]),
    ("layers.0.self_attn.q_norm.weight", &[2]),
    ("layers.0.self_attn.q_proj.weight", &[4, 4]),
    ("layers.0.self_attn.v_proj.weight", &[2, 4]),
    ("norm.weight", &[4]),
];

/// Header and data of the tensors that `keep` names, all of one type.
pub fn weights(
    dtype: &str,
    width: u64,
    prefix: &str,
    keep: impl Fn(&str) -> bool,
) -> (Value, Vec<u8>) {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut end = 0;
    for (name, shape) in TENSORS.iter().filter(|(name, _)| keep(name)) {
        let begin = end;
        end += shape.iter().product::<u64>() * width;
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]});
        header.insert(format!("{prefix}{name}"), entry);
    }
    // 0x3c3c is a small finite number in each of the three types.
    (Value::Object(header), vec![0x3c; end as usize])
}

/// A safetensors file. `length_lie` is added to the announced length of the header.
pub fn file(header: &[u8], data: &[u8], length_lie: i64) -> Vec<u8> {
    let length = (header.len() as u64).wrapping_add_signed(length_lie);
    [&length.to_le_bytes(), header, data].concat()
}

/// The inverse of [`file`], for any bytes.
pub fn split(file: &[u8]) -> (Option<Value>, Vec<u8>) {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return (None, file.to_vec());
    };
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    match rest.split_at_checked(length) {
        Some((header, data)) => (serde_json::from_slice(header).ok(), data.to_vec()),
        None => (None, rest.to_vec()),
    }
}
