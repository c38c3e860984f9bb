//! What the comparison tests share. Built with the feature `cuda` they run on the first CUDA device and
//! fail without one; otherwise they run on the CPU and test the fallbacks.
#![allow(dead_code)]

use candle_core::{DType, Device, Result, Shape, Tensor};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Where the tests run.
pub fn device() -> Device {
    #[cfg(feature = "cuda")]
    {
        static DEVICE: std::sync::OnceLock<Device> = std::sync::OnceLock::new();
        DEVICE
            .get_or_init(|| {
                Device::new_cuda(0).expect("built with the feature `cuda`, these tests need a GPU")
            })
            .clone()
    }
    #[cfg(not(feature = "cuda"))]
    Device::Cpu
}

/// Number of random cases; `KERNEL_TEST_CASES` overrides it (for a run under a checker, say).
pub fn cases(on_cpu: usize, on_gpu: usize) -> usize {
    let given = std::env::var("KERNEL_TEST_CASES").ok();
    let given = given.map(|n| n.parse().expect("KERNEL_TEST_CASES is a number"));
    given.unwrap_or(if device().is_cuda() { on_gpu } else { on_cpu })
}

/// Contexts stay short under a checker.
pub fn is_reduced() -> bool {
    std::env::var_os("KERNEL_TEST_CASES").is_some()
}

pub struct Random(StdRng);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    /// One of `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.0.random_range(0..n)
    }

    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    pub fn chance(&mut self, of_a_hundred: usize) -> bool {
        self.below(100) < of_a_hundred
    }

    /// Normally distributed.
    pub fn normal(&mut self) -> f32 {
        let (u, v): (f64, f64) = (self.0.random_range(1e-12..1.0), self.0.random());
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }

    pub fn normals(&mut self, n: usize, dtype: DType) -> Vec<f32> {
        (0..n).map(|_| rounded(self.normal(), dtype)).collect()
    }

    /// The numbers `0..n` in random order.
    pub fn shuffled(&mut self, n: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            all.swap(i, self.below(i + 1));
        }
        all
    }
}

/// To the nearest value of a dtype.
pub fn rounded(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(x).to_f32(),
        DType::F16 => f16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// A tensor of values that the dtype can hold exactly, on the device under test.
pub fn tensor(values: &[f32], shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    let on_cpu = Tensor::from_vec(values.to_vec(), shape.into(), &Device::Cpu)?;
    on_cpu.to_dtype(dtype)?.to_device(&device())
}

pub fn values(t: &Tensor) -> Result<Vec<f32>> {
    t.to_device(&Device::Cpu)?
        .to_dtype(DType::F32)?
        .flatten_all()?
        .to_vec1::<f32>()
}

/// Leaves NaN in freed memory of the sizes that the next operation is likely to get, so that what it
/// does not write shows.
pub fn poison(elements: &[usize]) -> Result<()> {
    for n in elements {
        for dtype in [DType::F32, DType::BF16] {
            let ones = Tensor::ones((*n).max(1), dtype, &device())?;
            drop((ones * f64::NAN)?);
        }
    }
    Ok(())
}

/// `‖found - expected‖ / ‖expected‖`; NaN when anything found is NaN.
pub fn error(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let difference: f64 = found
        .iter()
        .zip(expected)
        .map(|(f, e)| (*f as f64 - e).powi(2))
        .sum();
    let size: f64 = expected.iter().map(|e| e * e).sum();
    if size == 0.0 {
        return if difference == 0.0 {
            0.0
        } else {
            f64::INFINITY
        };
    }
    (difference / size).sqrt()
}

/// Runs `check` for the seeds `0..n` on several threads.
pub fn for_seeds(n: usize, check: impl Fn(u64) -> Result<()> + Sync) -> Result<()> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| loop {
                    let seed = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if seed >= n {
                        return Ok(());
                    }
                    check(seed as u64)?;
                })
            })
            .collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().expect("a case failed; its message is above"))
    })
}
