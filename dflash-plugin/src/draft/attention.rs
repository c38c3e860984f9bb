//! Attention of one block over its context and itself.

use candle_core::{DType, Device, Tensor, D};
use candle_nn::ops::softmax_last_dim;

use crate::config::LayerAttention;
use crate::error::Result;

/// What one sequence's block may see, for each distinct attention pattern of the model.
pub(super) type SequenceMasks = Vec<BlockMask>;

/// What a block may see in layers of one pattern.
pub(super) struct BlockMask {
    /// The first context position that any row sees; older ones are left out of the product.
    pub start: usize,
    /// Number of context positions from `start` on.
    pub context: usize,
    /// 0 where a row sees a key and -inf where not, f32 `[group * block, context + block]`; none when
    /// every row sees every key.
    pub bias: Option<Tensor>,
}

impl BlockMask {
    /// For a block of `block` rows after `context` positions, of which those from `kept` on have rows.
    /// Queries come in groups of `group` heads for each key/value head, so the rows of the bias repeat
    /// that often.
    pub fn new(
        pattern: LayerAttention,
        kept: usize,
        context: usize,
        block: usize,
        group: usize,
        device: &Device,
    ) -> Result<Self> {
        // The first row, at position `context`, reaches back furthest.
        let start = pattern
            .context_rows()
            .map_or(0, |rows| context.saturating_sub(rows))
            .clamp(kept.min(context), context);
        let keys = context - start + block;
        let sees = |row: usize, key: usize| {
            let (query, key) = (context + row, start + key);
            pattern.is_in_window(query, key, context) && (!pattern.causal || key <= query)
        };
        let all_seen = (0..block).all(|row| (0..keys).all(|key| sees(row, key)));
        let bias = if all_seen {
            None
        } else {
            let rows: Vec<f32> = (0..block)
                .flat_map(|row| (0..keys).map(move |key| (row, key)))
                .map(|(row, key)| {
                    if sees(row, key) {
                        0.0
                    } else {
                        f32::NEG_INFINITY
                    }
                })
                .collect();
            let one_head = Tensor::from_vec(rows, (block, keys), device)?;
            Some(one_head.repeat((group, 1))?)
        };
        Ok(Self {
            start,
            context: context - start,
            bias,
        })
    }
}

/// Attends with `q` over the context's and the block's keys; the softmax runs over both together.
///
/// `q` is `[kv_heads, group * block, head_dim]`, already scaled by `1/sqrt(head_dim)`; the context's
/// K and V are `[kv_heads, context, head_dim]` and may be views; the block's are
/// `[kv_heads, block, head_dim]`. The result has the shape of `q`. Neither K nor V is copied or
/// repeated: the scores, not the keys, are put together.
pub(super) fn attend(
    q: &Tensor,
    context: Option<(Tensor, Tensor)>,
    block: (Tensor, Tensor),
    mask: &BlockMask,
) -> Result<Tensor> {
    let (block_k, block_v) = block;
    let block_scores = q.matmul(&block_k.transpose(1, 2)?)?;
    let scores = match &context {
        Some((k, _)) => {
            let context_scores = q.matmul(&k.transpose(1, 2)?)?;
            Tensor::cat(&[&context_scores, &block_scores], D::Minus1)?
        }
        None => block_scores,
    };
    // [kv_heads, group * block, context + block]
    let scores = scores.to_dtype(DType::F32)?;
    let scores = match &mask.bias {
        Some(bias) => scores.broadcast_add(bias)?,
        None => scores,
    };
    let probs = softmax_last_dim(&scores)?.to_dtype(q.dtype())?;
    let Some((_, v)) = &context else {
        return Ok(probs.matmul(&block_v)?);
    };
    let (context_len, block_len) = (v.dim(1)?, block_v.dim(1)?);
    let context_probs = operand(probs.narrow(D::Minus1, 0, context_len)?)?;
    let block_probs = operand(probs.narrow(D::Minus1, context_len, block_len)?)?;
    Ok((context_probs.matmul(v)? + block_probs.matmul(&block_v)?)?)
}

