//! Argmax and accept against a plain scan by the host's rule.

mod common;

use candle_core::{DType, Result, Tensor};
use common::{cases, device, is_reduced, rounded, tensor, Random};
use dflash_kernels::{accept, argmax_last};

/// The host's scan: an entry takes over unless it is strictly below. Nothing is below or above a NaN.
fn scan(row: &[f32]) -> u32 {
    let mut best = 0;
    for (i, value) in row.iter().enumerate() {
        let is_below = *value < row[best];
        if !is_below {
            best = i;
        }
    }
    best as u32
}

/// Few distinct values, so that there are many ties, and now and then something unusual.
fn row(random: &mut Random, vocab: usize, dtype: DType) -> Vec<f32> {
    let coarse = random.chance(70);
    let mut row: Vec<f32> = (0..vocab)
        .map(|_| match coarse {
            true => (random.normal() * 2.0).round(),
            false => rounded(random.normal(), dtype),
        })
        .collect();
    match random.below(8) {
        0 => row.fill(f32::NEG_INFINITY),
        1 => {
            for _ in 0..3 {
                let at = random.below(vocab);
                row[at] = f32::NAN;
            }
        }
        2 => row[vocab - 1] = f32::NAN,
        3 => row
            .iter_mut()
            .for_each(|v| *v = if *v > 0.0 { 0.0 } else { -0.0 }),
        4 => {
            let at = random.below(vocab);
            row[at] = f32::INFINITY;
        }
        _ => {}
    }
    row
}

fn vocab(random: &mut Random) -> usize {
    match is_reduced() {
        true => random.one_of(&[1, 7, 300, 9000]),
        false => random.one_of(&[1, 2, 7, 8, 255, 1000, 4097, 9000, 32000]),
    }
}

#[test]
fn argmax_is_the_hosts() -> Result<()> {
    for seed in 0..cases(60, 200) as u64 {
        let mut random = Random::new(3000 + seed);
        let dtype = random.one_of(&[DType::BF16, DType::F16, DType::F32]);
        let (rows, vocab) = (1 + random.below(40), vocab(&mut random));
        let logits: Vec<Vec<f32>> = (0..rows).map(|_| row(&mut random, vocab, dtype)).collect();
        let found = argmax_last(&tensor(&logits.concat(), (rows, vocab), dtype)?)?;
        let expected: Vec<u32> = logits.iter().map(|row| scan(row)).collect();
        assert_eq!(
            found.to_vec1::<u32>()?,
            expected,
            "{dtype:?} {rows} x {vocab}"
        );
    }
    Ok(())
}

#[test]
fn accept_gives_tokens_and_the_length_of_the_agreeing_prefix() -> Result<()> {
    for seed in 0..cases(60, 200) as u64 {
        let mut random = Random::new(4000 + seed);
        let dtype = random.one_of(&[DType::BF16, DType::F16, DType::F32]);
        let (batch, rows) = (1 + random.below(9), 2 + random.below(31));
        let vocab = vocab(&mut random);
        let (mut logits, mut drafts, mut expected) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..batch {
            let own: Vec<Vec<f32>> = (0..rows).map(|_| row(&mut random, vocab, dtype)).collect();
            let tokens: Vec<u32> = own.iter().map(|row| scan(row)).collect();
            let agreeing = random.below(rows);
            let mut guesses = tokens[..rows - 1].to_vec();
            if agreeing < rows - 1 {
                guesses[agreeing] = guesses[agreeing].wrapping_add(1);
                // What agrees behind the first disagreement does not count.
            }
            drafts.extend_from_slice(&[4_000_000_000]); // the anchor's column, cut off below
            drafts.extend(guesses);
            logits.extend(own.concat());
            expected.push([tokens, vec![agreeing as u32]].concat());
        }
        let logits = tensor(&logits, (batch, rows, vocab), dtype)?;
        let drafts = Tensor::from_vec(drafts, (batch, rows), &device())?.narrow(1, 1, rows - 1)?;
        let found = accept(&logits, &drafts)?;
        assert_eq!(
            found.to_vec2::<u32>()?,
            expected,
            "{dtype:?} {batch} x {rows} x {vocab}"
        );
    }
    Ok(())
}

#[test]
fn a_real_vocabulary_works_again_and_again() -> Result<()> {
    let vocab = if is_reduced() { 9_001 } else { 151_936 };
    for seed in 0..if is_reduced() { 2 } else { 10 } {
        let mut random = Random::new(5000 + seed);
        let rows: Vec<Vec<f32>> = (0..16)
            .map(|_| row(&mut random, vocab, DType::BF16))
            .collect();
        let logits = tensor(&rows.concat(), (1, 16, vocab), DType::BF16)?;
        let drafts = Tensor::zeros((1, 15), DType::U32, &device())?;
        let found = accept(&logits, &drafts)?.to_vec2::<u32>()?;
        let expected: Vec<u32> = rows.iter().map(|row| scan(row)).collect();
        assert_eq!(found[0][..16], expected);
    }
    Ok(())
}

#[test]
fn wrong_inputs_are_errors_that_say_what_was_expected() -> Result<()> {
    let logits = tensor(&[0.0; 12], (1, 3, 4), DType::F32)?;
    let drafts = Tensor::zeros((1, 3), DType::U32, &device())?;
    let error = accept(&logits, &drafts).unwrap_err().to_string();
    assert!(error.contains("drafts: expected U32 [1, 2], found U32 [1, 3]"));
    let error = argmax_last(&logits).unwrap_err().to_string();
    assert!(error.contains("logits: expected [rows, vocab]"));
    Ok(())
}
