//! Runs the host in this process, with and without DFlash.

pub mod bench;
pub mod demo;
pub mod engine;
pub mod load;
pub mod prompts;
pub mod report;
pub mod shape;
