//! Products of few rows against f64, and that a row does not depend on the others.

mod common;

use candle_core::{DType, Result, Tensor};
use common::{cases, device, error, poison, rounded, tensor, values, Random};
use dflash_kernels::{
    covers_product, gated_product, product, product_onto, Weight, MOST_PRODUCT_ROWS,
};

/// Of values rounded once: half a step, relative to the largest of them; sums in f32.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2.0 / 256.0,
        DType::F16 => 2.0 / 2048.0,
        _ => 2e-6,
    }
}

struct Layer {
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    outputs: usize,
}

impl Layer {
    fn random(random: &mut Random, outputs: usize, width: usize, dtype: DType) -> Self {
        let bias = random.chance(50).then(|| random.normals(outputs, dtype));
        Self {
            weight: random.normals(outputs * width, dtype),
            bias,
            outputs,
        }
    }

    fn tensors(&self, width: usize, dtype: DType) -> Result<(Tensor, Option<Tensor>)> {
        let weight = tensor(&self.weight, (self.outputs, width), dtype)?;
        let bias = self.bias.as_ref();
        let bias = bias.map(|b| tensor(b, self.outputs, dtype)).transpose()?;
        Ok((weight, bias))
    }

    /// In f64, not rounded.
    fn of(&self, x: &[f32], width: usize) -> Vec<f64> {
        let mut out = Vec::new();
        for row in x.chunks(width) {
            for o in 0..self.outputs {
                let weights = &self.weight[o * width..(o + 1) * width];
                let sum: f64 = row
                    .iter()
                    .zip(weights)
                    .map(|(x, w)| *x as f64 * *w as f64)
                    .sum();
                out.push(sum + self.bias.as_ref().map_or(0.0, |bias| bias[o] as f64));
            }
        }
        out
    }
}

fn weights(tensors: &[(Tensor, Option<Tensor>)]) -> Vec<Weight<'_>> {
    tensors
        .iter()
        .map(|(weight, bias)| Weight {
            weight,
            bias: bias.as_ref(),
        })
        .collect()
}

/// Rows and width.
fn sizes(random: &mut Random) -> (usize, usize) {
    (
        1 + random.below(MOST_PRODUCT_ROWS + 4),
        random.one_of(&[8, 24, 64, 128, 576, 1000, 1536, 4096]),
    )
}

#[test]
fn products_are_those_of_f64() -> Result<()> {
    for seed in 0..cases(30, 300) as u64 {
        let mut random = Random::new(11_000 + seed);
        let dtype = random.one_of(&[DType::BF16, DType::F16, DType::F32]);
        let (rows, width) = sizes(&mut random);
        let count = 1 + random.below(3);
        let layers: Vec<Layer> = (0..count)
            .map(|_| {
                let outputs = random.one_of(&[1, 5, 32, 100, 192, 577]);
                Layer::random(&mut random, outputs, width, dtype)
            })
            .collect();
        let x = random.normals(rows * width, dtype);
        let tensors = layers.iter().map(|layer| layer.tensors(width, dtype));
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        poison(
            &layers
                .iter()
                .map(|layer| rows * layer.outputs)
                .collect::<Vec<_>>(),
        )?;
        let found = product(&tensor(&x, (rows, width), dtype)?, &weights(&tensors))?;
        assert_eq!(found.len(), count);
        for (found, layer) in found.iter().zip(&layers) {
            assert_eq!(found.dims(), [rows, layer.outputs]);
            assert_eq!(found.dtype(), dtype);
            let error = error(&values(found)?, &layer.of(&x, width));
            let outputs = layer.outputs;
            assert!(
                error < tolerance(dtype),
                "{dtype:?} {rows} x {width} x {outputs}: {error}"
            );
        }
    }
    Ok(())
}

#[test]
fn a_residual_is_added_to_the_rounded_product() -> Result<()> {
    for seed in 0..cases(20, 100) as u64 {
        let mut random = Random::new(12_000 + seed);
        let dtype = random.one_of(&[DType::BF16, DType::F16, DType::F32]);
        let (rows, width) = sizes(&mut random);
        let outputs = random.one_of(&[7, 64, 576]);
        let layer = Layer::random(&mut random, outputs, width, dtype);
        let x = random.normals(rows * width, dtype);
        let residual = random.normals(rows * outputs, dtype);
        let sum = layer.of(&x, width).into_iter().zip(&residual);
        let expected: Vec<f64> = sum
            .map(|(y, r)| rounded(y as f32, dtype) as f64 + *r as f64)
            .collect();
        let tensors = [layer.tensors(width, dtype)?];
        let found = product_onto(
            &tensor(&x, (rows, width), dtype)?,
            weights(&tensors)[0],
            &tensor(&residual, (rows, outputs), dtype)?,
        )?;
        let error = error(&values(&found)?, &expected);
        assert!(
            error < tolerance(dtype),
            "{dtype:?} {rows} x {width} x {outputs}: {error}"
        );
    }
    Ok(())
}

