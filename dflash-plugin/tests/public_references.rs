//! The draft model against the classes and loops that the trainers publish: `fixtures/public/README.md`.

mod common;
mod public;

use std::collections::HashMap;

use common::{materialize, pooled_block};
use dflash_plugin::accept::{AcceptWalk, Verdict};
use dflash_plugin::config::DraftConfig;
use dflash_plugin::layer_ids::build_target_layer_ids;
use public::{folder, largest_difference, tokens, Dialect, STEPS};
use serde_json::{json, Value};

/// The largest difference that a number may have, in f32.
const TOLERANCE: f32 = 1e-4;

#[track_caller]
fn assert_equal(name: &str, error: f32) {
    assert!(
        error < TOLERANCE,
        "{name}: difference {error:.2e}, allowed {TOLERANCE:.0e}"
    );
}

/// Three steps of a published decoding loop: which rows of which layers are materialized at which
/// positions, what the block holds, what comes out, which rows draft, how much is accepted.
fn follows_the_loop(name: &str) {
    let dialect = Dialect::open(name);
    assert_equal(name, dialect.loop_error());
    let (model, worker) = (dialect.model(), dialect.worker());
    let mut kv = model.new_kv().unwrap();
    let accepted = dialect.tokens("accepted");
    assert_eq!(accepted.len(), STEPS);
    for (step, accepted) in accepted.into_iter().enumerate() {
        let what = format!("{name} step {step}");
        let recorded = |key: &str| dialect.tokens(&format!("step{step}.{key}"));
        let first = kv.len();
        materialize(&model, &mut kv, &dialect.taps(step));
        let block = recorded("block");
        let positions = first..kv.len() + block.len();
        assert!(
            positions.map(|p| p as u32).eq(recorded("positions")),
            "{what}"
        );
        assert_eq!(block, dialect.block(block[0]), "{what}: the block");
        let drafts = dialect.drafts(&worker, &kv, block[0]);
        assert_eq!(drafts, recorded("drafts"), "{what}: drafts");

        let (choices, mut walk) = (recorded("choices"), AcceptWalk::new(&drafts));
        assert_eq!(
            choices.len(),
            drafts.len() + 1,
            "{what}: rows of the verify pass"
        );
        let bonus = choices.iter().find(|c| walk.take(**c) == Verdict::Bonus);
        assert_eq!(walk.accepted(), accepted as usize, "{what}: accepted");
        if step + 1 < STEPS {
            let next = dialect.tokens(&format!("step{}.block", step + 1))[0];
            assert_eq!(bonus, Some(&next), "{what}: the next anchor");
            let rows = dialect.taps(step + 1).dim(0).unwrap();
            assert_eq!(rows, walk.accepted() + 1, "{what}: rows to materialize");
        }
    }
}

/// Blocks at three anchors of a published training pass.
fn computes_the_training_pass(name: &str) {
    let dialect = Dialect::open(name);
    assert_equal(name, dialect.training_error());
    let (model, worker) = (dialect.model(), dialect.worker());
    let blocks = dialect.training_blocks(&model);
    for (i, (kv, block)) in blocks.into_iter().enumerate() {
        let drafts = dialect.drafts(&worker, &kv, block[0]);
        let skipped = block.len() - drafts.len();
        let by_row = tokens(&dialect.tensor("drafts").get(i).unwrap());
        assert_eq!(drafts, by_row[skipped..], "{name}, anchor {i}: drafts");
        // Of the trainer: the position of the token that each row was trained to predict.
        if dialect.io.contains_key("predicted_position") {
            let predicted = tokens(&dialect.tensor("predicted_position").get(i).unwrap());
            let drafted = (kv.len() + 1) as u32..;
            let expected: Vec<u32> = drafted.take(drafts.len()).collect();
            assert_eq!(predicted[skipped..], expected, "{name}, anchor {i}");
        }
    }
}

#[test]
fn z_lab_without_scaling() {
    follows_the_loop("zlab_block16");
}

#[test]
fn z_lab_with_taps_in_descending_order_and_rope_parameters() {
    follows_the_loop("zlab_descending_taps");
}

#[test]
fn z_lab_linear_rope_with_a_block_of_seven() {
    follows_the_loop("zlab_linear");
}

#[test]
fn z_lab_llama3_rope_with_a_block_of_ten() {
    follows_the_loop("zlab_llama3");
}

#[test]
fn z_lab_yarn() {
    follows_the_loop("zlab_yarn");
}

#[test]
fn z_lab_yarn_with_amplitudes() {
    follows_the_loop("zlab_yarn_mscale");
}

#[test]
fn z_lab_biases_in_f16_with_untruncated_yarn() {
    follows_the_loop("zlab_bias_yarn");
}

#[test]
fn z_lab_layers_by_the_default_rule() {
    follows_the_loop("zlab_default_ids");
}

#[test]
fn z_lab_eight_taps_for_six_layers_in_shards() {
    follows_the_loop("zlab_eight_taps");
}

#[test]
fn specforge_export_with_both_rope_tables() {
    follows_the_loop("specforge_export");
}

