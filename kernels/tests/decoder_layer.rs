//! A decoder layer and its parts: against f64, and the chain of launches against the operations.

mod common;

use candle_core::{DType, Result, Tensor};
use common::{cases, device, error, poison, rounded, tensor, values, Random};
use dflash_kernels::{
    block_attention, decoder_layer, decoder_layer_composed, draft_layer, gated_product, norm_rope,
    product, product_onto, rms_norm, rotate_and_store, AttentionOptions, DecoderLayer, DraftLayer,
    Norm, NormRope, PagedContext, RotateAndStore, Weight, MOST_PRODUCT_ROWS,
};

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2.0 / 256.0,
        DType::F16 => 2.0 / 2048.0,
        _ => 4e-6,
    }
}

fn normed(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let squares: f64 = x.iter().map(|x| (*x as f64).powi(2)).sum();
    let scale = 1.0 / (squares / x.len() as f64 + eps as f64).sqrt();
    let scaled = x.iter().zip(weight);
    scaled.map(|(x, w)| *x as f64 * scale * *w as f64).collect()
}

#[test]
fn rms_norm_is_that_of_f64() -> Result<()> {
    for seed in 0..cases(40, 200) as u64 {
        let mut random = Random::new(16_000 + seed);
        let dtype = random.one_of(&[DType::BF16, DType::F16, DType::F32]);
        let rows = 1 + random.below(40);
        let width = random.one_of(&[8, 24, 576, 1000, 4096, 8192, 20_000]);
        let eps = random.one_of(&[1e-6f32, 1e-5]);
        let x = random.normals(rows * width, dtype);
        let weight = random.normals(width, dtype);
        let expected: Vec<f64> = x
            .chunks(width)
            .flat_map(|x| normed(x, &weight, eps))
            .collect();
        let x = tensor(&x, (rows, width), dtype)?;
        poison(&[rows * width])?;
        let weight = &tensor(&weight, width, dtype)?;
        let found = rms_norm(&x, Norm { weight, eps })?;
        assert_eq!((found.dims(), found.dtype()), (&[rows, width][..], dtype));
        let error = error(&values(&found)?, &expected);
        assert!(
            error < tolerance(dtype),
            "{dtype:?} {rows} x {width}: {error}"
        );
    }
    Ok(())
}

/// Tensors of a layer's cache that hold NaN, with so many slots.
fn empty_cache(
    blocks: usize,
    kv_heads: usize,
    head_dim: usize,
    size: usize,
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    let x = 16 / dtype.size_in_bytes();
    let nan = |dims: &[usize]| Tensor::ones(dims, dtype, &device())? * f64::NAN;
    Ok((
        nan(&[blocks, kv_heads, head_dim / x, size, x])?,
        nan(&[blocks, kv_heads, head_dim, size])?,
    ))
}

/// Everything of a cache that is not NaN, as `(slot, head, dim, value)`.
fn written(cache: &Tensor, is_keys: bool) -> Result<Vec<(usize, usize, usize, f32)>> {
    let dims = cache.dims().to_vec();
    let (blocks, heads) = (dims[0], dims[1]);
    let (dim, size) = match is_keys {
        true => (dims[2] * dims[4], dims[3]),
        false => (dims[2], dims[3]),
    };
    let x = if is_keys { dims[4] } else { 1 };
    let all = values(cache)?;
    let mut found = Vec::new();
    for slot in 0..blocks * size {
        for head in 0..heads {
            for d in 0..dim {
                let base = (slot / size * heads + head) * dim * size;
                let value = all[base + ((d / x) * size + slot % size) * x + d % x];
                if !value.is_nan() {
                    found.push((slot, head, d, value));
                }
            }
        }
    }
    Ok(found)
}

