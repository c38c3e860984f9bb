//! Checkpoints as other trainers export them: what their configs mean, and which rows draft.

mod common;

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor, D};
use common::configs::{assert_refused, assert_unsupported, parse, with};
use common::{fixtures, load};
use dflash_plugin::checkpoint::Checkpoint;
use dflash_plugin::config::{DraftConfig, Harvest, LayerAttention};
use dflash_plugin::draft::DraftModel;
use dflash_plugin::kv::SequenceKv;
use dflash_plugin::worker::{DFlashWorker, DraftJob, TargetHead};
use serde_json::{json, Value};

const CPU: Device = Device::Cpu;
const DIALECT: &str = "v1_top_level";

/// A config of the speculators library with the sizes of the common base config.
fn speculators(edits: Value) -> Value {
    let mut json = json!({
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
        "speculators_version": "0.4.0", "speculators_config": {"algorithm": "dflash"},
        "aux_hidden_state_layer_ids": [2, 10], "block_size": 8, "mask_token_id": 150,
        "draft_vocab_size": 160, "sliding_window_non_causal": false,
        "sample_from_anchor": false, "projector_type": "dflash", "shift_label": false,
        "emb_dim": 256, "gru_hidden_dim": 1024, "tie_word_embeddings": false,
        "transformer_layer_config": {
            "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "vocab_size": 160, "max_position_embeddings": 512,
            "rope_theta": 10000.0
        }
    });
    for (key, value) in edits.as_object().unwrap() {
        json[key] = value.clone();
    }
    json
}

#[test]
fn a_speculators_config_is_the_same_as_z_labs_with_ids_less_one() {
    let expected = parse(&with(json!({"block_size": 8, "num_target_layers": null})));
    let mut found = parse(&speculators(json!({})));
    assert!(found.may_carry_copies);
    found.may_carry_copies = false;
    assert_eq!(found, expected);
    assert_eq!(found.listed_layer_ids, Some(vec![1, 9]));
}

#[test]
fn what_the_speculators_library_leaves_out_is_transformers_default() {
    let layers = json!({"transformer_layer_config": {"num_hidden_layers": 5}});
    let config = parse(&speculators(layers));
    let sizes = (config.hidden_size, config.head_dim, config.vocab_size);
    assert_eq!(sizes, (4096, 128, 151_936));
    let block = parse(&speculators(json!({"block_size": null}))).block_size;
    assert_eq!(block, 8);
    let other = json!({"transformer_layer_config": {"model_type": "llama"}});
    assert_refused(speculators(other), &["vocab_size", "missing"]);
}

#[test]
fn sliding_layers_of_a_speculators_config_may_be_bidirectional() {
    let pattern = |non_causal: bool| {
        let mut json = speculators(json!({"sliding_window_non_causal": non_causal}));
        let layers = &mut json["transformer_layer_config"];
        layers["layer_types"] = json!(["sliding_attention", "full_attention"]);
        layers["sliding_window"] = json!(12);
        layers["use_sliding_window"] = json!(true);
        parse(&json).layers
    };
    let layer = |causal, window: Option<usize>| LayerAttention {
        causal,
        window,
        from_anchor: window.is_some(),
        context: None,
    };
    assert_eq!(pattern(false), [layer(true, Some(12)), layer(false, None)]);
    assert_eq!(pattern(true), [layer(false, Some(12)), layer(false, None)]);
}

#[test]
fn speculators_configs_that_mean_another_model_are_refused() {
    for (edit, parts) in [
        (
            json!({"projector_type": "domino"}),
            ["projector_type", "domino"],
        ),
        (
            json!({"shift_label": true}),
            ["shift_label", "sample_from_anchor"],
        ),
    ] {
        assert_unsupported(speculators(edit), &parts);
    }
    for (edit, parts) in [
        (
            json!({"aux_hidden_state_layer_ids": null}),
            ["aux_hidden_state_layer_ids", "missing"],
        ),
        (
            json!({"aux_hidden_state_layer_ids": [0, 4]}),
            ["aux_hidden_state_layer_ids", "embedding"],
        ),
        (
            json!({"transformer_layer_config": null}),
            ["transformer_layer_config", "missing"],
        ),
        (
            json!({"draft_vocab_size": 161}),
            ["draft_vocab_size", "160"],
        ),
    ] {
        assert_refused(speculators(edit), &parts);
    }
}

