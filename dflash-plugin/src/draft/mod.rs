//! The draft model: a few Qwen3-style layers whose queries come from the block only and whose keys and
//! values come from the context features and the block.
//!
//! Source: z-lab/dflash `dflash/model.py` (arXiv 2602.06036). Embedding and lm_head are the target's
//! and are applied by the caller.

mod attention;
mod head;
mod layer;
mod linear;
mod norm;
mod pooled;
mod replay;
mod rope;

use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;

use crate::config::{DraftConfig, LayerAttention};
use crate::error::{DFlashError, Result};
use crate::kv::SequenceKv;
use crate::quantize::Quantizer;
use attention::{BlockMask, SequenceMasks};
use head::DraftHead;
use layer::{Contexts, Layer, LayerParts};
use linear::Linear;
use norm::rms_norm;
use rope::{RopeRows, RopeTable};

pub use replay::Replay;

/// A loaded draft model; context K/V live in [`SequenceKv`].
pub struct DraftModel {
    config: DraftConfig,
    fc: Linear,
    hidden_norm: Tensor,
    norm: Tensor,
    /// For a reduced vocabulary; otherwise the target's head is used.
    head: Option<DraftHead>,
    layers: Vec<Layer>,
    /// K rows of all layers, then V rows of all layers: `[2 * layers * kv_heads * head_dim, hidden]`.
    context_proj: Linear,
    /// K norm weights of all layers and heads, f32 `[layers * kv_heads, 1, head_dim]`.
    context_k_norm: Tensor,
    /// K norm weights of all layers, f32 `[layers, head_dim]`.
    layer_k_norms: Tensor,
    /// Ones `[head_dim]`: lets one fused RMS norm serve heads of different weights.
    unit_norm: Tensor,
    rope: RopeTable,
    /// The distinct attention patterns; layers refer to them by index.
    patterns: Vec<LayerAttention>,
    dtype: DType,
    device: Device,
    /// For the layers over a pool.
    replay: Option<Mutex<Box<dyn Replay>>>,
}

impl DraftModel {
    /// Builds the model from weights named as in the checkpoint (`fc.weight`, `layers.0.…`), in the
    /// builder's dtype and on its device. `n_taps` is the number of tapped target layers.
    ///
    /// # Errors
    /// [`DFlashError::Unsupported`] for bf16 on the CPU, which candle cannot multiply; otherwise
    /// candle's errors for missing or misshapen weights ([`crate::checkpoint::Checkpoint`] checks
    /// them first, with better messages).
    pub fn new(config: &DraftConfig, n_taps: usize, vb: VarBuilder) -> Result<Self> {
        Self::quantized(config, n_taps, vb, None)
    }

