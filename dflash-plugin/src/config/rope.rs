//! Rotary embedding settings, in the dialects of transformers 4 (`rope_theta`, `rope_scaling`) and
//! transformers 5 (`rope_parameters`).

use serde_json::Value;

use super::keys::{describe, is_finite_f32, Entry, Keys};
use crate::error::{DFlashError, Result};

/// Rotary embedding of the draft model.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// How frequencies are stretched for long contexts.
    pub scaling: RopeScaling,
    /// Whether neighbours are rotated together, `(0, 1), (2, 3), ..`, instead of halves,
    /// `(0, d/2), (1, d/2 + 1), ..` (`is_neox_style: false`).
    pub interleaved: bool,
    /// The first dims of each head, the `d` above: an even number. The other dims pass unrotated.
    pub rotary_dim: usize,
}

/// Frequency scaling, as defined by transformers' `modeling_rope_utils`.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// `theta^(-2i/d)`.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// Stretch of the context.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, a linear blend between.
    Llama3 {
        /// Stretch of the context.
        factor: f64,
        /// Wavelengths above `original_positions / low_freq_factor` are stretched.
        low_freq_factor: f64,
        /// Wavelengths below `original_positions / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length before stretching, in tokens.
        original_positions: f64,
    },
    /// YaRN (arXiv 2309.00071).
    Yarn {
        /// Stretch of the context.
        factor: f64,
        /// Context length before stretching, in tokens.
        original_positions: f64,
        /// Rotations over the original context above which a dimension is kept.
        beta_fast: f64,
        /// Rotations below which a dimension is stretched.
        beta_slow: f64,
        /// Whether the bounds of the blend are rounded to whole dimensions.
        truncate: bool,
        /// Factor on cos and sin.
        attention_factor: f64,
    },
}

impl RopeConfig {
    pub(super) fn parse(keys: &Keys, head_dim: usize, max_positions: usize) -> Result<Self> {
        let table = Table::find(keys)?;
        let theta = theta(keys, table.as_ref())?;
        let scaling = match &table {
            None => RopeScaling::Default,
            Some(table) => table.scaling(keys, max_positions)?,
        };
        Ok(Self {
            theta,
            scaling,
            interleaved: interleaved(keys)?,
            rotary_dim: rotary_dim(keys, table.as_ref(), head_dim)?,
        })
    }
}

/// A number that may be at the top level or in the table.
fn agreed<'a>(keys: &Keys<'a>, table: Option<&Table<'a>>, key: &str) -> Result<Option<Entry<'a>>> {
    let nested = table.and_then(|table| table.get(key));
    match (keys.top(key), nested) {
        (Some(top), Some(nested)) if top.number()? != nested.number()? => Err(top.error(format!(
            "{} contradicts `{}` = {}; keep one",
            top.value, nested.path, nested.value
        ))),
        (top, nested) => Ok(nested.or(top)),
    }
}

fn theta(keys: &Keys, table: Option<&Table>) -> Result<f64> {
    let Some(entry) = agreed(keys, table, "rope_theta")? else {
        return Err(DFlashError::config(
            "rope_theta",
            "missing; add it at the top level or in `rope_parameters`",
        ));
    };
    match entry.number()? {
        theta if theta > 1.0 => Ok(theta),
        theta => Err(entry.error(format!("expected a number above 1, found {theta}"))),
    }
}

fn interleaved(keys: &Keys) -> Result<bool> {
    let style = keys.optional_bool("is_neox_style")?;
    let alias = keys.optional_bool("rope_is_neox_style")?;
    match (style, alias) {
        (Some(a), Some(b)) if a != b => Err(DFlashError::config(
            "is_neox_style",
            format!("{a} contradicts `rope_is_neox_style` = {b}; keep one"),
        )),
        (style, alias) => Ok(!style.or(alias).unwrap_or(true)),
    }
}

/// How many dims of a head are rotated: `partial_rotary_factor` of them, rounded down as transformers
/// and vLLM do.
fn rotary_dim(keys: &Keys, table: Option<&Table>, head_dim: usize) -> Result<usize> {
    const KEY: &str = "partial_rotary_factor";
    if let Some(entry) = keys.nested(KEY) {
        return Err(entry.error("no engine reads it here; move it to the top level"));
    }
    let Some(entry) = agreed(keys, table, KEY)? else {
        return Ok(head_dim);
    };
    let factor = entry.number()?;
    if !(factor > 0.0 && factor <= 1.0) {
        return Err(entry.error(format!(
            "expected a number above 0 and at most 1, found {factor}"
        )));
    }
    match (head_dim as f64 * factor) as usize {
        dims if dims >= 2 && dims % 2 == 0 => Ok(dims),
        dims => Err(entry.error(format!(
            "{factor} of `head_dim` {head_dim} is {dims} (rounded down), expected an even number of \
             at least 2 (RoPE rotates pairs)"
        ))),
    }
}

/// The table `rope_scaling` or `rope_parameters`.
struct Table<'a>(Entry<'a>);

impl<'a> Table<'a> {
    fn find(keys: &Keys<'a>) -> Result<Option<Self>> {
        let entry = match (keys.top("rope_scaling"), keys.top("rope_parameters")) {
            // SpecForge writes both, the older one without the base.
            (Some(a), Some(b)) if !differ_only_in_base(a.value, b.value) => {
                return Err(a.error("differs from `rope_parameters`; keep one"))
            }
            (Some(a), Some(b)) => match b.value.get("rope_theta") {
                Some(_) => b,
                None => a,
            },
            (Some(entry), None) | (None, Some(entry)) => entry,
            (None, None) => return Ok(None),
        };
        let Some(map) = entry.value.as_object() else {
            return Err(entry.error(format!(
                "expected an object, found {}",
                describe(entry.value)
            )));
        };
        if let Some((layer_type, _)) = map.iter().find(|(_, value)| value.is_object()) {
            return Err(DFlashError::unsupported(
                format!("{}.{layer_type}", entry.path),
                "RoPE settings for each layer type; expected one set for all layers",
            ));
        }
        Ok(Some(Self(entry)))
    }

