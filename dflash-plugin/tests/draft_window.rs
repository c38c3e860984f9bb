//! Draft models that see a window of their context: what they compute, and what they keep.

mod common;
mod reference;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use common::{assert_close, fixtures, load, materialize, pooled_block, worst_row_error};
use dflash_plugin::config::DraftConfig;
use dflash_plugin::draft::DraftModel;
use dflash_plugin::kv::SequenceKv;
use reference::{rows_of, Reference};

const CPU: Device = Device::Cpu;
const BLOCK: usize = 8;
/// Of the sliding layers of the dialects.
const SLIDING: usize = 12;
/// Positions of a block of a pool.
const POOL_BLOCK: usize = 8;

fn config(dialect: &str, window: usize) -> DraftConfig {
    let file = fixtures()
        .join("dialects")
        .join(dialect)
        .join("config.json");
    let text = std::fs::read_to_string(file).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["max_position_embeddings"] = 4096.into();
    let mut config = DraftConfig::from_json(&json.to_string()).unwrap();
    if window > 0 {
        config.bound_context(window);
    }
    config
}

fn weights(dialect: &str) -> std::collections::HashMap<String, Tensor> {
    load(
        &fixtures()
            .join("dialects")
            .join(dialect)
            .join("model.safetensors"),
    )
}

/// A dialect's model with a window (0: none) over more positions than the checkpoint has.
fn model(dialect: &str, window: usize) -> DraftModel {
    let config = config(dialect, window);
    let vb = VarBuilder::from_tensors(weights(dialect), DType::F32, &CPU);
    DraftModel::new(&config, config.num_taps(), vb).unwrap()
}

fn taps(model: &DraftModel, rows: usize) -> Tensor {
    Tensor::randn(0f32, 1.0, (rows, model.taps_width()), &CPU).unwrap()
}

fn block(model: &DraftModel) -> Tensor {
    Tensor::randn(0f32, 1.0, (1, BLOCK, model.hidden_size()), &CPU).unwrap()
}

/// The context of these taps, made of chunks.
fn context(model: &DraftModel, taps: &Tensor, chunks: &[usize]) -> SequenceKv {
    let mut kv = model.new_kv().unwrap();
    for rows in chunks {
        let new = taps.narrow(0, kv.len(), *rows).unwrap();
        materialize(model, &mut kv, &new);
    }
    assert_eq!(kv.len(), taps.dim(0).unwrap());
    kv
}

fn output(model: &DraftModel, kv: &SequenceKv, block: &Tensor) -> Tensor {
    model
        .forward_block(block, &[kv])
        .unwrap()
        .squeeze(0)
        .unwrap()
}

/// The same with the context in a pool.
fn pooled_output(model: &DraftModel, taps: &Tensor, block: &Tensor) -> Tensor {
    pooled_block(model, taps, block, POOL_BLOCK)
        .squeeze(0)
        .unwrap()
}

/// What the reference computes when a context position older than the last `window` is masked, and
/// what the layer's own kind masks.
fn expected(dialect: &str, window: usize, taps: &Tensor, block: &Tensor) -> Tensor {
    let config = config(dialect, 0);
    let (layers, n) = (config.layers.clone(), taps.dim(0).unwrap());
    let reference = Reference::new(config, &weights(dialect), 10_000.0);
    let sees = |layer: usize, query: usize, key: usize| {
        let own = layers[layer];
        let in_window = own.window.is_none_or(|size| query.abs_diff(key) < size);
        let recent = key >= n || key + window >= n;
        recent && in_window && (!own.causal || key <= query)
    };
    let block = rows_of(&block.squeeze(0).unwrap());
    let rows = reference.forward(&rows_of(taps), &block, &sees);
    let width = rows[0].len();
    Tensor::from_vec(rows.concat(), (BLOCK, width), &CPU).unwrap()
}

#[test]
fn a_window_computes_what_a_mask_over_all_older_positions_does() {
    for dialect in ["v1_top_level", "mixed_sliding", "all_sliding_not_causal"] {
        assert_eq!(
            config(dialect, 0).layers[0].window.unwrap_or(SLIDING),
            SLIDING
        );
        // Smaller than the block and than the sliding layers' 12, around them, and larger.
        for window in [1, 3, 11, 12, 40, 150] {
            let bounded = model(dialect, window);
            let (taps, block) = (taps(&bounded, 700), block(&bounded));
            let kv = context(&bounded, &taps, &[400, 290, 10]);
            let found = output(&bounded, &kv, &block);
            let what = format!("{dialect}, window {window}");
            assert_close(&what, &found, &expected(dialect, window, &taps, &block));
        }
    }
}

