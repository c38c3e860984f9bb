//! Argmax of logit rows, and the accepted prefix of drafts.

#[cfg(feature = "cuda")]
mod cuda;
mod fallback;

use candle_core::{DType, Result, Tensor};

use crate::check::{expect, expect_float, mismatch};
#[cfg(feature = "cuda")]
use crate::slow_path::SlowPath;

#[cfg(feature = "cuda")]
static SLOW: SlowPath = SlowPath::new("accept");

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub sequences: usize,
    /// Logit rows of a sequence.
    pub rows: usize,
    pub vocab: usize,
}

/// The target's own tokens, and how many drafts they confirm.
///
/// `logits` is `[batch, rows, vocab]` (f32, bf16 or f16), `drafts` u32 `[batch, rows - 1]` with
/// `rows >= 2`. Row `j` holds the target's logits behind draft `j - 1` (row 0: behind the anchor). The
/// result is u32 `[batch, rows + 1]`: the argmax of each row, then the accept length `a`, the number of
/// leading `j` with `drafts[j] == argmax[j]`. The bonus token is `argmax[a]`, the commit length
/// `a + 1`. One copy of this tensor to the host serves the whole batch.
///
/// Argmax is that of [`argmax_last`].
///
/// # Errors
/// When shapes, dtypes or devices do not fit.
pub fn accept(logits: &Tensor, drafts: &Tensor) -> Result<Tensor> {
    let sizes = match *logits.dims() {
        [sequences, rows, vocab] if sequences * vocab > 0 && rows >= 2 => Sizes {
            sequences,
            rows,
            vocab,
        },
        _ => {
            return Err(mismatch(
                "logits",
                "[batch, rows, vocab] with at least 2 rows",
                format!("{:?}", logits.dims()),
            ))
        }
    };
    let dims = [sizes.sequences, sizes.rows - 1];
    expect("drafts", drafts, &dims, DType::U32, logits)?;
    run(logits, Some(drafts), &sizes)
}

/// Argmax of each row: `[rows, vocab]` (f32, bf16 or f16) to u32 `[rows]`.
///
/// The rule is that of the host's greedy sampler: of several equal maxima the last one wins, and +0
/// equals -0. A NaN counts as equal to whatever it is compared with, so the result is the argmax of what
/// follows the row's last NaN, or that NaN if nothing follows.
///
/// # Errors
/// When shape or dtype does not fit.
pub fn argmax_last(logits: &Tensor) -> Result<Tensor> {
    let sizes = match *logits.dims() {
        [sequences, vocab] if sequences * vocab > 0 => Sizes {
            sequences,
            rows: 1,
            vocab,
        },
        _ => {
            return Err(mismatch(
                "logits",
                "[rows, vocab], none 0",
                format!("{:?}", logits.dims()),
            ))
        }
    };
    run(logits, None, &sizes)
}

fn run(logits: &Tensor, drafts: Option<&Tensor>, sizes: &Sizes) -> Result<Tensor> {
    expect_float("logits", logits)?;
    #[cfg(feature = "cuda")]
    if logits.device().is_cuda() {
        match cuda::unsupported(sizes) {
            None => return cuda::run(logits, drafts, sizes),
            Some(why) => SLOW.note(&why),
        }
    }
    fallback::run(logits, drafts, sizes)
}
