//! The growing K/V of one sequence.

use candle_core::{DType, Device, Tensor};
use dflash_plugin::kv::SequenceKv;

const CPU: Device = Device::Cpu;
const LAYERS: usize = 2;

fn empty() -> SequenceKv {
    SequenceKv::with_shape(LAYERS, 3, 4, DType::F32, &CPU).unwrap()
}

fn rows(count: usize) -> Vec<(Tensor, Tensor)> {
    let random = || Tensor::randn(0f32, 1.0, (3, count, 4), &CPU).unwrap();
    (0..LAYERS).map(|_| (random(), random())).collect()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    let flat = tensor.contiguous().unwrap().flatten_all().unwrap();
    flat.to_vec1().unwrap()
}

/// K of layer 1 as values.
fn k(kv: &SequenceKv) -> Vec<f32> {
    values(&kv.layer(1).unwrap().0)
}

fn joined(parts: &[&Tensor]) -> Vec<f32> {
    values(&Tensor::cat(parts, 1).unwrap())
}

#[test]
fn appended_rows_come_back_in_order_across_growth() {
    let mut kv = empty();
    let parts: Vec<_> = [1, 7, 255, 1, 300, 16].map(rows).into();
    for part in &parts {
        kv.append(part.clone()).unwrap();
    }
    assert_eq!(kv.len(), 580);
    for layer in 0..LAYERS {
        let (k, v) = kv.layer(layer).unwrap();
        assert_eq!(k.dims(), [3, 580, 4]);
        let ks: Vec<&Tensor> = parts.iter().map(|part| &part[layer].0).collect();
        let vs: Vec<&Tensor> = parts.iter().map(|part| &part[layer].1).collect();
        assert_eq!(values(&k), joined(&ks));
        assert_eq!(values(&v), joined(&vs));
    }
}

#[test]
fn rows_after_a_truncation_replace_the_dropped_ones() {
    let mut kv = empty();
    let (first, second) = (rows(10), rows(3));
    kv.append(first.clone()).unwrap();
    kv.truncate(4);
    assert_eq!(kv.len(), 4);
    kv.append(second.clone()).unwrap();
    let kept = first[1].0.narrow(1, 0, 4).unwrap();
    assert_eq!(k(&kv), joined(&[&kept, &second[1].0]));
    kv.truncate(100);
    assert_eq!(kv.len(), 7, "a longer length keeps all");
}

#[test]
fn a_copied_prefix_and_its_origin_do_not_see_each_others_writes() {
    let mut kv = empty();
    let first = rows(10);
    kv.append(first.clone()).unwrap();
    let mut copy = kv.deep_clone_prefix(6).unwrap();
    assert_eq!(copy.len(), 6);
    let prefix = values(&first[1].0.narrow(1, 0, 6).unwrap());
    assert_eq!(k(&copy), prefix);
    kv.truncate(0);
    kv.append(rows(10)).unwrap();
    assert_eq!(k(&copy), prefix, "the copy kept its rows");
    let before = k(&kv);
    copy.truncate(2);
    copy.append(rows(8)).unwrap();
    assert_eq!(k(&kv), before, "the origin kept its rows");
}

#[test]
fn a_prefix_longer_than_the_context_is_refused() {
    let mut kv = empty();
    kv.append(rows(3)).unwrap();
    let error = kv.deep_clone_prefix(4).unwrap_err().to_string();
    assert!(error.contains("expected at most 3, found 4"), "{error}");
    assert!(kv.deep_clone_prefix(0).unwrap().is_empty());
}

#[test]
fn memory_grows_in_steps_and_stays_after_a_truncation() {
    let mut kv = empty();
    assert_eq!(kv.bytes(), 0);
    let bytes_of = |positions: usize| LAYERS * 2 * 3 * 4 * 4 * positions;
    kv.append(rows(1)).unwrap();
    assert_eq!(kv.bytes(), bytes_of(256));
    kv.append(rows(255)).unwrap();
    assert_eq!(kv.bytes(), bytes_of(256));
    kv.append(rows(1)).unwrap();
    assert_eq!(kv.bytes(), bytes_of(512));
    kv.append(rows(3744)).unwrap();
    assert_eq!(kv.bytes(), bytes_of(4096)); // 4001 positions
    kv.append(rows(96)).unwrap();
    assert_eq!(kv.bytes(), bytes_of(5120)); // a quarter more, not one step
    kv.truncate(0);
    assert_eq!(kv.bytes(), bytes_of(5120));
}

#[test]
fn a_refused_append_changes_nothing() {
    let mut kv = empty();
    kv.append(rows(5)).unwrap();
    let before = k(&kv);
    let mut short = rows(2);
    short.pop();
    let error = kv.append(short).unwrap_err().to_string();
    assert!(error.contains("expected 2, found 1"), "{error}");
    let mut uneven = rows(2);
    uneven[1].1 = rows(3).remove(0).1;
    let error = kv.append(uneven).unwrap_err().to_string();
    assert!(error.contains("V appended to draft layer 1"), "{error}");
    assert!(
        error.contains("[3, 2, 4]") && error.contains("[3, 3, 4]"),
        "{error}"
    );
    let halves = rows(2)
        .into_iter()
        .map(|(k, v)| (k.to_dtype(DType::F16).unwrap(), v))
        .collect();
    let error = kv.append(halves).unwrap_err().to_string();
    assert!(error.contains("F32") && error.contains("F16"), "{error}");
    assert_eq!((kv.len(), k(&kv)), (5, before));
}

#[test]
fn reading_outside_of_the_context_is_refused() {
    let mut kv = empty();
    kv.append(rows(5)).unwrap();
    let layer = kv.layer(2).unwrap_err().to_string();
    assert!(layer.contains("expected below 2, found 2"), "{layer}");
    let range = kv.layer_range(0, 3, 3).unwrap_err().to_string();
    assert!(range.contains("expected at most 5, found 6"), "{range}");
    assert_eq!(kv.layer_range(0, 3, 2).unwrap().0.dims(), [3, 2, 4]);
}

#[test]
fn the_length_can_grow_over_rows_that_were_written_before() {
    let mut kv = empty();
    let first = rows(8);
    kv.append(first.clone()).unwrap();
    kv.set_len(3).unwrap();
    assert_eq!(kv.len(), 3);
    kv.set_len(6).unwrap();
    assert_eq!(k(&kv), values(&first[1].0.narrow(1, 0, 6).unwrap()));
    kv.set_len(4).unwrap();
    let second = rows(2);
    kv.append(second.clone()).unwrap();
    let kept = first[1].0.narrow(1, 0, 4).unwrap();
    assert_eq!(k(&kv), joined(&[&kept, &second[1].0]));
    let error = kv.set_len(7).unwrap_err().to_string();
    assert!(error.contains("6 written positions, found 7"), "{error}");
}