/// A column range as a left operand: the CPU takes any strides, cuBLAS wants dense rows.
fn operand(view: Tensor) -> Result<Tensor> {
    match view.device() {
        Device::Cpu => Ok(view),
        _ => Ok(view.contiguous()?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For each row of the block, the absolute positions it sees.
    fn seen(causal: bool, window: Option<usize>, context: usize, block: usize) -> Vec<Vec<usize>> {
        seen_of(causal, window, None, context, block)
    }

    /// As `seen`, with a bound for the context.
    fn seen_of(
        causal: bool,
        window: Option<usize>,
        bound: Option<usize>,
        context: usize,
        block: usize,
    ) -> Vec<Vec<usize>> {
        let pattern = LayerAttention {
            causal,
            window,
            from_anchor: false,
            context: bound,
        };
        let mask = BlockMask::new(pattern, 0, context, block, 2, &Device::Cpu).unwrap();
        assert_eq!(mask.start + mask.context, context);
        let keys = mask.context + block;
        let bias = match &mask.bias {
            None => vec![vec![0.0; keys]; 2 * block],
            Some(bias) => bias.to_vec2::<f32>().unwrap(),
        };
        assert_eq!(
            bias[..block],
            bias[block..],
            "the same for each head of a group"
        );
        bias[..block]
            .iter()
            .map(|row| {
                let visible = (0..keys).filter(|key| row[*key] == 0.0);
                visible.map(|key| mask.start + key).collect()
            })
            .collect()
    }

    #[test]
    fn a_full_layer_sees_everything_without_a_bias() {
        let pattern = LayerAttention {
            causal: false,
            window: None,
            from_anchor: false,
            context: None,
        };
        let mask = BlockMask::new(pattern, 0, 5, 3, 2, &Device::Cpu).unwrap();
        assert!(mask.bias.is_none());
        assert_eq!((mask.start, mask.context), (0, 5));
    }

    #[test]
    fn a_causal_layer_sees_the_context_and_the_block_up_to_itself() {
        assert_eq!(
            seen(true, None, 2, 3),
            [vec![0, 1, 2], vec![0, 1, 2, 3], vec![0, 1, 2, 3, 4]]
        );
    }

    #[test]
    fn a_window_counts_the_current_token() {
        assert_eq!(
            seen(true, Some(3), 5, 3),
            [vec![3, 4, 5], vec![4, 5, 6], vec![5, 6, 7]]
        );
        assert_eq!(seen(true, Some(1), 5, 2), [vec![5], vec![6]]);
    }

    #[test]
    fn a_window_that_is_not_causal_reaches_as_far_ahead_as_back() {
        assert_eq!(
            seen(false, Some(2), 3, 3),
            [vec![2, 3, 4], vec![3, 4, 5], vec![4, 5]]
        );
    }

    #[test]
    fn a_window_larger_than_all_keys_needs_no_bias() {
        let pattern = LayerAttention {
            causal: false,
            window: Some(8),
            from_anchor: false,
            context: None,
        };
        let mask = BlockMask::new(pattern, 0, 5, 3, 1, &Device::Cpu).unwrap();
        assert!(mask.bias.is_none());
    }

    #[test]
    fn a_bound_of_the_context_is_the_same_for_all_rows_and_leaves_the_block_alone() {
        assert_eq!(
            seen_of(false, None, Some(2), 5, 3),
            [
                vec![3, 4, 5, 6, 7],
                vec![3, 4, 5, 6, 7],
                vec![3, 4, 5, 6, 7]
            ]
        );
        assert_eq!(
            seen_of(true, None, Some(1), 5, 2),
            [vec![4, 5], vec![4, 5, 6]]
        );
        assert_eq!(
            seen_of(true, None, Some(9), 2, 2),
            seen(true, None, 2, 2),
            "larger than the context"
        );
    }

    #[test]
    fn of_a_window_and_a_bound_of_the_context_the_smaller_counts() {
        let window = seen(true, Some(3), 5, 3);
        assert_eq!(seen_of(true, Some(3), Some(2), 5, 3), window);
        assert_eq!(
            seen_of(true, Some(3), Some(1), 5, 3),
            [vec![4, 5], vec![4, 5, 6], vec![5, 6, 7]]
        );
    }

    #[test]
    fn a_window_from_the_anchor_is_the_same_for_all_rows_and_leaves_the_block_alone() {
        let seen = |causal| {
            let pattern = LayerAttention {
                causal,
                window: Some(2),
                from_anchor: true,
                context: None,
            };
            let mask = BlockMask::new(pattern, 0, 5, 3, 1, &Device::Cpu).unwrap();
            assert_eq!((mask.start, mask.context), (3, 2));
            mask.bias.map(|bias| bias.to_vec2::<f32>().unwrap())
        };
        assert_eq!(seen(false), None);
        let hidden = f32::NEG_INFINITY;
        assert_eq!(
            seen(true).unwrap(),
            [
                [0.0, 0.0, 0.0, hidden, hidden],
                [0.0, 0.0, 0.0, 0.0, hidden],
                [0.0; 5]
            ]
        );
    }

    #[test]
    fn rows_that_were_dropped_are_not_seen() {
        let pattern = LayerAttention {
            causal: false,
            window: None,
            from_anchor: false,
            context: Some(4),
        };
        let of = |kept| {
            let mask = BlockMask::new(pattern, kept, 9, 2, 1, &Device::Cpu).unwrap();
            (mask.start, mask.context)
        };
        assert_eq!(
            [of(0), of(5), of(7), of(9)],
            [(5, 4), (5, 4), (7, 2), (9, 0)]
        );
    }
}
