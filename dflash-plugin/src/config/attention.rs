//! Which keys each draft layer's queries may see.

use super::keys::{Entry, Keys};
use crate::error::{DFlashError, Result};

/// Switches windows on in all layers (MiMo), and their size.
const USE_SWA: &str = "use_swa";
const SWA_WINDOW: &str = "swa_window_size";

/// Attention pattern of one draft layer. The context always lies before the block, so causality only
/// matters inside the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayerAttention {
    /// Whether a block row sees only itself and the rows before it.
    pub causal: bool,
    /// A row sees only positions less than `window` away from its own (itself counts as one), or, with
    /// `from_anchor`, the `window` positions before the block.
    pub window: Option<usize>,
    /// Whether the window is counted back from the anchor for all rows of a block alike, and leaves the
    /// block alone (speculators).
    pub from_anchor: bool,
    /// All rows of a block see at most this many of the most recent context positions: a setting of
    /// the user, which no checkpoint has.
    pub context: Option<usize>,
}

impl LayerAttention {
    /// Whether the window lets a row at position `query` see the position `key`, when the context has
    /// `context` positions and the block begins behind them.
    pub fn is_in_window(&self, query: usize, key: usize, context: usize) -> bool {
        self.window.is_none_or(|window| match self.from_anchor {
            true => key.saturating_add(window) >= context,
            false => query.abs_diff(key) < window,
        })
    }

    /// The window as a distance from each row, itself counted, which is all that attention over a pool
    /// knows. With `from_anchor` it is the anchor's, so the row `i` behind it sees `i` positions less.
    pub fn window_of_rows(&self) -> Option<usize> {
        let itself = usize::from(self.from_anchor);
        self.window.map(|window| window.saturating_add(itself))
    }

    /// The most context positions that a row sees; `None` if it sees all.
    pub fn context_rows(&self) -> Option<usize> {
        let itself = usize::from(!self.from_anchor);
        let in_window = self.window.map(|window| window.saturating_sub(itself));
        match (in_window, self.context) {
            (Some(window), Some(context)) => Some(window.min(context)),
            (window, context) => window.or(context),
        }
    }
}

/// Reads `layer_types`, `sliding_window`, `use_swa` with `swa_window_size`, and the causality overrides.
///
/// Without `layer_types` all layers are full. Full layers are bidirectional in the block, sliding ones
/// causal, unless `is_causal` or (after it) `dflash_config.causal` sets one rule for all layers (vLLM's
/// order). `use_swa` gives all layers a window and leaves their causality to `layer_types`, so without
/// it they are bidirectional (vLLM again). `from_anchor` says how windows are counted, for which there
/// is no key.
pub(super) fn parse_layers(
    keys: &Keys,
    num_layers: usize,
    from_anchor: bool,
) -> Result<Vec<LayerAttention>> {
    let forced = windows_are_forced(keys)?;
    let sliding = sliding_layers(keys, num_layers, forced)?;
    let window = match forced || sliding.contains(&true) {
        true => Some(window(keys, forced)?),
        false => None,
    };
    if window.is_none() {
        no_window_without_use(keys)?;
    }
    let causal_override = match (keys.top("is_causal"), keys.nested("causal")) {
        (Some(entry), _) | (None, Some(entry)) => Some(entry.boolean()?),
        (None, None) => None,
    };
    Ok(sliding
        .into_iter()
        .map(|is_sliding| LayerAttention {
            causal: causal_override.unwrap_or(is_sliding),
            window: window.filter(|_| is_sliding || forced),
            from_anchor: from_anchor && (is_sliding || forced),
            context: None,
        })
        .collect())
}

/// Whether `use_swa` gives every layer a window.
fn windows_are_forced(keys: &Keys) -> Result<bool> {
    let entry = keys.either(USE_SWA);
    Ok(entry.map(|entry| entry.boolean()).transpose()? == Some(true))
}