    /// As [`DraftModel::new`], with the matrices that a block passes (q, k, v, o, gate, up, down) in
    /// fewer bits. `fc`, the projections of context features and a head of its own stay exact.
    ///
    /// # Errors
    /// Those of [`DraftModel::new`] and of the quantizer.
    pub fn quantized(
        config: &DraftConfig,
        n_taps: usize,
        vb: VarBuilder,
        quantizer: Option<&dyn Quantizer>,
    ) -> Result<Self> {
        let (dtype, device) = (vb.dtype(), vb.device().clone());
        if device.is_cpu() && dtype == DType::BF16 {
            return Err(DFlashError::unsupported(
                "dtype",
                "bf16 matrix products are not available on the CPU; use --dtype f32 for the target (the draft model follows it)",
            ));
        }
        let hidden = config.hidden_size;
        let (mut layers, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let (mut key_norms, mut patterns) = (Vec::new(), Vec::<LayerAttention>::new());
        let mut layer_k_norms = Vec::new();
        for (i, pattern) in config.layers.iter().enumerate() {
            let index = patterns.iter().position(|p| p == pattern);
            let pattern_index = index.unwrap_or_else(|| {
                patterns.push(*pattern);
                patterns.len() - 1
            });
            let vb = vb.pp("layers").pp(i);
            let parts: LayerParts = Layer::load(config, pattern_index, vb, quantizer)?;
            layers.push(parts.layer);
            keys.push(parts.key);
            values.push(parts.value);
            let per_head = (config.num_key_value_heads, 1, config.head_dim);
            key_norms.push(parts.key_norm.broadcast_as(per_head)?);
            layer_k_norms.push(parts.key_norm);
        }
        keys.append(&mut values);
        let context_proj = Linear::stack(&keys)?;
        Ok(Self {
            fc: Linear::load(
                n_taps * config.target_hidden_size,
                hidden,
                false,
                vb.pp("fc"),
            )?,
            hidden_norm: vb.get(hidden, "hidden_norm.weight")?,
            norm: vb.get(hidden, "norm.weight")?,
            head: match config.draft_vocab_size {
                Some(size) => Some(DraftHead::load(config, size, &vb)?),
                None => None,
            },
            layers,
            context_proj,
            context_k_norm: Tensor::cat(&key_norms, 0)?.contiguous()?,
            layer_k_norms: Tensor::stack(&layer_k_norms, 0)?.contiguous()?,
            unit_norm: Tensor::ones(config.head_dim, DType::F32, &device)?,
            rope: RopeTable::new(&config.rope, config.max_position_embeddings, &device),
            patterns,
            config: config.clone(),
            dtype,
            device,
            replay: None,
        })
    }

    /// Let `replay` run the layers over contexts in a pool.
    pub fn with_replay(mut self, replay: Box<dyn Replay>) -> Self {
        self.replay = Some(Mutex::new(replay));
        self
    }

    /// Context features: `hidden_norm(fc(taps))`.
    ///
    /// `taps` is `[rows, n_taps * target_hidden]`, the tapped layers' outputs side by side in the
    /// order of `target_layer_ids`; the result is `[rows, hidden]`.
    ///
    /// # Errors
    /// [`DFlashError::Input`] when the width is not that of `fc`.
    pub fn fuse(&self, taps: &Tensor) -> Result<Tensor> {
        expect_rows("taps", taps, self.fc.in_features())?;
        let projected = self.fc.forward(&taps.to_dtype(self.dtype)?)?;
        rms_norm(&projected, &self.hidden_norm, self.eps())
    }

    /// Materializes context features: for each layer the pair of K (normed and rotated) and V, each
    /// `[kv_heads, rows, head_dim]`, ready for [`SequenceKv::append`].
    ///
    /// `fused` is `[rows, hidden]` from [`DraftModel::fuse`], `positions` the absolute position of
    /// each row. One matrix product serves all layers. Context features pass neither through a
    /// layer's input norm nor through its Q, O or MLP.
    ///
    /// # Errors
    /// [`DFlashError::Input`] when shapes disagree or a position is not below
    /// [`DraftModel::max_positions`].
    pub fn context_kv(&self, fused: &Tensor, positions: &[usize]) -> Result<Vec<(Tensor, Tensor)>> {
        expect_rows("context features", fused, self.config.hidden_size)?;
        let rows = fused.dim(0)?;
        if positions.len() != rows {
            return Err(DFlashError::input(
                "positions of the context features",
                rows.to_string(),
                positions.len().to_string(),
            ));
        }
        let (kv_heads, head_dim) = (self.config.num_key_value_heads, self.config.head_dim);
        let all_heads = self.layers.len() * kv_heads;
        let rope = self.rope.at(positions)?;
        // [rows, 2 * all_heads, head_dim] -> K and V, each [all_heads, rows, head_dim]
        let projected = self
            .context_proj
            .forward(&fused.to_dtype(self.dtype)?)?
            .reshape((rows, 2 * all_heads, head_dim))?
            .transpose(0, 1)?;
        let k = projected.narrow(0, 0, all_heads)?.contiguous()?;
        let k = rms_norm(&k.to_dtype(DType::F32)?, &self.unit_norm, self.eps())?
            .broadcast_mul(&self.context_k_norm)?;
        let k = rope.rotate(&k)?.to_dtype(self.dtype)?;
        let v = projected.narrow(0, all_heads, all_heads)?.contiguous()?;
        (0..self.layers.len())
            .map(|i| {
                Ok((
                    k.narrow(0, i * kv_heads, kv_heads)?,
                    v.narrow(0, i * kv_heads, kv_heads)?,
                ))
            })
            .collect()
    }

    /// One pass over blocks: `[batch, block, hidden]` embeddings of anchor and masks (by the target's
    /// embedding) to `[batch, block, hidden]` after the final norm, ready for the target's lm_head.
    ///
    /// `kv[b]` is the context of block `b`, whose rows are at positions `kv[b].len()..` on; contexts
    /// may differ in length. They are not modified: the block's own K/V are dropped afterwards.
    /// A block may be shorter than `block_size`.
    ///
    /// # Errors
    /// [`DFlashError::Input`] when shapes disagree or a block row would be at
    /// [`DraftModel::max_positions`] or beyond.
    pub fn forward_block(&self, embeds: &Tensor, kv: &[&SequenceKv]) -> Result<Tensor> {
        let (batch, block) = self.check_block(embeds, kv.len())?;
        for kv in kv {
            if kv.num_layers() != self.layers.len() {
                return Err(DFlashError::input(
                    "layers of the draft K/V",
                    self.layers.len().to_string(),
                    kv.num_layers().to_string(),
                ));
            }
        }
        let starts: Vec<usize> = kv.iter().map(|kv| kv.len()).collect();
        let masks = kv
            .iter()
            .map(|kv| self.sequence_masks(kv, block))
            .collect::<Result<Vec<_>>>()?;
        let rope = self.rope.blocks(&starts, block)?;
        let out = self.forward_layers(&self.input(embeds)?, &rope, &Contexts::Own { kv, masks })?;
        Ok(out.reshape((batch, block, ()))?)
    }

    /// What the first layer gets: `[batch, block, hidden]` embeddings to `[rows, hidden]`.
    fn input(&self, embeds: &Tensor) -> Result<Tensor> {
        let x = embeds.to_dtype(self.dtype)?.flatten_to(1)?;
        Ok(match self.config.input_embedding_scale {
            Some(scale) => x.affine(scale, 0.0)?,
            None => x,
        })
    }

    /// The layers and the final norm over the rows of blocks, `[rows, hidden]`.
    fn forward_layers(
        &self,
        x: &Tensor,
        rope: &RopeRows,
        contexts: &Contexts<'_>,
    ) -> Result<Tensor> {
        let mut x = x.clone();
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.forward(i, &x, contexts, &self.patterns, rope, self.eps())?;
        }
        rms_norm(&x, &self.norm, self.eps())
    }

