//! Materialize against a reference in f64, and that nothing else is written.

mod common;

use candle_core::{DType, Result, Tensor};
use common::{cases, device, error, for_seeds, tensor, values, Random};
use dflash_kernels::{materialize, Kept, KvOrder, MaterializeSpec};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mask {
    None,
    Rows,
    Accepted,
}

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    layers: usize,
    kv_heads: usize,
    dim: usize,
    rotary: usize,
    interleaved: bool,
    order: KvOrder,
    batch: usize,
    rows: usize,
    block_size: usize,
    mask: Mask,
}

const EPS: f32 = 1e-6;
const POSITIONS: usize = 300;

fn random_case(random: &mut Random) -> Case {
    let dim = random.one_of(&[16, 64, 80, 96, 112, 128, 256]);
    Case {
        dtype: random.one_of(&[DType::BF16, DType::F16, DType::F32]),
        layers: 1 + random.below(6),
        kv_heads: 1 + random.below(4),
        dim,
        rotary: random.one_of(&[dim, dim / 2, 8]),
        interleaved: random.chance(50),
        order: random.one_of(&[KvOrder::PerLayer, KvOrder::KeysThenValues]),
        batch: 1 + random.below(5),
        rows: random.one_of(&[1, 3, 8, 16, 21]),
        block_size: random.one_of(&[8, 16, 32, 5]),
        mask: random.one_of(&[Mask::None, Mask::Rows, Mask::Accepted]),
    }
}

/// Normed and rotated K of one head, in f64.
fn reference(case: &Case, k: &[f32], weight: &[f32], cos: &[f32], sin: &[f32]) -> Vec<f64> {
    let squares: f64 = k.iter().map(|k| (*k as f64).powi(2)).sum();
    let scale = 1.0 / (squares / case.dim as f64 + EPS as f64).sqrt();
    let normed: Vec<f64> = k
        .iter()
        .zip(weight)
        .map(|(k, w)| *k as f64 * scale * *w as f64)
        .collect();
    let mut out = normed.clone();
    for pair in 0..case.rotary / 2 {
        let (a, b) = match case.interleaved {
            true => (2 * pair, 2 * pair + 1),
            false => (pair, pair + case.rotary / 2),
        };
        let (c, s) = (cos[pair] as f64, sin[pair] as f64);
        out[a] = normed[a] * c - normed[b] * s;
        out[b] = normed[b] * c + normed[a] * s;
    }
    out
}

fn check(case: &Case, random: &mut Random) -> Result<()> {
    let (layers, kv_heads, dim, size) = (case.layers, case.kv_heads, case.dim, case.block_size);
    let tokens = case.batch * case.rows;
    let part = kv_heads * dim;
    let half = case.rotary / 2;
    let num_blocks = tokens.div_ceil(size) + 3;
    let x = 16 / case.dtype.size_in_bytes();

    let kv = random.normals(tokens * layers * 2 * part, case.dtype);
    let weights = random.normals(layers * dim, DType::F32);
    let angles: Vec<f32> = (0..POSITIONS * half)
        .map(|_| random.normal() * 3.0)
        .collect();
    let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
    let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
    let positions: Vec<u32> = (0..tokens)
        .map(|_| random.below(POSITIONS) as u32)
        .collect();
    // Runs of neighbouring slots, as in service, or all over the place; some padding.
    let mut slots: Vec<i64> = match random.chance(50) {
        true => (0..tokens as i64).map(|t| t + 3).collect(),
        false => random.shuffled(num_blocks * size)[..tokens]
            .iter()
            .map(|s| *s as i64)
            .collect(),
    };
    for slot in &mut slots {
        if random.chance(10) {
            *slot = -1;
        }
    }
    let lens: Vec<u32> = (0..case.batch)
        .map(|_| random.below(case.rows + 2) as u32)
        .collect();
    // The lengths are a column of a wider tensor, as accept gives them.
    let table: Vec<u32> = lens.iter().flat_map(|len| [99, *len, 98]).collect();
    let table = Tensor::from_vec(table, (case.batch, 3), &device())?;
    let column = table.narrow(1, 1, 1)?.squeeze(1)?;
    let kept = match case.mask {
        Mask::None => None,
        Mask::Rows => Some(Kept::Rows(&column)),
        Mask::Accepted => Some(Kept::Accepted(&column)),
    };

    let cells = num_blocks * part * size;
    let before = random.normals(cells, case.dtype);
    let caches = (0..layers)
        .map(|_| {
            let keys = tensor(
                &before,
                (num_blocks, kv_heads, dim / x, size, x),
                case.dtype,
            )?;
            let values = tensor(&before, (num_blocks, kv_heads, dim, size), case.dtype)?;
            Ok((keys, values))
        })
        .collect::<Result<Vec<_>>>()?;
    let spec = MaterializeSpec {
        k_norm: &tensor(&weights, (layers, dim), DType::F32)?,
        cos: &tensor(&cos, (POSITIONS, half), DType::F32)?,
        sin: &tensor(&sin, (POSITIONS, half), DType::F32)?,
        interleaved: case.interleaved,
        eps: EPS,
        order: case.order,
    };
    materialize(
        &tensor(&kv, (tokens, layers * 2 * part), case.dtype)?,
        &spec,
        &Tensor::from_vec(positions.clone(), tokens, &device())?,
        &Tensor::from_vec(slots.clone(), tokens, &device())?,
        kept,
        &caches,
    )?;

    let tolerance = match case.dtype {
        DType::BF16 => 4e-3,
        DType::F16 => 6e-4,
        _ => 2e-6,
    };
    for (layer, (keys, cached)) in caches.iter().enumerate() {
        let mut keys = values(keys)?;
        let mut cached = values(cached)?;
        for token in 0..tokens {
            let (sequence, row) = (token / case.rows, token % case.rows);
            let is_kept = match case.mask {
                Mask::None => true,
                Mask::Rows => row < lens[sequence] as usize,
                Mask::Accepted => row <= lens[sequence] as usize,
            };
            if slots[token] < 0 || !is_kept {
                continue;
            }
            let slot = slots[token] as usize;
            let (block, offset) = (slot / size, slot % size);
            let position = positions[token] as usize;
            for head in 0..kv_heads {
                let row = &kv[token * layers * 2 * part..];
                let (k_at, v_at) = match case.order {
                    KvOrder::PerLayer => (layer * 2 * part, (layer * 2 + 1) * part),
                    KvOrder::KeysThenValues => (layer * part, (layers + layer) * part),
                };
                let expected = reference(
                    case,
                    &row[k_at + head * dim..][..dim],
                    &weights[layer * dim..][..dim],
                    &cos[position * half..][..half],
                    &sin[position * half..][..half],
                );
                let base = (block * kv_heads + head) * dim * size;
                let k_place = |d: usize| base + ((d / x) * size + offset) * x + d % x;
                let found: Vec<f32> = (0..dim).map(|d| keys[k_place(d)]).collect();
                let error = error(&found, &expected);
                assert!(
                    error < tolerance,
                    "token {token}: error {error:e}\n{case:?}"
                );
                for d in 0..dim {
                    let v_place = base + d * size + offset;
                    assert_eq!(cached[v_place], row[v_at + head * dim + d], "{case:?}");
                    // What was to be written is put back, so that the rest can be compared below.
                    keys[k_place(d)] = before[k_place(d)];
                    cached[v_place] = before[v_place];
                }
            }
        }
        assert!(
            keys == before && cached == before,
            "more was written\n{case:?}"
        );
    }
    Ok(())
}

