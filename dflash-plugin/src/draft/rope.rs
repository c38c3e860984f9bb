//! Rotary embedding at absolute positions, in f32.

use std::sync::{PoisonError, RwLock};

use candle_core::{Device, Tensor, D};
use candle_nn::rotary_emb::{rope, rope_i};
use dflash_kernels::{norm_rope, NormRope};

use crate::config::{RopeConfig, RopeScaling};
use crate::error::{DFlashError, Result};

/// Tables are first made for this many positions, then doubled.
const FIRST_POSITIONS: usize = 1024;

/// cos and sin for all positions up to the highest one asked for so far.
pub(super) struct RopeTable {
    inv_freq: Vec<f32>,
    attention_factor: f64,
    interleaved: bool,
    max_positions: usize,
    device: Device,
    /// cos and sin, each `[positions, rotary_dim / 2]`.
    tables: RwLock<Option<(Tensor, Tensor)>>,
}

/// cos and sin of some rows, each `[rows, rotary_dim / 2]`.
pub(super) struct RopeRows {
    pub cos: Tensor,
    pub sin: Tensor,
    interleaved: bool,
}

impl RopeTable {
    pub fn new(cfg: &RopeConfig, max_positions: usize, device: &Device) -> Self {
        let attention_factor = match cfg.scaling {
            RopeScaling::Yarn {
                attention_factor, ..
            } => attention_factor,
            _ => 1.0,
        };
        Self {
            inv_freq: inverse_frequencies(cfg),
            attention_factor,
            interleaved: cfg.interleaved,
            max_positions,
            device: device.clone(),
            tables: RwLock::new(None),
        }
    }

    /// Rows at the given positions.
    pub fn at(&self, positions: &[usize]) -> Result<RopeRows> {
        let last = positions.iter().copied().max().unwrap_or(0);
        let (cos, sin) = self.tables(last)?;
        let consecutive = positions.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let (cos, sin) = match positions.first() {
            Some(first) if consecutive => (
                cos.narrow(0, *first, positions.len())?,
                sin.narrow(0, *first, positions.len())?,
            ),
            _ => {
                let ids: Vec<u32> = positions.iter().map(|p| *p as u32).collect();
                let ids = Tensor::new(ids, &self.device)?;
                (cos.index_select(&ids, 0)?, sin.index_select(&ids, 0)?)
            }
        };
        Ok(self.rows(cos, sin))
    }

    /// Rows of `starts.len()` blocks of `block` rows, block `b` from position `starts[b]` on.
    pub fn blocks(&self, starts: &[usize], block: usize) -> Result<RopeRows> {
        let furthest = starts.iter().copied().max().unwrap_or(0);
        let (cos, sin) = self.tables((furthest + block).saturating_sub(1))?;
        if let [start] = starts {
            return Ok(self.rows(cos.narrow(0, *start, block)?, sin.narrow(0, *start, block)?));
        }
        let rows = starts.iter().flat_map(|start| *start..start + block);
        let rows: Vec<u32> = rows.map(|position| position as u32).collect();
        let rows = Tensor::new(rows, &self.device)?;
        Ok(self.rows(cos.index_select(&rows, 0)?, sin.index_select(&rows, 0)?))
    }

    fn rows(&self, cos: Tensor, sin: Tensor) -> RopeRows {
        RopeRows {
            cos,
            sin,
            interleaved: self.interleaved,
        }
    }

    /// Whether pairs are neighbours.
    pub fn is_interleaved(&self) -> bool {
        self.interleaved
    }

    /// Tables that hold at least position `last`.
    pub fn tables(&self, last: usize) -> Result<(Tensor, Tensor)> {
        if last >= self.max_positions {
            return Err(DFlashError::input(
                "position in the draft model",
                format!("below `max_position_embeddings` {}", self.max_positions),
                last.to_string(),
            ));
        }
        {
            let tables = self.tables.read().unwrap_or_else(PoisonError::into_inner);
            if let Some((cos, sin)) = tables.as_ref() {
                if last < cos.dim(0)? {
                    return Ok((cos.clone(), sin.clone()));
                }
            }
        }
        let positions = (last + 1)
            .next_power_of_two()
            .max(FIRST_POSITIONS)
            .min(self.max_positions);
        let made = self.make_tables(positions)?;
        let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        *tables = Some(made.clone());
        Ok(made)
    }

