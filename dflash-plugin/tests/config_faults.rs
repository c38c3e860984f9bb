//! A `config.json` that is wrong, contradicts itself or belongs to another kind of draft model is
//! refused with the key.

mod common;

use common::configs::{assert_refused, assert_unsupported, nested, parse, with};
use dflash_plugin::config::DraftConfig;
use serde_json::{json, Value};

#[test]
fn text_that_is_no_config_is_refused() {
    for (text, part) in [
        ("{", "not valid JSON"),
        ("[]", "expected an object, found []"),
    ] {
        let error = DraftConfig::from_json(text).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    assert_refused(
        with(json!({"dflash_config": 3})),
        &["dflash_config", "expected an object"],
    );
}

#[test]
fn every_required_key_is_named_when_missing() {
    for key in [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "rope_theta",
    ] {
        assert_refused(with(json!({ key: null })), &[key, "missing", "add it"]);
        assert_refused(with(json!({ key: "x" })), &[key, "expected a", "\"x\""]);
        assert_refused(with(json!({ key: 0 })), &[key, "found 0"]);
        assert_refused(with(json!({ key: true })), &[key, "true"]);
        assert_refused(with(json!({ key: -1 })), &[key, "-1"]);
    }
    assert_refused(with(json!({"hidden_size": 1u64 << 60})), &["hidden_size"]);
    assert_refused(
        with(json!({"num_hidden_layers": 1e6})),
        &["num_hidden_layers"],
    );
}

#[test]
fn contradictions_name_their_keys_and_numbers() {
    assert_refused(
        with(json!({"num_key_value_heads": 3})),
        &[
            "num_key_value_heads",
            "divisor of `num_attention_heads` 4, found 3",
        ],
    );
    assert_refused(with(json!({"head_dim": 15})), &["head_dim", "even", "15"]);
    assert_refused(
        with(json!({"head_dim": null, "hidden_size": 66})),
        &["head_dim", "missing", "66", "add `head_dim`"],
    );
    assert_refused(
        nested(json!({"block_size": 1})),
        &["dflash_config.block_size", "at least 2"],
    );
    assert_refused(
        nested(json!({"block_size": 513})),
        &["block_size", "512, found 513"],
    );
    let mut large = with(json!({"max_position_embeddings": 1 << 30}));
    large["dflash_config"]["block_size"] = json!(1 << 30);
    assert_refused(large, &["dflash_config.block_size", "at most 1024"]);
    assert_refused(
        nested(json!({"target_layer_ids": []})),
        &["dflash_config.target_layer_ids", "found 0"],
    );
    assert_refused(
        nested(json!({"target_layer_ids": [1, 5, 1]})),
        &["target_layer_ids", "1 twice"],
    );
    assert_refused(
        nested(json!({"target_layer_ids": [1, 12]})),
        &["target_layer_ids", "below `num_target_layers` 12, found 12"],
    );
    assert_refused(
        nested(json!({"target_layer_ids": [1, -2]})),
        &["target_layer_ids[1]", "-2"],
    );
    assert_refused(
        with(json!({"layer_types": ["full_attention"]})),
        &["layer_types", "`num_hidden_layers` 2 layers, found 1"],
    );
    let sliding = json!(["sliding_attention", "full_attention"]);
    assert_refused(
        with(json!({ "layer_types": sliding })),
        &["sliding_window", "missing", "add the window"],
    );
    assert_refused(
        with(json!({"layer_types": sliding, "sliding_window": 8, "use_sliding_window": false})),
        &["use_sliding_window", "`layer_types` has sliding layers"],
    );
    assert_refused(
        with(json!({"sliding_window": 8, "use_sliding_window": true})),
        &["layer_types", "missing while `use_sliding_window` is true"],
    );
    assert_refused(
        with(json!({"rope_scaling": {"rope_type": "linear", "factor": 2, "rope_theta": 5.0}})),
        &[
            "rope_theta",
            "10000.0 contradicts `rope_scaling.rope_theta` = 5.0",
        ],
    );
    assert_refused(
        with(json!({"is_neox_style": true, "rope_is_neox_style": false})),
        &["is_neox_style", "contradicts"],
    );
    for parameters in [
        json!({"rope_type": "linear", "factor": 3, "rope_theta": 10000.0}),
        json!({"rope_type": "linear", "rope_theta": 10000.0}),
    ] {
        let scaling = json!({"rope_type": "linear", "factor": 2});
        assert_refused(
            with(json!({"rope_scaling": scaling, "rope_parameters": parameters})),
            &["rope_scaling", "differs from `rope_parameters`"],
        );
    }
    let parameters = json!({"rope_type": "default", "rope_theta": 5.0});
    assert_refused(
        with(json!({"rope_scaling": {"rope_type": "default"}, "rope_parameters": parameters})),
        &[
            "rope_theta",
            "contradicts `rope_parameters.rope_theta` = 5.0",
        ],
    );
}

#[test]
fn rope_scaling_without_its_numbers_is_refused() {
    let scaling = |table: Value| with(json!({ "rope_scaling": table }));
    assert_refused(
        scaling(json!({"rope_type": "linear"})),
        &["rope_scaling.factor", "missing"],
    );
    assert_refused(
        scaling(json!({"rope_type": "linear", "factor": 0.5})),
        &["at least 1", "0.5"],
    );
    let llama3 =
        json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4});
    assert_refused(scaling(llama3), &["high_freq_factor", "more than"]);
    let llama3 =
        json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4});
    assert_refused(
        scaling(llama3),
        &["rope_scaling.original_max_position_embeddings", "missing"],
    );
    assert_refused(scaling(json!(7)), &["rope_scaling", "expected an object"]);
}

