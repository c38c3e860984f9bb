//! The draft model's `config.json`: dialects and defaults.

mod common;

use common::configs::{assert_refused, base, nested, parse, with};
use dflash_plugin::config::{LayerAttention, RopeScaling};
use dflash_plugin::error::DFlashError;
use serde_json::{json, Value};

#[test]
fn absent_keys_take_their_defaults() {
    let config = parse(&with(json!({"head_dim": null, "dflash_config": null})));
    assert_eq!(config.block_size, 16);
    assert_eq!(config.head_dim, 16);
    assert_eq!(config.target_hidden_size, 64);
    assert_eq!(config.mask_token_id, None);
    assert_eq!(config.mask_token_text(), "<|MASK|>");
    assert_eq!(config.num_taps(), 2);
    assert_eq!(config.rope.scaling, RopeScaling::Default);
    assert!(!config.rope.interleaved && !config.attention_bias);
    let full = LayerAttention {
        causal: false,
        window: None,
        from_anchor: false,
        context: None,
    };
    assert_eq!(config.layers, [full, full]);
}

#[test]
fn keys_are_read_at_both_levels_and_the_nested_one_wins() {
    let top = parse(&with(json!({
        "block_size": 8, "mask_token_id": 7, "target_layer_ids": [2, 3, 4], "dflash_config": null
    })));
    assert_eq!(top.block_size, 8);
    assert_eq!(top.mask_token_id, Some(7));
    assert_eq!(top.target_layer_ids(12).unwrap(), [2, 3, 4]);
    let mut both = with(json!({"block_size": 8, "mask_token_id": 7}));
    both["dflash_config"]["block_size"] = 4.into();
    let both = parse(&both);
    assert_eq!((both.block_size, both.mask_token_id), (4, Some(150)));
}

#[test]
fn listed_layer_ids_keep_their_order() {
    let config = parse(&nested(json!({"target_layer_ids": [9, 1, 5]})));
    assert_eq!(config.target_layer_ids(12).unwrap(), [9, 1, 5]);
    assert_eq!(config.taps_width(), 3 * 64);
}

#[test]
fn a_target_of_another_depth_is_refused_with_both_numbers() {
    let trained = parse(&base()).target_layer_ids(10).unwrap_err();
    assert!(matches!(trained, DFlashError::Pair { .. }));
    let trained = trained.to_string();
    assert!(
        trained.contains("12 in the draft model, 10 in the target"),
        "{trained}"
    );
    let shallow = parse(&with(json!({"num_target_layers": null})));
    let error = shallow.target_layer_ids(9).unwrap_err().to_string();
    assert!(
        error.contains("9 in the draft model, 9 in the target"),
        "{error}"
    );
    assert_eq!(shallow.target_layer_ids(10).unwrap(), [1, 9]);
}

#[test]
fn a_default_rule_that_repeats_a_layer_asks_for_a_list() {
    let config = parse(&with(json!({
        "dflash_config": null, "num_target_layers": 4, "num_hidden_layers": 3
    })));
    let error = config.target_layer_ids(4).unwrap_err().to_string();
    assert!(error.contains("taps layer 1 twice"), "{error}");
    assert!(error.contains("list 3 layers"), "{error}");
}

#[test]
fn causality_follows_the_layer_type_unless_a_key_sets_it_for_all() {
    let types =
        json!({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12});
    let causal = |json: &Value| {
        parse(json)
            .layers
            .iter()
            .map(|l| l.causal)
            .collect::<Vec<_>>()
    };
    let mut json = with(types);
    assert_eq!(causal(&json), [true, false]);
    assert_eq!(parse(&json).layers[0].window, Some(12));
    assert_eq!(parse(&json).layers[1].window, None);
    json["dflash_config"]["causal"] = true.into();
    assert_eq!(causal(&json), [true, true]);
    json["is_causal"] = false.into();
    assert_eq!(causal(&json), [false, false]);
}

