//! Accept on the host.

use std::cmp::Ordering;

use candle_core::{DType, Result, Tensor};

use super::Sizes;

pub(super) fn run(logits: &Tensor, drafts: Option<&Tensor>, sizes: &Sizes) -> Result<Tensor> {
    let rows = sizes.sequences * sizes.rows;
    let tokens = logits
        .reshape((rows, sizes.vocab))?
        .to_dtype(DType::F32)?
        .to_vec2::<f32>()?
        .iter()
        .map(|row| argmax(row))
        .collect::<Vec<u32>>();
    let Some(drafts) = drafts else {
        return Tensor::from_vec(tokens, rows, logits.device());
    };
    let drafts = drafts.to_vec2::<u32>()?;
    let mut out = Vec::with_capacity(rows + sizes.sequences);
    for (tokens, drafts) in tokens.chunks(sizes.rows).zip(&drafts) {
        let agreeing = tokens.iter().zip(drafts).take_while(|(t, d)| t == d);
        let accepted = agreeing.count() as u32;
        out.extend_from_slice(tokens);
        out.push(accepted);
    }
    Tensor::from_vec(out, (sizes.sequences, sizes.rows + 1), logits.device())
}

/// Index of the last maximum, by the host sampler's rule.
fn argmax(row: &[f32]) -> u32 {
    let best = row
        .iter()
        .enumerate()
        .max_by(|(_, a), (_, b)| a.partial_cmp(b).unwrap_or(Ordering::Equal));
    best.map_or(0, |(index, _)| index as u32)
}
