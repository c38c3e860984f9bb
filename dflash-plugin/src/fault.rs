//! A hook that makes a step fail on purpose, for tests of invariant I5. Nothing sets it but code
//! that builds a `DFlashMethod` itself; no flag, file or request reaches it.

use std::sync::Arc;

/// Where a step can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultPoint {
    /// Before the draft model runs.
    Draft,
    /// After the target's verify pass has written its KV rows.
    Verify,
    /// Before the features of a prompt or plain step are materialized.
    Materialize,
    /// The features of a verify pass turn to NaN instead of an error being returned.
    NanFeatures,
}

/// Says whether to fail at this point, each time it is passed. It may panic, too.
pub type FaultHook = Arc<dyn Fn(FaultPoint) -> bool + Send + Sync>;