    fn make_tables(&self, positions: usize) -> Result<(Tensor, Tensor)> {
        let half = self.inv_freq.len();
        let mut cos = Vec::with_capacity(positions * half);
        let mut sin = Vec::with_capacity(positions * half);
        for position in 0..positions {
            for freq in &self.inv_freq {
                // The reference multiplies in f32; the same rounding keeps far positions comparable.
                let angle = (position as f32 * freq) as f64;
                cos.push((angle.cos() * self.attention_factor) as f32);
                sin.push((angle.sin() * self.attention_factor) as f32);
            }
        }
        let shape = (positions, half);
        Ok((
            Tensor::from_vec(cos, shape, &self.device)?,
            Tensor::from_vec(sin, shape, &self.device)?,
        ))
    }
}

impl RopeRows {
    /// Rotates the first dims of `[heads, rows, head_dim]`, contiguous f32.
    pub fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let (head_dim, rotary_dim) = (x.dim(D::Minus1)?, 2 * self.cos.dim(1)?);
        if rotary_dim == head_dim {
            return self.rotate_all(x);
        }
        let turned = self.rotate_all(&x.narrow(D::Minus1, 0, rotary_dim)?.contiguous()?)?;
        let rest = x.narrow(D::Minus1, rotary_dim, head_dim - rotary_dim)?;
        Ok(Tensor::cat(&[turned, rest.contiguous()?], D::Minus1)?)
    }

    /// `[heads, rows, rotary_dim]`, contiguous f32.
    fn rotate_all(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.unsqueeze(0)?;
        let rotated = match self.interleaved {
            true => rope_i(&x, &self.cos, &self.sin)?,
            false => rope(&x, &self.cos, &self.sin)?,
        };
        Ok(rotated.squeeze(0)?)
    }

    /// The same with other tables of the same shape.
    pub fn with(&self, cos: &Tensor, sin: &Tensor) -> Self {
        Self {
            cos: cos.clone(),
            sin: sin.clone(),
            interleaved: self.interleaved,
        }
    }

    /// cos, sin, and whether pairs are neighbours.
    pub fn parts(&self) -> (&Tensor, &Tensor, bool) {
        (&self.cos, &self.sin, self.interleaved)
    }

    /// RMS norm with `weight` (f32 `[heads, head_dim]`) and rotation of the first heads of `[rows, heads or
    /// more, head_dim]`, both in f32.
    pub fn norm_and_rotate_rows(&self, x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
        let spec = NormRope {
            weight,
            cos: &self.cos,
            sin: &self.sin,
            interleaved: self.interleaved,
            eps,
        };
        Ok(norm_rope(x, &spec)?)
    }
}

/// Radians a position for each of the `rotary_dim / 2` rotated pairs.
///
/// Formulas of transformers' `modeling_rope_utils`.
fn inverse_frequencies(cfg: &RopeConfig) -> Vec<f32> {
    let dim = cfg.rotary_dim as f64;
    let base: Vec<f64> = (0..cfg.rotary_dim / 2)
        .map(|i| cfg.theta.powf(-(2.0 * i as f64) / dim))
        .collect();
    let scaled: Vec<f64> = match &cfg.scaling {
        RopeScaling::Default => base,
        RopeScaling::Linear { factor } => base.iter().map(|f| f / factor).collect(),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_positions,
        } => base
            .iter()
            .map(|f| {
                let rotations = original_positions * f / std::f64::consts::TAU;
                let kept = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor);
                blend(*f, *factor, kept.clamp(0.0, 1.0))
            })
            .collect(),
        RopeScaling::Yarn {
            factor,
            original_positions,
            beta_fast,
            beta_slow,
            truncate,
            ..
        } => {
            // The (fractional) dimension that turns `rotations` times over the original context.
            let dimension = |rotations: f64| {
                dim * (original_positions / (rotations * std::f64::consts::TAU)).ln()
                    / (2.0 * cfg.theta.ln())
            };
            let (mut low, mut high) = (dimension(*beta_fast), dimension(*beta_slow));
            if *truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(dim - 1.0));
            if low == high {
                high += 0.001; // as the reference does, against a division by zero
            }
            base.iter()
                .enumerate()
                .map(|(i, f)| {
                    let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    blend(*f, *factor, 1.0 - stretched)
                })
                .collect()
        }
    };
    scaled.into_iter().map(|f| f as f32).collect()
}

/// A frequency of which the part `kept` stays as it is and the rest is stretched.
fn blend(freq: f64, factor: f64, kept: f64) -> f64 {
    kept * freq + (1.0 - kept) * freq / factor
}
