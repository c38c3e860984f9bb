//! A draft model on disk: `config.json` and `model.safetensors` (or shards with an index).
//!
//! [`Checkpoint::open`] reads the config and the headers only, and compares every tensor's name, shape
//! and type with what the config announces; [`Checkpoint::load`] reads the weights, checks that they
//! are finite and builds the model. A checkpoint that passes both computes what it was trained to.

mod expected;
mod header;
mod reader;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use serde_json::Value;

use crate::config::DraftConfig;
use crate::draft::DraftModel;
use crate::error::{DFlashError, Result};
use crate::quantize::Quantizer;
use header::read_header;
use reader::WeightReader;

/// Name of the config file.
pub const CONFIG_FILE: &str = "config.json";
/// Name of the weights, if they are one file.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// Name of the index of sharded weights.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// A side file that replaces the target's embedding of the mask token in one family of draft models.
pub const MASK_EMBEDDING_FILE: &str = "mask_embedding.pt";

/// A checkpoint whose config and tensor list have been checked. Holds no weights.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: DraftConfig,
    tensors: BTreeMap<String, StoredTensor>,
}

/// Where a tensor's data lies.
#[derive(Debug, Clone)]
pub(crate) struct StoredTensor {
    pub file: PathBuf,
    /// The name in the file, which may have the prefix `model.`.
    pub stored_name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Offset from the start of the file, in bytes.
    pub offset: u64,
    /// In bytes.
    pub len: usize,
}

impl Checkpoint {
    /// Opens the folder `dir` and checks config and tensor list (11 tensors a layer and 3 more, plus 4
    /// biases a layer with `attention_bias`, and 2 for a reduced vocabulary).
    ///
    /// # Errors
    /// [`DFlashError::Config`] and [`DFlashError::Unsupported`] from the config;
    /// [`DFlashError::Checkpoint`] names the file, and the tensor that is missing, not expected, of
    /// the wrong shape or type, or cut off.
    pub fn open(dir: &Path) -> Result<Self> {
        let config_file = dir.join(CONFIG_FILE);
        if !config_file.is_file() {
            return Err(DFlashError::file(
                dir,
                format!(
                    "no {CONFIG_FILE}; expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
                ),
            ));
        }
        let config = DraftConfig::from_file(&config_file)?;
        if dir.join(MASK_EMBEDDING_FILE).exists() {
            return Err(DFlashError::unsupported(
                MASK_EMBEDDING_FILE,
                "a trained mask embedding beside the weights; expected the target's embedding to be \
                 used for the mask token",
            ));
        }
        let mut tensors = stored_tensors(dir)?;
        expected::check(&config, dir, &mut tensors)?;
        Ok(Self {
            dir: dir.to_path_buf(),
            config,
            tensors,
        })
    }

    /// Reads the weights and builds the model with weights of type `dtype` on `device`.
    ///
    /// # Errors
    /// [`DFlashError::Checkpoint`] when a weight is NaN, infinite or beyond the range of `dtype`, or a
    /// file changed since [`Checkpoint::open`]; [`DFlashError::Unsupported`] as [`DraftModel::new`];
    /// candle's errors, such as lack of memory.
    pub fn load(&self, dtype: DType, device: &Device) -> Result<DraftModel> {
        self.load_quantized(dtype, device, None)
    }

    /// As [`Checkpoint::load`], with a part of the weights in fewer bits; see
    /// [`DraftModel::quantized`].
    ///
    /// # Errors
    /// Those of [`Checkpoint::load`] and of the quantizer.
    pub fn load_quantized(
        &self,
        dtype: DType,
        device: &Device,
        quantizer: Option<&dyn Quantizer>,
    ) -> Result<DraftModel> {
        let (reader, failure) = WeightReader::new(self.tensors.clone());
        let vb = VarBuilder::from_backend(Box::new(reader), dtype, device.clone());
        let model = DraftModel::quantized(&self.config, self.config.num_taps(), vb, quantizer);
        // candle passes a reader's error on as text; the typed one is kept aside.
        match (model, failure.take()) {
            (Err(_), Some(error)) => Err(error),
            (model, _) => model,
        }
    }

