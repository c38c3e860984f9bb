//! DFlash speculative decoding (arXiv 2602.06036) for mistral.rs.
//!
//! A small block-diffusion *draft model* fills a whole block of tokens in one forward pass; the
//! *target* verifies the block in one pass; its own choices are what is emitted, so the output is
//! that of the target alone. The draft model's context is not its own: hidden features *tapped*
//! from several target layers are projected into the K/V of every draft layer.
//!
//! Two rings, with one direction of dependency:
//!
//! | ring | module | concept |
//! | --- | --- | --- |
//! | core | [`config`] | drafter `config.json` to a validated [`config::DraftConfig`] |
//! | core | [`layer_ids`] | which target layers are tapped |
//! | core | [`mask_token`] | the token that stands for "not drafted yet" |
//! | core | [`checkpoint`] | the drafter's files, checked before anything is built |
//! | core | [`draft`] | the draft model |
//! | core | [`quantize`] | its linear layers in fewer bits, by the engine |
//! | core | [`kv`] | one sequence's draft K/V |
//! | core | [`pool`] | draft K/V in the blocks of a paged KV cache |
//! | core | [`accept`] | the accept rule |
//! | core | [`commit`] | the walk over a verified block: accept, emit, commit |
//! | core | [`controller`] | how many rows to verify, by measured cost and acceptance |
//! | core | [`worker`] | draft and materialize: tensors in, tokens out |
//! | core | [`stats`], [`trace`] | counters; what each round did |
//! | core | [`fault`] | failures on purpose, for tests |
//! | host | [`host`] | the only module that names mistral.rs types |
//!
//! The core builds without the host: `cargo test -p dflash-plugin --no-default-features`.

pub mod accept;
pub mod checkpoint;
pub mod commit;
pub mod config;
pub mod controller;
pub mod draft;
pub mod error;
pub mod fault;
#[cfg(feature = "host")]
pub mod host;
pub mod kv;
pub mod layer_ids;
pub mod mask_token;
pub mod pool;
pub mod quantize;
pub mod stats;
pub mod trace;
pub mod worker;

#[cfg(feature = "host")]
#[doc(hidden)]
pub use host::{decode_layers_run, use_decode_layers_anywhere};
#[cfg(feature = "host")]
pub use host::{use_decode_kernels, DFlashMethod};
