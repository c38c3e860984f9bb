//! Block attention against a reference in f64.

mod common;

use candle_core::{DType, Result, Tensor};
use common::{
    cases, device, error, for_seeds, is_reduced, poison, rounded, tensor, values, Random,
};
use dflash_kernels::{
    block_attention, block_attention_with_splits, AttentionOptions, PagedContext,
};

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    dim: usize,
    kv_heads: usize,
    group: usize,
    rows: usize,
    lens: Vec<usize>,
    block_size: usize,
    own: bool,
    causal: bool,
    window: Option<usize>,
    softcap: Option<f32>,
    sinks: bool,
    splits: Option<usize>,
}

impl Case {
    fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    /// Allowed error of one head of one row, and of the whole result.
    fn tolerances(&self) -> (f64, f64) {
        match self.dtype {
            DType::BF16 => (2.5e-2, 6e-3),
            DType::F16 => (3e-3, 8e-4),
            _ => (5e-5, 5e-6),
        }
    }
}

/// Keys and values of one sequence, `[position][kv_head][dim]`, the block's own rows behind the context.
struct Sequence {
    k: Vec<f32>,
    v: Vec<f32>,
}

struct Inputs {
    q: Vec<f32>,
    sequences: Vec<Sequence>,
    sinks: Vec<f32>,
    q_tensor: Tensor,
    own: Option<(Tensor, Tensor)>,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lens: Tensor,
    sink_tensor: Option<Tensor>,
}

/// Random inputs. Whatever no row may see is NaN: unused blocks, and slots behind a context's end.
fn inputs(case: &Case, random: &mut Random) -> Result<Inputs> {
    let (dim, kv_heads, size) = (case.dim, case.kv_heads, case.block_size);
    let batch = case.lens.len();
    let width = kv_heads * dim;
    let x = 16 / case.dtype.size_in_bytes();
    let needed: Vec<usize> = case.lens.iter().map(|len| len.div_ceil(size)).collect();
    let num_blocks = needed.iter().sum::<usize>() + 2;
    let max_blocks = (needed.iter().max().unwrap() + random.below(3)).max(1);
    let mut ids = random.shuffled(num_blocks).into_iter();
    let mut keys = vec![f32::NAN; num_blocks * width * size];
    let mut cached = keys.clone();
    let mut tables = vec![u32::MAX; batch * max_blocks];
    let mut sequences = Vec::new();
    for (b, len) in case.lens.iter().enumerate() {
        let total = len + if case.own { case.rows } else { 0 };
        let sequence = Sequence {
            k: random.normals(total * width, case.dtype),
            v: random.normals(total * width, case.dtype),
        };
        for i in 0..needed[b] {
            tables[b * max_blocks + i] = ids.next().unwrap() as u32;
        }
        for position in 0..*len {
            let block = tables[b * max_blocks + position / size] as usize;
            let offset = position % size;
            for head in 0..kv_heads {
                let base = (block * kv_heads + head) * dim * size;
                for d in 0..dim {
                    let from = position * width + head * dim + d;
                    keys[base + ((d / x) * size + offset) * x + d % x] = sequence.k[from];
                    cached[base + d * size + offset] = sequence.v[from];
                }
            }
        }
        sequences.push(sequence);
    }
    // Q, and the block's own K and V, are views into one tensor, as behind a fused projection.
    let (heads, rows) = (case.heads(), case.rows);
    let q = random.normals(batch * rows * heads * dim, case.dtype);
    let fused_width = (heads + 2 * kv_heads) * dim;
    let mut fused = Vec::with_capacity(batch * rows * fused_width);
    for (b, len) in case.lens.iter().enumerate() {
        for row in 0..rows {
            let from = (b * rows + row) * heads * dim;
            fused.extend_from_slice(&q[from..from + heads * dim]);
            if case.own {
                let from = (len + row) * width;
                fused.extend_from_slice(&sequences[b].k[from..from + width]);
                fused.extend_from_slice(&sequences[b].v[from..from + width]);
            } else {
                fused.resize(fused.len() + 2 * width, f32::NAN);
            }
        }
    }
    let fused = tensor(&fused, (batch, rows, heads + 2 * kv_heads, dim), case.dtype)?;
    let own = match case.own {
        true => Some((
            fused.narrow(2, heads, kv_heads)?,
            fused.narrow(2, heads + kv_heads, kv_heads)?,
        )),
        false => None,
    };
    let sinks: Vec<f32> = (0..heads).map(|_| random.normal()).collect();
    let lens: Vec<u32> = case.lens.iter().map(|len| *len as u32).collect();
    Ok(Inputs {
        q_tensor: fused.narrow(2, 0, heads)?,
        own,
        keys: tensor(&keys, (num_blocks, kv_heads, dim / x, size, x), case.dtype)?,
        values: tensor(&cached, (num_blocks, kv_heads, dim, size), case.dtype)?,
        tables: Tensor::from_vec(tables, (batch, max_blocks), &device())?,
        lens: Tensor::from_vec(lens, batch, &device())?,
        sink_tensor: match case.sinks {
            true => Some(tensor(&sinks, heads, DType::F32)?),
            false => None,
        },
        q,
        sequences,
        sinks,
    })
}

