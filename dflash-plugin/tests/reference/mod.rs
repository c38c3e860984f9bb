//! The draft model once more, in plain loops over f64 and with a mask that a test chooses: what the
//! crate's attention, KV, windows and rotated dims are compared with. RoPE is of the default kind
//! unless a test gives its numbers.
#![allow(dead_code)] // each test binary uses a part

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use dflash_plugin::config::DraftConfig;

type Rows = Vec<Vec<f64>>;

/// Weights by their names in the checkpoint.
pub struct Reference {
    config: DraftConfig,
    weights: HashMap<String, Rows>,
    /// Radians a position of each rotated pair, the first dims of a head.
    frequencies: Vec<f64>,
    /// Factor on cos and sin.
    amplitude: f64,
    theta: f64,
    /// Whether pairs are neighbours.
    interleaved: bool,
}

/// Whether the block's row at `query` sees the key at `key`, both absolute positions, in a layer.
pub type Sees<'a> = &'a dyn Fn(usize, usize, usize) -> bool;

pub fn rows_of(tensor: &Tensor) -> Rows {
    let tensor = tensor.to_dtype(DType::F64).unwrap();
    match tensor.rank() {
        1 => vec![tensor.to_vec1().unwrap()],
        _ => tensor.to_vec2().unwrap(),
    }
}

impl Reference {
    pub fn new(config: DraftConfig, weights: &HashMap<String, Tensor>, theta: f64) -> Self {
        let weights = weights.iter().map(|(name, t)| (name.clone(), rows_of(t)));
        Self {
            frequencies: frequencies(theta, config.head_dim),
            amplitude: 1.0,
            config,
            weights: weights.collect(),
            theta,
            interleaved: false,
        }
    }

    /// Rotates the first `rotary` dims of a head only, in neighbours if `interleaved`.
    pub fn rotating(self, rotary: usize, interleaved: bool) -> Self {
        Self {
            frequencies: frequencies(self.theta, rotary),
            interleaved,
            ..self
        }
    }

    /// Rotates as many pairs as there are frequencies.
    pub fn scaled(self, frequencies: &[f64], amplitude: f64) -> Self {
        Self {
            frequencies: frequencies.to_vec(),
            amplitude,
            ..self
        }
    }

    /// Final hidden states of a block behind a context: `taps` are those of positions `0..n`, `block`
    /// the embeddings of positions `n..`.
    pub fn forward(&self, taps: &Rows, block: &Rows, sees: Sees) -> Rows {
        let features: Rows = self.linear("fc", taps);
        let features = self.norm("hidden_norm", &features);
        let start = taps.len();
        let mut x = block.clone();
        for layer in 0..self.config.num_hidden_layers {
            let name = |part: &str| format!("layers.{layer}.{part}");
            let normed = self.norm(&name("input_layernorm"), &x);
            let q = self.heads(&name("self_attn.q"), &normed, start);
            let mut k = self.heads(&name("self_attn.k"), &features, 0);
            k.extend(self.heads(&name("self_attn.k"), &normed, start));
            let mut v = self.linear(&name("self_attn.v_proj"), &features);
            v.extend(self.linear(&name("self_attn.v_proj"), &normed));
            let attended: Rows = (0..q.len())
                .map(|row| self.attend(&q[row], &k, &v, |key| sees(layer, start + row, key)))
                .collect();
            x = add(&x, &self.linear(&name("self_attn.o_proj"), &attended));
            let normed = self.norm(&name("post_attention_layernorm"), &x);
            let gate = self.linear(&name("mlp.gate_proj"), &normed);
            let up = self.linear(&name("mlp.up_proj"), &normed);
            let both = gate.iter().zip(&up).map(|(gate, up)| {
                let silu = |g: &f64| g / (1.0 + (-g).exp());
                gate.iter().zip(up).map(|(g, u)| silu(g) * u).collect()
            });
            x = add(&x, &self.linear(&name("mlp.down_proj"), &both.collect()));
        }
        self.norm("norm", &x)
    }

    fn linear(&self, name: &str, x: &Rows) -> Rows {
        let weight = &self.weights[&format!("{name}.weight")];
        x.iter()
            .map(|x| weight.iter().map(|w| dot(w, x)).collect())
            .collect()
    }

    fn norm(&self, name: &str, x: &Rows) -> Rows {
        let weight = &self.weights[&format!("{name}.weight")][0];
        x.iter().map(|row| self.rms(row, weight)).collect()
    }

    fn rms(&self, row: &[f64], weight: &[f64]) -> Vec<f64> {
        let mean = dot(row, row) / row.len() as f64;
        let scale = (mean + self.config.rms_norm_eps).sqrt();
        row.iter().zip(weight).map(|(x, w)| x / scale * w).collect()
    }

    /// Projection, norm of each head and rotation, of rows at positions `start..`.
    fn heads(&self, name: &str, x: &Rows, start: usize) -> Rows {
        let (dim, norm) = (self.config.head_dim, format!("{name}_norm.weight"));
        let norm = &self.weights[&norm][0];
        let projected = self.linear(&format!("{name}_proj"), x);
        projected
            .iter()
            .enumerate()
            .map(|(row, heads)| {
                let turned = heads
                    .chunks(dim)
                    .flat_map(|head| self.rotate(self.rms(head, norm), (start + row) as f64));
                turned.collect()
            })
            .collect()
    }

    fn rotate(&self, head: Vec<f64>, position: f64) -> Vec<f64> {
        let mut turned = head.clone();
        for (pair, frequency) in self.frequencies.iter().enumerate() {
            let (a, b) = match self.interleaved {
                true => (2 * pair, 2 * pair + 1),
                false => (pair, pair + self.frequencies.len()),
            };
            let (sin, cos) = (position * frequency).sin_cos();
            let (sin, cos) = (self.amplitude * sin, self.amplitude * cos);
            turned[a] = head[a] * cos - head[b] * sin;
            turned[b] = head[b] * cos + head[a] * sin;
        }
        turned
    }

    fn attend(&self, q: &[f64], k: &Rows, v: &Rows, sees: impl Fn(usize) -> bool) -> Vec<f64> {
        let (dim, group) = (self.config.head_dim, self.config.group_size());
        let keys: Vec<usize> = (0..k.len()).filter(|key| sees(*key)).collect();
        let heads = q.chunks(dim).enumerate().flat_map(|(head, q)| {
            let of = |row: &[f64]| row[head / group * dim..][..dim].to_vec();
            let score = |key: &usize| dot(q, &of(&k[*key])) / (dim as f64).sqrt();
            let scores: Vec<f64> = keys.iter().map(score).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
            let total: f64 = weights.iter().sum();
            let mut out = vec![0.0; dim];
            for (key, weight) in keys.iter().zip(weights) {
                for (out, v) in out.iter_mut().zip(of(&v[*key])) {
                    *out += weight / total * v;
                }
            }
            out
        });
        heads.collect()
    }
}

fn frequencies(theta: f64, rotary: usize) -> Vec<f64> {
    let power = |pair: usize| -2.0 * pair as f64 / rotary as f64;
    (0..rotary / 2)
        .map(|pair| theta.powf(power(pair)))
        .collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(a: &Rows, b: &Rows) -> Rows {
    let sum = |(a, b): (&Vec<f64>, &Vec<f64>)| a.iter().zip(b).map(|(a, b)| a + b).collect();
    a.iter().zip(b).map(sum).collect()
}
