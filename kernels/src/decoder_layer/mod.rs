//! A decoder layer for few rows: decode steps and verify passes of a target.

#[cfg(feature = "cuda")]
pub(crate) mod chain;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "cuda")]
mod decode;
#[cfg(feature = "cuda")]
mod draft;
mod fallback;
mod parts;

use candle_core::{Result, Tensor};

use crate::attention::{block_attention, AttentionOptions, PagedContext};
use crate::check::mismatch;
use crate::product::{gated_product, product, product_onto, Weight};

pub use parts::{rms_norm, rotate_and_store, Norm, RotateAndStore};

/// A decoder layer of the usual make: norm, attention with RoPE over a paged cache, residual; norm, gated
/// (SiLU) MLP, residual.
#[derive(Clone, Copy, Debug)]
pub struct DecoderLayer<'a> {
    pub input_norm: Norm<'a>,
    pub q: Weight<'a>,
    pub k: Weight<'a>,
    pub v: Weight<'a>,
    pub rotate: RotateAndStore<'a>,
    /// u32 `[sequences, blocks]`: the rows are in as many blocks of rows, as many each.
    pub block_tables: &'a Tensor,
    /// u32 `[sequences]`: positions of each sequence, this step's rows included.
    pub context_lens: &'a Tensor,
    /// The longest of them, or more.
    pub longest: Option<usize>,
    pub attention: AttentionOptions<'a>,
    pub o: Weight<'a>,
    pub mlp_norm: Norm<'a>,
    pub gate: Weight<'a>,
    pub up: Weight<'a>,
    pub down: Weight<'a>,
}

impl<'a> DecoderLayer<'a> {
    fn context(&self) -> PagedContext<'a> {
        PagedContext {
            keys: self.rotate.keys,
            values: self.rotate.values,
            block_tables: self.block_tables,
            context_lens: self.context_lens,
            longest: self.longest,
        }
    }

    /// Heads and head dim.
    fn heads(&self) -> Result<(usize, usize)> {
        let head_dim = self.rotate.values.dims().get(2).copied().unwrap_or(0);
        let width = self.q.outputs();
        match head_dim {
            1.. if width > 0 && width.is_multiple_of(head_dim) => Ok((width / head_dim, head_dim)),
            _ => Err(mismatch(
                "outputs of the q projection",
                format!("a multiple of the head dim, {head_dim}"),
                width.to_string(),
            )),
        }
    }
}

/// A layer of a draft model: as [`DecoderLayer`], but it attends to a paged context and to the rows of its
/// own block, whose K and V are not kept, and norms and rotates heads in f32.
#[derive(Clone, Copy, Debug)]
pub struct DraftLayer<'a> {
    pub input_norm: Norm<'a>,
    /// `[(heads + 2 * kv_heads) * head_dim, hidden]`: q, k and v.
    pub qkv: Weight<'a>,
    /// f32 `[heads + kv_heads, head_dim]`: weights of the norms over heads.
    pub qk_norm: &'a Tensor,
    /// Their epsilon.
    pub head_eps: f32,
    /// f32 `[rows, rotary_dim / 2]`, for each row's position.
    pub cos: &'a Tensor,
    /// Likewise.
    pub sin: &'a Tensor,
    /// Pairs are neighbours.
    pub interleaved: bool,
    /// The layer's paged cache of the context.
    pub keys: &'a Tensor,
    /// Likewise.
    pub values: &'a Tensor,
    /// u32 `[sequences, blocks]`
    pub block_tables: &'a Tensor,
    /// u32 `[sequences]`: positions of the context.
    pub context_lens: &'a Tensor,
    /// The longest of them, or more.
    pub longest: Option<usize>,
    pub attention: AttentionOptions<'a>,
    pub o: Weight<'a>,
    pub mlp_norm: Norm<'a>,
    /// `[2 * width, hidden]`: gate and up.
    pub gate_up: Weight<'a>,
    pub down: Weight<'a>,
}

/// The layer's output for `x`, `[rows, hidden]`, block by block, if all of it has kernels (see
/// [`decoder_layer`]); else `None`: it is then to be made of this crate's operations.
///
/// # Errors
/// Those of the launches.
pub fn draft_layer(x: &Tensor, layer: &DraftLayer) -> Result<Option<Tensor>> {
    #[cfg(feature = "cuda")]
    {
        draft::run(x, layer)
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (x, layer);
        Ok(None)
    }
}

/// [`decoder_layer`] if it runs on a CUDA device, in bf16 or f16, on shapes that fit together and that all
/// kernels cover; else `None`, and nothing was done.
///
/// # Errors
/// Those of the launches.
pub fn chained_decoder_layer(x: &Tensor, layer: &DecoderLayer) -> Result<Option<Tensor>> {
    #[cfg(feature = "cuda")]
    {
        decode::run(x, layer)
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (x, layer);
        Ok(None)
    }
}

/// The layer's output for `x`, `[rows, hidden]`: row `j` of sequence `s` is row `s * rows / sequences + j`,
/// and the last position of its context is the last row's. Writes the rows' K and V to their slots.
///
/// In bf16 or f16 on a CUDA device these are nine launches with no memory operation between them. With up
/// to [`MOST_PRODUCT_ROWS`](crate::MOST_PRODUCT_ROWS) rows, each of them starts while the one before ends.
/// With more, products are cuBLAS's. Otherwise the layer is made of this crate's operations, one after another, with the same result (of more rows: but for the
/// order of sums).
///
/// # Errors
/// When shapes, dtypes or devices do not fit.
pub fn decoder_layer(x: &Tensor, layer: &DecoderLayer) -> Result<Tensor> {
    match chained_decoder_layer(x, layer)? {
        Some(out) => Ok(out),
        None => composed(x, layer),
    }
}

/// [`decoder_layer`] out of the crate's operations; for tests.
#[doc(hidden)]
pub fn composed(x: &Tensor, layer: &DecoderLayer) -> Result<Tensor> {
    let rows = x.dims().first().copied().unwrap_or(0);
    let (heads, head_dim) = layer.heads()?;
    let sequences = sequences(rows, layer.block_tables)?;
    let normed = rms_norm(x, layer.input_norm)?;
    let [q, k, v] = &product(&normed, &[layer.q, layer.k, layer.v])?[..] else {
        return Err(mismatch("products", "three", "another number"));
    };
    let by_heads = |t: &Tensor| t.reshape((rows, (), head_dim));
    let q = rotate_and_store(&by_heads(q)?, &by_heads(k)?, &by_heads(v)?, &layer.rotate)?;
    let q = q.reshape((sequences, rows / sequences, heads, head_dim))?;
    let attended = block_attention(&q, &layer.context(), None, &layer.attention)?;
    let attended = attended.reshape((rows, heads * head_dim))?;
    let x = product_onto(&attended, layer.o, x)?;
    let normed = rms_norm(&x, layer.mlp_norm)?;
    product_onto(
        &gated_product(&normed, layer.gate, layer.up)?,
        layer.down,
        &x,
    )
}

fn sequences(rows: usize, block_tables: &Tensor) -> Result<usize> {
    match block_tables.dims().first() {
        Some(&sequences) if sequences > 0 && rows > 0 && rows.is_multiple_of(sequences) => {
            Ok(sequences)
        }
        sequences => Err(mismatch(
            "sequences of the block tables",
            format!("a divisor of the {rows} rows"),
            format!("{sequences:?}"),
        )),
    }
}