#[test]
fn q_k_and_v_are_rotated_and_stored() -> Result<()> {
    for seed in 0..cases(40, 200) as u64 {
        let mut random = Random::new(17_000 + seed);
        let dtype = random.one_of(&[DType::BF16, DType::F16, DType::F32]);
        let rows = 1 + random.below(20);
        let kv_heads = 1 + random.below(4);
        let heads = kv_heads * (1 + random.below(4));
        let dim = random.one_of(&[16, 64, 80, 128, 256]);
        let half = random.one_of(&[dim / 2, dim / 4, 1]);
        let (size, interleaved) = (random.one_of(&[8, 16, 32, 5]), random.chance(50));
        let has_norm = random.chance(50);
        let blocks = rows.div_ceil(size) + 2;
        let [q, k, v] = [heads, kv_heads, kv_heads].map(|h| random.normals(rows * h * dim, dtype));
        let [q_weight, k_weight] = [(); 2].map(|()| random.normals(dim, dtype));
        let angles = random.normals(rows * half, DType::F32);
        let cos: Vec<f32> = angles.iter().map(|a| rounded(a.cos(), dtype)).collect();
        let sin: Vec<f32> = angles.iter().map(|a| rounded(a.sin(), dtype)).collect();
        let places = random.shuffled(blocks * size);
        let slots: Vec<i64> = (0..rows)
            .map(|row| {
                if random.chance(20) {
                    -1
                } else {
                    places[row] as i64
                }
            })
            .collect();

        let turned = |x: &[f32], weight: &[f32], heads: usize| -> Vec<f64> {
            let mut out = Vec::new();
            for (at, x) in x.chunks(dim).enumerate() {
                let row = at / heads;
                let x: Vec<f64> = match has_norm {
                    true => normed(x, weight, 1e-6),
                    false => x.iter().map(|x| *x as f64).collect(),
                };
                let x: Vec<f64> = x.iter().map(|x| rounded(*x as f32, dtype) as f64).collect();
                let mut y = x.clone();
                for pair in 0..half {
                    let (a, b) = match interleaved {
                        true => (2 * pair, 2 * pair + 1),
                        false => (pair, pair + half),
                    };
                    let at = row * half + pair;
                    let (c, s) = (cos[at] as f64, sin[at] as f64);
                    y[a] = x[a] * c - x[b] * s;
                    y[b] = x[b] * c + x[a] * s;
                }
                out.extend(y);
            }
            out
        };
        let (keys, store) = empty_cache(blocks, kv_heads, dim, size, dtype)?;
        let norms = [&q_weight, &k_weight].map(|weight| tensor(weight, dim, dtype));
        let [q_norm, k_norm] = norms;
        let (q_norm, k_norm) = (q_norm?, k_norm?);
        let norm = |weight| has_norm.then_some(Norm { weight, eps: 1e-6 });
        let slot_tensor = Tensor::new(slots.as_slice(), &device())?;
        let spec = RotateAndStore {
            q_norm: norm(&q_norm),
            k_norm: norm(&k_norm),
            cos: &tensor(&cos, (rows, half), dtype)?,
            sin: &tensor(&sin, (rows, half), dtype)?,
            interleaved,
            slots: &slot_tensor,
            keys: &keys,
            values: &store,
        };
        let cube = |x: &[f32], heads: usize| tensor(x, (rows, heads, dim), dtype);
        poison(&[rows * heads * dim])?;
        let found = rotate_and_store(
            &cube(&q, heads)?,
            &cube(&k, kv_heads)?,
            &cube(&v, kv_heads)?,
            &spec,
        )?;
        let what = format!("{dtype:?} {rows} x {heads}/{kv_heads} x {dim}, {half}, {interleaved}");
        let q_error = error(&values(&found)?, &turned(&q, &q_weight, heads));
        assert!(q_error < tolerance(dtype), "{what}: {q_error}");

        // What is in the cache, and nothing else.
        let k = turned(&k, &k_weight, kv_heads);
        let v: Vec<f64> = v.iter().map(|v| *v as f64).collect();
        for (cache, x, is_keys) in [(&keys, &k, true), (&store, &v, false)] {
            let (mut stored, mut expected) = (Vec::new(), Vec::new());
            let in_cache = written(cache, is_keys)?;
            assert_eq!(
                in_cache.len(),
                slots.iter().filter(|slot| **slot >= 0).count() * kv_heads * dim,
                "{what}"
            );
            for (slot, head, d, value) in in_cache {
                let row = slots.iter().position(|s| *s == slot as i64);
                let row = row.unwrap_or_else(|| panic!("slot {slot} was written: {what}"));
                stored.push(value);
                expected.push(x[(row * kv_heads + head) * dim + d]);
            }
            let error = error(&stored, &expected);
            assert!(error < tolerance(dtype), "{what}, keys {is_keys}: {error}");
        }
    }
    Ok(())
}

