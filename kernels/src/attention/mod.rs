//! Attention of a block of query rows over each sequence's paged context.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod fallback;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod plan;

use candle_core::{DType, Result, Tensor};

use crate::check::{expect, expect_device, mismatch};
use crate::paged::PagedShape;
#[cfg(feature = "cuda")]
use crate::slow_path::SlowPath;

#[cfg(feature = "cuda")]
static SLOW: SlowPath = SlowPath::new("block attention");

/// Where the keys and values of a batch of sequences lie.
#[derive(Clone, Copy, Debug)]
pub struct PagedContext<'a> {
    /// `[num_blocks, kv_heads, head_dim / x, block_size, x]`, contiguous.
    pub keys: &'a Tensor,
    /// `[num_blocks, kv_heads, head_dim, block_size]`, contiguous, of the same dtype.
    pub values: &'a Tensor,
    /// u32 `[batch, max_blocks]`; entries behind a sequence's last block are not read.
    pub block_tables: &'a Tensor,
    /// u32 `[batch]`: positions of each sequence that the cache holds. Zero is allowed.
    pub context_lens: &'a Tensor,
    /// An upper bound of `context_lens`, if one is known that is below `max_blocks * block_size`. It
    /// only decides how the work is cut; a bound that is too low costs time, not correctness.
    pub longest: Option<usize>,
}

/// How rows attend.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOptions<'a> {
    /// Scores are multiplied with this, usually `1 / sqrt(head_dim)`. Must be above 0.
    pub scale: f32,
    /// A row sees no later position. Otherwise all rows of the block see each other.
    pub causal: bool,
    /// A row sees positions less than this away from its own (which counts), in both directions.
    pub window: Option<usize>,
    /// Scores become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// f32 `[heads]`: a further logit of each head that takes weight and adds no value.
    pub sinks: Option<&'a Tensor>,
}

impl AttentionOptions<'_> {
    /// Bidirectional over everything, `1 / sqrt(head_dim)`.
    pub fn new(head_dim: usize) -> Self {
        Self {
            scale: 1.0 / (head_dim as f32).sqrt(),
            causal: false,
            window: None,
            softcap: None,
            sinks: None,
        }
    }
}

/// Sizes that both implementations need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub batch: usize,
    pub rows: usize,
    pub heads: usize,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub max_blocks: usize,
    pub cache: PagedShape,
}

include!("../../head_dims.rs");

/// Whether [`block_attention`] on a GPU has a kernel for these sizes, and takes no slow fallback.
pub fn covers(head_dim: usize, block_size: usize) -> bool {
    HEAD_DIMS.contains(&head_dim) && block_size.is_multiple_of(8)
}

/// Attends with a block of rows for each sequence.
///
/// `q` is `[batch, rows, heads, head_dim]` in the cache's dtype (bf16, f16 or f32); `heads` is a
/// multiple of the cache's `kv_heads`, and head `h` uses kv head `h / (heads / kv_heads)`. The result
/// has the shape and dtype of `q`. Scores, softmax and sums are in f32.
///
/// - With `own`, the pair of K and V of the block itself, each `[batch, rows, kv_heads, head_dim]`, row
///   `j` of sequence `b` is at position `context_lens[b] + j`, behind the cached context. This is the
///   draft's case: its block is not in the cache.
/// - Without, the block is the end of the cached context: row `j` is at position
///   `context_lens[b] - rows + j`. This is the case of a verify pass, which has written the block's K and
///   V before. Rows at negative positions (a padding sequence of length 0, say) come out as 0.
///
/// A row that sees no key at all is 0. `q` and `own` may be views with strides over batch and rows.
///
/// The kernel covers head dims 64, 80, 96, 128 and 256 and block sizes that are multiples of 8. It
/// uses tensor cores for bf16 and f16. K and V are read once for up to 128 query rows (`rows * heads /
/// kv_heads`; 64 with head dim 256, 32 in f32), and it never waits for the device.
///
/// # Errors
/// When shapes, dtypes or devices do not fit, or an option is out of range. In the fallback also when a
/// context is longer than its block table or a block id is not below `num_blocks`.
pub fn block_attention(
    q: &Tensor,
    context: &PagedContext,
    own: Option<(&Tensor, &Tensor)>,
    options: &AttentionOptions,
) -> Result<Tensor> {
    block_attention_with_splits(q, context, own, options, None)
}

