//! Our kernels in the target's decode steps: whole decoder layers, and products of few rows.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use dflash_kernels::{
    argmax_last, chained_decoder_layer, covers_product, decoder_layer, product, AttentionOptions,
    DecoderLayer, Norm, RotateAndStore, Weight, MOST_PRODUCT_ROWS,
};
use mistralrs_core::plugin::{
    set_argmax, set_decode_attention, set_decode_layers, DecodeLayer, DecodeLayers, SdpaParams,
};
use mistralrs_quant::{set_few_rows, FewRows};

use super::attention::DecodeKernel;

/// Let every model of this process decode with our kernels on a GPU, in bf16 and f16: attention, products
/// of up to 16 rows, and for families that hand their layers over (llama, mistral, qwen2, qwen3) the
/// whole layer; and choose greedily. Where all of that covers a model (`docs/cuda.md`), a row comes out bit
/// by bit the same in a plain step and in a verify pass of up to 16 rows.
/// To be called before a model is loaded.
pub fn use_decode_kernels() {
    // Only one of each can be set; another one is this one as well.
    set_decode_attention(Arc::new(DecodeKernel));
    set_decode_layers(Arc::new(Layers));
    set_few_rows(Arc::new(Products));
    set_argmax(argmax_last);
}

/// Run the layers of decode steps by their fallback on every device, to test what the host hands over.
#[doc(hidden)]
pub fn use_decode_layers_anywhere() {
    ANYWHERE.store(true, Ordering::Relaxed);
    use_decode_kernels();
}

/// Not only on GPUs with kernels.
static ANYWHERE: AtomicBool = AtomicBool::new(false);

/// Whether a verify pass over the paged cache there is made of decode rows.
pub(super) fn takes_rows(device: &Device) -> bool {
    device.is_cuda() || ANYWHERE.load(Ordering::Relaxed)
}

static RUNS: AtomicU64 = AtomicU64::new(0);

/// How many decoder layers were run so in this process. Those of a CUDA graph count when it is recorded.
#[doc(hidden)]
pub fn decode_layers_run() -> u64 {
    RUNS.load(Ordering::Relaxed)
}

#[derive(Debug)]
struct Products;

impl FewRows for Products {
    fn most_rows(&self) -> usize {
        MOST_PRODUCT_ROWS
    }

    fn product(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let weights = [Weight { weight, bias }];
        let has_fit = |bias: &Tensor| {
            bias.dtype() == x.dtype()
                && bias.dims() == [weight.dims()[0]]
                && bias.device().same_device(x.device())
        };
        if !covers_product(x, &weights) || !bias.is_none_or(has_fit) {
            return Ok(None);
        }
        Ok(product(x, &weights)?.pop())
    }
}

#[derive(Debug)]
struct Layers;

impl DecodeLayers for Layers {
    fn run(&self, layer: &DecodeLayer) -> Result<Option<Tensor>> {
        let anywhere = ANYWHERE.load(Ordering::Relaxed);
        if !anywhere && !layer.xs.device().is_cuda() {
            return Ok(None);
        }
        let sinks = f32_sinks(layer.sdpa_params)?;
        let linear = |(weight, bias)| Weight { weight, bias };
        let norm = |(weight, eps): (_, f64)| Norm {
            weight,
            eps: eps as f32,
        };
        let ours = DecoderLayer {
            input_norm: norm(layer.input_norm),
            q: linear(layer.q),
            k: linear(layer.k),
            v: linear(layer.v),
            rotate: RotateAndStore {
                q_norm: layer.q_norm.map(norm),
                k_norm: layer.k_norm.map(norm),
                cos: &layer.cos,
                sin: &layer.sin,
                interleaved: !layer.is_gpt_neox,
                slots: &layer.slots,
                keys: layer.rows.key_cache,
                values: layer.rows.value_cache,
            },
            block_tables: layer.rows.block_tables,
            context_lens: layer.rows.context_lens,
            longest: Some(layer.rows.longest),
            attention: options(layer.sdpa_params, sinks.as_ref()),
            o: linear(layer.o),
            mlp_norm: norm(layer.mlp_norm),
            gate: linear(layer.gate),
            up: linear(layer.up),
            down: linear(layer.down),
        };
        let out = match anywhere {
            true => Some(decoder_layer(layer.xs, &ours)?),
            false => chained_decoder_layer(layer.xs, &ours)?,
        };
        RUNS.fetch_add(u64::from(out.is_some()), Ordering::Relaxed);
        Ok(out)
    }
}

/// Causal attention without a window as the host describes it.
pub(super) fn options<'a>(params: &SdpaParams, sinks: Option<&'a Tensor>) -> AttentionOptions<'a> {
    AttentionOptions {
        scale: params.softmax_scale,
        causal: true,
        window: None,
        softcap: params.softcap.filter(|cap| *cap != 1.0),
        sinks,
    }
}

pub(super) fn f32_sinks(params: &SdpaParams) -> Result<Option<Tensor>> {
    let sinks = params.sinks.as_ref();
    sinks.map(|sinks| sinks.to_dtype(DType::F32)).transpose()
}
