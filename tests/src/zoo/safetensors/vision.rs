//! Vision towers: two layers over the 4 x 4 patches of an image of 64 x 64 pixels, of which 2 x 2 become
//! a token. (The host reckons with images of 1024 x 1024, so patches cannot be much smaller.)

use super::*;

/// Pixels of an image's edge, and of a patch's.
pub const SIDE: usize = 64;
pub const PATCH: usize = 16;
/// Patches of a token's edge.
pub const MERGE: usize = 2;
pub const IMAGE_TOKENS: usize = 4;
pub const HIDDEN: usize = 16;
const INTER: usize = 32;
const HEADS: usize = 2;
const DEPTH: usize = 2;
const CHANNELS: usize = 3;
const PATCHES: usize = (SIDE / PATCH) * (SIDE / PATCH);

fn sizes(more: Value) -> Value {
    let mut config = json!({
        "hidden_size": HIDDEN, "intermediate_size": INTER, "patch_size": PATCH,
        "image_size": SIDE, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
        "num_heads": HEADS, "num_channels": CHANNELS, "depth": DEPTH, "in_chans": CHANNELS,
        "spatial_merge_size": MERGE, "temporal_patch_size": 2
    });
    if let (Some(config), Value::Object(more)) = (config.as_object_mut(), more) {
        config.extend(more);
    }
    config
}

/// Gemma 3's.
pub fn siglip_config() -> Value {
    sizes(json!({}))
}

pub fn siglip(w: &mut Weights, tower: &str) {
    let embeddings = format!("{tower}.embeddings");
    let patch = format!("{embeddings}.patch_embedding");
    w.stacked(
        &format!("{patch}.weight"),
        &[HIDDEN, CHANNELS, PATCH, PATCH],
    );
    w.small(&format!("{patch}.bias"), &[HIDDEN]);
    w.matrix(&format!("{embeddings}.position_embedding"), PATCHES, HIDDEN);
    w.layer_norm(&format!("{tower}.post_layernorm"), HIDDEN);
    for i in 0..DEPTH {
        let layer = format!("{tower}.encoder.layers.{i}");
        w.layer_norm(&format!("{layer}.layer_norm1"), HIDDEN);
        w.layer_norm(&format!("{layer}.layer_norm2"), HIDDEN);
        for name in ["q_proj", "k_proj", "v_proj", "out_proj"] {
            w.linear(&format!("{layer}.self_attn.{name}"), HIDDEN, HIDDEN);
        }
        w.linear(&format!("{layer}.mlp.fc1"), INTER, HIDDEN);
        w.linear(&format!("{layer}.mlp.fc2"), HIDDEN, INTER);
    }
}

/// Mistral 3's.
pub fn pixtral_config() -> Value {
    sizes(json!({ "rope_theta": 10000.0 }))
}

pub fn pixtral(w: &mut Weights, tower: &str, projector: &str) {
    w.stacked(
        &format!("{tower}.patch_conv.weight"),
        &[HIDDEN, CHANNELS, PATCH, PATCH],
    );
    w.norm(&format!("{tower}.ln_pre"), HIDDEN);
    for i in 0..DEPTH {
        let layer = format!("{tower}.transformer.layers.{i}");
        w.norm(&format!("{layer}.attention_norm"), HIDDEN);
        w.norm(&format!("{layer}.ffn_norm"), HIDDEN);
        for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            w.matrix(&format!("{layer}.attention.{name}"), HIDDEN, HIDDEN);
        }
        w.matrix(&format!("{layer}.feed_forward.gate_proj"), INTER, HIDDEN);
        w.matrix(&format!("{layer}.feed_forward.up_proj"), INTER, HIDDEN);
        w.matrix(&format!("{layer}.feed_forward.down_proj"), HIDDEN, INTER);
    }
    w.norm(&format!("{projector}.norm"), HIDDEN);
    w.matrix(
        &format!("{projector}.patch_merger.merging_layer"),
        HIDDEN,
        HIDDEN * MERGE * MERGE,
    );
    w.matrix(&format!("{projector}.linear_1"), super::HIDDEN, HIDDEN);
    w.matrix(
        &format!("{projector}.linear_2"),
        super::HIDDEN,
        super::HIDDEN,
    );
}

pub fn qwen2_config() -> Value {
    // Its `hidden_size` is that of the text.
    sizes(json!({ "embed_dim": HIDDEN, "hidden_size": super::HIDDEN, "mlp_ratio": 2.0 }))
}