    /// As [`DraftConfig::bound_context`], for the model that is loaded.
    pub fn bound_context(&mut self, tokens: usize) {
        self.config.bound_context(tokens);
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The validated config.
    pub fn config(&self) -> &DraftConfig {
        &self.config
    }

    /// Number of weights in the checkpoint.
    pub fn num_parameters(&self) -> usize {
        self.tensors
            .values()
            .filter(|tensor| tensor.dtype.is_float())
            .map(|tensor| tensor.shape.iter().product::<usize>())
            .sum()
    }

    /// Bytes that the weights take once loaded as `dtype`, or quantized.
    ///
    /// K and V projections count twice: once fused with Q for the block, once stacked over the layers
    /// for the context.
    pub fn bytes(&self, dtype: DType, quantizer: Option<&dyn Quantizer>) -> usize {
        let cfg = &self.config;
        let kv_width = cfg.num_key_value_heads * cfg.head_dim;
        let columns = cfg.hidden_size + usize::from(cfg.attention_bias);
        let stacked = cfg.num_hidden_layers * 2 * kv_width * columns;
        let exact = (self.num_parameters() + stacked) * dtype.size_in_bytes();
        let Some(quantizer) = quantizer else {
            return exact;
        };
        let q_width = cfg.num_attention_heads * cfg.head_dim;
        // The four matrices of a layer, `[rows, width]`.
        let quantized = [
            (q_width + 2 * kv_width, cfg.hidden_size),
            (cfg.hidden_size, q_width),
            (2 * cfg.intermediate_size, cfg.hidden_size),
            (cfg.hidden_size, cfg.intermediate_size),
        ];
        let saved: usize = quantized
            .iter()
            .map(|(rows, width)| {
                let before = rows * width * dtype.size_in_bytes();
                before.saturating_sub(quantizer.bytes(*rows, *width, dtype))
            })
            .sum();
        exact - cfg.num_hidden_layers * saved
    }
}

/// All tensors of the checkpoint, by their names without the prefix `model.`.
fn stored_tensors(dir: &Path) -> Result<BTreeMap<String, StoredTensor>> {
    let mut tensors: BTreeMap<String, StoredTensor> = BTreeMap::new();
    for file in weight_files(dir)? {
        for tensor in read_header(&file)? {
            let stored = &tensor.stored_name;
            let name = stored.strip_prefix("model.").unwrap_or(stored).to_string();
            if let Some(other) = tensors.get(&name) {
                return Err(DFlashError::tensor(
                    &file,
                    stored,
                    format!(
                        "stored twice, also as `{}` in {}; remove one",
                        other.stored_name,
                        other.file.display()
                    ),
                ));
            }
            tensors.insert(name, tensor);
        }
    }
    Ok(tensors)
}

/// The single weight file, or the shards that the index lists.
fn weight_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let single = dir.join(WEIGHTS_FILE);
    if single.is_file() {
        return Ok(vec![single]);
    }
    let index = dir.join(INDEX_FILE);
    if !index.is_file() {
        return Err(DFlashError::file(
            dir,
            format!("neither {WEIGHTS_FILE} nor {INDEX_FILE} found; add the weights"),
        ));
    }
    let text = std::fs::read_to_string(&index).map_err(|source| DFlashError::Io {
        path: index.clone(),
        source,
    })?;
    let root: Value = serde_json::from_str(&text)
        .map_err(|e| DFlashError::file(&index, format!("not valid JSON: {e}")))?;
    let map = root
        .get("weight_map")
        .and_then(Value::as_object)
        .filter(|map| !map.is_empty())
        .ok_or_else(|| DFlashError::file(&index, "expected a non-empty object `weight_map`"))?;
    let mut files = Vec::new();
    for (tensor, shard) in map {
        let file = shard
            .as_str()
            .filter(|name| is_plain_name(name))
            .map(|name| dir.join(name))
            .ok_or_else(|| {
                DFlashError::tensor(
                    &index,
                    tensor,
                    format!("expected the name of a file in the same folder, found {shard}"),
                )
            })?;
        if !file.is_file() {
            return Err(DFlashError::tensor(
                &index,
                tensor,
                format!("its file {shard} does not exist; add the shard"),
            ));
        }
        if !files.contains(&file) {
            files.push(file);
        }
    }
    Ok(files)
}

/// Whether a shard's name stays inside the folder.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!(parts.next(), Some(std::path::Component::Normal(_))) && parts.next().is_none()
}