/// A random layer with its cache and a step's rows.
struct Case {
    dtype: DType,
    rows: usize,
    sequences: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    mlp: usize,
    tensors: Vec<Tensor>,
    has_head_norms: bool,
    has_bias: bool,
}

const SIZE: usize = 16;

impl Case {
    fn random(random: &mut Random) -> Result<Self> {
        let dtype = random.one_of(&[DType::BF16, DType::F16]);
        let sequences = 1 + random.below(4);
        let mut rows = sequences * (1 + random.below(16 / sequences));
        if random.chance(25) {
            rows += 16 * sequences;
        }
        let kv_heads = 1 + random.below(3);
        let heads = kv_heads * (1 + random.below(4));
        let dim = random.one_of(&[64, 128]);
        let (hidden, mlp) = (random.one_of(&[64, 576]), random.one_of(&[128, 1536]));
        let most = 40 * SIZE;
        let blocks = sequences * most / SIZE + 1;
        let mut normals = |dims: &[usize], scale: f32| {
            let mut all = random.normals(dims.iter().product(), DType::F32);
            all.iter_mut().for_each(|x| *x = rounded(*x * scale, dtype));
            tensor(&all, dims, dtype)
        };
        let by_width = |width: usize| 1.0 / (width as f32).sqrt();
        let x = 16 / dtype.size_in_bytes();
        let mut tensors = vec![
            normals(&[rows, hidden], 1.0)?,
            normals(&[heads * dim, hidden], by_width(hidden))?,
            normals(&[kv_heads * dim, hidden], by_width(hidden))?,
            normals(&[kv_heads * dim, hidden], by_width(hidden))?,
            normals(&[hidden, heads * dim], by_width(heads * dim))?,
            normals(&[mlp, hidden], by_width(hidden))?,
            normals(&[mlp, hidden], by_width(hidden))?,
            normals(&[hidden, mlp], by_width(mlp))?,
            normals(&[hidden], 1.0)?,
            normals(&[hidden], 1.0)?,
            normals(&[dim], 1.0)?,
            normals(&[dim], 1.0)?,
            normals(&[rows, dim / 2], 1.0)?.cos()?,
            normals(&[rows, dim / 2], 1.0)?.sin()?,
            normals(&[heads * dim], 1.0)?,
            normals(&[kv_heads * dim], 1.0)?,
            normals(&[blocks, kv_heads, dim / x, SIZE, x], 1.0)?,
            normals(&[blocks, kv_heads, dim, SIZE], 1.0)?,
        ];
        if random.chance(50) {
            for (first, count) in [(1, 3), (5, 2)] {
                let whole = Tensor::cat(&tensors[first..first + count], 0)?;
                let mut at = 0;
                for tensor in &mut tensors[first..first + count] {
                    let outputs = tensor.dim(0)?;
                    *tensor = whole.narrow(0, at, outputs)?;
                    at += outputs;
                }
            }
        }
        let per = rows / sequences;
        let order = random.shuffled(blocks - 1);
        let tables: Vec<u32> = (0..sequences * most / SIZE)
            .map(|i| order[i] as u32)
            .collect();
        // Short contexts need no reduction of splits, for which the tables have room all the same.
        let longest = if random.chance(30) { 64 } else { most };
        let lens: Vec<u32> = (0..sequences)
            .map(|_| (per + random.below(longest - per)) as u32)
            .collect();
        let mut slots = Vec::new();
        for (s, len) in lens.iter().enumerate() {
            for j in 0..per {
                let position = *len as usize - per + j;
                let block = tables[s * most / SIZE + position / SIZE] as usize;
                slots.push((block * SIZE + position % SIZE) as i64);
            }
        }
        tensors.push(Tensor::from_vec(
            tables,
            (sequences, most / SIZE),
            &device(),
        )?);
        tensors.push(Tensor::new(lens, &device())?);
        tensors.push(Tensor::new(slots, &device())?);
        Ok(Self {
            dtype,
            rows,
            sequences,
            hidden,
            heads,
            kv_heads,
            dim,
            mlp,
            tensors,
            has_head_norms: random.chance(50),
            has_bias: random.chance(50),
        })
    }

