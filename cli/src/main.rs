//! The host's command line with the DFlash plugin linked in.

use std::sync::Arc;

use dflash_plugin::{use_decode_kernels, DFlashMethod};
use mistralrs_core::SpeculativeMethods;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    use_decode_kernels();
    let methods = SpeculativeMethods::default().with(Arc::new(DFlashMethod::new()));
    mistralrs_cli::run(methods).await
}