/// A size that no layer uses is more likely a switch that was forgotten.
fn no_window_without_use(keys: &Keys) -> Result<()> {
    let size = keys.either(SWA_WINDOW).filter(Entry::is_truthy);
    match size {
        Some(size) if keys.either(USE_SWA).is_none() => Err(size.error(format!(
            "no layer slides, and `dflash_config.{USE_SWA}` is missing; add that key as true (all \
             layers slide) or false"
        ))),
        _ => Ok(()),
    }
}

/// For each layer, whether `layer_types` makes its attention a sliding window.
fn sliding_layers(keys: &Keys, num_layers: usize, forced: bool) -> Result<Vec<bool>> {
    let Some(entry) = keys.top("layer_types") else {
        if !forced {
            no_layer_types(keys, num_layers)?;
        }
        return Ok(vec![false; num_layers]);
    };
    let types = entry.strings()?;
    if types.len() != num_layers {
        return Err(entry.error(format!(
            "expected one entry for each of the `num_hidden_layers` {num_layers} layers, found {}",
            types.len()
        )));
    }
    let sliding = types
        .into_iter()
        .enumerate()
        .map(|(i, kind)| match kind {
            "full_attention" => Ok(false),
            "sliding_attention" => Ok(true),
            other => Err(DFlashError::unsupported(
                format!("layer_types[{i}]"),
                format!("expected \"full_attention\" or \"sliding_attention\", found \"{other}\""),
            )),
        })
        .collect::<Result<Vec<_>>>()?;
    // vLLM's description gives all layers the window then, its code the sliding ones.
    if forced && sliding.contains(&true) && sliding.contains(&false) {
        return Err(entry.error(format!(
            "has sliding layers and full ones, but `{USE_SWA}` makes all layers slide; remove one of \
             the two keys"
        )));
    }
    Ok(sliding)
}

/// Engines disagree on a config that switches windows on without saying for which layers.
fn no_layer_types(keys: &Keys, num_layers: usize) -> Result<()> {
    let switched_on = keys.optional_bool("use_sliding_window")?.unwrap_or(false)
        && keys.either("sliding_window").is_some();
    let first_sliding = match keys.top("max_window_layers") {
        Some(entry) => entry.integer()?,
        None => 0,
    };
    if switched_on && first_sliding < num_layers {
        return Err(DFlashError::config(
            "layer_types",
            "missing while `use_sliding_window` is true; list \"full_attention\" or \
             \"sliding_attention\" for each layer",
        ));
    }
    Ok(())
}

/// The window's size, by whichever of its two keys is there. With `forced` windows `use_sliding_window`,
/// false by default in Qwen3's configs, only says that `sliding_window` is none.
fn window(keys: &Keys, forced: bool) -> Result<usize> {
    let switched_off = keys.optional_bool("use_sliding_window")? == Some(false);
    if switched_off && !forced {
        return Err(DFlashError::config(
            "use_sliding_window",
            "false, but `layer_types` has sliding layers; remove the key, or make the layers \
             \"full_attention\"",
        ));
    }
    let size = |entry: &Entry| entry.size(super::MAX_POSITIONS);
    let of_swa = keys
        .either(SWA_WINDOW)
        .filter(|entry| forced || entry.is_truthy());
    let of_layers = keys.either("sliding_window").filter(|_| !switched_off);
    match (of_swa, of_layers) {
        (Some(a), Some(b)) if size(&a)? != size(&b)? => Err(a.error(format!(
            "{} contradicts `{}` = {}; keep one",
            a.value, b.path, b.value
        ))),
        (Some(entry), _) | (None, Some(entry)) => size(&entry),
        (None, None) if forced => Err(DFlashError::config(
            format!("dflash_config.{SWA_WINDOW}"),
            format!(
                "missing, but `{USE_SWA}` is true; add the window in tokens, the current one included"
            ),
        )),
        (None, None) => Err(DFlashError::config(
            "sliding_window",
            "missing, but `layer_types` has sliding layers; add the window in tokens, the current \
             one included",
        )),
    }
}