    fn layer<'a>(&'a self, keys: &'a Tensor, values: &'a Tensor) -> DecoderLayer<'a> {
        let t = |i: usize| &self.tensors[i];
        let plain = |i: usize| Weight {
            weight: t(i),
            bias: None,
        };
        let biased = |i: usize, bias: usize| Weight {
            weight: t(i),
            bias: self.has_bias.then(|| t(bias)),
        };
        let norm = |i: usize| Norm {
            weight: t(i),
            eps: 1e-6,
        };
        DecoderLayer {
            input_norm: norm(8),
            q: biased(1, 14),
            k: biased(2, 15),
            v: plain(3),
            rotate: RotateAndStore {
                q_norm: self.has_head_norms.then(|| norm(10)),
                k_norm: self.has_head_norms.then(|| norm(11)),
                cos: t(12),
                sin: t(13),
                interleaved: false,
                slots: t(20),
                keys,
                values,
            },
            block_tables: t(18),
            context_lens: t(19),
            longest: None,
            attention: AttentionOptions {
                scale: 1.0 / (self.dim as f32).sqrt(),
                causal: true,
                window: None,
                softcap: None,
                sinks: None,
            },
            o: plain(4),
            mlp_norm: norm(9),
            gate: plain(5),
            up: plain(6),
            down: plain(7),
        }
    }

    fn cache(&self) -> Result<(Tensor, Tensor)> {
        Ok((self.tensors[16].copy()?, self.tensors[17].copy()?))
    }

    fn what(&self) -> String {
        format!(
            "{:?}, {} rows of {} sequences, hidden {}, {}/{} heads of {}, mlp {}, norms {}, bias {}",
            self.dtype,
            self.rows,
            self.sequences,
            self.hidden,
            self.heads,
            self.kv_heads,
            self.dim,
            self.mlp,
            self.has_head_norms,
            self.has_bias
        )
    }
}

#[test]
fn a_chain_of_launches_is_the_operations_one_by_one() -> Result<()> {
    for seed in 0..cases(6, 100) as u64 {
        let mut random = Random::new(18_000 + seed);
        let case = Case::random(&mut random)?;
        let ((keys, store), (other_keys, other_store)) = (case.cache()?, case.cache()?);
        poison(&[case.rows * case.hidden, case.rows * case.mlp])?;
        let chained = decoder_layer(&case.tensors[0], &case.layer(&keys, &store))?;
        let composed =
            decoder_layer_composed(&case.tensors[0], &case.layer(&other_keys, &other_store))?;
        let pairs = [
            (&chained, &composed),
            (&keys, &other_keys),
            (&store, &other_store),
        ];
        for (found, expected) in pairs {
            let (found, expected) = (values(found)?, values(expected)?);
            if case.rows <= MOST_PRODUCT_ROWS {
                assert_eq!(found, expected, "{}", case.what());
            } else {
                // cuBLAS adds up otherwise for weights that lie side by side.
                let expected: Vec<f64> = expected.iter().map(|x| *x as f64).collect();
                let error = error(&found, &expected);
                assert!(error < tolerance(case.dtype), "{}: {error}", case.what());
            }
        }
    }
    Ok(())
}