#[test]
fn random_shapes_agree_with_f64_and_nothing_else_is_written() -> Result<()> {
    for_seeds(cases(80, 200), |seed| {
        let mut random = Random::new(2000 + seed);
        let case = random_case(&mut random);
        check(&case, &mut random)
    })
}

#[test]
fn more_layers_than_one_launch_takes_agree_with_f64() -> Result<()> {
    let case = Case {
        dtype: DType::BF16,
        layers: 35,
        kv_heads: 1,
        dim: 64,
        rotary: 64,
        interleaved: false,
        order: KvOrder::KeysThenValues,
        batch: 2,
        rows: 4,
        block_size: 16,
        mask: Mask::Rows,
    };
    check(&case, &mut Random::new(5))
}

#[test]
fn no_tokens_are_no_error() -> Result<()> {
    let keys = tensor(&[0.0; 256], (2, 1, 2, 16, 4), DType::F32)?;
    let values = tensor(&[0.0; 256], (2, 1, 8, 16), DType::F32)?;
    let spec = MaterializeSpec {
        k_norm: &tensor(&[1.0; 8], (1, 8), DType::F32)?,
        cos: &tensor(&[1.0; 16], (4, 4), DType::F32)?,
        sin: &tensor(&[0.0; 16], (4, 4), DType::F32)?,
        interleaved: false,
        eps: EPS,
        order: KvOrder::PerLayer,
    };
    let kv = tensor(&[0.0; 16], (1, 16), DType::F32)?.narrow(0, 0, 0)?;
    let positions = Tensor::new(&[0u32], &device())?.narrow(0, 0, 0)?;
    let slots = Tensor::new(&[0i64], &device())?.narrow(0, 0, 0)?;
    materialize(&kv, &spec, &positions, &slots, None, &[(keys, values)])
}

#[test]
fn wrong_inputs_are_errors_that_say_what_was_expected() -> Result<()> {
    let keys = tensor(&[0.0; 256], (2, 1, 2, 16, 4), DType::F32)?;
    let values = tensor(&[0.0; 256], (2, 1, 8, 16), DType::F32)?;
    let spec = MaterializeSpec {
        k_norm: &tensor(&[1.0; 8], (1, 8), DType::F32)?,
        cos: &tensor(&[1.0; 16], (4, 4), DType::F32)?,
        sin: &tensor(&[0.0; 16], (4, 4), DType::F32)?,
        interleaved: false,
        eps: EPS,
        order: KvOrder::PerLayer,
    };
    let caches = [(keys, values)];
    let positions = Tensor::new(&[0u32], &device())?;
    let slots = Tensor::new(&[0i64], &device())?;
    let kv = tensor(&[0.0; 15], (1, 15), DType::F32)?;
    let error = materialize(&kv, &spec, &positions, &slots, None, &caches).unwrap_err();
    assert!(error
        .to_string()
        .contains("expected [tokens, 16], found [1, 15]"));
    let kv = tensor(&[0.0; 16], (1, 16), DType::F32)?;
    let error = materialize(&kv, &spec, &slots, &slots, None, &caches).unwrap_err();
    assert!(error
        .to_string()
        .contains("positions: expected U32 [1], found I64"));
    Ok(())
}
