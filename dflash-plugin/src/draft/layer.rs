//! One draft layer.

use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;

use dflash_kernels::{
    block_attention, draft_layer, AttentionOptions, DraftLayer, Norm, PagedContext,
};

use super::attention::{attend, SequenceMasks};
use super::linear::{Linear, Projection};
use super::norm::rms_norm;
use super::rope::RopeRows;
use crate::config::{DraftConfig, LayerAttention};
use crate::error::Result;
use crate::kv::SequenceKv;
use crate::pool::PooledContexts;
use crate::quantize::Quantizer;

/// Where the contexts of a batch of blocks are.
pub(super) enum Contexts<'a> {
    /// In buffers of their own.
    Own {
        kv: &'a [&'a SequenceKv],
        masks: Vec<SequenceMasks>,
    },
    /// In the blocks of a pool.
    Pool {
        layers: &'a [(Tensor, Tensor)],
        /// u32 `[batch, blocks]`
        tables: Tensor,
        /// u32 `[batch]`
        lens: Tensor,
        longest: usize,
    },
}

impl<'a> Contexts<'a> {
    /// Contexts in a pool.
    pub fn pooled(contexts: &PooledContexts<'a>) -> Result<Self> {
        let (tables, lens) = contexts.tensors()?;
        Ok(Self::Pool {
            layers: contexts.pool.layers(),
            tables,
            lens,
            longest: contexts.lens.iter().copied().max().unwrap_or(0),
        })
    }
}

/// Weights of one layer, with q/k/v and gate/up each fused to one matrix. The four matrices may be
/// quantized.
pub(super) struct Layer {
    input_norm: Tensor,
    qkv: Projection,
    /// f32 `[head_dim]`, with the attention scale folded in (RoPE is linear).
    q_norm: Tensor,
    /// f32 `[head_dim]`.
    k_norm: Tensor,
    /// `q_norm` for each query head, then `k_norm` for each key head: f32 `[heads + kv_heads, head_dim]`.
    qk_norm: Tensor,
    output: Projection,
    post_norm: Tensor,
    gate_up: Projection,
    down: Projection,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Index into the model's attention patterns.
    pattern: usize,
}

/// How rows attend over contexts in a pool.
fn pooled_options(pattern: LayerAttention) -> AttentionOptions<'static> {
    AttentionOptions {
        scale: 1.0, // In `qk_norm`.
        causal: pattern.causal,
        window: pattern.window_of_rows(),
        softcap: None,
        sinks: None,
    }
}

/// A layer, and what the model stacks over all layers to materialize context features.
pub(super) struct LayerParts {
    pub layer: Layer,
    pub key: Linear,
    pub value: Linear,
    /// f32 `[head_dim]`.
    pub key_norm: Tensor,
}

