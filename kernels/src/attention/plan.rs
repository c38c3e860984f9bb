//! How the work of block attention is cut.

/// At most this many splits of one context; the reduction kernel has room for no more.
pub(crate) const MAX_SPLITS: usize = 128;

/// What the cut depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Tiles of the longest sequence.
    pub tiles: usize,
    /// Thread blocks a split: sequences, kv heads and row tiles.
    pub units: usize,
    /// Thread blocks that the GPU holds at a time.
    pub slots: usize,
    pub multiprocessors: usize,
    /// Bytes of K and V in a tile.
    pub tile_bytes: usize,
    /// Query rows of a thread block.
    pub row_tile: usize,
}

impl Load {
    /// A load that is the same for any number of query rows, with `units` kv heads of sequences, and
    /// for contexts of about one length: it changes where the length doubles.
    pub fn whatever_the_rows(self, units: usize) -> Self {
        Self {
            tiles: self.tiles.next_power_of_two(),
            units,
            slots: 2 * self.multiprocessors,
            row_tile: 64,
            ..self
        }
    }
}

/// Tiles a split and splits of the longest sequence; shorter ones take fewer splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    pub chunk: usize,
    pub splits: usize,
}

impl Cut {
    fn into_splits(tiles: usize, splits: usize) -> Self {
        let chunk = tiles.div_ceil(splits).max(1);
        let splits = tiles.div_ceil(chunk).max(1);
        Self { chunk, splits }
    }
}

/// The cut with the least estimated time, or the one nearest to `wanted` splits.
pub(crate) fn cut(load: Load, wanted: Option<usize>) -> Cut {
    let most = load.tiles.clamp(1, MAX_SPLITS);
    if let Some(wanted) = wanted {
        return Cut::into_splits(load.tiles, wanted.clamp(1, most));
    }
    let mut best = Cut::into_splits(load.tiles, 1);
    let mut least = microseconds(load, best);
    for splits in 2..=most {
        let cut = Cut::into_splits(load.tiles, splits);
        let time = microseconds(load, cut);
        if time < least {
            (best, least) = (cut, time);
        }
    }
    best
}

/// Estimated time. The constants were fitted to an H200 (bf16, head dim 128, 1 to 32 rows a block, batch 1
/// to 32, contexts 1024 to 16384); only their ratios matter. The choice is within 15% of the best measured.
fn microseconds(load: Load, cut: Cut) -> f64 {
    /// Until a thread block's first tile is there.
    const START: f64 = 3.8;
    /// A tile of 32 KiB, and what each query row adds to it.
    const TILE: f64 = 1.3;
    const TILE_ROW: f64 = 0.0122;
    /// A tile's time grows by this when multiprocessors hold more than one thread block.
    const SHARED: f64 = 1.33;
    /// The reduction, and what each thread block adds to it.
    const REDUCTION: f64 = 0.5;
    const REDUCTION_BLOCK: f64 = 0.042;
    let blocks = load.units * cut.splits;
    let waves = blocks.div_ceil(load.slots) as f64;
    let shared = if blocks > load.multiprocessors {
        SHARED
    } else {
        1.0
    };
    let tile = (TILE + TILE_ROW * load.row_tile as f64) * load.tile_bytes as f64 / 32768.0;
    let reduction = match cut.splits {
        1 => 0.0,
        _ => REDUCTION + REDUCTION_BLOCK * blocks as f64,
    };
    waves * (START + tile * shared * cut.chunk as f64) + reduction
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(tiles: usize, units: usize) -> Load {
        Load {
            tiles,
            units,
            slots: 264,
            multiprocessors: 132,
            tile_bytes: 32768,
            row_tile: 64,
        }
    }

    #[test]
    fn the_choice_is_near_the_best_measured_one() {
        // Tiles, units; then splits and microseconds, of 64 query rows with head dim 128 on an H200.
        type Times = &'static [(usize, f64)];
        let measured: [(usize, usize, Times); 8] = [
            (
                16,
                8,
                &[
                    (1, 37.2),
                    (2, 21.7),
                    (4, 14.0),
                    (6, 12.4),
                    (8, 10.3),
                    (16, 11.4),
                ],
            ),
            (
                64,
                8,
                &[
                    (4, 39.1),
                    (8, 22.4),
                    (11, 19.7),
                    (16, 17.3),
                    (22, 20.8),
                    (32, 21.9),
                ],
            ),
            (
                256,
                8,
                &[
                    (8, 72.0),
                    (12, 51.9),
                    (16, 41.5),
                    (24, 44.1),
                    (32, 41.8),
                    (64, 56.7),
                ],
            ),
            (
                16,
                32,
                &[
                    (1, 37.6),
                    (2, 22.5),
                    (4, 16.4),
                    (6, 19.3),
                    (8, 18.3),
                    (16, 25.1),
                ],
            ),
            (
                16,
                64,
                &[
                    (1, 38.4),
                    (2, 24.5),
                    (4, 24.4),
                    (6, 32.2),
                    (8, 32.4),
                    (16, 46.8),
                ],
            ),
            (
                64,
                64,
                &[
                    (1, 141.8),
                    (2, 75.1),
                    (4, 62.2),
                    (6, 80.6),
                    (8, 71.4),
                    (16, 85.4),
                ],
            ),
            (
                16,
                128,
                &[(1, 38.4), (2, 39.6), (4, 47.3), (8, 60.5), (16, 89.3)],
            ),
            (64, 256, &[(1, 192.4), (2, 208.9), (4, 223.3), (8, 248.5)]),
        ];
        for (tiles, units, times) in measured {
            let Cut { splits, .. } = cut(load(tiles, units), None);
            let best = times.iter().map(|(_, time)| *time).fold(f64::MAX, f64::min);
            // A number that was not measured counts as the slower of its neighbours.
            let below = times.iter().rev().find(|(s, _)| *s <= splits).unwrap().1;
            let above = times.iter().find(|(s, _)| *s >= splits).unwrap().1;
            let taken = below.max(above);
            assert!(
                taken <= 1.15 * best,
                "{tiles} tiles, {units} units: {splits} splits, {taken}"
            );
        }
    }

    #[test]
    fn the_number_of_rows_need_not_matter() {
        let plain = Load {
            row_tile: 16,
            slots: 396,
            ..load(17, 8)
        };
        let verify = Load {
            row_tile: 128,
            slots: 132,
            ..load(18, 16)
        };
        let cut = |load: Load| cut(load.whatever_the_rows(8), None);
        assert_eq!(cut(plain), cut(verify));
        assert_eq!(cut(plain), cut(load(32, 8)));
    }

    #[test]
    fn a_full_chip_is_not_split() {
        assert_eq!(cut(load(16, 256), None).splits, 1);
    }

    #[test]
    fn one_long_sequence_is_spread_over_the_chip() {
        let cut = cut(load(256, 8), None);
        assert!(cut.splits >= 12, "{cut:?}");
    }

    #[test]
    fn every_tile_is_in_a_split_and_no_split_is_empty() {
        for tiles in 0..400 {
            for wanted in [None, Some(1), Some(7), Some(128), Some(100_000)] {
                let Cut { chunk, splits } = cut(load(tiles, 8), wanted);
                assert!((1..=MAX_SPLITS).contains(&splits));
                assert!(chunk * splits >= tiles);
                assert!(splits == 1 || chunk * (splits - 1) < tiles);
            }
        }
    }
}