/// [`block_attention`] with the number of splits of the longest context given, for tuning and tests.
#[doc(hidden)]
pub fn block_attention_with_splits(
    q: &Tensor,
    context: &PagedContext,
    own: Option<(&Tensor, &Tensor)>,
    options: &AttentionOptions,
    splits: Option<usize>,
) -> Result<Tensor> {
    let sizes = check(q, context, own, options)?;
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        match cuda::unsupported(&sizes) {
            None => return cuda::run(q, context, own, options, &sizes, splits),
            Some(why) => SLOW.note(&why),
        }
    }
    let _ = splits;
    fallback::run(q, context, own, options, &sizes)
}

fn check(
    q: &Tensor,
    context: &PagedContext,
    own: Option<(&Tensor, &Tensor)>,
    options: &AttentionOptions,
) -> Result<Sizes> {
    let cache = PagedShape::of(context.keys, context.values)?;
    expect_device("key cache", context.keys, q)?;
    let (head_dim, kv_heads) = (cache.head_dim, cache.kv_heads);
    let (batch, rows, heads) = match *q.dims() {
        [batch, rows, heads, dim]
            if dim == head_dim && batch * rows * heads > 0 && heads.is_multiple_of(kv_heads) =>
        {
            (batch, rows, heads)
        }
        _ => {
            return Err(mismatch(
                "queries",
                format!("[batch, rows, a multiple of {kv_heads} heads, {head_dim}], none 0"),
                format!("{:?}", q.dims()),
            ))
        }
    };
    if q.dtype() != context.keys.dtype() {
        return Err(mismatch(
            "dtype of the queries",
            format!("that of the cache, {:?}", context.keys.dtype()),
            format!("{:?}", q.dtype()),
        ));
    }
    let max_blocks = match *context.block_tables.dims() {
        [sequences, max_blocks] if sequences == batch => max_blocks,
        _ => {
            return Err(mismatch(
                "block tables",
                format!("[{batch}, max_blocks]"),
                format!("{:?}", context.block_tables.dims()),
            ))
        }
    };
    let tables = [batch, max_blocks];
    expect("block tables", context.block_tables, &tables, DType::U32, q)?;
    expect(
        "context lens",
        context.context_lens,
        &[batch],
        DType::U32,
        q,
    )?;
    if let Some((k, v)) = own {
        let dims = [batch, rows, kv_heads, head_dim];
        expect("the block's own keys", k, &dims, q.dtype(), q)?;
        expect("the block's own values", v, &dims, q.dtype(), q)?;
    }
    check_options(options, heads, q)?;
    Ok(Sizes {
        batch,
        rows,
        heads,
        max_blocks,
        cache,
    })
}

pub(crate) fn check_options(options: &AttentionOptions, heads: usize, q: &Tensor) -> Result<()> {
    let above_zero = |what: &str, value: f32| {
        if value.is_finite() && value > 0.0 {
            return Ok(());
        }
        Err(mismatch(what, "a finite number above 0", value.to_string()))
    };
    above_zero("attention scale", options.scale)?;
    if let Some(cap) = options.softcap {
        above_zero("soft cap", cap)?;
    }
    if options.window == Some(0) {
        return Err(mismatch("attention window", "at least 1", "0"));
    }
    if let Some(sinks) = options.sinks {
        expect("sinks", sinks, &[heads], DType::F32, q)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::covers;

    #[test]
    fn what_has_no_kernel_is_not_covered() {
        assert!(covers(128, 32) && covers(64, 8));
        assert!(!covers(112, 32) && !covers(192, 32) && !covers(512, 32) && !covers(128, 12));
    }
}