/// On the CPU in f32, the reference; on the GPU in the case's dtype. What is compared is the layer's
/// share, without the residual.
#[test]
fn a_layer_is_that_of_f32() -> Result<()> {
    for seed in 0..cases(6, 60) as u64 {
        let mut random = Random::new(19_000 + seed);
        let case = Case::random(&mut random)?;
        let (keys, store) = case.cache()?;
        let found = decoder_layer(&case.tensors[0], &case.layer(&keys, &store))?;
        let exact = Case {
            dtype: DType::F32,
            tensors: case
                .tensors
                .iter()
                .enumerate()
                .map(|(i, t)| match (i, t.dims()) {
                    (16, &[blocks, heads, pieces, size, x]) => {
                        // f32 pieces have 4 elements.
                        let all = t.permute((0, 1, 2, 4, 3))?.contiguous()?;
                        let all = all.reshape((blocks, heads, pieces * x / 4, 4, size))?;
                        let all = all.permute((0, 1, 2, 4, 3))?.contiguous()?;
                        all.to_dtype(DType::F32)?
                            .to_device(&candle_core::Device::Cpu)
                    }
                    (..18, _) => t.to_device(&candle_core::Device::Cpu)?.to_dtype(DType::F32),
                    _ => t.to_device(&candle_core::Device::Cpu),
                })
                .collect::<Result<_>>()?,
            ..case
        };
        let (keys, store) = exact.cache()?;
        let expected = decoder_layer(&exact.tensors[0], &exact.layer(&keys, &store))?;
        let x = values(&exact.tensors[0])?;
        let share = |y: Vec<f32>| y.iter().zip(&x).map(|(y, x)| y - x).collect::<Vec<f32>>();
        let expected: Vec<f64> = share(values(&expected)?)
            .iter()
            .map(|y| *y as f64)
            .collect();
        let error = error(&share(values(&found)?), &expected);
        // Seven roundings in a row, and those of the residual.
        let dtype = found.dtype();
        assert!(error < 4.0 * tolerance(dtype), "{}: {error}", exact.what());
    }
    Ok(())
}

/// A verify pass over one sequence equals plain decoding of its rows, bit by bit.
#[test]
fn rows_of_a_block_are_those_of_plain_decoding() -> Result<()> {
    if !device().is_cuda() {
        return Ok(()); // Only the kernels promise it.
    }
    for seed in 0..cases(0, 60) as u64 {
        let mut random = Random::new(20_000 + seed);
        let case = loop {
            let case = Case::random(&mut random)?;
            if case.sequences == 1 && (2..=MOST_PRODUCT_ROWS).contains(&case.rows) {
                break case;
            }
        };
        let (keys, store) = case.cache()?;
        let block = decoder_layer(&case.tensors[0], &case.layer(&keys, &store))?;
        let (plain_keys, plain_store) = case.cache()?;
        let last = case.tensors[19].to_vec1::<u32>()?[0];
        for row in 0..case.rows {
            let mut tensors = case.tensors.clone();
            for i in [0, 12, 13, 20] {
                tensors[i] = tensors[i].narrow(0, row, 1)?;
            }
            let len = last - (case.rows - 1 - row) as u32;
            tensors[19] = Tensor::new(&[len][..], &device())?;
            let one = Case {
                tensors,
                rows: 1,
                ..Case { ..case_like(&case) }
            };
            let mut layer = one.layer(&plain_keys, &plain_store);
            layer.longest = Some(len as usize);
            let plain = decoder_layer(&one.tensors[0], &layer)?;
            let of_block = values(&block.narrow(0, row, 1)?)?;
            // Contexts are cut otherwise where the number of tiles passes a power of two.
            let tiles = |len: u32| (len as usize).div_ceil(64).next_power_of_two();
            if tiles(len) == tiles(640) {
                assert_eq!(values(&plain)?, of_block, "row {row}: {}", case.what());
            }
        }
    }
    Ok(())
}

fn case_like(case: &Case) -> Case {
    Case {
        tensors: Vec::new(),
        ..*case
    }
}

/// A draft layer from the same random parts.
fn draft_parts(case: &Case) -> Result<(Tensor, Tensor, Tensor, [Tensor; 2])> {
    let t = |i: usize| &case.tensors[i];
    let f32 = |i: usize| t(i).to_dtype(DType::F32);
    let of_heads = |i: usize, heads: usize| f32(i)?.broadcast_as((heads, case.dim))?.contiguous();
    Ok((
        Tensor::cat(&[t(1), t(2), t(3)], 0)?,
        Tensor::cat(&[t(5), t(6)], 0)?,
        Tensor::cat(
            &[of_heads(10, case.heads)?, of_heads(11, case.kv_heads)?],
            0,
        )?,
        [f32(12)?, f32(13)?],
    ))
}

