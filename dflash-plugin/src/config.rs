//! The draft model's `config.json`, validated.
//!
//! Published checkpoints spread the same facts over several dialects: keys at the top level or inside
//! `dflash_config` (which wins), RoPE settings in `rope_scaling` or `rope_parameters`, causality per
//! layer type or forced for all layers; other trainers use other names (`config/speculators.rs`) or
//! train other rows to predict (`config/harvest.rs`). [`DraftConfig`] is what remains after all of that is resolved.
//! Variants that would load but compute something else are refused (`config/refuse.rs`).

mod attention;
mod harvest;
mod keys;
mod refuse;
mod rope;
mod speculators;

use std::path::Path;

pub use attention::LayerAttention;
pub use harvest::Harvest;
pub use rope::{RopeConfig, RopeScaling};

use crate::error::{DFlashError, Result};
use crate::layer_ids::build_target_layer_ids;
use keys::Keys;

/// Block size of a checkpoint that does not name one.
pub const DEFAULT_BLOCK_SIZE: usize = 16;
/// Mask token of a checkpoint that names neither its id nor its text.
pub const DEFAULT_MASK_TOKEN: &str = "<|MASK|>";

/// Bounds that keep products of sizes far from overflow; real models stay far below them.
const MAX_DIM: usize = 1 << 24;
const MAX_LAYERS: usize = 512;
const MAX_POSITIONS: usize = 1 << 30;
/// A draft step allocates for every row of a block, so a number in a file must not be all that it
/// takes to ask for gigabytes; published models have 16 rows and fewer.
const MAX_BLOCK: usize = 1024;

/// A validated draft model configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftConfig {
    /// Tokens in a block: the anchor and `block_size - 1` masks. From 2 to 1024.
    pub block_size: usize,
    /// Which of them predict drafts.
    pub harvest: Harvest,
    /// Width of the draft model's residual stream, equal to the target's embedding width.
    pub hidden_size: usize,
    /// Width of one tap. `hidden_size` unless the checkpoint says otherwise.
    pub target_hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of draft layers.
    pub num_hidden_layers: usize,
    /// Number of query heads, a multiple of `num_key_value_heads`.
    pub num_attention_heads: usize,
    /// Number of key/value heads.
    pub num_key_value_heads: usize,
    /// Width of one head, even. `num_attention_heads * head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f64,
    /// Vocabulary size that the draft model was trained with.
    pub vocab_size: usize,
    /// Tokens that the draft model can draft, if it has a head of its own for a part of the
    /// vocabulary.
    pub draft_vocab_size: Option<usize>,
    /// Whether the checkpoint may carry copies of the target's embedding and head.
    pub may_carry_copies: bool,
    /// Positions `0..max_position_embeddings` may be used.
    pub max_position_embeddings: usize,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Whether the q, k, v and o projections have a bias (all four or none).
    pub attention_bias: bool,
    /// Attention pattern of each draft layer, `num_hidden_layers` entries.
    pub layers: Vec<LayerAttention>,
    /// Target layers as listed by the checkpoint, in the order of the columns of `fc`.
    /// See [`DraftConfig::target_layer_ids`].
    pub listed_layer_ids: Option<Vec<usize>>,
    /// Number of layers of the target that the draft model was trained for.
    pub num_target_layers: Option<usize>,
    /// Mask token id given by the checkpoint. See [`crate::mask_token::resolve_mask_token`].
    pub mask_token_id: Option<u32>,
    /// Mask token text given by the checkpoint.
    pub mask_token: Option<String>,
    /// Factor on the target's embeddings before they enter the draft model (applied by its forward).
    pub input_embedding_scale: Option<f64>,
    /// Positive factor on the logits; does not change the argmax.
    pub output_multiplier: Option<f64>,
    /// Positive factor on the logits under its other name; does not change the argmax.
    pub logit_scale: Option<f64>,
    /// Soft cap on the logits (`cap * tanh(logits / cap)`); monotonic, does not change the argmax.
    pub final_logit_softcapping: Option<f64>,
}

