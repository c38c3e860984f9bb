//! Settings that no trainer's class has, but engines do, against the model in plain loops: see
//! `docs/checkpoint-formats.md`.

mod common;
mod reference;

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor, D};
use candle_nn::VarBuilder;
use common::{assert_close, fixtures, load, materialize, pooled_block};
use dflash_plugin::config::DraftConfig;
use dflash_plugin::draft::DraftModel;
use dflash_plugin::kv::SequenceKv;
use dflash_plugin::worker::{DFlashWorker, DraftJob, TargetHead};
use reference::{rows_of, Reference, Sees};
use serde_json::{json, Value};

const CPU: Device = Device::Cpu;
const DIALECT: &str = "v1_top_level";
const CONTEXT: usize = 23;
const BLOCK: usize = 8;

fn folder() -> std::path::PathBuf {
    fixtures().join("dialects").join(DIALECT)
}

fn config(edit: impl FnOnce(&mut Value)) -> DraftConfig {
    let text = std::fs::read_to_string(folder().join("config.json")).unwrap();
    let mut json = serde_json::from_str(&text).unwrap();
    edit(&mut json);
    DraftConfig::from_json(&json.to_string()).unwrap()
}

fn weights() -> HashMap<String, Tensor> {
    load(&folder().join("model.safetensors"))
}

fn random(shape: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1.0, shape, &CPU).unwrap()
}

fn model(config: &DraftConfig, weights: &HashMap<String, Tensor>) -> DraftModel {
    let vb = VarBuilder::from_tensors(weights.clone(), DType::F32, &CPU);
    DraftModel::new(config, config.num_taps(), vb).unwrap()
}

fn context(model: &DraftModel, taps: &Tensor) -> SequenceKv {
    let mut kv = model.new_kv().unwrap();
    materialize(model, &mut kv, taps);
    kv
}

/// What the crate and the reference compute for random taps and a random block.
fn both(
    config: &DraftConfig,
    weights: &HashMap<String, Tensor>,
    scale: f64,
    sees: Sees,
) -> (Tensor, Tensor) {
    let reference = Reference::new(config.clone(), weights, 10_000.0);
    let outputs = outputs(config, weights, reference, scale, sees);
    (outputs.own, outputs.expected)
}

/// What is computed over a context in buffers of its own and over one in a pool, and what should be.
struct Outputs {
    own: Tensor,
    pooled: Tensor,
    expected: Tensor,
}

impl Outputs {
    #[track_caller]
    fn assert_close(&self, what: &str) {
        assert_close(&format!("{what}, buffers"), &self.own, &self.expected);
        assert_close(&format!("{what}, pool"), &self.pooled, &self.expected);
    }
}

fn outputs(
    config: &DraftConfig,
    weights: &HashMap<String, Tensor>,
    reference: Reference,
    scale: f64,
    sees: Sees,
) -> Outputs {
    let model = model(config, weights);
    let taps = random(&[CONTEXT, model.taps_width()]);
    let block = random(&[BLOCK, model.hidden_size()]);
    let embeds = block.unsqueeze(0).unwrap();
    let own = model.forward_block(&embeds, &[&context(&model, &taps)]);
    let scaled = (block * scale).unwrap();
    let rows = reference.forward(&rows_of(&taps), &rows_of(&scaled), sees);
    let expected = Tensor::from_vec(rows.concat(), (BLOCK, model.hidden_size()), &CPU);
    Outputs {
        own: own.unwrap().squeeze(0).unwrap(),
        pooled: pooled_block(&model, &taps, &embeds, 8).squeeze(0).unwrap(),
        expected: expected.unwrap(),
    }
}

#[test]
fn taps_of_another_width_than_the_draft_model() {
    let config = config(|json| json["target_hidden_size"] = 48.into());
    let mut weights = weights();
    let columns = config.taps_width();
    assert_eq!(columns, 48 * config.num_taps());
    weights.insert("fc.weight".into(), random(&[config.hidden_size, columns]));
    let (found, expected) = both(&config, &weights, 1.0, &|_, _, _| true);
    assert_close("target_hidden_size", &found, &expected);
}

#[test]
fn full_layers_that_are_declared_causal() {
    let edits: [fn(&mut Value); 2] = [
        |json| json["is_causal"] = true.into(),
        |json| json["dflash_config"] = json!({"causal": true}),
    ];
    for edit in edits {
        let config = config(edit);
        let (found, expected) = both(&config, &weights(), 1.0, &|_, query, key| key <= query);
        assert_close("causal", &found, &expected);
    }
}

#[test]
fn sliding_layers_that_are_declared_not_causal_reach_as_far_ahead_as_back() {
    for window in [3, 12] {
        let config = config(|json| {
            json["dflash_config"] = json!({"causal": false});
            json["sliding_window"] = window.into();
            let layers = json["num_hidden_layers"].as_u64().unwrap() as usize;
            json["layer_types"] = vec!["sliding_attention"; layers].into();
        });
        let sees = |_, query: usize, key: usize| query.abs_diff(key) < window;
        let (found, expected) = both(&config, &weights(), 1.0, &sees);
        assert_close("not causal", &found, &expected);
    }
}

