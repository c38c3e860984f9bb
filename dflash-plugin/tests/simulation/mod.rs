//! A toy LLM server around the real accept walk and the real draft KV.

pub mod coverage;
pub mod draft;
pub mod engine;
pub mod mutants;
pub mod request;
pub mod scenario;
pub mod sequence;
pub mod target;