impl DraftConfig {
    /// Reads and validates a `config.json`.
    ///
    /// # Errors
    /// [`DFlashError::Io`] when the file cannot be read, otherwise as [`DraftConfig::from_json`].
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|source| DFlashError::Io {
            path: path.to_path_buf(),
            source,
        })?;
        Self::from_json(&text)
    }

    /// Parses and validates the text of a `config.json`.
    ///
    /// # Errors
    /// [`DFlashError::Config`] names the key that is missing or contradicts another one,
    /// [`DFlashError::Unsupported`] the key that asks for something not implemented.
    pub fn from_json(json: &str) -> Result<Self> {
        let root: serde_json::Value = serde_json::from_str(json)
            .map_err(|e| DFlashError::config("config.json", format!("not valid JSON: {e}")))?;
        let kind = root.get("speculators_model_type");
        let is_speculators = kind.is_some_and(|kind| !kind.is_null());
        let root = speculators::rewrite(root)?;
        let keys = Keys::new(&root)?;
        refuse::refuse_unsupported(&keys)?;

        let vocab_size = keys.require_size("vocab_size", u32::MAX as usize)?;
        let hidden_size = keys.require_size("hidden_size", MAX_DIM)?;
        let num_hidden_layers = keys.require_size("num_hidden_layers", MAX_LAYERS)?;
        let max_position_embeddings =
            keys.require_size("max_position_embeddings", MAX_POSITIONS)?;
        let (num_attention_heads, num_key_value_heads, head_dim) = heads(&keys, hidden_size)?;
        let block_size = block_size(&keys, max_position_embeddings)?;
        let num_target_layers = keys.optional_size("num_target_layers", MAX_LAYERS)?;
        Ok(Self {
            block_size,
            harvest: harvest::parse(&keys)?,
            draft_vocab_size: draft_vocab_size(&keys, vocab_size)?,
            may_carry_copies: is_speculators || harvest::is_deepspec(&keys)?,
            hidden_size,
            target_hidden_size: keys
                .optional_size("target_hidden_size", MAX_DIM)?
                .unwrap_or(hidden_size),
            intermediate_size: keys.require_size("intermediate_size", MAX_DIM)?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps: rms_norm_eps(&keys)?,
            vocab_size,
            max_position_embeddings,
            rope: RopeConfig::parse(&keys, head_dim, max_position_embeddings)?,
            attention_bias: keys.optional_bool("attention_bias")?.unwrap_or(false),
            layers: attention::parse_layers(&keys, num_hidden_layers, is_speculators)?,
            listed_layer_ids: listed_layer_ids(&keys, num_target_layers)?,
            num_target_layers,
            mask_token_id: mask_token_id(&keys)?,
            mask_token: keys.optional_string("mask_token")?,
            input_embedding_scale: keys.optional_positive("input_embedding_scale")?,
            output_multiplier: keys.optional_positive("output_multiplier")?,
            logit_scale: keys.optional_positive("logit_scale")?,
            final_logit_softcapping: keys.optional_positive("final_logit_softcapping")?,
        })
    }

    /// Rows of the longest verify pass: the anchor, and the drafts that a block gives.
    pub fn verify_rows(&self) -> usize {
        self.block_size + self.harvest.shift()
    }

    /// Lets no layer see more than the `tokens` most recent positions of the context, which keep their
    /// places. Windows of the checkpoint stay: the smaller one counts.
    pub fn bound_context(&mut self, tokens: usize) {
        for layer in &mut self.layers {
            layer.context = Some(tokens);
        }
    }

    /// The most context positions that any layer sees; `None` if one sees all.
    pub fn context_rows(&self) -> Option<usize> {
        let mut layers = self.layers.iter().map(LayerAttention::context_rows);
        layers.try_fold(0, |most, rows| Some(most.max(rows?)))
    }

    /// Number of taps: the listed target layers, or one for each draft layer.
    pub fn num_taps(&self) -> usize {
        self.listed_layer_ids
            .as_ref()
            .map_or(self.num_hidden_layers, Vec::len)
    }

    /// Width of the input of `fc`: [`DraftConfig::num_taps`] `* target_hidden_size`.
    pub fn taps_width(&self) -> usize {
        self.num_taps() * self.target_hidden_size
    }

    /// The 0-based target layers whose outputs are tapped, in the order of the columns of `fc`.
    ///
    /// Listed ids are kept as they are; otherwise [`build_target_layer_ids`] decides.
    ///
    /// # Errors
    /// [`DFlashError::Pair`] when the target has another number of layers than the draft model was
    /// trained for, or too few for a listed id; [`DFlashError::Config`] when the default rule does
    /// not give distinct layers.
    pub fn target_layer_ids(&self, n_target_layers: usize) -> Result<Vec<usize>> {
        if let Some(trained) = self.num_target_layers {
            if trained != n_target_layers {
                return Err(DFlashError::Pair {
                    what: "number of target layers (`num_target_layers`)".into(),
                    draft: trained,
                    target: n_target_layers,
                    fix: "use the target that the draft model was trained for, or correct the key"
                        .into(),
                });
            }
        }
        let Some(ids) = &self.listed_layer_ids else {
            let ids = build_target_layer_ids(n_target_layers, self.num_hidden_layers)?;
            return match first_repeated(&ids) {
                None => Ok(ids),
                Some(id) => Err(DFlashError::config(
                    "target_layer_ids",
                    format!(
                        "the default rule taps layer {id} twice on a target of {n_target_layers} \
                         layers; list {} layers in `dflash_config.target_layer_ids`",
                        self.num_hidden_layers
                    ),
                )),
            };
        };
        match ids.iter().find(|id| **id >= n_target_layers) {
            None => Ok(ids.clone()),
            Some(id) => Err(DFlashError::Pair {
                what: "a tapped layer in `target_layer_ids` against the number of target layers"
                    .into(),
                draft: *id,
                target: n_target_layers,
                fix: "ids are 0-based and must be below the number of layers: use the target that \
                      the draft model was trained for"
                    .into(),
            }),
        }
    }

    /// The mask token's text: the checkpoint's, or [`DEFAULT_MASK_TOKEN`].
    pub fn mask_token_text(&self) -> &str {
        self.mask_token.as_deref().unwrap_or(DEFAULT_MASK_TOKEN)
    }

    /// Query heads for each key/value head.
    pub fn group_size(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads
    }
}