#[test]
fn a_gated_product_is_that_of_f64() -> Result<()> {
    for seed in 0..cases(20, 200) as u64 {
        let mut random = Random::new(13_000 + seed);
        let dtype = random.one_of(&[DType::BF16, DType::F16, DType::F32]);
        let (rows, width) = sizes(&mut random);
        let outputs = random.one_of(&[1, 16, 40, 192, 577]);
        let layers = [(); 2].map(|()| Layer::random(&mut random, outputs, width, dtype));
        // Small enough that the activation is not all linear.
        let mut x = random.normals(rows * width, dtype);
        x.iter_mut()
            .for_each(|x| *x = rounded(*x / (width as f32).sqrt(), dtype));
        let (gate, up) = (layers[0].of(&x, width), layers[1].of(&x, width));
        let expected = gate
            .iter()
            .zip(&up)
            .map(|(g, u)| g / (1.0 + (-g).exp()) * u);
        let expected: Vec<f64> = expected.collect();
        let tensors = [
            layers[0].tensors(width, dtype)?,
            layers[1].tensors(width, dtype)?,
        ];
        let both = weights(&tensors);
        let found = gated_product(&tensor(&x, (rows, width), dtype)?, both[0], both[1])?;
        assert_eq!(found.dims(), [rows, outputs]);
        let error = error(&values(&found)?, &expected);
        // The gate, its activation and the product are rounded.
        let tolerance = 2.0 * tolerance(dtype);
        assert!(
            error < tolerance,
            "{dtype:?} {rows} x {width} x {outputs}: {error}"
        );
    }
    Ok(())
}

/// Why verified rows can equal plain decoding's bit by bit in bf16.
#[test]
fn a_row_comes_out_the_same_alone_and_among_others() -> Result<()> {
    if !device().is_cuda() {
        return Ok(()); // Only the kernel promises it.
    }
    for seed in 0..cases(0, 60) as u64 {
        let mut random = Random::new(14_000 + seed);
        let dtype = random.one_of(&[DType::BF16, DType::F16]);
        let (_, width) = sizes(&mut random);
        let rows = MOST_PRODUCT_ROWS;
        let outputs = random.one_of(&[33, 192, 4100]);
        let layers = [(); 2].map(|()| Layer::random(&mut random, outputs, width, dtype));
        let tensors = [
            layers[0].tensors(width, dtype)?,
            layers[1].tensors(width, dtype)?,
        ];
        let both = weights(&tensors);
        let x = tensor(&random.normals(rows * width, dtype), (rows, width), dtype)?;
        assert!(covers_product(&x, &both));
        let all = values(&product(&x, &both)?[1])?;
        let gated = values(&gated_product(&x, both[0], both[1])?)?;
        let mut first = 0;
        while first < rows {
            let some = (1 + random.below(17)).min(rows - first);
            let part = x.narrow(0, first, some)?;
            let range = first * outputs..(first + some) * outputs;
            assert_eq!(
                values(&product(&part, &both[1..])?[0])?,
                all[range.clone()],
                "{some}"
            );
            assert_eq!(
                values(&gated_product(&part, both[0], both[1])?)?,
                gated[range],
                "{some}"
            );
            first += some;
        }
    }
    Ok(())
}

#[test]
fn what_has_no_kernel_is_multiplied_all_the_same() -> Result<()> {
    let mut random = Random::new(15_000);
    for (rows, width, dtype) in [
        (33, 64, DType::BF16),
        (3, 60, DType::F16),
        (3, 64, DType::F32),
    ] {
        let layer = Layer::random(&mut random, 40, width, dtype);
        let x = random.normals(rows * width, dtype);
        let tensors = [layer.tensors(width, dtype)?];
        let x_tensor = tensor(&x, (rows, width), dtype)?;
        assert!(!covers_product(&x_tensor, &weights(&tensors)));
        let found = values(&product(&x_tensor, &weights(&tensors))?[0])?;
        assert!(error(&found, &layer.of(&x, width)) < 2.0 * tolerance(dtype));
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &device());
    let (x, weight, narrow) = (zeros(&[2, 8])?, zeros(&[3, 8])?, zeros(&[3, 4])?);
    let (short, half) = (zeros(&[2])?, zeros(&[3, 8])?.to_dtype(DType::F16)?);
    let plain = |weight| Weight { weight, bias: None };
    let good = plain(&weight);
    assert!(product(&x, &[good]).is_ok());
    assert!(product(&x, &[]).is_err());
    assert!(product(&x, &[good; 4]).is_err());
    assert!(product(&zeros(&[8])?, &[good]).is_err());
    for bad in [plain(&narrow), plain(&half), plain(&short)] {
        assert!(product(&x, &[bad]).is_err(), "{bad:?}");
    }
    let bias = Some(&short);
    assert!(product(&x, &[Weight { bias, ..good }]).is_err());
    assert!(product_onto(&x, good, &zeros(&[2, 4])?).is_err());
    assert!(gated_product(&x, good, plain(&zeros(&[5, 8])?)).is_err());
    Ok(())
}
