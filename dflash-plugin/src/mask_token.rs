//! Which token fills the block behind the anchor.

use crate::config::DraftConfig;
use crate::error::{DFlashError, Result};

/// The mask token's id.
///
/// An explicit `mask_token_id` wins; otherwise the tokenizer is asked for the text `mask_token`
/// (default `<|MASK|>`). `token_to_id` is the target tokenizer's look-up, `target_vocab` the number of
/// rows of the target's embedding: a token outside of it cannot be embedded.
///
/// # Errors
/// [`DFlashError::Pair`] when the id is outside of the target's vocabulary, [`DFlashError::Config`]
/// when the config names a text that the tokenizer maps to another id than `mask_token_id`, or when
/// neither key leads to a token.
pub fn resolve_mask_token(
    cfg: &DraftConfig,
    token_to_id: &dyn Fn(&str) -> Option<u32>,
    target_vocab: usize,
) -> Result<u32> {
    let text = cfg.mask_token_text();
    let id = match cfg.mask_token_id {
        Some(id) => {
            // Only a text that the checkpoint names can contradict its id; the default text cannot.
            let named = cfg.mask_token.as_deref().and_then(token_to_id);
            if let Some(other) = named.filter(|other| *other != id) {
                return Err(DFlashError::config(
                    "mask_token_id",
                    format!(
                        "{id} contradicts `mask_token` \"{text}\", which the target's tokenizer maps \
                         to {other}; remove the wrong one of the two keys"
                    ),
                ));
            }
            id
        }
        None => token_to_id(text).ok_or_else(|| {
            DFlashError::config(
                "mask_token_id",
                format!(
                    "missing, and the target's tokenizer has no token \"{text}\"; add \
                     `dflash_config.mask_token_id` with the id that the draft model was trained with"
                ),
            )
        })?,
    };
    if id as usize >= target_vocab {
        return Err(DFlashError::Pair {
            what: "mask token id against the rows of the target's embedding".into(),
            draft: id as usize,
            target: target_vocab,
            fix: "use the target that the draft model was trained for, or correct \
                  `dflash_config.mask_token_id`"
                .into(),
        });
    }
    Ok(id)
}