impl Layer {
    /// What is materialized stays exact: a context feature is projected once and attended to ever
    /// after.
    pub fn load(
        cfg: &DraftConfig,
        pattern: usize,
        vb: VarBuilder,
        quantizer: Option<&dyn Quantizer>,
    ) -> Result<LayerParts> {
        let (hidden, head_dim) = (cfg.hidden_size, cfg.head_dim);
        let q_width = cfg.num_attention_heads * head_dim;
        let kv_width = cfg.num_key_value_heads * head_dim;
        let (attn, mlp) = (vb.pp("self_attn"), vb.pp("mlp"));
        let bias = cfg.attention_bias;
        let query = Linear::load(hidden, q_width, bias, attn.pp("q_proj"))?;
        let key = Linear::load(hidden, kv_width, bias, attn.pp("k_proj"))?;
        let value = Linear::load(hidden, kv_width, bias, attn.pp("v_proj"))?;
        let gate = Linear::load(hidden, cfg.intermediate_size, false, mlp.pp("gate_proj"))?;
        let up = Linear::load(hidden, cfg.intermediate_size, false, mlp.pp("up_proj"))?;
        let output = Linear::load(q_width, hidden, bias, attn.pp("o_proj"))?;
        let down = Linear::load(cfg.intermediate_size, hidden, false, mlp.pp("down_proj"))?;
        let q_norm = attn.get(head_dim, "q_norm.weight")?.to_dtype(DType::F32)?;
        let k_norm = attn.get(head_dim, "k_norm.weight")?.to_dtype(DType::F32)?;
        let scaled_q_norm = q_norm.affine((head_dim as f64).powf(-0.5), 0.0)?;
        let for_heads = |norm: &Tensor, heads: usize| norm.broadcast_as((heads, head_dim));
        let layer = Self {
            input_norm: vb.get(hidden, "input_layernorm.weight")?,
            qkv: Linear::stack(&[query, key.clone(), value.clone()])?.quantized(quantizer)?,
            qk_norm: Tensor::cat(
                &[
                    for_heads(&scaled_q_norm, cfg.num_attention_heads)?,
                    for_heads(&k_norm, cfg.num_key_value_heads)?,
                ],
                0,
            )?,
            q_norm: scaled_q_norm,
            k_norm: k_norm.clone(),
            output: output.quantized(quantizer)?,
            post_norm: vb.get(hidden, "post_attention_layernorm.weight")?,
            gate_up: Linear::stack(&[gate, up])?.quantized(quantizer)?,
            down: down.quantized(quantizer)?,
            heads: cfg.num_attention_heads,
            kv_heads: cfg.num_key_value_heads,
            head_dim,
            pattern,
        };
        Ok(LayerParts {
            layer,
            key,
            value,
            key_norm: k_norm,
        })
    }

    /// `x` is `[batch * block, hidden]`, the blocks one after another; `contexts` has an entry for each
    /// block; `rope` holds the rows' positions. `index` is this layer's number, `pattern` its own.
    pub fn forward(
        &self,
        index: usize,
        x: &Tensor,
        contexts: &Contexts<'_>,
        patterns: &[LayerAttention],
        rope: &RopeRows,
        eps: f32,
    ) -> Result<Tensor> {
        if let Some(out) = self.chained(index, x, contexts, patterns, rope, eps)? {
            return Ok(out);
        }
        let normed = rms_norm(x, &self.input_norm, eps)?;
        let attended = match contexts {
            Contexts::Own { kv, masks } => self.attention(index, &normed, kv, masks, rope, eps)?,
            Contexts::Pool {
                layers,
                tables,
                lens,
                longest,
            } => {
                let (keys, values) = &layers[index];
                let context = PagedContext {
                    keys,
                    values,
                    block_tables: tables,
                    context_lens: lens,
                    longest: Some(*longest),
                };
                self.pooled_attention(&normed, &context, patterns[self.pattern], rope, eps)?
            }
        };
        let x = self.output.forward_onto(&attended, x)?;
        let normed = rms_norm(&x, &self.post_norm, eps)?;
        self.down.forward_onto(&self.gate_up.gated(&normed)?, &x)
    }

    /// The whole layer by kernels that follow each other closely, where there are such.
    fn chained(
        &self,
        index: usize,
        x: &Tensor,
        contexts: &Contexts<'_>,
        patterns: &[LayerAttention],
        rope: &RopeRows,
        eps: f32,
    ) -> Result<Option<Tensor>> {
        let Contexts::Pool {
            layers,
            tables,
            lens,
            longest,
        } = contexts
        else {
            return Ok(None);
        };
        let exact = (
            self.qkv.exact(),
            self.output.exact(),
            self.gate_up.exact(),
            self.down.exact(),
        );
        let (Some(qkv), Some(o), Some(gate_up), Some(down)) = exact else {
            return Ok(None);
        };
        let norm = |weight| Norm { weight, eps };
        let (cos, sin, interleaved) = rope.parts();
        let (keys, values) = &layers[index];
        let layer = DraftLayer {
            input_norm: norm(&self.input_norm),
            qkv,
            qk_norm: &self.qk_norm,
            head_eps: eps,
            cos,
            sin,
            interleaved,
            keys,
            values,
            block_tables: tables,
            context_lens: lens,
            longest: Some(*longest),
            attention: pooled_options(patterns[self.pattern]),
            o,
            mlp_norm: norm(&self.post_norm),
            gate_up,
            down,
        };
        Ok(draft_layer(x, &layer)?)
    }

