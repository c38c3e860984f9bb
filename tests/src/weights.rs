//! Random tensors by name, for the tiny models that tests write.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor};

/// Tensors by name, filled from one stream of pseudo-random numbers.
pub struct Weights {
    state: u64,
    pub tensors: HashMap<String, Tensor>,
}

impl Weights {
    pub fn new(seed: u64) -> Self {
        Self {
            state: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15),
            tensors: HashMap::new(),
        }
    }

    fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1 (splitmix64).
    fn next(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn add(&mut self, name: &str, shape: &[usize], value: impl Fn(f32) -> f32) {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| value(self.next())).collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        self.tensors.insert(name.into(), tensor);
    }

    /// `name.weight`, whose product with a vector of ones' size has that size too.
    pub fn matrix(&mut self, name: &str, rows: usize, columns: usize) {
        self.stacked(&format!("{name}.weight"), &[rows, columns]);
    }

    /// The same under this very name, for several matrices at once.
    pub fn stacked(&mut self, name: &str, shape: &[usize]) {
        let columns = shape.last().copied().unwrap_or(1);
        let scale = (3.0 / columns as f32).sqrt();
        self.add(name, shape, |x| x * scale);
    }

    /// A linear layer with a bias.
    pub fn linear(&mut self, name: &str, rows: usize, columns: usize) {
        self.matrix(name, rows, columns);
        self.small(&format!("{name}.bias"), &[rows]);
    }

    /// `name.weight` around 1.
    pub fn norm(&mut self, name: &str, width: usize) {
        self.add(&format!("{name}.weight"), &[width], |x| 1.0 + 0.1 * x);
    }

    /// A layer norm with a bias.
    pub fn layer_norm(&mut self, name: &str, width: usize) {
        self.norm(name, width);
        self.small(&format!("{name}.bias"), &[width]);
    }

    /// Values around 0 under this very name.
    pub fn small(&mut self, name: &str, shape: &[usize]) {
        self.add(name, shape, |x| 0.1 * x);
    }

    /// Random bytes under this very name.
    pub fn bytes(&mut self, name: &str, shape: &[usize]) {
        let count: usize = shape.iter().product();
        let values: Vec<u8> = (0..count).map(|_| self.next_u64() as u8).collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        self.tensors.insert(name.into(), tensor);
    }

    /// One byte everywhere.
    pub fn byte(&mut self, name: &str, shape: &[usize], value: u8) {
        let tensor = Tensor::full(value, shape, &Device::Cpu).unwrap();
        self.tensors.insert(name.into(), tensor);
    }

    /// `model.safetensors` and `config.json`.
    pub fn save(&self, folder: &Path, config: &serde_json::Value) {
        candle_core::safetensors::save(&self.tensors, folder.join("model.safetensors")).unwrap();
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    }
}
