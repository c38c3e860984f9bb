//! Kernels of DFlash speculative decoding over a paged KV cache.
//!
//! | operation | what it is for |
//! | --- | --- |
//! | [`block_attention`] | a block of query rows over each sequence's paged context: draft and verify |
//! | [`materialize`] | the one product of all draft layers' K and V to normed, rotated, paged K and V |
//! | [`norm_rope`], [`silu_mul`] | what a draft layer does between its matrix products |
//! | [`product`], [`product_onto`], [`gated_product`] | few rows times weights, each read once |
//! | [`rms_norm`], [`rotate_and_store`] | what a target's layer does between its products, for decode rows |
//! | [`decoder_layer`] | all of that: a target's decoder layer in a decode step or verify pass |
//! | [`accept`], [`argmax_last`] | argmax of all rows and the accepted prefix, without leaving the device |
//!
//! Each is one function. On a CUDA device (feature `cuda`) it launches its kernel; elsewhere, and for
//! what no kernel covers, it takes a fallback made of candle's operations with the same result. A
//! fallback on a CUDA device is slow, since it reads lengths back to the host: it is logged once for
//! each operation and counted ([`slow_paths`]).
//!
//! # The paged cache
//! The cache of one layer is a pair of tensors as the host (mistral.rs) keeps them, with
//! `x = 16 / size_of(dtype)`:
//! - keys `[num_blocks, kv_heads, head_dim / x, block_size, x]`,
//! - values `[num_blocks, kv_heads, head_dim, block_size]`.
//!
//! A sequence's position `p` lies in block `block_table[p / block_size]` at `p % block_size`. A slot
//! is `block * block_size + offset`; slot -1 is padding.
//!
//! # What is checked
//! Shapes, dtypes and devices are checked on the host and give errors that say what was expected. The
//! contents of index tensors (lengths, block ids, slots, positions) can only be checked by the fallbacks,
//! which return errors; the kernels then neither read nor write outside the tensors, but what they
//! compute for such a row is unspecified.

mod accept;
mod attention;
mod check;
#[cfg(feature = "cuda")]
mod cuda;
mod decoder_layer;
mod layer;
mod materialize;
mod paged;
mod product;
mod slow_path;

pub use accept::{accept, argmax_last};
#[doc(hidden)]
pub use attention::block_attention_with_splits;
pub use attention::{block_attention, covers, AttentionOptions, PagedContext};
#[doc(hidden)]
pub use decoder_layer::composed as decoder_layer_composed;
pub use decoder_layer::{
    chained_decoder_layer, decoder_layer, draft_layer, rms_norm, rotate_and_store, DecoderLayer,
    DraftLayer, Norm, RotateAndStore,
};
pub use layer::{norm_rope, silu_mul, NormRope};
pub use materialize::{materialize, Kept, KvOrder, MaterializeSpec};
pub use product::{
    covers_product, gated_product, product, product_onto, Weight, MOST_PRODUCT_ROWS, MOST_WEIGHTS,
};
pub use slow_path::slow_paths;