fn options<'a>(case: &Case, inputs: &'a Inputs) -> AttentionOptions<'a> {
    AttentionOptions {
        causal: case.causal,
        window: case.window,
        softcap: case.softcap,
        sinks: inputs.sink_tensor.as_ref(),
        ..AttentionOptions::new(case.dim)
    }
}

fn run(case: &Case, inputs: &Inputs) -> Result<Tensor> {
    let context = PagedContext {
        keys: &inputs.keys,
        values: &inputs.values,
        block_tables: &inputs.tables,
        context_lens: &inputs.lens,
        longest: None,
    };
    let own = inputs.own.as_ref().map(|(k, v)| (k, v));
    let options = options(case, inputs);
    poison(&[inputs.q.len()])?;
    block_attention_with_splits(&inputs.q_tensor, &context, own, &options, case.splits)
}

/// One head of one row, in f64.
fn reference(case: &Case, inputs: &Inputs, b: usize, row: usize, head: usize) -> Vec<f64> {
    let (dim, len) = (case.dim, case.lens[b] as i64);
    let position = if case.own {
        len
    } else {
        len - case.rows as i64
    } + row as i64;
    let mut out = vec![0.0; dim];
    if position < 0 {
        return out;
    }
    let sequence = &inputs.sequences[b];
    let scale = (1.0 / (dim as f32).sqrt()) as f64;
    let q = &inputs.q[((b * case.rows + row) * case.heads() + head) * dim..][..dim];
    let kv_head = head / case.group;
    let at = |key: i64| (key as usize * case.kv_heads + kv_head) * dim;
    let total = (sequence.k.len() / (case.kv_heads * dim)) as i64;
    let seen: Vec<(i64, f64)> = (0..total)
        .filter(|key| {
            case.window
                .is_none_or(|w| (position - key).unsigned_abs() < w as u64)
                && (!case.causal || *key <= position)
        })
        .map(|key| {
            let k = &sequence.k[at(key)..][..dim];
            let dot: f64 = q.iter().zip(k).map(|(q, k)| *q as f64 * *k as f64).sum();
            let score = dot * scale;
            let capped = case.softcap.map(|c| c as f64 * (score / c as f64).tanh());
            (key, capped.unwrap_or(score))
        })
        .collect();
    let maximum = seen.iter().fold(f64::NEG_INFINITY, |m, (_, s)| m.max(*s));
    let mut sum = 0.0;
    for (key, score) in &seen {
        let weight = (score - maximum).exp();
        sum += weight;
        for (out, v) in out.iter_mut().zip(&sequence.v[at(*key)..][..dim]) {
            *out += weight * *v as f64;
        }
    }
    if case.sinks && !seen.is_empty() {
        sum += (inputs.sinks[head] as f64 - maximum).exp();
    }
    if sum > 0.0 {
        out.iter_mut().for_each(|o| *o /= sum);
    }
    out
}

fn compare(case: &Case, inputs: &Inputs, found: &Tensor) -> Result<()> {
    let dims = [case.lens.len(), case.rows, case.heads(), case.dim];
    assert_eq!(found.dims(), dims, "{case:?}");
    assert_eq!(found.dtype(), case.dtype);
    let found = values(found)?;
    let (per_row, overall) = case.tolerances();
    let mut expected = Vec::with_capacity(found.len());
    for b in 0..case.lens.len() {
        for row in 0..case.rows {
            for head in 0..case.heads() {
                let reference = reference(case, inputs, b, row, head);
                let error = error(&found[expected.len()..][..case.dim], &reference);
                assert!(
                    error < per_row,
                    "sequence {b}, row {row}, head {head}: error {error:e}\n{case:?}"
                );
                expected.extend(reference);
            }
        }
    }
    let error = error(&found, &expected);
    assert!(error < overall, "error {error:e}\n{case:?}");
    Ok(())
}

