//! Hooks that make a step fail or go wrong on purpose, for tests of invariant I5 and for tests of
//! the tests of I1, and one that drafts in the draft model's place. Nothing sets it but code that builds a `DFlashMethod` itself; no flag,
//! file or request reaches it.

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
    /// When the target chose another token than the draft: go on as if it had not, so that the next
    /// token is chosen behind a draft that is not in the text. A wrong accept rule, which shows in
    /// nothing but the distribution of the output.
    Accept,
}

/// Says whether to fail (or to go wrong) at this point, each time it is passed. It may panic, too.
pub type FaultHook = Arc<dyn Fn(FaultPoint) -> bool + Send + Sync>;

/// Gets the tokens of a sequence and the drafts that would follow them, and may change the drafts: an
/// oracle that knows what the target will say makes every accept length happen.
pub type DraftHook = Arc<dyn Fn(&[u32], &mut [u32]) + Send + Sync>;