#[test]
fn a_draft_layer_is_its_operations_one_by_one() -> Result<()> {
    for seed in 0..cases(3, 80) as u64 {
        let mut random = Random::new(22_000 + seed);
        let case = Case::random(&mut random)?;
        let (keys, store) = case.cache()?;
        let (qkv, gate_up, qk_norm, [cos, sin]) = draft_parts(&case)?;
        let plain = |weight| Weight { weight, bias: None };
        let decoder = case.layer(&keys, &store);
        let causal = random.chance(50);
        let layer = DraftLayer {
            input_norm: decoder.input_norm,
            qkv: plain(&qkv),
            qk_norm: &qk_norm,
            head_eps: 1e-6,
            cos: &cos,
            sin: &sin,
            interleaved: false,
            keys: &keys,
            values: &store,
            block_tables: decoder.block_tables,
            context_lens: decoder.context_lens,
            longest: None,
            attention: AttentionOptions {
                causal,
                ..decoder.attention
            },
            o: decoder.o,
            mlp_norm: decoder.mlp_norm,
            gate_up: plain(&gate_up),
            down: decoder.down,
        };
        let x = &case.tensors[0];
        poison(&[case.rows * case.hidden, case.rows * case.mlp])?;
        let chained = draft_layer(x, &layer)?;
        assert_eq!(chained.is_some(), device().is_cuda(), "{}", case.what());

        let (rows, heads, kv_heads, dim) = (case.rows, case.heads, case.kv_heads, case.dim);
        let one = |x: &Tensor, weight| -> Result<Tensor> { Ok(product(x, &[weight])?.remove(0)) };
        let projected = one(&rms_norm(x, layer.input_norm)?, layer.qkv)?;
        let projected = projected.reshape((rows, heads + 2 * kv_heads, dim))?;
        let spec = NormRope {
            weight: &qk_norm,
            cos: &cos,
            sin: &sin,
            interleaved: false,
            eps: 1e-6,
        };
        let turned = norm_rope(&projected, &spec)?;
        let by_block = |t: &Tensor, first: usize, count: usize| {
            t.reshape((case.sequences, rows / case.sequences, t.dim(1)?, dim))?
                .narrow(2, first, count)
        };
        let q = by_block(&turned, 0, heads)?;
        let k = by_block(&turned, heads, kv_heads)?;
        let v = by_block(&projected, heads + kv_heads, kv_heads)?;
        let context = PagedContext {
            keys: &keys,
            values: &store,
            block_tables: layer.block_tables,
            context_lens: layer.context_lens,
            longest: None,
        };
        let attended = block_attention(&q, &context, Some((&k, &v)), &layer.attention)?;
        let middle = product_onto(&attended.reshape((rows, heads * dim))?, layer.o, x)?;
        let (gate, up) = (decoder.gate, decoder.up);
        let active = gated_product(&rms_norm(&middle, layer.mlp_norm)?, gate, up)?;
        let expected = values(&product_onto(&active, layer.down, &middle)?)?;
        let Some(chained) = chained else {
            continue;
        };
        if rows <= MOST_PRODUCT_ROWS {
            assert_eq!(values(&chained)?, expected, "{}", case.what());
        } else {
            let expected: Vec<f64> = expected.iter().map(|x| *x as f64).collect();
            let error = error(&values(&chained)?, &expected);
            assert!(error < tolerance(case.dtype), "{}: {error}", case.what());
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let mut random = Random::new(21_000);
    let case = Case::random(&mut random)?;
    let (keys, store) = case.cache()?;
    let layer = case.layer(&keys, &store);
    let x = &case.tensors[0];
    assert!(decoder_layer(x, &layer).is_ok());
    let wrong = Tensor::zeros((3, 5), case.dtype, &device())?;
    let bad = Weight {
        weight: &wrong,
        bias: None,
    };
    let bad_norm = Norm {
        weight: &wrong,
        eps: 1e-6,
    };
    for changed in [
        DecoderLayer { q: bad, ..layer },
        DecoderLayer { v: bad, ..layer },
        DecoderLayer { o: bad, ..layer },
        DecoderLayer { up: bad, ..layer },
        DecoderLayer { down: bad, ..layer },
        DecoderLayer {
            mlp_norm: bad_norm,
            ..layer
        },
        DecoderLayer {
            context_lens: &wrong,
            ..layer
        },
        DecoderLayer {
            rotate: RotateAndStore {
                cos: &wrong,
                ..layer.rotate
            },
            ..layer
        },
    ] {
        assert!(decoder_layer(x, &changed).is_err());
    }
    assert!(decoder_layer(&x.narrow(1, 0, 8)?, &layer).is_err());
    Ok(())
}
