//! From the product of all draft layers' K and V projections to their paged caches.

#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod fallback;

use candle_core::{DType, Result, Tensor};

use crate::check::{expect, expect_device, expect_float, mismatch};
use crate::paged::PagedShape;
#[cfg(feature = "cuda")]
use crate::slow_path::SlowPath;

#[cfg(feature = "cuda")]
static SLOW: SlowPath = SlowPath::new("materialize");

/// How a row of the product is laid out; in each case a part is `[kv_heads, head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvOrder {
    /// K and V of the first layer, K and V of the second, …
    PerLayer,
    /// K of all layers, then V of all layers.
    KeysThenValues,
}

/// What is the same for every call of one draft model.
#[derive(Clone, Copy, Debug)]
pub struct MaterializeSpec<'a> {
    /// f32 `[layers, head_dim]`: weights of the RMS norm over each head of K.
    pub k_norm: &'a Tensor,
    /// f32 `[positions, rotary_dim / 2]`; the first `rotary_dim` dims of a head are rotated.
    pub cos: &'a Tensor,
    /// f32 `[positions, rotary_dim / 2]`.
    pub sin: &'a Tensor,
    /// Pairs are neighbours (`2i`, `2i + 1`); otherwise `i`, `i + rotary_dim / 2`.
    pub interleaved: bool,
    /// Epsilon of the norm.
    pub eps: f32,
    /// Layout of the product.
    pub order: KvOrder,
}

/// Which rows of each sequence are written; the tokens are then `[batch * rows]`, sequence by sequence.
#[derive(Clone, Copy, Debug)]
pub enum Kept<'a> {
    /// u32 `[batch]`, any stride: rows `0..n` (a commit length).
    Rows(&'a Tensor),
    /// u32 `[batch]`, any stride: rows `0..=n` (an accept length, as [`crate::accept`] gives it).
    Accepted(&'a Tensor),
}

impl<'a> Kept<'a> {
    fn lens(&self) -> &'a Tensor {
        match self {
            Kept::Rows(lens) | Kept::Accepted(lens) => lens,
        }
    }

    fn extra(&self) -> usize {
        match self {
            Kept::Rows(_) => 0,
            Kept::Accepted(_) => 1,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub tokens: usize,
    pub layers: usize,
    /// Tokens of a sequence, where [`Kept`] is given.
    pub rows: usize,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub rotary_dim: usize,
    pub table_positions: usize,
    pub cache: PagedShape,
}

impl Sizes {
    /// Elements of a row before K of layer 0, before V of layer 0, and from layer to layer.
    pub fn offsets(&self, order: KvOrder) -> (usize, usize, usize) {
        let part = self.cache.kv_heads * self.cache.head_dim;
        match order {
            KvOrder::PerLayer => (0, part, 2 * part),
            KvOrder::KeysThenValues => (0, self.layers * part, part),
        }
    }
}

/// Norms and rotates K, and writes K and V of all layers to their paged caches.
///
/// - `kv` is `[tokens, layers * 2 * kv_heads * head_dim]`, the context features times all layers' K and
///   V projections, in the caches' dtype (bf16, f16 or f32).
/// - `positions` is u32 `[tokens]`, below the length of the RoPE tables.
/// - `slots` is i64 `[tokens]`; a token with slot -1 is not written. No two tokens may share a slot.
/// - `kept` limits what is written by a length of each sequence that lives on the device.
/// - `caches` has a pair of K and V for each layer, all of one shape, each its own memory. They are
///   written in place; nothing else in them changes.
///
/// Norm and rotation are in f32, rounded once. The kernel covers every shape with head dims up to 1024
/// and never waits for the device.
///
/// # Errors
/// When shapes, dtypes or devices do not fit. In the fallback also when a position or a slot is out of
/// range; nothing is written then.
pub fn materialize(
    kv: &Tensor,
    spec: &MaterializeSpec,
    positions: &Tensor,
    slots: &Tensor,
    kept: Option<Kept>,
    caches: &[(Tensor, Tensor)],
) -> Result<()> {
    let sizes = check(kv, spec, positions, slots, kept, caches)?;
    if sizes.tokens == 0 {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    if kv.device().is_cuda() {
        match cuda::unsupported(&sizes) {
            None => return cuda::run(kv, spec, positions, slots, kept, caches, &sizes),
            Some(why) => SLOW.note(&why),
        }
    }
    fallback::run(kv, spec, positions, slots, kept, caches, &sizes)
}

fn check(
    kv: &Tensor,
    spec: &MaterializeSpec,
    positions: &Tensor,
    slots: &Tensor,
    kept: Option<Kept>,
    caches: &[(Tensor, Tensor)],
) -> Result<Sizes> {
    expect_float("product of K and V", kv)?;
    let Some((keys, values)) = caches.first() else {
        return Err(mismatch("caches", "one pair for each layer", "none"));
    };
    let cache = PagedShape::of(keys, values)?;
    for (i, (keys, values)) in caches.iter().enumerate() {
        let other = PagedShape::of(keys, values)?;
        if other != cache || keys.dtype() != kv.dtype() {
            return Err(mismatch(
                &format!("cache of layer {i}"),
                format!("{:?} {cache:?}", kv.dtype()),
                format!("{:?} {other:?}", keys.dtype()),
            ));
        }
        expect_device("cache", keys, kv)?;
    }
    let layers = caches.len();
    let width = layers * 2 * cache.kv_heads * cache.head_dim;
    let tokens = match *kv.dims() {
        [tokens, found] if found == width => tokens,
        _ => {
            return Err(mismatch(
                "product of K and V",
                format!("[tokens, {width}]"),
                format!("{:?}", kv.dims()),
            ))
        }
    };
    let norms = [layers, cache.head_dim];
    expect("weights of the K norm", spec.k_norm, &norms, DType::F32, kv)?;
    let (table_positions, half) = spec.cos.dims2()?;
    let tables = [table_positions, half];
    expect("cos", spec.cos, &tables, DType::F32, kv)?;
    expect("sin", spec.sin, &tables, DType::F32, kv)?;
    if 2 * half > cache.head_dim {
        return Err(mismatch(
            "width of the RoPE tables",
            format!("at most {}, half the head dim", cache.head_dim / 2),
            half.to_string(),
        ));
    }
    expect("positions", positions, &[tokens], DType::U32, kv)?;
    expect("slots", slots, &[tokens], DType::I64, kv)?;
    let mut rows = tokens;
    if let Some(kept) = kept {
        let batch = kept.lens().dims1()?;
        expect("kept rows", kept.lens(), &[batch], DType::U32, kv)?;
        if batch == 0 || !tokens.is_multiple_of(batch) {
            return Err(mismatch(
                "tokens",
                format!("a multiple of the {batch} sequences"),
                tokens.to_string(),
            ));
        }
        rows = tokens / batch;
    }
    Ok(Sizes {
        tokens,
        layers,
        rows,
        rotary_dim: 2 * half,
        table_positions,
        cache,
    })
}