    fn get(&self, key: &str) -> Option<Entry<'a>> {
        let value = self.0.value.get(key).filter(|v: &&Value| !v.is_null())?;
        Some(Entry {
            path: format!("{}.{key}", self.0.path),
            value,
        })
    }

    fn positive(&self, key: &str) -> Result<Option<f64>> {
        self.get(key).map(|entry| entry.positive()).transpose()
    }

    fn require_positive(&self, key: &str) -> Result<f64> {
        self.positive(key)?.ok_or_else(|| {
            DFlashError::config(
                format!("{}.{key}", self.0.path),
                "missing; this kind of RoPE scaling needs it",
            )
        })
    }

    fn scaling(&self, keys: &Keys, max_positions: usize) -> Result<RopeScaling> {
        let kind = self.get("rope_type").or_else(|| self.get("type"));
        match &kind {
            None => Ok(RopeScaling::Default),
            Some(entry) => match entry.string()? {
                "default" => Ok(RopeScaling::Default),
                "linear" => Ok(RopeScaling::Linear {
                    factor: self.factor()?,
                }),
                "llama3" => self.llama3(keys),
                "yarn" => self.yarn(keys, max_positions),
                other => Err(DFlashError::unsupported(
                    &entry.path,
                    format!(
                        "expected \"default\", \"linear\", \"llama3\" or \"yarn\", found \"{other}\""
                    ),
                )),
            },
        }
    }

    fn factor(&self) -> Result<f64> {
        match self.require_positive("factor")? {
            factor if factor >= 1.0 => Ok(factor),
            factor => Err(DFlashError::config(
                format!("{}.factor", self.0.path),
                format!("expected at least 1, found {factor}"),
            )),
        }
    }

    fn original_positions(&self, keys: &Keys) -> Result<Option<f64>> {
        const KEY: &str = "original_max_position_embeddings";
        match self.positive(KEY)? {
            Some(positions) => Ok(Some(positions)),
            None => keys.top(KEY).map(|entry| entry.positive()).transpose(),
        }
    }

    fn llama3(&self, keys: &Keys) -> Result<RopeScaling> {
        let low_freq_factor = self.require_positive("low_freq_factor")?;
        let high_freq_factor = self.require_positive("high_freq_factor")?;
        if high_freq_factor <= low_freq_factor {
            return Err(DFlashError::config(
                format!("{}.high_freq_factor", self.0.path),
                format!(
                    "expected more than `low_freq_factor` {low_freq_factor}, found {high_freq_factor}"
                ),
            ));
        }
        Ok(RopeScaling::Llama3 {
            factor: self.factor()?,
            low_freq_factor,
            high_freq_factor,
            original_positions: match self.original_positions(keys)? {
                Some(positions) => positions,
                None => self.require_positive("original_max_position_embeddings")?,
            },
        })
    }

    fn yarn(&self, keys: &Keys, max_positions: usize) -> Result<RopeScaling> {
        let original = self.original_positions(keys)?;
        // Without a factor, it is the ratio of the two context lengths (DeepSeek's convention).
        let factor = match (self.get("factor"), original) {
            // (Finite: both are within f32.)
            (None, Some(original)) => (max_positions as f64 / original).max(1.0),
            _ => self.factor()?,
        };
        let mscale = self.get("mscale").map(|e| e.number()).transpose()?;
        let mscale_all = self.get("mscale_all_dim").map(|e| e.number()).transpose()?;
        let attention_factor = match (self.positive("attention_factor")?, mscale, mscale_all) {
            (Some(given), _, _) => given,
            (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => {
                yarn_mscale(factor, m) / yarn_mscale(factor, all)
            }
            _ => yarn_mscale(factor, 1.0),
        };
        if !(is_finite_f32(attention_factor) && attention_factor as f32 > 0.0) {
            return Err(DFlashError::config(
                format!("{}.mscale", self.0.path),
                format!("gives the attention factor {attention_factor}, expected a positive one"),
            ));
        }
        let truncate = self.get("truncate").map(|e| e.boolean()).transpose()?;
        Ok(RopeScaling::Yarn {
            factor,
            original_positions: original.unwrap_or(max_positions as f64),
            beta_fast: self.positive("beta_fast")?.unwrap_or(32.0),
            beta_slow: self.positive("beta_slow")?.unwrap_or(1.0),
            truncate: truncate.unwrap_or(true),
            attention_factor,
        })
    }
}

/// Whether two RoPE tables say the same, but that one of them may lack `rope_theta`.
fn differ_only_in_base(a: &Value, b: &Value) -> bool {
    const BASE: &str = "rope_theta";
    let (Some(a), Some(b)) = (a.as_object(), b.as_object()) else {
        return a == b;
    };
    let scaling = |table: &serde_json::Map<String, Value>| {
        let mut table = table.clone();
        table.remove(BASE);
        table
    };
    let bases = (a.get(BASE), b.get(BASE));
    scaling(a) == scaling(b) && (bases.0.is_none() || bases.1.is_none() || bases.0 == bases.1)
}

/// YaRN's amplitude correction for a context stretched `factor` times.
fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * mscale * factor.ln() + 1.0
    }
}
