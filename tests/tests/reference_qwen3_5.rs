//! The host's Qwen3.5 and its mixture of experts against their definition (transformers'
//! `modeling_qwen3_5.py` and `modeling_qwen3_5_moe.py`), written out here row by row in f64. What is tested
//! elsewhere is the host against itself.

use std::collections::HashMap;

use candle_core::{DType, Device};
use dflash_bench::engine::{Engine, Setup};
use dflash_tests::oracle::{difference, prompt, run};
use dflash_tests::zoo::{self, LAYERS};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
/// Dimensions of a head that are rotated.
const ROTATED: usize = 8;
const ROPE_THETA: f64 = 10000.0;
const EPS: f64 = 1e-6;
const CHOSEN_EXPERTS: usize = 2;

type Row = Vec<f64>;

/// A checkpoint's tensors as flat values with their shapes.
struct Weights(HashMap<String, (Vec<usize>, Row)>);

impl Weights {
    fn load(target: &zoo::Target) -> Self {
        let file = target.path.join("model.safetensors");
        let tensors = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
        let flat = tensors.into_iter().map(|(name, tensor)| {
            let values = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
            (name, (tensor.dims().to_vec(), values.to_vec1().unwrap()))
        });
        Self(flat.collect())
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    fn get(&self, name: &str) -> &[f64] {
        &self.0[name].1
    }

    /// The rows of matrix `name`, or of matrix `index` of several.
    fn rows(&self, name: &str, index: usize) -> impl Iterator<Item = &[f64]> {
        let (shape, values) = &self.0[name];
        let [rows, columns] = shape[shape.len() - 2..] else {
            panic!("{name} is no matrix: {shape:?}")
        };
        values[index * rows * columns..].chunks(columns).take(rows)
    }

    fn product(&self, name: &str, x: &[f64]) -> Row {
        self.product_of(name, 0, x)
    }

    fn product_of(&self, name: &str, index: usize, x: &[f64]) -> Row {
        self.rows(name, index).map(|row| dot(row, x)).collect()
    }

    /// `x` normalised; the weight is added to 1.
    fn norm(&self, name: &str, x: &[f64]) -> Row {
        let scale = 1.0 / (dot(x, x) / x.len() as f64 + EPS).sqrt();
        let weight = self.get(name).iter();
        x.iter()
            .zip(weight)
            .map(|(x, w)| x * scale * (1.0 + w))
            .collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut [f64], y: &[f64], factor: f64) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y * factor);
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn softmax(x: &[f64]) -> Row {
    let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exps: Row = x.iter().map(|x| (x - largest).exp()).collect();
    let sum: f64 = exps.iter().sum();
    exps.iter().map(|x| x / sum).collect()
}

fn unit(x: &[f64]) -> Row {
    let scale = 1.0 / (dot(x, x) + EPS).sqrt();
    x.iter().map(|x| x * scale).collect()
}

/// The first half of the rotated dimensions with the second.
fn rotate(x: &mut [f64], position: usize) {
    for i in 0..ROTATED / 2 {
        let angle = position as f64 / ROPE_THETA.powf(2.0 * i as f64 / ROTATED as f64);
        let (a, b) = (x[i], x[i + ROTATED / 2]);
        x[i] = a * angle.cos() - b * angle.sin();
        x[i + ROTATED / 2] = b * angle.cos() + a * angle.sin();
    }
}

/// Attention with a gate beside each query.
fn attention(w: &Weights, layer: &str, x: &[Row]) -> Vec<Row> {
    let name = |kind: &str| format!("{layer}.self_attn.{kind}.weight");
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    let mut outputs = Vec::new();
    for (position, x) in x.iter().enumerate() {
        let heads = |product: Row, norm: &str| {
            let heads = product.chunks(HEAD_DIM).map(|head| {
                let mut head = w.norm(&name(norm), head);
                rotate(&mut head, position);
                head
            });
            heads.collect::<Vec<Row>>()
        };
        keys.push(heads(w.product(&name("k_proj"), x), "k_norm"));
        values.push(w.product(&name("v_proj"), x));
        let queries = w.product(&name("q_proj"), x);
        let mut y = Vec::new();
        for (i, both) in queries.chunks(2 * HEAD_DIM).enumerate() {
            let (query, gate) = both.split_at(HEAD_DIM);
            let query = &heads(query.to_vec(), "q_norm")[0];
            let kv = i / (HEADS / KV_HEADS);
            let scale = 1.0 / (HEAD_DIM as f64).sqrt();
            let scores: Row = keys.iter().map(|k| dot(query, &k[kv]) * scale).collect();
            let mut head = vec![0.0; HEAD_DIM];
            for (weight, value) in softmax(&scores).into_iter().zip(&values) {
                add(&mut head, &value[kv * HEAD_DIM..][..HEAD_DIM], weight);
            }
            y.extend(head.iter().zip(gate).map(|(y, gate)| y * sigmoid(*gate)));
        }
        outputs.push(w.product(&name("o_proj"), &y));
    }
    outputs
}

/// A gated delta net, token by token.
fn delta_net(w: &Weights, layer: &str, x: &[Row]) -> Vec<Row> {
    let name = |kind: &str| format!("{layer}.linear_attn.{kind}");
    let keys = KV_HEADS * HEAD_DIM;
    let kernel: Vec<&[f64]> = w.get(&name("conv1d.weight")).chunks(4).collect();
    let project = |x: &Row| w.product(&name("in_proj_qkv.weight"), x);
    let inputs: Vec<Row> = x.iter().map(project).collect();
    let mut states = vec![vec![vec![0.0; HEAD_DIM]; HEAD_DIM]; HEADS];
    let mut outputs = Vec::new();
    for (i, x) in x.iter().enumerate() {
        let convolved = |(channel, kernel): (usize, &&[f64])| {
            let last = kernel.iter().rev().zip(inputs[..=i].iter().rev());
            silu(last.map(|(weight, row)| weight * row[channel]).sum())
        };
        let qkv: Row = kernel.iter().enumerate().map(convolved).collect();
        let z = w.product(&name("in_proj_z.weight"), x);
        let b = w.product(&name("in_proj_b.weight"), x);
        let a = w.product(&name("in_proj_a.weight"), x);
        let mut y = Vec::new();
        for (head, state) in states.iter_mut().enumerate() {
            let of = |start: usize, head: usize| &qkv[start + head * HEAD_DIM..][..HEAD_DIM];
            let group = head / (HEADS / KV_HEADS);
            let (q, k) = (unit(of(0, group)), unit(of(keys, group)));
            let v = of(2 * keys, head);
            let step = (1.0 + (a[head] + w.get(&name("dt_bias"))[head]).exp()).ln();
            let decay = (-w.get(&name("A_log"))[head].exp() * step).exp();
            let mut memory = vec![0.0; HEAD_DIM];
            for (row, k) in state.iter_mut().zip(&k) {
                row.iter_mut().for_each(|s| *s *= decay);
                add(&mut memory, row, *k);
            }
            let beta = sigmoid(b[head]);
            let delta: Row = v.iter().zip(&memory).map(|(v, m)| (v - m) * beta).collect();
            let mut out = vec![0.0; HEAD_DIM];
            for ((row, k), q) in state.iter_mut().zip(&k).zip(&q) {
                add(row, &delta, *k);
                add(&mut out, row, q / (HEAD_DIM as f64).sqrt());
            }
            let scale = 1.0 / (dot(&out, &out) / HEAD_DIM as f64 + EPS).sqrt();
            let gates = z[head * HEAD_DIM..].iter();
            let rest = w.get(&name("norm.weight")).iter().zip(gates);
            y.extend(
                out.iter()
                    .zip(rest)
                    .map(|(y, (w, z))| y * scale * w * silu(*z)),
            );
        }
        outputs.push(w.product(&name("out_proj.weight"), &y));
    }
    outputs
}

fn mlp(w: &Weights, prefix: &str, x: &[f64]) -> Row {
    let gate = w.product(&format!("{prefix}.gate_proj.weight"), x);
    let up = w.product(&format!("{prefix}.up_proj.weight"), x);
    let inner: Row = gate.iter().zip(&up).map(|(g, u)| silu(*g) * u).collect();
    w.product(&format!("{prefix}.down_proj.weight"), &inner)
}

/// The best experts by their shares, and one that every token goes through.
fn mixture(w: &Weights, prefix: &str, x: &[f64]) -> Row {
    let shares = softmax(&w.product(&format!("{prefix}.gate.weight"), x));
    let mut best: Vec<usize> = (0..shares.len()).collect();
    best.sort_by(|a, b| shares[*b].total_cmp(&shares[*a]));
    best.truncate(CHOSEN_EXPERTS);
    let sum: f64 = best.iter().map(|i| shares[*i]).sum();
    let gate = w.product(&format!("{prefix}.shared_expert_gate.weight"), x)[0];
    let mut y = vec![0.0; x.len()];
    add(
        &mut y,
        &mlp(w, &format!("{prefix}.shared_expert"), x),
        sigmoid(gate),
    );
    for i in best {
        let both = w.product_of(&format!("{prefix}.experts.gate_up_proj"), i, x);
        let (gate, up) = both.split_at(both.len() / 2);
        let inner: Row = gate.iter().zip(up).map(|(g, u)| silu(*g) * u).collect();
        let out = w.product_of(&format!("{prefix}.experts.down_proj"), i, &inner);
        add(&mut y, &out, shares[i] / sum);
    }
    y
}

/// The logits behind `ids`.
fn logits(w: &Weights, ids: &[u32]) -> Vec<f32> {
    let text = "model.language_model";
    let embedding = format!("{text}.embed_tokens.weight");
    let embed = |id: &u32| w.rows(&embedding, 0).nth(*id as usize).unwrap().to_vec();
    let mut x: Vec<Row> = ids.iter().map(embed).collect();
    for i in 0..LAYERS {
        let layer = format!("{text}.layers.{i}");
        let norm = |kind: &str, x: &Row| w.norm(&format!("{layer}.{kind}.weight"), x);
        let normed: Vec<Row> = x.iter().map(|x| norm("input_layernorm", x)).collect();
        let mixed = match i % 2 {
            0 => delta_net(w, &layer, &normed),
            _ => attention(w, &layer, &normed),
        };
        let prefix = format!("{layer}.mlp");
        for (x, mixed) in x.iter_mut().zip(&mixed) {
            add(x, mixed, 1.0);
            let normed = norm("post_attention_layernorm", x);
            let y = match w.has(&format!("{prefix}.gate.weight")) {
                true => mixture(w, &prefix, &normed),
                false => mlp(w, &prefix, &normed),
            };
            add(x, &y, 1.0);
        }
    }
    let last = w.norm(&format!("{text}.norm.weight"), x.last().unwrap());
    let logits = w.product("lm_head.weight", &last);
    logits.into_iter().map(|logit| logit as f32).collect()
}

/// Behind a prompt, and behind an answer that was decoded token by token.
#[tokio::test(flavor = "multi_thread")]
async fn qwen3_5_has_the_logits_of_its_definition() {
    /// f32 against f64, relative to the largest logit.
    const MOST: f32 = 1e-4;
    const TOKENS: usize = 24;
    for title in ["qwen3_5", "qwen3_5moe"] {
        let folder = tempfile::tempdir().unwrap();
        let target = zoo::find(title).write_target(LAYERS, folder.path());
        let weights = Weights::load(&target);
        let engine = Engine::load(&Setup::plain(&target.path)).await.unwrap();
        for index in [0, 5] {
            let mut ids = prompt(index);
            let answer = run(&engine, ids.clone(), TOKENS).await;
            let want = logits(&weights, &ids);
            let differ = difference(&want, &answer.first_logits);
            println!("{title}, prompt of {}: {differ:e}", ids.len());
            assert!(differ < MOST, "{title}: {differ}");
            for (token, gap) in answer.tokens.iter().zip(&answer.gaps) {
                let want = logits(&weights, &ids);
                let mut best: Vec<usize> = (0..want.len()).collect();
                best.sort_by(|a, b| want[*b].total_cmp(&want[*a]));
                let want_gap = want[best[0]] - want[best[1]];
                let what = format!("{title}, behind {} tokens", ids.len());
                assert_eq!(*token as usize, best[0], "{what}");
                assert!(
                    (gap - want_gap).abs() < 10.0 * MOST,
                    "{what}: {gap} {want_gap}"
                );
                ids.push(*token);
            }
        }
    }
}
