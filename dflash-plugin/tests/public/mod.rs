//! Checkpoints and outputs of the trainers' own code: `fixtures/public/README.md`.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use dflash_plugin::checkpoint::Checkpoint;
use dflash_plugin::config::DraftConfig;
use dflash_plugin::draft::DraftModel;
use dflash_plugin::kv::SequenceKv;
use dflash_plugin::worker::{DFlashWorker, DraftJob, TargetHead};
use serde_json::Value;

use crate::common::{fixtures, load, materialize};

const CPU: Device = Device::Cpu;
const TARGET_LAYERS: usize = 12;
/// Steps of a recorded loop.
pub const STEPS: usize = 3;

pub fn folder(name: &str) -> PathBuf {
    fixtures().join("public").join(name)
}

/// The target's embedding and head.
struct Ends(HashMap<String, Tensor>);

impl Ends {
    fn load() -> Self {
        let stored = load(&folder("shared").join("target.safetensors"));
        let widened = stored.into_iter();
        Self(
            widened
                .map(|(name, t)| (name, t.to_dtype(DType::F32).unwrap()))
                .collect(),
        )
    }

    fn embed_tokens(&self, ids: &[u32]) -> Tensor {
        self.embed(&Tensor::new(ids, &CPU).unwrap()).unwrap()
    }
}

impl TargetHead for Ends {
    fn embed(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        self.0["embed_tokens.weight"].index_select(ids, 0)
    }

    fn logits(&self, hidden: &Tensor) -> candle_core::Result<Tensor> {
        hidden.matmul(&self.0["lm_head.weight"].t()?)
    }
}

/// A dialect: its checkpoint, with its config edited, and what the public code computed.
pub struct Dialect {
    checkpoint: Checkpoint,
    pub io: HashMap<String, Tensor>,
    ends: Ends,
    _folder: tempfile::TempDir,
}

impl Dialect {
    pub fn open(name: &str) -> Self {
        Self::edited(name, |_| ())
    }

    pub fn edited(name: &str, edit: impl FnOnce(&mut Value)) -> Self {
        let (source, copy) = (folder(name), tempfile::tempdir().unwrap());
        for entry in std::fs::read_dir(&source).unwrap() {
            let file = entry.unwrap().path();
            std::fs::copy(&file, copy.path().join(file.file_name().unwrap())).unwrap();
        }
        let names = std::fs::read_dir(&source).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        if !names
            .iter()
            .any(|n| n.to_string_lossy().starts_with("model"))
        {
            let shared = folder("shared").join("draft.safetensors");
            std::fs::copy(shared, copy.path().join("model.safetensors")).unwrap();
        }
        let config = copy.path().join("config.json");
        let mut json = serde_json::from_str(&std::fs::read_to_string(&config).unwrap()).unwrap();
        edit(&mut json);
        std::fs::write(&config, json.to_string()).unwrap();
        Self {
            checkpoint: Checkpoint::open(copy.path()).unwrap(),
            io: load(&source.join("io.safetensors")),
            ends: Ends::load(),
            _folder: copy,
        }
    }

    pub fn config(&self) -> &DraftConfig {
        self.checkpoint.config()
    }

    pub fn model(&self) -> DraftModel {
        self.checkpoint.load(DType::F32, &CPU).unwrap()
    }

    pub fn worker(&self) -> DFlashWorker {
        let mask = self.config().mask_token_id.unwrap();
        DFlashWorker::new(self.model(), mask, self.config().verify_rows()).unwrap()
    }

    pub fn tensor(&self, key: &str) -> &Tensor {
        let keys = || self.io.keys().collect::<Vec<_>>();
        let found = self.io.get(key);
        found.unwrap_or_else(|| panic!("the public code used no {key} but {:?}", keys()))
    }

    pub fn tokens(&self, key: &str) -> Vec<u32> {
        tokens(self.tensor(key))
    }

    /// What the tapped layers put out for the rows that are new in a step of a loop.
    pub fn taps(&self, step: usize) -> Tensor {
        let ids = self.config().target_layer_ids(TARGET_LAYERS).unwrap();
        let layer = |id: &usize| self.tensor(&format!("step{step}.layer{id}")).clone();
        let layers: Vec<Tensor> = ids.iter().map(layer).collect();
        Tensor::cat(&layers, 1).unwrap()
    }

    pub fn block(&self, anchor: u32) -> Vec<u32> {
        let config = self.config();
        let mut block = vec![config.mask_token_id.unwrap(); config.block_size];
        block[0] = anchor;
        block
    }

    /// A batch of this block alone.
    pub fn embeds(&self, block: &[u32]) -> Tensor {
        self.ends.embed_tokens(block).unsqueeze(0).unwrap()
    }

    pub fn hidden(&self, model: &DraftModel, kv: &SequenceKv, block: &[u32]) -> Tensor {
        let hidden = model.forward_block(&self.embeds(block), &[kv]).unwrap();
        hidden.squeeze(0).unwrap()
    }

    pub fn drafts(&self, worker: &DFlashWorker, kv: &SequenceKv, anchor: u32) -> Vec<u32> {
        let jobs = [DraftJob { anchor, kv }];
        let rows = self.config().verify_rows();
        let drafts = worker.draft(&self.ends, &jobs, rows).unwrap();
        drafts.to_vec2().unwrap().remove(0)
    }

    /// The largest difference over the steps of a recorded loop.
    pub fn loop_error(&self) -> f32 {
        let (model, mut kv) = (self.model(), self.model().new_kv().unwrap());
        let errors = (0..STEPS).map(|step| {
            materialize(&model, &mut kv, &self.taps(step));
            let block = self.tokens(&format!("step{step}.block"));
            let found = self.hidden(&model, &kv, &block);
            largest_difference(&found, self.tensor(&format!("step{step}.hidden")))
        });
        errors.fold(0.0, f32::max)
    }

    /// The context and the block of every anchor of a recorded training pass.
    pub fn training_blocks(&self, model: &DraftModel) -> Vec<(SequenceKv, Vec<u32>)> {
        let ids = self.tokens("ids");
        let anchors = self.tokens("anchors").into_iter();
        let behind = |anchor: u32| {
            let anchor = anchor as usize;
            let mut kv = model.new_kv().unwrap();
            let taps = self.tensor("taps").narrow(0, 0, anchor).unwrap();
            materialize(model, &mut kv, &taps);
            (kv, self.block(ids[anchor]))
        };
        anchors.map(behind).collect()
    }

    /// The largest difference over the blocks of a recorded training pass.
    pub fn training_error(&self) -> f32 {
        let model = self.model();
        let blocks = self.training_blocks(&model).into_iter().enumerate();
        let errors = blocks.map(|(i, (kv, block))| {
            let found = self.hidden(&model, &kv, &block);
            largest_difference(&found, &self.tensor("hidden").get(i).unwrap())
        });
        errors.fold(0.0, f32::max)
    }
}

pub fn tokens(tensor: &Tensor) -> Vec<u32> {
    let tensor = tensor.flatten_all().unwrap();
    tensor.to_dtype(DType::U32).unwrap().to_vec1().unwrap()
}

pub fn largest_difference(found: &Tensor, expected: &Tensor) -> f32 {
    assert_eq!(found.dims(), expected.dims());
    let difference = (found - expected).unwrap().abs().unwrap();
    let values: Vec<f32> = difference.flatten_all().unwrap().to_vec1().unwrap();
    let largest = values.iter().copied().fold(0.0, f32::max);
    match values.iter().any(|value| value.is_nan()) {
        true => f32::INFINITY,
        false => largest,
    }
}