fn check(case: &Case, random: &mut Random) -> Result<()> {
    let inputs = inputs(case, random)?;
    let found = run(case, &inputs)?;
    compare(case, &inputs, &found)
}

fn random_case(random: &mut Random) -> Case {
    let dim = random.one_of(&[64, 80, 96, 128, 256]);
    let rows = random.one_of(&[1, 2, 3, 5, 8, 16, 17, 32]);
    let batch = 1 + random.below(if is_reduced() { 3 } else { 9 });
    let longest = match (is_reduced(), device().is_cuda()) {
        (true, _) => 150,
        (_, true) => random.one_of(&[40, 300, 1500]),
        (_, false) => random.one_of(&[10, 40, 150]),
    };
    let lens = (0..batch)
        .map(|_| match random.below(5) {
            0 => random.below(3),
            1 => 16 * random.below(longest / 16 + 1),
            2 => longest,
            _ => random.below(longest + 1),
        })
        .collect();
    Case {
        dtype: random.one_of(&[DType::BF16, DType::F16, DType::F32]),
        dim,
        kv_heads: 1 + random.below(3),
        group: 1 + random.below(8),
        rows,
        lens,
        block_size: random.one_of(&[8, 16, 32, 64]),
        own: random.chance(50),
        causal: random.chance(50),
        window: match random.below(4) {
            0 => Some(1 + random.below(8)),
            1 => Some(1 + random.below(longest + 8)),
            _ => None,
        },
        softcap: random.chance(20).then_some(5.0),
        sinks: random.chance(20),
        splits: random.chance(50).then(|| 1 + random.below(12)),
    }
}

fn plain(dtype: DType, dim: usize) -> Case {
    Case {
        dtype,
        dim,
        kv_heads: 2,
        group: 4,
        rows: 16,
        lens: vec![75],
        block_size: 16,
        own: false,
        causal: true,
        window: None,
        softcap: None,
        sinks: false,
        splits: None,
    }
}

#[test]
fn random_shapes_agree_with_f64() -> Result<()> {
    for_seeds(cases(60, 300), |seed| {
        let mut random = Random::new(1000 + seed);
        let case = random_case(&mut random);
        check(&case, &mut random)
    })
}