#[test]
fn a_part_of_a_head_that_cannot_be_rotated_is_refused() {
    let factor = |value: Value| with(json!({ "partial_rotary_factor": value }));
    for bad in [json!(0), json!(0.0), json!(-0.5), json!(1.0001), json!(2)] {
        let text = bad.as_f64().unwrap().to_string();
        let parts = ["partial_rotary_factor", "at most 1, found", &text];
        assert_refused(factor(bad.clone()), &parts);
        let table = json!({"rope_type": "default", "partial_rotary_factor": bad});
        assert_refused(
            with(json!({ "rope_parameters": table })),
            &["rope_parameters.partial_rotary_factor", "at most 1, found"],
        );
    }
    // 5 and 1 of 16 dims, and none.
    for (odd, dims) in [(0.32, "5"), (0.1, "1"), (0.01, "0")] {
        let parts = ["partial_rotary_factor", "`head_dim` 16", "even number"];
        assert_refused(factor(json!(odd)), &parts);
        let found = format!("16 is {dims} (rounded down)");
        assert_refused(factor(json!(odd)), &[&found]);
    }
    for no_number in [json!("0.5"), json!(true), json!([0.5])] {
        assert_refused(factor(no_number), &["partial_rotary_factor", "a number"]);
    }
    let table = json!({"rope_type": "default", "partial_rotary_factor": 0.25});
    assert_refused(
        with(json!({"partial_rotary_factor": 0.5, "rope_scaling": table})),
        &[
            "partial_rotary_factor",
            "0.5 contradicts `rope_scaling.partial_rotary_factor` = 0.25",
        ],
    );
    assert_refused(
        nested(json!({"partial_rotary_factor": 0.5})),
        &["dflash_config.partial_rotary_factor", "to the top level"],
    );
}

#[test]
fn forced_windows_without_one_size_for_all_layers_are_refused() {
    let swa = |edits: Value| {
        let mut json = with(edits);
        json["dflash_config"]["use_swa"] = true.into();
        json
    };
    let missing = [
        "dflash_config.swa_window_size",
        "missing",
        "`use_swa`",
        "add",
    ];
    assert_refused(swa(json!({})), &missing);
    assert_refused(
        swa(json!({"sliding_window": 8, "use_sliding_window": false})),
        &missing,
    );
    assert_refused(
        swa(json!({"swa_window_size": 12, "sliding_window": 8})),
        &["swa_window_size", "12 contradicts `sliding_window` = 8"],
    );
    for bad in [json!(0), json!(-1), json!(1.5), json!("8")] {
        assert_refused(
            swa(json!({ "swa_window_size": bad })),
            &["swa_window_size", "expected"],
        );
    }
    assert_refused(
        swa(json!({
            "swa_window_size": 12, "layer_types": ["sliding_attention", "full_attention"]
        })),
        &["layer_types", "full ones", "`use_swa`"],
    );
    assert_refused(
        nested(json!({"use_swa": 1, "swa_window_size": 12})),
        &["dflash_config.use_swa", "true or false"],
    );
    assert_refused(
        nested(json!({"swa_window_size": 12})),
        &["dflash_config.swa_window_size", "use_swa` is missing"],
    );
    let sliding = json!(["sliding_attention", "sliding_attention"]);
    let mut both = with(json!({"layer_types": sliding, "sliding_window": 8}));
    both["dflash_config"]["swa_window_size"] = 12.into();
    assert_refused(both, &["12 contradicts `sliding_window` = 8"]);
}