#[test]
fn specforge_sliding_layers_beside_full_ones() {
    computes_the_training_pass("specforge_mixed_sliding");
}

#[test]
fn specforge_sliding_layers_with_a_window_as_long_as_the_block() {
    computes_the_training_pass("specforge_all_sliding");
}

#[test]
fn speculators_reduced_vocabulary_with_a_sliding_layer() {
    computes_the_training_pass("speculators_reduced_vocabulary");
}

#[test]
fn speculators_drafts_from_the_anchor_with_bidirectional_sliding_layers() {
    computes_the_training_pass("speculators_from_anchor");
}

#[test]
fn deepspec_drafts_from_the_anchor() {
    follows_the_loop("deepspec_export");
}

#[test]
fn speculators_converter_gives_the_same_config() {
    let config = |name: &str| DraftConfig::from_file(&folder(name).join("config.json")).unwrap();
    let mut expected = config("zlab_llama3");
    expected.may_carry_copies = true;
    expected.num_target_layers = None; // which the converter leaves out
    assert_eq!(config("speculators_converted"), expected);
}

#[test]
fn default_layers_are_those_of_the_public_rule() {
    let text = std::fs::read_to_string(folder("layer_ids.json")).unwrap();
    let table: HashMap<usize, HashMap<usize, Vec<usize>>> = serde_json::from_str(&text).unwrap();
    assert_eq!(table.len(), 85);
    for (target, rows) in &table {
        for (taps, expected) in rows {
            let found = build_target_layer_ids(*target, *taps).unwrap();
            assert_eq!(found, *expected, "{target} layers, {taps} taps");
        }
    }
}

#[test]
fn keys_of_dflash_config_may_be_at_the_top_level_and_others_in_it() {
    let moved = Dialect::edited("zlab_llama3", |json| {
        let nested = json["dflash_config"].take();
        json["dflash_config"] = json!({
            "block_size": json["block_size"].take(), "num_target_layers": json["num_target_layers"].take()
        });
        for key in ["mask_token_id", "target_layer_ids"] {
            json[key] = nested[key].clone();
        }
    });
    assert_eq!(moved.config().block_size, 10);
    assert_equal("moved keys", moved.loop_error());
}

/// Attention over a pool counts windows from each row, so with speculators' windows the anchor's row
/// alone is exact there. (Causal layers only, so that it does not see the others.)
#[test]
fn over_a_pool_the_anchors_row_sees_the_whole_window() {
    let dialect = Dialect::edited("speculators_from_anchor", |json| {
        json["sliding_window_non_causal"] = false.into();
    });
    let model = dialect.model();
    let (kv, block) = dialect.training_blocks(&model).pop().unwrap();
    let taps = dialect.tensor("taps").narrow(0, 0, kv.len()).unwrap();
    let pooled = pooled_block(&model, &taps, &dialect.embeds(&block), 4);
    let found = pooled.squeeze(0).unwrap().get(0).unwrap();
    let expected = dialect.hidden(&model, &kv, &block).get(0).unwrap();
    assert_equal("the anchor's row", largest_difference(&found, &expected));
}

/// What the comparisons above are worth: settings that are read wrongly are seen.
#[test]
fn a_setting_that_is_read_wrongly_is_far_from_the_reference() {
    let far = |name: &str, edit: fn(&mut Value)| {
        let dialect = Dialect::edited(name, edit);
        let error = match dialect.io.contains_key("anchors") {
            true => dialect.training_error(),
            false => dialect.loop_error(),
        };
        assert!(error > 1e-2, "{name}: difference {error:.2e}");
    };
    far("zlab_block16", |json| json["rope_theta"] = 1e5.into());
    far("zlab_block16", |json| json["is_causal"] = true.into());
    far("zlab_block16", |json| json["is_neox_style"] = false.into());
    far("zlab_descending_taps", |json| {
        json["dflash_config"]["target_layer_ids"] = json!([2, 5, 9]);
    });
    for name in ["zlab_linear", "zlab_llama3", "zlab_yarn"] {
        far(name, |json| json["rope_scaling"] = Value::Null);
    }
    far("zlab_yarn", |json| {
        json["rope_scaling"]["attention_factor"] = 1.0.into()
    });
    far("zlab_yarn_mscale", |json| {
        json["rope_parameters"]["mscale_all_dim"] = 1.0.into()
    });
    far("zlab_bias_yarn", |json| {
        json["rope_scaling"]["truncate"] = true.into()
    });
    for name in ["specforge_mixed_sliding", "specforge_all_sliding"] {
        far(name, |json| json["sliding_window"] = 9.into());
        far(name, |json| json["is_causal"] = false.into());
    }
    for name in ["speculators_reduced_vocabulary", "speculators_from_anchor"] {
        far(name, |json| {
            json["transformer_layer_config"]["sliding_window"] = 7.into()
        });
        far(name, |json| {
            let key = "sliding_window_non_causal";
            json[key] = (!json[key].as_bool().unwrap()).into();
        });
    }
}
