//! Helpers of the integration tests.
#![allow(dead_code)] // each test binary uses a part

pub mod allocation;
pub mod configs;
pub mod fuzz;
pub mod property;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor, D};
use dflash_plugin::draft::DraftModel;
use dflash_plugin::kv::SequenceKv;
use dflash_plugin::pool::{DraftPool, PooledContexts};

/// The largest relative error, in the Euclidean norm of a row, that f32 results may have.
pub const TOLERANCE: f64 = 1e-4;

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The reference tensors of the trained draft model, which the end-to-end tests use, too.
pub fn golden() -> HashMap<String, Tensor> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden");
    load(&folder.join("golden.safetensors"))
}

/// The trained draft model of the repository.
pub fn smollm2_drafter() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/smollm2-135m-dflash")
}

/// The target's embedding, which is its lm_head too: `[vocab, hidden]`. `cargo xtask model` makes it in
/// its default place, `DFLASH_TEST_TARGET` names another folder.
pub fn smollm2_embedding() -> Tensor {
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/smollm2-135m");
    let dir = std::env::var_os("DFLASH_TEST_TARGET").map_or(default, Into::into);
    let file = dir.join("model.safetensors");
    assert!(file.exists(), "{}: run `cargo xtask model`", file.display());
    let weights = load(&file);
    weights["model.embed_tokens.weight"]
        .to_dtype(DType::F32)
        .unwrap()
}

pub fn load(path: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path, &Device::Cpu)
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The largest relative error over the rows (last dimension) of two tensors of one shape.
pub fn worst_row_error(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.dims(), expected.dims());
    let rows = |t: &Tensor| {
        let width = t.dim(D::Minus1).unwrap();
        let t = t.to_dtype(DType::F64).unwrap().contiguous().unwrap();
        t.reshape(((), width)).unwrap().to_vec2::<f64>().unwrap()
    };
    let norm = |xs: &[f64]| xs.iter().map(|x| x * x).sum::<f64>().sqrt();
    rows(found)
        .iter()
        .zip(rows(expected))
        .map(|(found, expected)| {
            let difference: Vec<f64> = found.iter().zip(&expected).map(|(a, b)| a - b).collect();
            norm(&difference) / norm(&expected).max(f64::MIN_POSITIVE)
        })
        .fold(0.0, |worst, error| {
            if error > worst || error.is_nan() {
                error
            } else {
                worst
            }
        })
}

#[track_caller]
pub fn assert_close(what: &str, found: &Tensor, expected: &Tensor) {
    let error = worst_row_error(found, expected);
    assert!(
        error < TOLERANCE,
        "{what}: relative error {error:.2e}, allowed {TOLERANCE:.0e}"
    );
}

/// Fuses, projects and appends new context rows at the end of `kv`; returns the context features.
pub fn materialize(model: &DraftModel, kv: &mut SequenceKv, taps: &Tensor) -> Tensor {
    let fused = model.fuse(taps).unwrap();
    let rows = fused.dim(0).unwrap();
    let positions: Vec<usize> = (kv.len()..kv.len() + rows).collect();
    kv.append(model.context_kv(&fused, &positions).unwrap())
        .unwrap();
    fused
}

/// Block states `[1, block, hidden]` over the context of `taps` (`[rows, width]`) in a pool, in blocks of
/// so many positions that lie about in it.
pub fn pooled_block(model: &DraftModel, taps: &Tensor, embeds: &Tensor, size: usize) -> Tensor {
    const BLOCKS: usize = 20;
    let pool = DraftPool::new(model.config(), DType::F32, &Device::Cpu, BLOCKS, size).unwrap();
    let rows = taps.dim(0).unwrap();
    assert!(rows <= BLOCKS * size);
    let table: Vec<usize> = (0..rows.div_ceil(size))
        .map(|i| (i * 7 + 3) % BLOCKS)
        .collect();
    let positions: Vec<usize> = (0..rows).collect();
    let slot = |position: &usize| table[position / size] * size + position % size;
    let slots: Vec<usize> = positions.iter().map(slot).collect();
    let fused = model.fuse(taps).unwrap();
    model
        .context_to_pool(&fused, &positions, &pool, &slots)
        .unwrap();
    let contexts = PooledContexts {
        pool: &pool,
        tables: vec![table],
        lens: vec![rows],
    };
    model.forward_block_pooled(embeds, &contexts).unwrap()
}
