//! Draft models that would load as plain DFlash but are something else.
//!
//! A wrong variant still yields the right text and only drafts badly, so it must not load at all.

use super::harvest;
use super::keys::{describe, Entry, Keys};
use crate::error::{DFlashError, Result};

/// The architecture that is implemented.
const ARCHITECTURE: &str = "DFlashDraftModel";

const DFLASH2: &str = "DFlash 2 (in-block convolutions and a candidate selector)";
const DSPARK: &str = "DSpark (a Markov or confidence head)";
const DOMINO: &str = "Domino (a projector behind the draft model)";
const SPECULATORS: &str =
    "a key of the speculators format without its `speculators_model_type`; add that, or convert the \
     config to z-lab's keys";
const SINKS: &str = "attention sinks or a value scale (MiMo)";

/// Keys that, when switched on at the top level or in `dflash_config`, mean another model.
const FOREIGN: &[(&str, &str)] = &[
    ("conv_kernel_size", DFLASH2),
    ("conv_group_size", DFLASH2),
    ("selector_rank", DFLASH2),
    ("selector_top_k", DFLASH2),
    ("markov_rank", DSPARK),
    ("markov_head_type", DSPARK),
    ("enable_confidence_head", DSPARK),
    ("speculators_config", SPECULATORS),
    ("transformer_layer_config", SPECULATORS),
    ("aux_hidden_state_layer_ids", SPECULATORS),
    ("eagle_aux_hidden_state_layer_ids", SPECULATORS),
    ("sliding_window_non_causal", SPECULATORS),
    ("shift_label", DOMINO),
    ("gru_hidden_dim", DOMINO),
    ("attention_sink_bias", SINKS),
    ("add_swa_attention_sink_bias", SINKS),
    ("add_full_attention_sink_bias", SINKS),
    ("n_routed_experts", "a mixture of experts"),
    ("num_experts", "a mixture of experts"),
    ("mlp_bias", "an MLP with biases"),
    ("quantization_config", "quantised draft weights"),
];

/// Keys of `dflash_config` that are read, or are harmless.
const KNOWN_NESTED: &[&str] = &[
    "block_size",
    "causal",
    "draft_vocab_size",
    "final_logit_softcapping",
    "input_embedding_scale",
    "logit_scale",
    "mask_token",
    "mask_token_id",
    "num_target_layers",
    "output_multiplier",
    "projector_type",
    "sample_from_anchor",
    "attention_mode",
    "sliding_window",
    "swa_window_size",
    "target_hidden_size",
    "target_layer_ids",
    "use_swa",
];

/// Fails when the config asks for something that is not implemented.
pub(super) fn refuse_unsupported(keys: &Keys) -> Result<()> {
    architecture(keys)?;
    for (key, meaning) in FOREIGN {
        for entry in places(keys, key) {
            if entry.is_truthy() {
                return Err(unsupported(&entry, &format!("this is {meaning}")));
            }
        }
    }
    one_of(keys, "projector_type", &["dflash"], DOMINO)?;
    one_of(keys, "attention_mode", &["gqa", "mha"], "another attention")?;
    one_of(keys, "hidden_act", &["silu", "swish"], "another activation")?;
    only_number(keys, "attention_value_scale", 1.0, SINKS)?;
    for name in keys.nested_names() {
        let foreign = FOREIGN.iter().any(|(key, _)| *key == name);
        if !foreign && !KNOWN_NESTED.contains(&name) {
            tracing::warn!("draft model config: unknown key `dflash_config.{name}` is ignored");
        }
    }
    Ok(())
}

/// `architectures` may be absent (some converters strip it); the tensor list is checked in any case.
fn architecture(keys: &Keys) -> Result<()> {
    let Some(entry) = keys.top("architectures") else {
        return Ok(());
    };
    let names = entry.strings()?;
    if names.is_empty() || names.contains(&ARCHITECTURE) || harvest::is_deepspec(keys)? {
        return Ok(());
    }
    let meaning = match names[0] {
        "DFlash2DraftModel" | "DFlash2MoEDraftModel" => DFLASH2,
        "Qwen3DSparkModel" | "Qwen3MoEDSparkModel" => DSPARK,
        "MuseGlimmerAssistantModel" => "Muse-Glimmer (other tensor names)",
        "DFlashMoEDraftModel" => "a mixture of experts",
        _ => "not a DFlash draft model",
    };
    Err(unsupported(
        &entry,
        &format!("this is {meaning}; expected \"{ARCHITECTURE}\""),
    ))
}

fn one_of(keys: &Keys, key: &str, allowed: &[&str], meaning: &str) -> Result<()> {
    for entry in places(keys, key) {
        if !allowed.contains(&entry.string()?) {
            let allowed = allowed.join("\" or \"");
            return Err(unsupported(
                &entry,
                &format!("this is {meaning}; expected \"{allowed}\""),
            ));
        }
    }
    Ok(())
}

fn only_number(keys: &Keys, key: &str, allowed: f64, meaning: &str) -> Result<()> {
    for entry in places(keys, key) {
        if entry.number()? != allowed {
            return Err(unsupported(
                &entry,
                &format!("this is {meaning}; expected {allowed}"),
            ));
        }
    }
    Ok(())
}

fn places<'a>(keys: &Keys<'a>, key: &str) -> impl Iterator<Item = Entry<'a>> {
    keys.nested(key).into_iter().chain(keys.top(key))
}

fn unsupported(entry: &Entry, meaning: &str) -> DFlashError {
    DFlashError::unsupported(
        &entry.path,
        format!("found {}: {meaning}", describe(entry.value)),
    )
}