/// Query heads, key/value heads and head width.
fn heads(keys: &Keys, hidden_size: usize) -> Result<(usize, usize, usize)> {
    let query = keys.require_size("num_attention_heads", MAX_DIM)?;
    let key_value = keys.require_size("num_key_value_heads", MAX_DIM)?;
    if query % key_value != 0 {
        return Err(DFlashError::config(
            "num_key_value_heads",
            format!("expected a divisor of `num_attention_heads` {query}, found {key_value}"),
        ));
    }
    let head_dim = match keys.optional_size("head_dim", MAX_DIM)? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(query) => hidden_size / query,
        None => {
            return Err(DFlashError::config(
                "head_dim",
                format!(
                    "missing, and `hidden_size` {hidden_size} is not a multiple of \
                     `num_attention_heads` {query}; add `head_dim`"
                ),
            ))
        }
    };
    if head_dim % 2 != 0 {
        return Err(DFlashError::config(
            "head_dim",
            format!("expected an even number (RoPE rotates pairs), found {head_dim}"),
        ));
    }
    if query.saturating_mul(head_dim) > MAX_DIM {
        return Err(DFlashError::config(
            "num_attention_heads",
            format!("{query} heads of `head_dim` {head_dim} exceed {MAX_DIM} columns"),
        ));
    }
    Ok((query, key_value, head_dim))
}

fn block_size(keys: &Keys, max_positions: usize) -> Result<usize> {
    let Some(entry) = keys.either("block_size") else {
        return Ok(DEFAULT_BLOCK_SIZE);
    };
    let block_size = entry.integer()?;
    if block_size < 2 || block_size > max_positions {
        return Err(entry.error(format!(
            "expected at least 2 (the anchor and a mask) and at most `max_position_embeddings` \
             {max_positions}, found {block_size}"
        )));
    }
    if block_size > MAX_BLOCK {
        return Err(entry.error(format!("expected at most {MAX_BLOCK}, found {block_size}")));
    }
    Ok(block_size)
}

/// The size of a reduced draft vocabulary.
fn draft_vocab_size(keys: &Keys, vocab_size: usize) -> Result<Option<usize>> {
    let Some(entry) = keys.either("draft_vocab_size") else {
        return Ok(None);
    };
    let size = entry.size(u32::MAX as usize)?;
    match size > vocab_size {
        true => Err(entry.error(format!(
            "expected at most `vocab_size` {vocab_size}, found {size}"
        ))),
        false => Ok((size < vocab_size).then_some(size)),
    }
}

fn rms_norm_eps(keys: &Keys) -> Result<f64> {
    let entry = keys.require("rms_norm_eps")?;
    let eps = entry.number()?;
    // As f32, in which the norms are computed, it must not vanish.
    if eps as f32 > 0.0 && eps < 1.0 {
        Ok(eps)
    } else {
        Err(entry.error(format!("expected a number between 0 and 1, found {eps}")))
    }
}

fn listed_layer_ids(keys: &Keys, num_target_layers: Option<usize>) -> Result<Option<Vec<usize>>> {
    let Some(entry) = keys.either("target_layer_ids") else {
        return Ok(None);
    };
    let ids = entry.integers()?;
    if ids.is_empty() || ids.len() > MAX_LAYERS {
        return Err(entry.error(format!(
            "expected 1 to {MAX_LAYERS} layers, found {}; remove the key to use the default rule",
            ids.len()
        )));
    }
    if let Some(id) = first_repeated(&ids) {
        return Err(entry.error(format!("expected distinct layers, found {id} twice")));
    }
    if let Some(layers) = num_target_layers {
        if let Some(id) = ids.iter().find(|id| **id >= layers) {
            return Err(entry.error(format!(
                "expected 0-based layers below `num_target_layers` {layers}, found {id}"
            )));
        }
    }
    Ok(Some(ids))
}

fn mask_token_id(keys: &Keys) -> Result<Option<u32>> {
    let Some(entry) = keys.either("mask_token_id") else {
        return Ok(None);
    };
    let id = entry.integer()?;
    u32::try_from(id)
        .map(Some)
        .map_err(|_| entry.error(format!("expected a token id below 2^32, found {id}")))
}

fn first_repeated(ids: &[usize]) -> Option<usize> {
    ids.iter()
        .enumerate()
        .find(|(i, id)| ids[..*i].contains(id))
        .map(|(_, id)| *id)
}