/// Contexts that end just before, at and behind the length of the layers' own window, and far behind.
#[test]
fn sliding_layers_compute_what_a_mask_does_around_their_window() {
    for dialect in ["mixed_sliding", "all_sliding_not_causal"] {
        for rows in [
            SLIDING - 1,
            SLIDING,
            SLIDING + 1,
            SLIDING + BLOCK,
            4 * SLIDING,
        ] {
            let model = model(dialect, 0);
            let (taps, block) = (taps(&model, rows), block(&model));
            let want = expected(dialect, rows, &taps, &block);
            let what = format!("{dialect}, {rows} rows");
            let kv = context(&model, &taps, &[rows]);
            assert_close(&what, &output(&model, &kv, &block), &want);
            let found = pooled_output(&model, &taps, &block);
            assert_close(&format!("{what}, in a pool"), &found, &want);
        }
    }
}

#[test]
fn a_window_is_noticed() {
    let (bounded, whole) = (model("v1_top_level", 40), model("v1_top_level", 0));
    let (taps, block) = (taps(&whole, 100), block(&whole));
    let outputs = [&bounded, &whole].map(|m| output(m, &context(m, &taps, &[100]), &block));
    assert!(worst_row_error(&outputs[0], &outputs[1]) > 1e-3);
}

#[test]
fn a_window_larger_than_the_context_changes_no_bit() {
    for (dialect, rows) in [("v1_top_level", 300), ("mixed_sliding", 300)] {
        let whole = model(dialect, 0);
        let (taps, block) = (taps(&whole, rows), block(&whole));
        let want = output(&whole, &context(&whole, &taps, &[rows - 7, 7]), &block);
        for window in [rows, rows + 1, 100_000, usize::MAX] {
            let bounded = model(dialect, window);
            let kv = context(&bounded, &taps, &[rows - 7, 7]);
            let found = output(&bounded, &kv, &block);
            assert_eq!(worst_row_error(&found, &want), 0.0, "{dialect}, {window}");
        }
    }
}

/// Rows that a window keeps, as `SequenceKv::bounded` says.
fn most_rows(window: usize) -> usize {
    (window + 256 + 256).next_multiple_of(256)
}

#[test]
fn memory_is_bounded_and_constant_over_ten_windows() {
    let window = 64;
    let bounded = model("v1_top_level", window);
    let row = 2 * 3 * 2 * 16 * 4; // K and V, layers, heads, head_dim, f32
    let rows = taps(&bounded, 16);
    let mut kv = bounded.new_kv().unwrap();
    materialize(&bounded, &mut kv, &taps(&bounded, 2000));
    assert_eq!(kv.len(), 2000);
    assert!(
        kv.bytes() <= most_rows(window) * row,
        "{} bytes",
        kv.bytes()
    );
    let mut sizes = Vec::new();
    while kv.len() < 2000 + 10 * window + 1000 {
        materialize(&bounded, &mut kv, &rows);
        kv.set_len(kv.len() - 11).unwrap(); // a verify pass of 16 rows that keeps 5
        sizes.push(kv.bytes());
        assert!(kv.len() - kv.start() >= window + 11);
    }
    sizes.dedup();
    assert!(sizes.len() <= 2, "{sizes:?}");
    assert!(sizes.iter().all(|bytes| *bytes <= most_rows(window) * row));
    let whole = context(&model("v1_top_level", 0), &taps(&bounded, 2000), &[2000]);
    assert!(whole.bytes() > 2 * kv.bytes());
}

#[test]
fn a_draft_model_of_sliding_layers_alone_keeps_its_window() {
    let (sliding, mixed) = (
        model("all_sliding_not_causal", 0),
        model("mixed_sliding", 0),
    );
    let kv = context(&sliding, &taps(&sliding, 2000), &[1000, 1000]);
    let row = 2 * 2 * 2 * 16 * 4;
    assert!(
        kv.bytes() <= most_rows(SLIDING) * row,
        "{} bytes",
        kv.bytes()
    );
    // A full layer needs the whole context.
    let kv = context(&mixed, &taps(&mixed, 2000), &[1000, 1000]);
    assert_eq!(kv.start(), 0);
}