#[test]
fn windows_that_are_forced_on_every_layer() {
    // `is_causal`, `dflash_config.causal`, and what follows from them.
    let cases = [
        (None, None, false),
        (Some(true), None, true),
        (None, Some(true), true),
        (Some(false), Some(true), false),
    ];
    for window in [1, 3, 12, 100] {
        for (top, nested, causal) in cases {
            for types in [false, true] {
                let config = config(|json| {
                    json["is_causal"] = json!(top);
                    json["dflash_config"] =
                        json!({"use_swa": true, "swa_window_size": window, "causal": nested});
                    if !types {
                        json["layer_types"] = Value::Null;
                    }
                });
                let sees = |_, query: usize, key: usize| {
                    query.abs_diff(key) < window && (!causal || key <= query)
                };
                let weights = weights();
                let reference = Reference::new(config.clone(), &weights, 10_000.0);
                let outputs = outputs(&config, &weights, reference, 1.0, &sees);
                let what = format!("window {window}, causal {causal}, layer types {types}");
                outputs.assert_close(&what);
            }
        }
    }
}

/// Dims behind the rotated ones pass as they are, in the context's keys, the block's and the queries.
#[test]
fn rope_on_a_part_of_each_head() {
    let table = |kind: &str, factor: f64| {
        let mut config = json!({"rope_type": "default", "partial_rotary_factor": factor});
        if kind == "rope_parameters" {
            config["rope_theta"] = 10_000.0.into();
        }
        config
    };
    // Heads have 16 dims; 0.4 of them is 6.4.
    for (factor, rotary) in [(0.5, 8), (0.25, 4), (0.4, 6), (0.125, 2), (1.0, 16)] {
        for kind in ["partial_rotary_factor", "rope_scaling", "rope_parameters"] {
            for interleaved in [false, true] {
                let config = config(|json| {
                    json["is_neox_style"] = (!interleaved).into();
                    json[kind] = match kind {
                        "partial_rotary_factor" => factor.into(),
                        _ => table(kind, factor),
                    };
                });
                let weights = weights();
                let reference = Reference::new(config.clone(), &weights, 10_000.0);
                let reference = reference.rotating(rotary, interleaved);
                let outputs = outputs(&config, &weights, reference, 1.0, &|_, _, _| true);
                outputs.assert_close(&format!("{kind} {factor}, interleaved {interleaved}"));
            }
        }
    }
}

/// The bounds of YaRN's blend are those of the rotated dims, 0 and 2 of the 4 pairs, and its factor is
/// on these dims alone: `dim = int(head_dim * partial_rotary_factor)` in transformers' formula.
#[test]
fn yarn_on_a_part_of_each_head() {
    let config = config(|json| {
        json["rope_scaling"] = json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
            "partial_rotary_factor": 0.5
        });
    });
    let weights = weights();
    // 1, 0.1, 0.01 and 0.001, of which the second is half, the last two are wholly stretched.
    let frequencies = [1.0, 0.0625, 0.0025, 0.000_25];
    let reference = Reference::new(config.clone(), &weights, 10_000.0);
    let reference = reference.scaled(&frequencies, 0.1 * 4f64.ln() + 1.0);
    let outputs = outputs(&config, &weights, reference, 1.0, &|_, _, _| true);
    outputs.assert_close("YaRN");
}

#[test]
fn an_embedding_scale() {
    let config = config(|json| json["input_embedding_scale"] = 0.125.into());
    let (found, expected) = both(&config, &weights(), 0.125, &|_, _, _| true);
    assert_close("input_embedding_scale", &found, &expected);
}

/// A head whose logits are scaled and capped as engines do it.
struct Capped {
    embedding: Tensor,
    multiplier: f64,
    cap: f64,
}

impl TargetHead for Capped {
    fn embed(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        self.embedding.index_select(ids, 0)
    }

    fn logits(&self, hidden: &Tensor) -> candle_core::Result<Tensor> {
        hidden.matmul(&self.embedding.t()?)
    }
}

impl Capped {
    fn choices(&self, hidden: &Tensor) -> Vec<u32> {
        let logits = (self.logits(hidden).unwrap() * self.multiplier).unwrap();
        let capped = ((logits / self.cap).unwrap().tanh().unwrap() * self.cap).unwrap();
        capped.argmax(D::Minus1).unwrap().to_vec1().unwrap()
    }
}

#[test]
fn a_multiplier_and_a_soft_cap_on_the_logits_change_no_draft() {
    let config = config(|json| {
        json["output_multiplier"] = 0.05.into();
        json["final_logit_softcapping"] = 30.0.into();
    });
    let head = Capped {
        embedding: random(&[config.vocab_size, config.hidden_size]),
        multiplier: config.output_multiplier.unwrap(),
        cap: config.final_logit_softcapping.unwrap(),
    };
    let model = model(&config, &weights());
    let kv = context(&model, &random(&[CONTEXT, model.taps_width()]));
    let mut block = vec![3u32; BLOCK];
    block[0] = 11;
    let ids = Tensor::new(block, &CPU).unwrap();
    let embeds = head.embed(&ids).unwrap().unsqueeze(0).unwrap();
    let hidden = model.forward_block(&embeds, &[&kv]).unwrap();
    let expected = head.choices(&hidden.squeeze(0).unwrap())[1..].to_vec();
    let worker = DFlashWorker::new(model, 3, BLOCK).unwrap();
    let jobs = [DraftJob {
        anchor: 11,
        kv: &kv,
    }];
    let drafts = worker.draft(&head, &jobs, BLOCK).unwrap();
    assert_eq!(drafts.to_vec2::<u32>().unwrap(), [expected]);
}