    /// `[rows, hidden]` to `[rows, heads * head_dim]`.
    fn attention(
        &self,
        index: usize,
        x: &Tensor,
        kv: &[&SequenceKv],
        masks: &[SequenceMasks],
        rope: &RopeRows,
        eps: f32,
    ) -> Result<Tensor> {
        let rows = x.dim(0)?;
        let block = rows / kv.len();
        let group = self.heads / self.kv_heads;
        // [rows, (heads + 2 kv_heads) * head_dim] -> [heads + 2 kv_heads, rows, head_dim]
        let qkv = self
            .qkv
            .forward(x)?
            .reshape((rows, self.heads + 2 * self.kv_heads, self.head_dim))?
            .transpose(0, 1)?
            .contiguous()?;
        let q = qkv.narrow(0, 0, self.heads)?;
        let k = qkv.narrow(0, self.heads, self.kv_heads)?;
        let v = qkv.narrow(0, self.heads + self.kv_heads, self.kv_heads)?;
        let q = self.norm_and_rotate(&q, &self.q_norm, rope, eps)?;
        let k = self.norm_and_rotate(&k, &self.k_norm, rope, eps)?;
        let mut outputs = Vec::with_capacity(kv.len());
        for (b, (kv, masks)) in kv.iter().zip(masks).enumerate() {
            let mask = &masks[self.pattern];
            let context = match mask.context {
                0 => None,
                len => Some(kv.layer_range(index, mask.start, len)?),
            };
            let of_block = |t: &Tensor| t.narrow(1, b * block, block);
            // [heads, block, head_dim] -> [kv_heads, group * block, head_dim]
            let q = of_block(&q)?.reshape((self.kv_heads, group * block, self.head_dim))?;
            let k = of_block(&k)?.contiguous()?;
            let v = of_block(&v)?.contiguous()?;
            let out = attend(&q, context, (k, v), mask)?;
            outputs.push(out.reshape((self.heads, block, self.head_dim))?);
        }
        let out = match outputs.as_slice() {
            [one] => one.clone(),
            _ => Tensor::cat(&outputs, 1)?,
        };
        // [heads, rows, head_dim] -> [rows, heads * head_dim]
        Ok(out
            .transpose(0, 1)?
            .reshape((rows, self.heads * self.head_dim))?)
    }

    /// As `attention`, over contexts in a pool: no transposition and no copy of a context.
    fn pooled_attention(
        &self,
        x: &Tensor,
        context: &PagedContext<'_>,
        pattern: LayerAttention,
        rope: &RopeRows,
        eps: f32,
    ) -> Result<Tensor> {
        let (rows, batch) = (x.dim(0)?, context.context_lens.dim(0)?);
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        let qkv = self
            .qkv
            .forward(x)?
            .reshape((rows, heads + 2 * kv_heads, self.head_dim))?;
        let qk = rope.norm_and_rotate_rows(&qkv, &self.qk_norm, eps)?;
        let by_block = |t: &Tensor, first: usize, heads: usize| {
            t.reshape((batch, rows / batch, t.dim(1)?, self.head_dim))?
                .narrow(2, first, heads)
        };
        let q = by_block(&qk, 0, heads)?;
        let k = by_block(&qk, heads, kv_heads)?;
        let v = by_block(&qkv, heads + kv_heads, kv_heads)?;
        let options = pooled_options(pattern);
        let out = block_attention(&q, context, Some((&k, &v)), &options)?;
        Ok(out.reshape((rows, heads * self.head_dim))?)
    }

    /// RMS norm over each head and RoPE, both in f32, of `[heads, rows, head_dim]`.
    fn norm_and_rotate(
        &self,
        x: &Tensor,
        weight: &Tensor,
        rope: &RopeRows,
        eps: f32,
    ) -> Result<Tensor> {
        let normed = rms_norm(&x.to_dtype(DType::F32)?, weight, eps)?;
        Ok(rope.rotate(&normed)?.to_dtype(x.dtype())?)
    }
}
