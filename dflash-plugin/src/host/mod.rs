//! The only part of the crate that names mistral.rs types.
//!
//! | file | concept |
//! | --- | --- |
//! | `method` | [`DFlashMethod`]: what a binary registers under the name `dflash` |
//! | `loader` | loads target and drafter, wraps the target's pipeline |
//! | `source` | where a drafter comes from: folder or hub |
//! | `pairing` | do target and drafter fit: checked at load, with numbers |
//! | `quant` | the drafter's linear layers in fewer bits, by the host's ISQ |
//! | `targets` | the table of families that can be used, and of reasons why others cannot |
//! | `pipeline` | [`DFlashPipeline`]: the host's `Pipeline`, delegated |
//! | `step` | one engine step: plan, draft, verify, accept, commit |
//! | `ranks` | tensor parallelism: what the ranks decide once for all |
//! | `passes` | the draft pass and the verify pass, and how a failed one is undone |
//! | `plan` | which sequences speculate, and with how many rows |
//! | `drafted` | the blocks of a step, on the host or still on the GPU |
//! | `accept` | the verified rows in front of the host's sampler |
//! | `plain` | prompts and plain steps, which keep the draft KV in step |
//! | `verify` | the verify pass on the host's normal KV cache, and its rollback |
//! | `recurrent` | the states of recurrent layers over a step |
//! | `cache` | the KV cache of a step: the model's own, or the host's paged one |
//! | `attention` | block attention in the target's decode steps on a GPU |
//! | `decode` | decoder layers and products of few rows in the target's decode steps on a GPU |
//! | `replay` | draft passes as CUDA graphs |
//! | `state` | the draft KV that a host `Sequence` owns |

mod accept;
mod attention;
mod cache;
mod decode;
mod drafted;
mod loader;
mod method;
mod pairing;
mod passes;
mod pipeline;
mod plain;
mod plan;
mod quant;
mod ranks;
mod recurrent;
mod replay;
mod source;
mod state;
mod step;
pub mod targets;
mod verify;

pub use decode::{decode_layers_run, use_decode_kernels, use_decode_layers_anywhere};
pub use loader::DFlashLoader;
pub use method::DFlashMethod;
pub use pipeline::DFlashPipeline;
pub use quant::HostQuantizer;