pub fn qwen2_5_config() -> Value {
    sizes(json!({
        "out_hidden_size": super::HIDDEN, "hidden_act": "silu", "window_size": PATCH * MERGE,
        "fullatt_block_indexes": [1]
    }))
}

/// Qwen3-VL's and Qwen3.5's; the text model gets the outputs of its first `deepstack` layers, too.
pub fn qwen3_config(deepstack: usize) -> Value {
    let indexes: Vec<usize> = (0..deepstack).collect();
    sizes(json!({
        "out_hidden_size": super::HIDDEN, "num_position_embeddings": PATCHES,
        "deepstack_visual_indexes": indexes
    }))
}

fn qwen_patches(w: &mut Weights, tower: &str) {
    w.stacked(
        &format!("{tower}.patch_embed.proj.weight"),
        &[HIDDEN, CHANNELS, 2, PATCH, PATCH],
    );
}

fn qwen_attention(w: &mut Weights, block: &str) {
    w.linear(&format!("{block}.attn.qkv"), 3 * HIDDEN, HIDDEN);
    w.linear(&format!("{block}.attn.proj"), HIDDEN, HIDDEN);
}

const MERGED: usize = HIDDEN * MERGE * MERGE;

pub fn qwen2(w: &mut Weights, tower: &str) {
    qwen_patches(w, tower);
    for i in 0..DEPTH {
        let block = format!("{tower}.blocks.{i}");
        w.layer_norm(&format!("{block}.norm1"), HIDDEN);
        w.layer_norm(&format!("{block}.norm2"), HIDDEN);
        qwen_attention(w, &block);
        w.linear(&format!("{block}.mlp.fc1"), INTER, HIDDEN);
        w.linear(&format!("{block}.mlp.fc2"), HIDDEN, INTER);
    }
    w.layer_norm(&format!("{tower}.merger.ln_q"), HIDDEN);
    w.linear(&format!("{tower}.merger.mlp.0"), MERGED, MERGED);
    w.linear(&format!("{tower}.merger.mlp.2"), super::HIDDEN, MERGED);
}

pub fn qwen2_5(w: &mut Weights, tower: &str) {
    qwen_patches(w, tower);
    for i in 0..DEPTH {
        let block = format!("{tower}.blocks.{i}");
        w.norm(&format!("{block}.norm1"), HIDDEN);
        w.norm(&format!("{block}.norm2"), HIDDEN);
        qwen_attention(w, &block);
        w.linear(&format!("{block}.mlp.gate_proj"), INTER, HIDDEN);
        w.linear(&format!("{block}.mlp.up_proj"), INTER, HIDDEN);
        w.linear(&format!("{block}.mlp.down_proj"), HIDDEN, INTER);
    }
    w.norm(&format!("{tower}.merger.ln_q"), HIDDEN);
    w.linear(&format!("{tower}.merger.mlp.0"), MERGED, MERGED);
    w.linear(&format!("{tower}.merger.mlp.2"), super::HIDDEN, MERGED);
}

pub fn qwen3(w: &mut Weights, tower: &str, deepstack: usize) {
    qwen_patches(w, tower);
    w.small(&format!("{tower}.patch_embed.proj.bias"), &[HIDDEN]);
    w.matrix(&format!("{tower}.pos_embed"), PATCHES, HIDDEN);
    for i in 0..DEPTH {
        let block = format!("{tower}.blocks.{i}");
        w.layer_norm(&format!("{block}.norm1"), HIDDEN);
        w.layer_norm(&format!("{block}.norm2"), HIDDEN);
        qwen_attention(w, &block);
        w.linear(&format!("{block}.mlp.linear_fc1"), INTER, HIDDEN);
        w.linear(&format!("{block}.mlp.linear_fc2"), HIDDEN, INTER);
    }
    let mut merger = |merger: &str, norm: usize| {
        w.layer_norm(&format!("{merger}.norm"), norm);
        w.linear(&format!("{merger}.linear_fc1"), MERGED, MERGED);
        w.linear(&format!("{merger}.linear_fc2"), super::HIDDEN, MERGED);
    };
    merger(&format!("{tower}.merger"), HIDDEN);
    for i in 0..deepstack {
        merger(&format!("{tower}.deepstack_merger_list.{i}"), MERGED);
    }
}