#[test]
fn rope_settings_are_read_in_both_dialects() {
    let v5 = parse(&with(json!({
        "rope_theta": null,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    })));
    assert_eq!(v5.rope.theta, 5000.0);
    assert_eq!(v5.rope.scaling, RopeScaling::Linear { factor: 4.0 });
    let v4 = parse(&with(
        json!({"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ));
    assert_eq!(v4.rope.scaling, RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn the_rotated_dims_of_a_head_are_a_factor_of_it_rounded_down() {
    let dims = |edits: Value| parse(&with(edits)).rope.rotary_dim;
    assert_eq!(dims(json!({})), 16);
    for (factor, expected) in [(1.0, 16), (0.5, 8), (0.4, 6), (0.125, 2)] {
        assert_eq!(dims(json!({ "partial_rotary_factor": factor })), expected);
        let table = json!({"rope_type": "default", "partial_rotary_factor": factor});
        assert_eq!(dims(json!({ "rope_scaling": table })), expected);
        assert_eq!(dims(json!({ "rope_parameters": table })), expected);
        let both = json!({"partial_rotary_factor": factor, "rope_parameters": table});
        assert_eq!(dims(both), expected);
    }
    // Of MiMo's targets: 0.334 of 192 dims is 64.128.
    let wide = json!({"head_dim": 192, "partial_rotary_factor": 0.334});
    assert_eq!(dims(wide), 64);
}

#[test]
fn forced_windows_are_those_of_all_layers_and_leave_causality_alone() {
    let layers = |json: Value| {
        let layers = parse(&json).layers;
        assert_eq!(layers.len(), 2);
        assert_eq!(layers[0], layers[1]);
        (layers[0].window, layers[0].causal)
    };
    let swa = json!({"use_swa": true, "swa_window_size": 12});
    let forced = |edits: Value| {
        let mut json = with(edits);
        for (key, value) in swa.as_object().unwrap() {
            json["dflash_config"][key] = value.clone();
        }
        json
    };
    assert_eq!(layers(nested(swa.clone())), (Some(12), false));
    assert_eq!(layers(with(swa.clone())), (Some(12), false));
    let types = |kind: &str| json!({"layer_types": [kind, kind]});
    assert_eq!(layers(forced(types("full_attention"))), (Some(12), false));
    assert_eq!(layers(forced(types("sliding_attention"))), (Some(12), true));
    let causal = json!({"is_causal": true});
    assert_eq!(layers(forced(causal)), (Some(12), true));
    let causal = nested(json!({"use_swa": true, "swa_window_size": 12, "causal": true}));
    assert_eq!(layers(causal), (Some(12), true));
    // The window by its other key, and that key switched off.
    let other = json!({"use_swa": true, "sliding_window": 9});
    assert_eq!(layers(with(other)), (Some(9), false));
    let both = json!({"sliding_window": 12, "use_sliding_window": true});
    assert_eq!(layers(forced(both)), (Some(12), false));
    let off = json!({"sliding_window": 9, "use_sliding_window": false});
    assert_eq!(layers(forced(off)), (Some(12), false));
    assert_eq!(parse(&nested(swa.clone())).context_rows(), Some(11));
    // Without the switch the size is that of layers which slide by their type.
    let mut sized = with(types("sliding_attention"));
    sized["dflash_config"]["swa_window_size"] = 7.into();
    assert_eq!(layers(sized), (Some(7), true));
    let off = nested(json!({"use_swa": false, "swa_window_size": 7}));
    assert_eq!(layers(off), (None, false));
}

#[test]
fn yarns_attention_factor_follows_transformers() {
    let factor = |extra: Value| {
        let mut scaling = json!({
            "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64
        });
        for (key, value) in extra.as_object().unwrap() {
            scaling[key] = value.clone();
        }
        match parse(&with(json!({"rope_scaling": scaling}))).rope.scaling {
            RopeScaling::Yarn {
                attention_factor,
                truncate,
                ..
            } => (attention_factor, truncate),
            other => panic!("{other:?}"),
        }
    };
    let plain = 0.1 * 64f64.ln() + 1.0;
    assert_eq!(factor(json!({})), (plain, true));
    assert_eq!(factor(json!({"attention_factor": 1.25})).0, 1.25);
    assert_eq!(factor(json!({"mscale": 1.0, "mscale_all_dim": 1.0})).0, 1.0);
    let mscale = (0.1 * 2.0 * 64f64.ln() + 1.0) / plain;
    assert_eq!(
        factor(json!({"mscale": 2.0, "mscale_all_dim": 1.0})).0,
        mscale
    );
    assert_eq!(factor(json!({"mscale": 2.0})).0, plain);
    assert!(!factor(json!({"truncate": false})).1);
}

#[test]
fn scalars_on_embeddings_and_logits_are_exposed() {
    let mut json = with(json!({"final_logit_softcapping": 30.0, "logit_scale": 0.5}));
    json["dflash_config"]["input_embedding_scale"] = 8.0.into();
    json["dflash_config"]["output_multiplier"] = 2.0.into();
    let config = parse(&json);
    assert_eq!(config.input_embedding_scale, Some(8.0));
    assert_eq!(config.output_multiplier, Some(2.0));
    assert_eq!(config.logit_scale, Some(0.5));
    assert_eq!(config.final_logit_softcapping, Some(30.0));
    assert_refused(
        with(json!({"logit_scale": -1.0})),
        &["logit_scale", "positive", "-1"],
    );
}
