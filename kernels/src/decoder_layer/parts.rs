//! What is no product and no attention.

use candle_core::{DType, Result, Tensor};

use crate::check::{expect, expect_float, mismatch};
use crate::paged::PagedShape;

#[cfg(feature = "cuda")]
use super::cuda;
use super::fallback;

/// An RMS norm.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// `[width]`, in the dtype of what is normed.
    pub weight: &'a Tensor,
    pub eps: f32,
}

/// RMS norm of rows `[rows, width]` (f32, bf16 or f16). In f32, rounded once.
///
/// # Errors
/// When shapes, dtypes or devices do not fit.
pub fn rms_norm(x: &Tensor, norm: Norm) -> Result<Tensor> {
    expect_float("rows", x)?;
    let &[_, width] = x.dims() else {
        return Err(mismatch("rows", "[rows, width]", format!("{:?}", x.dims())));
    };
    expect("weight of the norm", norm.weight, &[width], x.dtype(), x)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && x.elem_count() > 0 && cuda::norm_is_covered(width, x.dtype()) {
        return cuda::rms_norm(x, norm);
    }
    fallback::rms_norm(x, norm)
}

/// What [`rotate_and_store`] does.
#[derive(Clone, Copy, Debug)]
pub struct RotateAndStore<'a> {
    /// Over each head of q, if the model has one; its weight is `[head_dim]`.
    pub q_norm: Option<Norm<'a>>,
    /// Likewise for k.
    pub k_norm: Option<Norm<'a>>,
    /// `[rows, rotary_dim / 2]` for each row's position, in the rows' dtype; the first `rotary_dim` dims
    /// of a head are rotated.
    pub cos: &'a Tensor,
    /// Likewise.
    pub sin: &'a Tensor,
    /// Pairs are neighbours (`2i`, `2i + 1`); otherwise `i`, `i + rotary_dim / 2`.
    pub interleaved: bool,
    /// i64 `[rows]`: where K and V go; negative for padding.
    pub slots: &'a Tensor,
    /// The layer's paged cache.
    pub keys: &'a Tensor,
    /// Likewise.
    pub values: &'a Tensor,
}

/// What lies between the projections of decode rows and their attention: norms over heads, RoPE, and K
/// and V to the paged cache. `q` is `[rows, heads, head_dim]`, `k` and `v` are `[rows, kv_heads, head_dim]`,
/// in the cache's dtype; the result is the rotated `q`. Values are rounded behind the norm and at the end.
///
/// # Errors
/// When shapes, dtypes or devices do not fit; in the fallback also for slots outside of the cache, which the
/// kernel leaves out.
pub fn rotate_and_store(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &RotateAndStore,
) -> Result<Tensor> {
    let cache = check(q, k, v, spec)?;
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() && q.elem_count() > 0 && cuda::rotate_is_covered(q.dims()[0], &cache) {
        return cuda::rotate_and_store(q, k, v, spec, &cache);
    }
    fallback::rotate_and_store(q, k, v, spec, &cache)
}

pub(super) fn check(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &RotateAndStore,
) -> Result<PagedShape> {
    let cache = PagedShape::of(spec.keys, spec.values)?;
    let dtype = spec.keys.dtype();
    let (kv_heads, head_dim) = (cache.kv_heads, cache.head_dim);
    let &[rows, heads, _] = q.dims() else {
        return Err(mismatch(
            "queries",
            format!("[rows, heads, {head_dim}]"),
            format!("{:?}", q.dims()),
        ));
    };
    expect("queries", q, &[rows, heads, head_dim], dtype, spec.keys)?;
    for (what, t) in [("keys", k), ("values", v)] {
        expect(what, t, &[rows, kv_heads, head_dim], dtype, q)?;
    }
    expect("slots", spec.slots, &[rows], DType::I64, q)?;
    for (what, norm) in [("q norm", spec.q_norm), ("k norm", spec.k_norm)] {
        if let Some(norm) = norm {
            expect(what, norm.weight, &[head_dim], dtype, q)?;
        }
    }
    let half = spec.cos.dims().last().copied().unwrap_or(0);
    if !(1..=head_dim / 2).contains(&half) {
        return Err(mismatch(
            "width of the RoPE tables",
            format!("from 1 to {}, half the head dim", head_dim / 2),
            half.to_string(),
        ));
    }
    for (what, table) in [("cos", spec.cos), ("sin", spec.sin)] {
        expect(what, table, &[rows, half], dtype, q)?;
    }
    Ok(cache)
}