#[test]
fn a_deepspec_config_without_markov_head_drafts_from_the_anchor() {
    let mut json = with(json!({
        "markov_rank": 0, "enable_confidence_head": false, "num_anchors": 512,
        "block_size": 7, "target_layer_ids": [1, 9], "mask_token_id": 150
    }));
    json["architectures"] = json!(["Qwen3DSparkModel"]);
    json["dflash_config"] = Value::Null;
    let config = parse(&json);
    assert_eq!(config.harvest, Harvest::FromAnchor);
    assert!(config.may_carry_copies);
    assert_eq!((config.block_size, config.verify_rows()), (7, 8));
    let usual = parse(&with(json!({})));
    assert_eq!(usual.harvest, Harvest::BehindAnchor);
    assert_eq!(usual.verify_rows(), usual.block_size);
}

/// The dialect's checkpoint with other tensors and another config, written anew.
fn checkpoint(
    folder: &Path,
    edit: impl FnOnce(&mut Value),
    more: &[(&str, Tensor)],
) -> Result<Checkpoint, String> {
    let dir = fixtures().join("dialects").join(DIALECT);
    let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    edit(&mut json);
    std::fs::write(folder.join("config.json"), json.to_string()).unwrap();
    let mut tensors = load(&dir.join("model.safetensors"));
    tensors.extend(
        more.iter()
            .map(|(name, tensor)| (name.to_string(), tensor.clone())),
    );
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    Checkpoint::open(folder).map_err(|error| error.to_string())
}

fn vocab_size() -> usize {
    let dir = fixtures().join("dialects").join(DIALECT);
    DraftConfig::from_file(&dir.join("config.json"))
        .unwrap()
        .vocab_size
}

fn random(shape: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1.0, shape, &CPU).unwrap()
}

/// Maps draft token `n` to the target's token `factor * n`.
fn multiples(factor: i64, count: usize) -> Tensor {
    let offsets: Vec<i64> = (0..count as i64).map(|n| (factor - 1) * n).collect();
    Tensor::from_vec(offsets, count, &CPU).unwrap()
}

/// The target's embedding and head at random.
struct Ends {
    embedding: Tensor,
    head: Tensor,
}

impl Ends {
    fn new(model: &DraftModel) -> Self {
        let shape = [vocab_size(), model.hidden_size()];
        Self {
            embedding: random(&shape),
            head: random(&shape),
        }
    }
}

impl TargetHead for Ends {
    fn embed(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        self.embedding.index_select(ids, 0)
    }

    fn logits(&self, hidden: &Tensor) -> candle_core::Result<Tensor> {
        hidden.matmul(&self.head.t()?)
    }
}

fn context(model: &DraftModel) -> SequenceKv {
    let mut kv = model.new_kv().unwrap();
    common::materialize(model, &mut kv, &random(&[9, model.taps_width()]));
    kv
}

/// The best tokens of `head` on the rows of a block of `count` tokens.
fn choices(
    model: &DraftModel,
    ends: &Ends,
    kv: &SequenceKv,
    block: &[u32],
    head: &Tensor,
) -> Vec<u32> {
    let ids = Tensor::new(block, &CPU).unwrap();
    let embeds = ends.embed(&ids).unwrap().unsqueeze(0).unwrap();
    let hidden = model
        .forward_block(&embeds, &[kv])
        .unwrap()
        .squeeze(0)
        .unwrap();
    let logits = hidden.matmul(&head.t().unwrap()).unwrap();
    logits.argmax(D::Minus1).unwrap().to_vec1().unwrap()
}

/// The drafts of the first job.
fn first(drafts: Tensor) -> Vec<u32> {
    drafts.to_vec2().unwrap().remove(0)
}

