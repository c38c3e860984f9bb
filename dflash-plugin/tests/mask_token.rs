//! Which token the masks of a block are.

mod common;

use common::configs::{assert_refused, base, nested, parse};
use dflash_plugin::error::DFlashError;
use dflash_plugin::mask_token::resolve_mask_token;
use serde_json::json;

/// A tokenizer with two tokens.
fn token_to_id(text: &str) -> Option<u32> {
    match text {
        "<|MASK|>" => Some(151),
        "<fill>" => Some(40),
        _ => None,
    }
}

#[test]
fn an_explicit_mask_id_wins_over_the_default_text() {
    assert_eq!(
        resolve_mask_token(&parse(&base()), &token_to_id, 160).unwrap(),
        150
    );
}

#[test]
fn without_an_id_the_tokenizer_is_asked_for_the_text() {
    let default = parse(&nested(json!({"mask_token_id": null})));
    assert_eq!(
        resolve_mask_token(&default, &token_to_id, 160).unwrap(),
        151
    );
    let named = parse(&nested(
        json!({"mask_token_id": null, "mask_token": "<fill>"}),
    ));
    assert_eq!(resolve_mask_token(&named, &token_to_id, 160).unwrap(), 40);
}

#[test]
fn a_mask_text_that_means_another_token_than_the_id_is_a_conflict() {
    let conflict = parse(&nested(json!({"mask_token": "<fill>"})));
    let error = resolve_mask_token(&conflict, &token_to_id, 160).unwrap_err();
    let error = error.to_string();
    for part in ["mask_token_id", "150 contradicts", "\"<fill>\"", "to 40"] {
        assert!(error.contains(part), "{error}");
    }
    let unknown = parse(&nested(json!({"mask_token": "<unknown>"})));
    assert_eq!(
        resolve_mask_token(&unknown, &token_to_id, 160).unwrap(),
        150
    );
}

#[test]
fn a_mask_id_outside_of_the_targets_vocabulary_is_refused_with_both_numbers() {
    for (json, id) in [
        (base(), "150 in the draft model"),
        (
            nested(json!({"mask_token_id": null})),
            "151 in the draft model",
        ),
    ] {
        let error = resolve_mask_token(&parse(&json), &token_to_id, 150).unwrap_err();
        assert!(matches!(error, DFlashError::Pair { .. }));
        let error = error.to_string();
        assert!(
            error.contains(id) && error.contains("150 in the target"),
            "{error}"
        );
    }
}

#[test]
fn a_mask_token_that_cannot_be_found_names_the_key_to_add() {
    let config = parse(&nested(
        json!({"mask_token_id": null, "mask_token": "<none>"}),
    ));
    let error = resolve_mask_token(&config, &token_to_id, 160).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("\"<none>\""), "{error}");
    assert!(
        error.contains("add `dflash_config.mask_token_id`"),
        "{error}"
    );
}

#[test]
fn a_mask_id_that_is_no_token_id_is_refused() {
    for (value, part) in [
        (json!(true), "found true"),
        (json!(-1), "found -1"),
        (json!(1.5), "found 1.5"),
        (json!("<mask>"), "non-negative integer"),
        (json!(1u64 << 32), "below 2^32"),
    ] {
        assert_refused(
            nested(json!({ "mask_token_id": value })),
            &["dflash_config.mask_token_id", part],
        );
    }
}