#[test]
fn numbers_that_f32_cannot_hold_are_refused() {
    assert_refused(
        with(json!({"rms_norm_eps": 5e-324})),
        &["rms_norm_eps", "between 0 and 1"],
    );
    assert_refused(
        with(json!({"rope_theta": 1e300})),
        &["rope_theta", "in the range of f32"],
    );
    assert_refused(
        with(json!({"input_embedding_scale": 1e-300})),
        &["input_embedding_scale", "positive"],
    );
    // Its factor would be infinite.
    let yarn = json!({
        "rope_type": "yarn", "original_max_position_embeddings": 5e-324, "attention_factor": 1.0
    });
    assert_refused(
        with(json!({ "rope_scaling": yarn })),
        &["rope_scaling.original_max_position_embeddings", "positive"],
    );
    // The bounds of its blend would be infinite, and every frequency NaN.
    let yarn = json!({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-320});
    assert_refused(
        with(json!({ "rope_scaling": yarn })),
        &["rope_scaling.beta_fast", "positive"],
    );
}

#[test]
fn other_kinds_of_draft_model_are_refused_by_name() {
    let architecture = |name: &str| with(json!({ "architectures": [name] }));
    assert_unsupported(
        architecture("DFlash2DraftModel"),
        &["architectures", "DFlash 2"],
    );
    let dspark = |edit: Value| {
        let mut json = with(edit);
        json["architectures"] = json!(["Qwen3DSparkModel"]);
        json
    };
    assert_unsupported(
        dspark(json!({"markov_rank": 256})),
        &["DSpark", "DFlashDraftModel"],
    );
    assert_unsupported(
        dspark(json!({"markov_rank": 0, "enable_confidence_head": true})),
        &["enable_confidence_head", "DSpark"],
    );
    assert_refused(dspark(json!({})), &["markov_rank", "missing"]);
    assert_refused(
        dspark(json!({"markov_rank": 0, "sample_from_anchor": false})),
        &["sample_from_anchor", "Qwen3DSparkModel"],
    );
    assert_unsupported(architecture("MuseGlimmerAssistantModel"), &["Muse-Glimmer"]);
    assert_unsupported(
        architecture("LlamaForCausalLM"),
        &["not a DFlash draft model"],
    );
    for (edit, parts) in [
        (
            json!({"conv_kernel_size": 2}),
            ["dflash_config.conv_kernel_size", "DFlash 2"],
        ),
        (
            json!({"selector_rank": 256}),
            ["dflash_config.selector_rank", "DFlash 2"],
        ),
        (
            json!({"markov_rank": 8}),
            ["dflash_config.markov_rank", "DSpark"],
        ),
        (
            json!({"projector_type": "domino"}),
            ["dflash_config.projector_type", "Domino"],
        ),
        (
            json!({"shift_label": true}),
            ["dflash_config.shift_label", "Domino"],
        ),
        (
            json!({"attention_sink_bias": true}),
            ["attention_sink_bias", "sinks"],
        ),
        (
            json!({"use_swa": true, "swa_window_size": 8, "attention_sink_bias": true}),
            ["dflash_config.attention_sink_bias", "sinks"],
        ),
        (
            json!({"attention_value_scale": 0.7}),
            ["attention_value_scale", "0.7"],
        ),
        (json!({"attention_mode": "mla"}), ["attention_mode", "mla"]),
    ] {
        assert_unsupported(nested(edit), &parts);
    }
    for (edit, parts) in [
        (
            json!({"speculators_model_type": "eagle3"}),
            ["speculators_model_type", "eagle3"],
        ),
        (
            json!({"aux_hidden_state_layer_ids": [2, 10]}),
            ["aux_hidden_state_layer_ids", "speculators_model_type"],
        ),
        (
            json!({"hidden_act": "gelu"}),
            ["hidden_act", "expected \"silu\""],
        ),
        (
            json!({"add_swa_attention_sink_bias": true}),
            ["add_swa_attention_sink_bias", "sinks"],
        ),
        (
            json!({"add_full_attention_sink_bias": true}),
            ["add_full_attention_sink_bias", "sinks"],
        ),
        (
            json!({"quantization_config": {"bits": 4}}),
            ["quantization_config", "quantised"],
        ),
        (json!({"mlp_bias": true}), ["mlp_bias", "biases"]),
        (
            json!({"rope_scaling": {"rope_type": "longrope"}}),
            ["rope_scaling.rope_type", "longrope"],
        ),
        (
            json!({"layer_types": ["full_attention", "linear_attention"]}),
            ["layer_types[1]", "linear"],
        ),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
            ["rope_parameters.full_attention", "each layer type"],
        ),
    ] {
        assert_unsupported(with(edit), &parts);
    }
}

#[test]
fn features_that_are_switched_off_are_accepted() {
    parse(&nested(json!({
        "markov_rank": 0, "use_swa": false, "swa_window_size": 0, "shift_label": false,
        "attention_sink_bias": false,
        "projector_type": "dflash", "attention_value_scale": 1.0, "pure_draft_prefix_len": 1
    })));
    parse(&with(json!({
        "sample_from_anchor": false, "draft_vocab_size": 160, "quantization_config": null,
        "hidden_act": "silu", "rope_scaling": null, "sliding_window": null,
        "use_sliding_window": false, "max_window_layers": 2, "architectures": null
    })));
}
