//! Medians, ratios and tables.

use std::path::Path;

use anyhow::{Context, Result};
use comfy_table::{presets::UTF8_FULL_CONDENSED, CellAlignment, Table};
use dflash_plugin::stats::StatsSnapshot;
use serde::Serialize;

use crate::engine::Generation;

/// One prompt decoded plainly and with DFlash at one block size.
#[derive(Debug, Clone, Serialize)]
pub struct Pair {
    pub id: String,
    pub kind: String,
    pub block_size: usize,
    pub new_tokens: usize,
    pub plain_tok_s: f64,
    pub dflash_tok_s: f64,
    /// Verify steps of the last repetition, and the tokens they emitted.
    pub rounds: u64,
    pub emitted: u64,
    pub accepts: Vec<u64>,
    /// Text, finish reason and token count are those of plain decoding.
    pub identical: bool,
    /// Where the tokens part, if that was looked for and they do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub divergence: Option<Divergence>,
}

/// The first token that is not plain decoding's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Divergence {
    /// Its place in the answer, from 0.
    pub token: usize,
    /// Plain decoding's best logit minus its second best there.
    pub gap: f32,
}

impl Divergence {
    /// From recorded runs. An answer that ends earlier parts from the other at its end.
    pub fn between(plain: &Generation, dflash: &Generation) -> Option<Self> {
        let longest = plain.tokens.len().max(dflash.tokens.len());
        let token =
            (0..longest).find(|token| plain.tokens.get(*token) != dflash.tokens.get(*token))?;
        Some(Self {
            token,
            gap: plain.gaps.get(token).copied().unwrap_or(f32::NAN),
        })
    }
}

impl Pair {
    fn tau(&self) -> f64 {
        self.emitted as f64 / self.rounds.max(1) as f64
    }

    pub fn same(plain: &Generation, dflash: &Generation) -> bool {
        plain.text == dflash.text
            && plain.finish_reason == dflash.finish_reason
            && plain.completion_tokens == dflash.completion_tokens
            && plain.tokens == dflash.tokens
    }
}

/// Several pairs together.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    pub kind: String,
    pub block_size: usize,
    pub prompts: usize,
    pub plain_tok_s: f64,
    pub dflash_tok_s: f64,
    /// Median over the prompts of the ratio within a prompt.
    pub speedup: f64,
    /// Tokens emitted by verify steps over verify steps.
    pub tau: f64,
    /// Median over the prompts of speedup over tau: 1 would be a draft and a verify pass at the
    /// cost of one plain step.
    pub efficiency: f64,
    pub identical: usize,
}

impl Summary {
    /// `None` if there are no pairs.
    pub fn of(kind: &str, block_size: usize, pairs: &[&Pair]) -> Option<Self> {
        let rounds: u64 = pairs.iter().map(|p| p.rounds).sum();
        let emitted: u64 = pairs.iter().map(|p| p.emitted).sum();
        let tau = emitted as f64 / rounds.max(1) as f64;
        let speedup = median(pairs.iter().map(|p| p.dflash_tok_s / p.plain_tok_s))?;
        Some(Self {
            kind: kind.into(),
            block_size,
            prompts: pairs.len(),
            plain_tok_s: median(pairs.iter().map(|p| p.plain_tok_s))?,
            dflash_tok_s: median(pairs.iter().map(|p| p.dflash_tok_s))?,
            speedup,
            tau,
            efficiency: median(
                pairs
                    .iter()
                    .map(|p| p.dflash_tok_s / p.plain_tok_s / p.tau()),
            )?,
            identical: pairs.iter().filter(|p| p.identical).count(),
        })
    }

    /// A summary for each block size and kind, and one over all kinds.
    pub fn table_of(pairs: &[Pair]) -> Vec<Self> {
        let mut block_sizes: Vec<usize> = pairs.iter().map(|p| p.block_size).collect();
        block_sizes.sort_unstable_by(|a, b| b.cmp(a));
        block_sizes.dedup();
        let mut kinds: Vec<&str> = pairs.iter().map(|p| p.kind.as_str()).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let mut out = Vec::new();
        for block_size in block_sizes {
            let of_size: Vec<&Pair> = pairs
                .iter()
                .filter(|p| p.block_size == block_size)
                .collect();
            for kind in &kinds {
                let of_kind: Vec<&Pair> = of_size
                    .iter()
                    .copied()
                    .filter(|p| p.kind == *kind)
                    .collect();
                out.extend(Self::of(kind, block_size, &of_kind));
            }
            out.extend(Self::of("all", block_size, &of_size));
        }
        out
    }
}

