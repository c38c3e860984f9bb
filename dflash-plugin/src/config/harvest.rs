//! Which rows of a block predict drafts.

use super::keys::Keys;
use crate::error::{DFlashError, Result};

/// Trainers differ in which token a row of the block predicts. Taken for the other one, a draft model
/// still runs and hardly any draft is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harvest {
    /// Each mask row predicts its own token; the anchor's row predicts nothing (z-lab). A block of
    /// `n` tokens gives `n - 1` drafts.
    BehindAnchor,
    /// Each row predicts the token after its own, the anchor's too (DeepSpec; speculators'
    /// `sample_from_anchor`). A block of `n` tokens gives `n` drafts.
    FromAnchor,
}

impl Harvest {
    /// Rows of the verify pass (anchor and drafts) less the rows of the block.
    pub fn shift(self) -> usize {
        match self {
            Self::BehindAnchor => 0,
            Self::FromAnchor => 1,
        }
    }
}

/// DeepSpec's architecture, of which the variant without further heads is DFlash.
pub(super) const DEEPSPEC: &str = "Qwen3DSparkModel";

/// Whether this is a DFlash draft model of DeepSpec: it says so by having no Markov head.
pub(super) fn is_deepspec(keys: &Keys) -> Result<bool> {
    let Some(entry) = keys.top("architectures") else {
        return Ok(false);
    };
    if entry.strings()?.first() != Some(&DEEPSPEC) {
        return Ok(false);
    }
    match keys.either("markov_rank") {
        Some(rank) => Ok(rank.integer()? == 0),
        None => Err(DFlashError::config(
            "markov_rank",
            format!("missing; {DEEPSPEC} is DFlash only with 0"),
        )),
    }
}

/// From `architectures` and `sample_from_anchor`.
pub(super) fn parse(keys: &Keys) -> Result<Harvest> {
    let said = keys.optional_bool("sample_from_anchor")?;
    match (is_deepspec(keys)?, said) {
        (true, Some(false)) => Err(DFlashError::config(
            "sample_from_anchor",
            format!("false, but {DEEPSPEC} predicts from the anchor; remove one of the two"),
        )),
        (true, _) | (false, Some(true)) => Ok(Harvest::FromAnchor),
        (false, _) => Ok(Harvest::BehindAnchor),
    }
}
