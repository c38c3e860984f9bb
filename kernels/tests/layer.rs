//! The small operations of a draft layer against f64.

mod common;

use candle_core::{DType, Result, Tensor};
use common::{cases, device, error, poison, tensor, values, Random};
use dflash_kernels::{norm_rope, silu_mul, NormRope};

/// Half of the largest relative rounding error, twice: inputs are exact, outputs rounded once (silu_mul:
/// twice), and f32 arithmetic in between.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2.0 / 256.0,
        DType::F16 => 2.0 / 2048.0,
        _ => 2e-6,
    }
}

#[test]
fn norm_rope_is_that_of_f64() -> Result<()> {
    for seed in 0..cases(40, 200) as u64 {
        let mut random = Random::new(7000 + seed);
        let dtype = random.one_of(&[DType::BF16, DType::F16, DType::F32]);
        let rows = 1 + random.below(40);
        let head_dim = random.one_of(&[2, 6, 64, 80, 96, 128, 256]);
        let heads = 1 + random.below(9);
        let all = heads + random.below(4);
        let interleaved = random.chance(50);
        let eps = random.one_of(&[1e-6f32, 1e-5]);
        let x = random.normals(rows * all * head_dim, dtype);
        let weight = random.normals(heads * head_dim, DType::F32);
        let half = random.one_of(&[head_dim / 2, (head_dim / 4).max(1), 1]);
        let angles = random.normals(rows * half, DType::F32);
        let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();

        let mut expected = Vec::new();
        for row in 0..rows {
            for head in 0..heads {
                let at = (row * all + head) * head_dim;
                let x: Vec<f64> = x[at..at + head_dim].iter().map(|v| *v as f64).collect();
                let mean = x.iter().map(|v| v * v).sum::<f64>() / head_dim as f64;
                let scale = 1.0 / (mean + eps as f64).sqrt();
                let normed: Vec<f64> = (0..head_dim)
                    .map(|d| x[d] * scale * weight[head * head_dim + d] as f64)
                    .collect();
                for d in 0..2 * half {
                    let (pair, partner, is_second) = match interleaved {
                        true => (d / 2, d ^ 1, d % 2 == 1),
                        false if d < half => (d, d + half, false),
                        false => (d - half, d - half, true),
                    };
                    let (c, s) = (cos[row * half + pair] as f64, sin[row * half + pair] as f64);
                    let sign = if is_second { 1.0 } else { -1.0 };
                    expected.push(normed[d] * c + sign * normed[partner] * s);
                }
                expected.extend(&normed[2 * half..]);
            }
        }
        let x = tensor(&x, (rows, all, head_dim), dtype)?;
        poison(&[rows * heads * head_dim])?;
        let spec = NormRope {
            weight: &tensor(&weight, (heads, head_dim), DType::F32)?,
            cos: &tensor(&cos, (rows, half), DType::F32)?,
            sin: &tensor(&sin, (rows, half), DType::F32)?,
            interleaved,
            eps,
        };
        let found = norm_rope(&x, &spec)?;
        assert_eq!(found.dims(), [rows, heads, head_dim]);
        assert_eq!(found.dtype(), dtype);
        let error = error(&values(&found)?, &expected);
        assert!(
            error < tolerance(dtype),
            "{dtype:?} {rows} x {heads} x {head_dim}, {half} pairs, interleaved {interleaved}: {error}"
        );
    }
    Ok(())
}

#[test]
fn silu_mul_is_that_of_f64() -> Result<()> {
    for seed in 0..cases(40, 200) as u64 {
        let mut random = Random::new(8000 + seed);
        let dtype = random.one_of(&[DType::BF16, DType::F16, DType::F32]);
        let (rows, width) = (
            1 + random.below(40),
            random.one_of(&[1, 3, 8, 100, 1536, 4100]),
        );
        let x = random.normals(rows * 2 * width, dtype);
        let expected: Vec<f64> = (0..rows * width)
            .map(|i| {
                let at = i / width * 2 * width + i % width;
                let (gate, up) = (x[at] as f64, x[at + width] as f64);
                gate / (1.0 + (-gate).exp()) * up
            })
            .collect();
        let x = tensor(&x, (rows, 2 * width), dtype)?;
        poison(&[rows * width])?;
        let found = silu_mul(&x)?;
        assert_eq!(found.dims(), [rows, width]);
        let error = error(&values(&found)?, &expected);
        assert!(
            error < tolerance(dtype),
            "{dtype:?} {rows} x {width}: {error}"
        );
    }
    Ok(())
}

#[test]
fn a_part_of_a_larger_tensor_is_taken_where_it_lies() -> Result<()> {
    let mut random = Random::new(9000);
    let (rows, heads, head_dim) = (5, 3, 64);
    let wide = random.normals(rows * 7 * head_dim, DType::F32);
    let wide = tensor(&wide, (rows, 7, head_dim), DType::F32)?;
    let part = wide.narrow(1, 2, 4)?;
    let spec = NormRope {
        weight: &Tensor::ones((heads, head_dim), DType::F32, &device())?,
        cos: &tensor(&vec![0.6; rows * 32], (rows, 32), DType::F32)?,
        sin: &tensor(&vec![0.8; rows * 32], (rows, 32), DType::F32)?,
        interleaved: false,
        eps: 1e-6,
    };
    let found = values(&norm_rope(&part, &spec)?)?;
    assert_eq!(
        found,
        values(&norm_rope(&part.force_contiguous()?, &spec)?)?
    );
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &device());
    let (weight, table) = (zeros(&[2, 8])?, zeros(&[3, 4])?);
    let spec = NormRope {
        weight: &weight,
        cos: &table,
        sin: &table,
        interleaved: false,
        eps: 1e-6,
    };
    for dims in [vec![3, 1, 8], vec![3, 2, 6], vec![4, 2, 8], vec![3, 16]] {
        assert!(norm_rope(&zeros(&dims)?, &spec).is_err(), "{dims:?}");
    }
    for half in [0, 3, 5] {
        let (cos, heads) = (zeros(&[3, half])?, zeros(&[3, 2, 8])?);
        let narrow = NormRope { cos: &cos, ..spec };
        assert!(norm_rope(&heads, &narrow).is_err(), "{half} beside 4");
        let (cos, sin) = (&cos, &cos);
        let both = norm_rope(&heads, &NormRope { cos, sin, ..spec });
        assert_eq!(both.is_ok(), half == 3, "{half}");
    }
    assert!(silu_mul(&zeros(&[2, 7])?).is_err());
    assert!(silu_mul(&zeros(&[2, 2, 4])?).is_err());
    Ok(())
}