    /// The best tokens of the draft model's own head, if it has one: `[rows, hidden]` (from
    /// [`DraftModel::forward_block`]) to one token of the target a row.
    ///
    /// # Errors
    /// Only those of candle.
    pub fn own_choices(&self, hidden: &Tensor) -> Result<Option<Vec<u32>>> {
        self.head
            .as_ref()
            .map(|head| head.choose(hidden))
            .transpose()
    }

    /// An empty context for one sequence.
    ///
    /// # Errors
    /// Only those of candle.
    pub fn new_kv(&self) -> Result<SequenceKv> {
        SequenceKv::new(&self.config, self.dtype, &self.device)
    }

    /// The configuration that the model was built from.
    pub fn config(&self) -> &DraftConfig {
        &self.config
    }

    /// Width of embeddings, context features and outputs.
    pub fn hidden_size(&self) -> usize {
        self.config.hidden_size
    }

    /// Number of draft layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Width of a row of taps.
    pub fn taps_width(&self) -> usize {
        self.fc.in_features()
    }

    /// Context and block must lie at positions below this.
    pub fn max_positions(&self) -> usize {
        self.config.max_position_embeddings
    }

    /// Type of weights, K/V and outputs.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the weights are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    fn eps(&self) -> f32 {
        self.config.rms_norm_eps as f32
    }

    fn sequence_masks(&self, kv: &SequenceKv, block: usize) -> Result<SequenceMasks> {
        let (kept, context, group) = (kv.start(), kv.len(), self.config.group_size());
        self.patterns
            .iter()
            .map(|pattern| BlockMask::new(*pattern, kept, context, block, group, &self.device))
            .collect()
    }

    /// Batch and block length, when everything fits together.
    fn check_block(&self, embeds: &Tensor, contexts: usize) -> Result<(usize, usize)> {
        let hidden = self.config.hidden_size;
        let (batch, block) = match *embeds.dims() {
            [batch, block, width] if width == hidden && batch * block > 0 => (batch, block),
            _ => {
                return Err(DFlashError::input(
                    "block embeddings",
                    format!("[batch, block, {hidden}]"),
                    format!("{:?}", embeds.dims()),
                ))
            }
        };
        if contexts != batch {
            return Err(DFlashError::input(
                "draft K/V, one for each block",
                batch.to_string(),
                contexts.to_string(),
            ));
        }
        Ok((batch, block))
    }
}

fn expect_rows(what: &str, tensor: &Tensor, width: usize) -> Result<()> {
    match *tensor.dims() {
        [rows, found] if found == width && rows > 0 => Ok(()),
        _ => Err(DFlashError::input(
            what,
            format!("[rows, {width}]"),
            format!("{:?}", tensor.dims()),
        )),
    }
}
