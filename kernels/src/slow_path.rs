//! Fallbacks on a CUDA device are slow, so nobody should take one without knowing.

use std::sync::atomic::{AtomicU64, Ordering};

static SLOW: AtomicU64 = AtomicU64::new(0);

/// How often a fallback served tensors on a CUDA device in this process.
pub fn slow_paths() -> u64 {
    SLOW.load(Ordering::Relaxed)
}

/// One operation's fallback on a CUDA device.
#[cfg(feature = "cuda")]
pub(crate) struct SlowPath {
    operation: &'static str,
    taken: AtomicU64,
}

#[cfg(feature = "cuda")]
impl SlowPath {
    pub const fn new(operation: &'static str) -> Self {
        Self {
            operation,
            taken: AtomicU64::new(0),
        }
    }

    /// Counts, and logs the first time.
    pub fn note(&self, why: &str) {
        SLOW.fetch_add(1, Ordering::Relaxed);
        if self.taken.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                "{} takes a slow fallback on the GPU: {why} (logged once)",
                self.operation
            );
        }
    }
}