#[test]
fn from_the_anchor_every_row_drafts_and_otherwise_all_but_the_first() {
    for from_anchor in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let edit = |json: &mut Value| json["sample_from_anchor"] = json!(from_anchor);
        let load = || {
            checkpoint(folder.path(), edit, &[])
                .unwrap()
                .load(DType::F32, &CPU)
                .unwrap()
        };
        let model = load();
        let (mask, anchor) = (3, 11);
        let most = model.config().block_size + usize::from(from_anchor);
        let ends = Ends::new(&model);
        let kv = context(&model);
        let worker = DFlashWorker::new(load(), mask, most).unwrap();
        assert!(DFlashWorker::new(load(), mask, most + 1).is_err());
        for rows in [2, 5, most] {
            let jobs = [DraftJob { anchor, kv: &kv }];
            let drafts = first(worker.draft(&ends, &jobs, rows).unwrap());
            let mut block = vec![mask; rows - usize::from(from_anchor)];
            block[0] = anchor;
            let all = choices(&model, &ends, &kv, &block, &ends.head);
            let expected = if from_anchor { &all[..] } else { &all[1..] };
            assert_eq!(
                drafts, expected,
                "{rows} rows, from the anchor {from_anchor}"
            );
        }
    }
}

#[test]
fn a_reduced_vocabulary_drafts_with_its_own_head_and_the_targets_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let size = vocab_size() / 3;
    let head = random(&[size, 64]);
    let more = [
        ("lm_head.weight", head.clone()),
        ("d2t", multiples(3, size)),
    ];
    let edit = |json: &mut Value| json["draft_vocab_size"] = json!(size);
    let model = checkpoint(folder.path(), edit, &more)
        .unwrap()
        .load(DType::F32, &CPU)
        .unwrap();
    let ends = Ends::new(&model);
    let kv = context(&model);
    let block = [11, 3, 3, 3];
    let own = choices(&model, &ends, &kv, &block, &head);
    let worker = DFlashWorker::new(model, 3, 4).unwrap();
    let jobs = [DraftJob {
        anchor: 11,
        kv: &kv,
    }];
    let drafts = first(worker.draft(&ends, &jobs, 4).unwrap());
    let expected: Vec<u32> = own[1..].iter().map(|token| 3 * token).collect();
    assert_eq!(drafts, expected);
}

#[test]
fn a_vocabulary_map_that_does_not_fit_is_refused() {
    let size = vocab_size() / 3;
    let open = |more: &[(&str, Tensor)]| {
        let folder = tempfile::tempdir().unwrap();
        let edit = |json: &mut Value| json["draft_vocab_size"] = json!(size);
        let checkpoint = checkpoint(folder.path(), edit, more)?;
        let model = checkpoint.load(DType::F32, &CPU);
        model.map(drop).map_err(|error| error.to_string())
    };
    let head = || ("lm_head.weight", random(&[size, 64]));
    let contains = |error: Result<(), String>, parts: &[&str]| {
        let error = error.unwrap_err();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    contains(open(&[head()]), &["d2t", "missing", "draft_vocab_size"]);
    contains(
        open(&[("d2t", multiples(3, size))]),
        &["lm_head.weight", "missing"],
    );
    contains(
        open(&[head(), ("d2t", multiples(3, size - 1))]),
        &["d2t", "draft_vocab_size"],
    );
    let far = multiples(4, size);
    contains(
        open(&[head(), ("d2t", far)]),
        &["d2t", "out of the vocabulary"],
    );
    let before = Tensor::full(-1i64, size, &CPU).unwrap();
    contains(open(&[head(), ("d2t", before)]), &["d2t", "draft token 0"]);
}

#[test]
fn copies_of_the_targets_ends_are_left_alone_where_a_trainer_writes_them() {
    let folder = tempfile::tempdir().unwrap();
    let shape = [vocab_size(), 64];
    let more: HashMap<&str, Tensor> = HashMap::from([
        ("embed_tokens.weight", random(&shape)),
        ("lm_head.weight", random(&shape)),
    ]);
    let more: Vec<_> = more.into_iter().collect();
    let plain = checkpoint(folder.path(), |_| (), &more);
    assert!(plain
        .unwrap_err()
        .contains("embedding and lm_head are the target's"));
    let deepspec = |json: &mut Value| {
        json["architectures"] = json!(["Qwen3DSparkModel"]);
        json["markov_rank"] = json!(0);
    };
    let with_copies = checkpoint(folder.path(), deepspec, &more).unwrap();
    let without = checkpoint(folder.path(), deepspec, &[]).unwrap();
    assert_eq!(with_copies.num_parameters(), without.num_parameters());
}