#[test]
fn every_head_dim_dtype_and_group_agrees_with_f64() -> Result<()> {
    let groups = if is_reduced() { 4..=4 } else { 1..=8 };
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for dim in [64, 80, 96, 128, 256] {
            for group in groups.clone() {
                for own in [false, true] {
                    let case = Case {
                        group,
                        own,
                        causal: !own,
                        kv_heads: 1,
                        lens: vec![67, 5],
                        ..plain(dtype, dim)
                    };
                    check(&case, &mut Random::new(7 * group as u64))?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn contexts_around_tile_and_block_borders_agree_with_f64() -> Result<()> {
    let lens: Vec<usize> = match is_reduced() {
        true => vec![0, 1, 16, 63, 64, 65],
        false => vec![
            0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129,
        ],
    };
    for own in [false, true] {
        for causal in [false, true] {
            for (dtype, dim) in [(DType::BF16, 128), (DType::F16, 64), (DType::F32, 64)] {
                let case = Case {
                    own,
                    causal,
                    kv_heads: 1,
                    group: 2,
                    rows: 4,
                    lens: lens.clone(),
                    ..plain(dtype, dim)
                };
                check(&case, &mut Random::new(3))?;
            }
        }
    }
    Ok(())
}

#[test]
fn windows_around_tile_borders_agree_with_f64() -> Result<()> {
    for window in [1, 2, 15, 16, 17, 63, 64, 65, 80, 200] {
        for own in [false, true] {
            for causal in [false, true] {
                let case = Case {
                    own,
                    causal,
                    window: Some(window),
                    kv_heads: 1,
                    group: 2,
                    rows: 8,
                    lens: vec![0, 3, 70, 130, 150],
                    ..plain(DType::BF16, 64)
                };
                check(&case, &mut Random::new(window as u64))?;
            }
        }
    }
    Ok(())
}

#[test]
fn every_number_of_splits_gives_the_same() -> Result<()> {
    let len = if device().is_cuda() && !is_reduced() {
        5000
    } else {
        200
    };
    for dtype in [DType::BF16, DType::F32] {
        for own in [false, true] {
            let case = Case {
                own,
                kv_heads: 1,
                group: 2,
                lens: vec![len, 3, len / 2],
                ..plain(dtype, 128)
            };
            let inputs = inputs(&case, &mut Random::new(11))?;
            for splits in [1, 2, 3, 8, 79, 128, 1000] {
                let case = Case {
                    splits: Some(splits),
                    ..case.clone()
                };
                compare(&case, &inputs, &run(&case, &inputs)?)?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_bound_on_the_context_that_is_too_low_does_not_change_the_result() -> Result<()> {
    for splits in [None, Some(4)] {
        let case = Case {
            lens: vec![150, 40],
            splits,
            ..plain(DType::BF16, 64)
        };
        let inputs = inputs(&case, &mut Random::new(5))?;
        let context = PagedContext {
            keys: &inputs.keys,
            values: &inputs.values,
            block_tables: &inputs.tables,
            context_lens: &inputs.lens,
            longest: Some(100),
        };
        let options = options(&case, &inputs);
        let found =
            block_attention_with_splits(&inputs.q_tensor, &context, None, &options, splits)?;
        compare(&case, &inputs, &found)?;
    }
    Ok(())
}

#[test]
fn more_rows_than_a_block_of_32_agree_with_f64() -> Result<()> {
    for (dtype, dim, own) in [
        (DType::BF16, 128, true),
        (DType::F16, 256, true),
        (DType::F32, 256, true),
        (DType::BF16, 80, false),
    ] {
        let case = Case {
            rows: 70,
            own,
            lens: vec![90, 20],
            ..plain(dtype, dim)
        };
        check(&case, &mut Random::new(13))?;
    }
    Ok(())
}

#[test]
fn large_scores_do_not_overflow() -> Result<()> {
    let case = Case {
        lens: vec![130],
        ..plain(DType::BF16, 128)
    };
    let mut inputs = inputs(&case, &mut Random::new(17))?;
    inputs
        .q
        .iter_mut()
        .for_each(|q| *q = rounded(*q * 64.0, case.dtype));
    let dims = inputs.q_tensor.dims4()?;
    inputs.q_tensor = tensor(&inputs.q, dims, case.dtype)?;
    compare(&case, &inputs, &run(&case, &inputs)?)
}

#[test]
fn the_same_inputs_give_the_same_bits() -> Result<()> {
    let case = Case {
        lens: vec![150, 10, 90],
        splits: Some(3),
        ..plain(DType::BF16, 128)
    };
    let inputs = inputs(&case, &mut Random::new(19))?;
    let first = values(&run(&case, &inputs)?)?;
    for _ in 0..20 {
        assert_eq!(values(&run(&case, &inputs)?)?, first);
    }
    Ok(())
}

#[test]
fn a_head_dim_without_a_kernel_takes_the_fallback_and_is_counted() -> Result<()> {
    let before = dflash_kernels::slow_paths();
    check(&plain(DType::F32, 112), &mut Random::new(23))?;
    let expected = if device().is_cuda() { 1 } else { 0 };
    assert_eq!(dflash_kernels::slow_paths() - before, expected);
    Ok(())
}

#[test]
fn wrong_inputs_are_errors_that_say_what_was_expected() -> Result<()> {
    let case = plain(DType::F32, 64);
    let inputs = inputs(&case, &mut Random::new(29))?;
    let context = PagedContext {
        keys: &inputs.keys,
        values: &inputs.values,
        block_tables: &inputs.tables,
        context_lens: &inputs.lens,
        longest: None,
    };
    let options = AttentionOptions::new(64);
    let message = |q: &Tensor, context: &PagedContext, options: &AttentionOptions| {
        let error = block_attention(q, context, None, options).expect_err("an error");
        error.to_string()
    };
    let q = &inputs.q_tensor;
    let half = q.to_dtype(DType::F16)?;
    assert!(message(&half, &context, &options).contains("dtype of the queries: expected"));
    let narrow = q.narrow(3, 0, 32)?;
    assert!(message(&narrow, &context, &options).contains("queries: expected"));
    let lens = Tensor::new(&[1u32, 2], &device())?;
    let wrong = PagedContext {
        context_lens: &lens,
        ..context
    };
    assert!(message(q, &wrong, &options).contains("context lens: expected U32 [1], found"));
    let no_window = AttentionOptions {
        window: Some(0),
        ..options
    };
    assert!(message(q, &context, &no_window).contains("window: expected at least 1"));
    Ok(())
}
