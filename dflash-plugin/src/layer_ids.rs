//! The rule for target layers when a checkpoint does not list them.

use crate::error::{DFlashError, Result};

/// The target layers that are tapped when the checkpoint has no `target_layer_ids`.
///
/// `n_target` and `n_draft` are the numbers of decoder layers of target and draft model. The ids are
/// 0-based and name the layer whose *output* is tapped. They are spread evenly over `1..=n_target - 3`;
/// halves are rounded to the even neighbour, as Python's `round` does (published draft models were
/// trained with that rule: for 30 layers and 5 taps the fourth is 20, not 21). One draft layer takes
/// the middle, `n_target / 2`.
///
/// Source: `build_target_layer_ids` of z-lab/dflash. As there, ids repeat when the target has fewer
/// layers than taps.
///
/// # Errors
/// Either number is 0, or `n_target` is below 4 and more than one id is wanted.
pub fn build_target_layer_ids(n_target: usize, n_draft: usize) -> Result<Vec<usize>> {
    if n_target == 0 {
        return Err(DFlashError::config(
            "num_target_layers",
            "expected at least 1 layer, found 0",
        ));
    }
    if n_draft == 0 {
        return Err(DFlashError::config(
            "num_hidden_layers",
            "expected at least 1 layer, found 0",
        ));
    }
    if n_draft == 1 {
        return Ok(vec![n_target / 2]);
    }
    if n_target < 4 {
        return Err(DFlashError::config(
            "target_layer_ids",
            format!(
                "the default rule needs a target of at least 4 layers, found {n_target}; \
                 list the layers in `dflash_config.target_layer_ids`"
            ),
        ));
    }
    let span = (n_target - 3) - 1;
    let steps = n_draft - 1;
    Ok((0..n_draft)
        // The start is inside the rounding, as in the reference: it decides which neighbour is even.
        .map(|i| divide_ties_to_even(steps + i * span, steps))
        .collect())
}

/// `numerator / denominator`, rounded to the nearest integer, halves to the even one.
///
/// In integers, while the reference uses floats: halves are exact there too, and no other fraction of
/// such small numbers rounds to a half (compared for all targets below 400 layers).
fn divide_ties_to_even(numerator: usize, denominator: usize) -> usize {
    let (floor, rest) = (numerator / denominator, numerator % denominator);
    match (2 * rest).cmp(&denominator) {
        std::cmp::Ordering::Less => floor,
        std::cmp::Ordering::Greater => floor + 1,
        std::cmp::Ordering::Equal => floor + floor % 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(n_target: usize, n_draft: usize) -> Vec<usize> {
        build_target_layer_ids(n_target, n_draft).unwrap()
    }

    #[test]
    fn ids_are_spread_evenly_from_layer_1_to_the_third_last() {
        assert_eq!(ids(36, 5), [1, 9, 17, 25, 33]);
        assert_eq!(ids(61, 6), [1, 12, 24, 35, 47, 58]);
        assert_eq!(ids(12, 2), [1, 9]);
    }

    #[test]
    fn halves_go_to_the_even_neighbour() {
        assert_eq!(ids(30, 5), [1, 8, 14, 20, 27]);
        assert_eq!(ids(27, 5), [1, 7, 12, 18, 24]);
        assert_eq!(ids(5, 3), [1, 2, 2]);
    }

    #[test]
    fn one_draft_layer_taps_the_middle() {
        assert_eq!(ids(36, 1), [18]);
        assert_eq!(ids(27, 1), [13]);
        assert_eq!(ids(1, 1), [0]);
    }

    #[test]
    fn the_smallest_target_repeats_its_only_candidate() {
        assert_eq!(ids(4, 3), [1, 1, 1]);
    }

    #[test]
    fn a_target_of_three_layers_is_refused_with_the_key_to_set() {
        let error = build_target_layer_ids(3, 2).unwrap_err().to_string();
        assert!(error.contains("at least 4 layers, found 3"), "{error}");
        assert!(error.contains("dflash_config.target_layer_ids"), "{error}");
    }

    #[test]
    fn zero_layers_are_refused() {
        let target = build_target_layer_ids(0, 5).unwrap_err().to_string();
        assert!(target.contains("num_target_layers"), "{target}");
        let draft = build_target_layer_ids(36, 0).unwrap_err().to_string();
        assert!(draft.contains("num_hidden_layers"), "{draft}");
    }
}