/// The middle value, or the mean of the two middle ones. `None` of nothing.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// Write all figures to `file`.
///
/// # Errors
/// If it cannot be written.
pub fn write_json(file: &Path, figures: &impl Serialize) -> Result<()> {
    std::fs::write(file, serde_json::to_string_pretty(figures)?)
        .with_context(|| format!("cannot write {}", file.display()))
}

/// Divergences by block size: how many, and how near the ties were.
pub fn render_divergences(pairs: &[Pair]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header([
        "block",
        "prompts",
        "tokens",
        "texts that part",
        "median gap there",
        "largest",
    ]);
    let mut block_sizes: Vec<usize> = pairs.iter().map(|p| p.block_size).collect();
    block_sizes.sort_unstable();
    block_sizes.dedup();
    for block_size in block_sizes {
        let of_size: Vec<&Pair> = pairs
            .iter()
            .filter(|p| p.block_size == block_size)
            .collect();
        let gaps = || {
            let divergences = of_size.iter().filter_map(|p| p.divergence);
            divergences.map(|divergence| f64::from(divergence.gap))
        };
        let largest = gaps().max_by(f64::total_cmp);
        let cell = |gap: Option<f64>| gap.map_or("-".into(), |gap| format!("{gap:.3}"));
        table.add_row([
            block_size.to_string(),
            of_size.len().to_string(),
            of_size
                .iter()
                .map(|p| p.new_tokens)
                .sum::<usize>()
                .to_string(),
            gaps().count().to_string(),
            cell(median(gaps())),
            cell(largest),
        ]);
    }
    table
}

/// The summaries as a table for a terminal.
pub fn render(summaries: &[Summary]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header([
        "block",
        "kind",
        "prompts",
        "plain tok/s",
        "DFlash tok/s",
        "speedup",
        "tau",
        "efficiency",
        "identical",
    ]);
    for s in summaries {
        table.add_row([
            s.block_size.to_string(),
            s.kind.clone(),
            s.prompts.to_string(),
            format!("{:.1}", s.plain_tok_s),
            format!("{:.1}", s.dflash_tok_s),
            format!("{:.2}x", s.speedup),
            format!("{:.2}", s.tau),
            format!("{:.2}", s.efficiency),
            format!("{}/{}", s.identical, s.prompts),
        ]);
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// A line a count: how many verify steps accepted how many drafts.
pub fn histogram(stats: &StatsSnapshot) -> String {
    const WIDTH: u64 = 40;
    let most = stats.accepts.iter().copied().max().unwrap_or(0).max(1);
    stats
        .accepts
        .iter()
        .enumerate()
        .map(|(accepted, &steps)| {
            let bar = "#".repeat((steps * WIDTH).div_ceil(most) as usize);
            format!("  {accepted:>2} accepted  {steps:>5}  {bar}\n")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_count_is_the_mean_of_the_middle_two() {
        assert_eq!(median([4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([]), None);
    }

    #[test]
    fn texts_part_at_their_first_other_token_or_at_the_shorter_ones_end() {
        let run = |tokens: &[u32]| Generation {
            tokens: tokens.to_vec(),
            gaps: vec![0.5, 0.25, 0.125],
            ..Generation::default()
        };
        let plain = run(&[1, 2, 3]);
        let at = |other| Divergence::between(&plain, &run(other)).map(|d| (d.token, d.gap));
        assert_eq!(at(&[1, 2, 3]), None);
        assert_eq!(at(&[1, 7, 3]), Some((1, 0.25)));
        assert_eq!(at(&[1, 2]), Some((2, 0.125)));
    }

    #[test]
    fn tau_weighs_prompts_by_their_rounds_and_efficiency_is_their_median() {
        let pair = |plain, dflash, rounds, emitted| Pair {
            id: "x".into(),
            kind: "k".into(),
            block_size: 8,
            new_tokens: 0,
            plain_tok_s: plain,
            dflash_tok_s: dflash,
            rounds,
            emitted,
            accepts: Vec::new(),
            identical: true,
            divergence: None,
        };
        let (a, b) = (pair(10.0, 20.0, 10, 20), pair(10.0, 20.0, 30, 100));
        let summary = Summary::of("k", 8, &[&a, &b]).unwrap();
        assert_eq!((summary.speedup, summary.tau), (2.0, 3.0));
        // 2 / 2 and 2 / (10 / 3).
        assert!((summary.efficiency - 0.8).abs() < 1e-12);
    }
}