/// Verify passes of 16 rows that keep 1 to 16, beside a context that keeps everything.
#[test]
fn rollback_is_exact_wherever_rows_are_dropped() {
    let window = 20;
    let (bounded, whole) = (model("v1_top_level", window), model("v1_top_level", 0));
    let block = block(&bounded);
    let mut kv = context(&bounded, &taps(&bounded, 30), &[30]);
    let mut kept = whole.new_kv().unwrap(); // never drops
    kept.append((0..3).map(|i| kv.layer(i).unwrap()).collect())
        .unwrap();
    let mut drops = 0;
    for step in 0..120 {
        let start = kv.start();
        let rows = taps(&bounded, 16);
        for kv in [&mut kv, &mut kept] {
            materialize(&bounded, kv, &rows);
        }
        drops += usize::from(kv.start() > start);
        let base = kv.len() - 16;
        for kv in [&mut kv, &mut kept] {
            match step % 5 {
                0 => kv.truncate(base), // a pass that failed
                _ => kv.set_len(base + 1 + step % 16).unwrap(),
            }
        }
        let found = output(&bounded, &kv, &block);
        let want = output(&bounded, &kept, &block);
        assert_eq!(worst_row_error(&found, &want), 0.0, "step {step}");
        let copy = kv.deep_clone_prefix(kv.len()).unwrap();
        let copied = output(&bounded, &copy, &block);
        assert_eq!(worst_row_error(&copied, &want), 0.0, "copy at step {step}");
    }
    assert!(drops > 0 && kept.start() == 0, "{drops} drops");
}

/// A hit within what is kept is exact; before it, a copy sees the rows that there are, and fills up.
#[test]
fn a_copy_of_a_prefix_is_exact_or_fills_up_again() {
    let window = 20;
    let bounded = model("v1_top_level", window);
    let (taps, block) = (taps(&bounded, 1500), block(&bounded));
    let kv = context(&bounded, &taps, &[1500]);
    assert!(kv.start() > 0);
    let cold = |len: usize| context(&bounded, &taps.narrow(0, 0, len).unwrap(), &[len]);
    for len in [1500, 1400, kv.start() + window] {
        let copy = kv.deep_clone_prefix(len).unwrap();
        let (found, want) = (
            output(&bounded, &copy, &block),
            output(&bounded, &cold(len), &block),
        );
        assert!(worst_row_error(&found, &want) < 1e-5, "copy of {len}");
    }
    let mut copy = kv.deep_clone_prefix(700).unwrap();
    assert_eq!((copy.len(), copy.start()), (700, 700));
    assert!(output(&bounded, &copy, &block)
        .sum_all()
        .unwrap()
        .to_scalar::<f32>()
        .unwrap()
        .is_finite());
    materialize(&bounded, &mut copy, &taps.narrow(0, 700, window).unwrap());
    let (found, want) = (
        output(&bounded, &copy, &block),
        output(&bounded, &cold(720), &block),
    );
    assert!(worst_row_error(&found, &want) < 1e-5);
}

/// In a pool the window is rounded up to whole blocks of the cache.
#[test]
fn in_a_pool_the_window_begins_with_a_block() {
    let (rows, size) = (100, POOL_BLOCK);
    for dialect in ["v1_top_level", "mixed_sliding"] {
        for window in [1, 30, 32, 95, 100, 500] {
            let bounded = model(dialect, window);
            let (taps, block) = (taps(&bounded, rows), block(&bounded));
            let found = pooled_output(&bounded, &taps, &block);
            let seen = rows - rows.saturating_sub(window) / size * size;
            let want = expected(dialect, seen, &taps, &block);
            let what = format!("{dialect}, window {window}, {seen} seen");
            assert_close(&what, &found, &want);
        }
    }
}

#[test]
fn rows_that_were_dropped_are_refused_with_the_oldest_one_that_is_there() {
    let bounded = model("v1_top_level", 20);
    let mut kv = context(&bounded, &taps(&bounded, 1000), &[1000]);
    let start = kv.start();
    assert!(start > 0);
    for error in [
        kv.set_len(start - 1).unwrap_err(),
        kv.layer_range(0, start - 1, 2).unwrap_err(),
    ] {
        assert!(
            error.to_string().contains(&format!("{start}, found")),
            "{error}"
        );
    }
    assert_eq!(kv.len(), 1000);
    kv.truncate(10);
    assert_eq!((kv.len(), kv.start()), (10, 10));
    materialize(&bounded, &mut kv, &taps(&bounded, 3));
    assert_eq!((kv.len(), kv.start()), (13, 10));
}
