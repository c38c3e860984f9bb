//! `SequenceKv` against a model that cannot be wrong: one `Vec` of rows for each layer.
//!
//! Random interleavings of everything that can be done with it, on up to four contexts of which
//! some are copies of others; after every operation the contents of all of them are compared, bit
//! for bit.

#[path = "common/property.rs"]
#[allow(dead_code)] // each test binary uses a part
mod property;

use candle_core::{DType, Device, Tensor};
use dflash_plugin::kv::SequenceKv;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

/// Cases in a default run of this file.
const CASES: u32 = 1_500;
/// Contexts that are alive at once.
const MOST_CONTEXTS: usize = 4;

#[derive(Debug, Clone)]
enum Op {
    /// Rows to append.
    Append(usize),
    /// Length to keep, in 256ths of the current one; above 256 it is longer than the context.
    Truncate(usize),
    /// Length to set, in 256ths of the rows ever written; above 256 it must be refused.
    SetLen(usize),
    /// Length of the prefix to copy, in 256ths of the current one; above 256 it must be refused.
    Fork(usize),
    Drop,
    /// Rows of which one layer lacks its last: must be refused.
    AppendUneven(usize),
    /// Start and number of rows to read, in 256ths of the length.
    ReadRange(usize, usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0usize..=20).prop_map(Op::Append),
        // Across one capacity step, and across several.
        2 => (200usize..=300).prop_map(Op::Append),
        1 => (700usize..=1400).prop_map(Op::Append),
        3 => (0usize..=270).prop_map(Op::Truncate),
        4 => (0usize..=270).prop_map(Op::SetLen),
        3 => (0usize..=270).prop_map(Op::Fork),
        1 => Just(Op::Drop),
        1 => (1usize..=5).prop_map(Op::AppendUneven),
        2 => (0usize..=256, 0usize..=270).prop_map(|(start, rows)| Op::ReadRange(start, rows)),
    ]
}

#[derive(Debug, Clone)]
struct Shape {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    dtype: DType,
    /// Window and rollback of a bounded context.
    bound: Option<(usize, usize)>,
}

fn shape() -> impl Strategy<Value = Shape> {
    let dtype = prop_oneof![Just(DType::F32), Just(DType::BF16)];
    let bound = prop::option::of((0usize..=600, 0usize..=400));
    let sizes = (1usize..=3, 1usize..=3, 1usize..=2);
    (sizes, dtype, bound).prop_map(|((layers, kv_heads, half), dtype, bound)| Shape {
        layers,
        kv_heads,
        head_dim: 2 * half,
        dtype,
        bound,
    })
}

impl Shape {
    /// Rows that must be there after an append.
    fn keep(&self) -> usize {
        let keep = |(window, rollback): (usize, usize)| window + rollback.max(256);
        self.bound.map_or(usize::MAX, keep)
    }

    fn empty(&self) -> SequenceKv {
        let (layers, heads, dim) = (self.layers, self.kv_heads, self.head_dim);
        let kv = SequenceKv::with_shape(layers, heads, dim, self.dtype, &Device::Cpu).unwrap();
        match self.bound {
            Some((window, rollback)) => kv.bounded(window, rollback),
            None => kv,
        }
    }

    /// Element bits of row `row` (of all rows ever made) in K (0) or V (1) of a layer, head by head.
    fn row_bits(&self, row: usize, layer: usize, k_or_v: usize) -> Vec<u32> {
        (0..self.kv_heads * self.head_dim)
            .map(|i| {
                let mut x = (row * 64 + layer * 32 + k_or_v * 16 + i) as u64;
                x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                match self.dtype {
                    // Any pattern at all: NaNs with payloads, infinities, denormals.
                    DType::F32 => (x >> 32) as u32,
                    // A bf16 is the upper half of an f32; numbers that keep their bits on the way.
                    _ => ((x % 4096) as f32 * 16.0).to_bits() & 0xffff_0000,
                }
            })
            .collect()
    }

    /// `[kv_heads, rows, head_dim]` from rows of element bits.
    fn tensor(&self, rows: &[Vec<u32>]) -> Tensor {
        let mut values = Vec::with_capacity(rows.len() * self.kv_heads * self.head_dim);
        for head in 0..self.kv_heads {
            for row in rows {
                let part = &row[head * self.head_dim..(head + 1) * self.head_dim];
                values.extend(part.iter().map(|bits| f32::from_bits(*bits)));
            }
        }
        Tensor::from_vec(
            values,
            (self.kv_heads, rows.len(), self.head_dim),
            &Device::Cpu,
        )
        .unwrap()
        .to_dtype(self.dtype)
        .unwrap()
    }

    /// The first row of `tensor` that is not, bit for bit, that of `rows`.
    fn difference(&self, tensor: &Tensor, rows: &[Vec<u32>]) -> Option<usize> {
        let dims = (self.kv_heads, rows.len(), self.head_dim);
        if tensor.dims3().unwrap() != dims || tensor.dtype() != self.dtype {
            return Some(0);
        }
        let flat = tensor.to_dtype(DType::F32).unwrap().contiguous().unwrap();
        let flat: Vec<f32> = flat.flatten_all().unwrap().to_vec1().unwrap();
        let is_same = |row: &usize| {
            let expected = rows[*row].chunks(self.head_dim).enumerate();
            let mut heads = expected.map(|(head, bits)| {
                let found = &flat[(head * rows.len() + row) * self.head_dim..][..self.head_dim];
                found.iter().zip(bits).all(|(x, bits)| x.to_bits() == *bits)
            });
            heads.all(|same| same)
        };
        (0..rows.len()).find(|row| !is_same(row))
    }
}

/// What a context must hold.
#[derive(Debug, Clone)]
struct Model {
    /// For each layer K and V of all rows written and not forgotten since.
    layers: Vec<[Vec<Vec<u32>>; 2]>,
    len: usize,
    /// Rows before this position may be missing.
    droppable: usize,
}

impl Model {
    fn new(shape: &Shape) -> Self {
        Self {
            layers: vec![[Vec::new(), Vec::new()]; shape.layers],
            len: 0,
            droppable: 0,
        }
    }

    fn written(&self) -> usize {
        self.layers[0][0].len()
    }

    /// Forgets everything from `len` on.
    fn cut(&mut self, len: usize) {
        for rows in self.layers.iter_mut().flatten() {
            rows.truncate(len);
        }
        self.len = len;
    }
}

struct World {
    shape: Shape,
    contexts: Vec<(SequenceKv, Model)>,
    /// Rows made so far: every appended row is another one.
    made: usize,
}

impl World {
    fn apply(&mut self, pick: usize, op: &Op) -> Result<(), TestCaseError> {
        let pick = pick % self.contexts.len();
        let shape = self.shape.clone();
        let (first, alive) = (self.made, self.contexts.len());
        let (kv, model) = &mut self.contexts[pick];
        match *op {
            Op::Append(count) => {
                self.made += count;
                // An empty append writes nothing, so it forgets nothing behind the length either.
                if count > 0 {
                    model.cut(model.len);
                    model.len += count;
                    let old = model.len.saturating_sub(shape.keep());
                    model.droppable = model.droppable.max(old);
                }
                let mut tensors = Vec::new();
                for (layer, model) in model.layers.iter_mut().enumerate() {
                    let [k, v] = [0, 1].map(|side| {
                        let rows: Vec<_> = (first..first + count)
                            .map(|row| shape.row_bits(row, layer, side))
                            .collect();
                        let tensor = shape.tensor(&rows);
                        model[side].extend(rows);
                        tensor
                    });
                    tensors.push((k, v));
                }
                kv.append(tensors).unwrap();
            }
            Op::Truncate(part) => {
                let len = part_of(part, kv.len());
                kv.truncate(len);
                model.cut(len.min(model.len));
            }
            Op::SetLen(part) => {
                let len = part_of(part, model.written());
                let there = kv.start()..=model.written();
                let result = kv.set_len(len);
                prop_assert_eq!(result.is_ok(), there.contains(&len));
                if result.is_ok() {
                    model.len = len;
                }
            }
            Op::Fork(part) => {
                let len = part_of(part, kv.len());
                let copy = kv.deep_clone_prefix(len);
                prop_assert_eq!(copy.is_ok(), len <= model.len);
                if let Ok(copy) = copy {
                    let mut copied = model.clone();
                    copied.cut(len);
                    let old = len.saturating_sub(shape.keep());
                    copied.droppable = copied.droppable.max(old);
                    self.contexts.push((copy, copied));
                    if self.contexts.len() > MOST_CONTEXTS {
                        self.contexts.remove(0);
                    }
                }
            }
            Op::Drop if alive > 1 => {
                self.contexts.remove(pick);
            }
            Op::Drop => (),
            Op::AppendUneven(count) => {
                let rows = vec![vec![0; shape.kv_heads * shape.head_dim]; count];
                let whole = shape.tensor(&rows);
                let short = shape.tensor(&rows[1..]);
                let mut tensors = vec![(whole.clone(), whole); shape.layers];
                tensors[shape.layers - 1].1 = short;
                prop_assert!(kv.append(tensors).is_err());
            }
            Op::ReadRange(start, rows) => {
                let start = part_of(start, kv.len());
                let rows = part_of(rows, kv.len() - start);
                let read = kv.layer_range(shape.layers - 1, start, rows);
                let is_there = start >= kv.start() && start + rows <= model.len;
                prop_assert_eq!(read.is_ok(), is_there);
                if let Ok((_, v)) = read {
                    let expected = &model.layers[shape.layers - 1][1][start..start + rows];
                    prop_assert_eq!(shape.difference(&v, expected), None);
                }
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), TestCaseError> {
        for (i, (kv, model)) in self.contexts.iter().enumerate() {
            prop_assert_eq!(kv.len(), model.len);
            prop_assert_eq!(kv.is_empty(), model.len == 0);
            prop_assert_eq!(kv.num_layers(), self.shape.layers);
            let row_bytes = 2
                * self.shape.layers
                * self.shape.kv_heads
                * self.shape.head_dim
                * self.shape.dtype.size_in_bytes();
            prop_assert!(kv.start() <= model.droppable.min(model.len));
            prop_assert!(kv.bytes() >= (model.written() - kv.start()) * row_bytes);
            if self.shape.bound.is_some() {
                let most = (self.shape.keep() + 256).next_multiple_of(256);
                prop_assert!(kv.bytes() <= most * row_bytes);
            }
            for (layer, expected) in model.layers.iter().enumerate() {
                let (k, v) = kv.layer(layer).unwrap();
                for (side, tensor) in [k, v].iter().enumerate() {
                    let differs = self
                        .shape
                        .difference(tensor, &expected[side][kv.start()..model.len]);
                    prop_assert!(
                        differs.is_none(),
                        "context {i}, layer {layer}, side {side}: row {differs:?} differs"
                    );
                }
            }
        }
        Ok(())
    }
}

/// `part` 256ths of `whole`; one more than `whole` above 256.
fn part_of(part: usize, whole: usize) -> usize {
    match part {
        0..=256 => whole * part / 256,
        _ => whole + part - 256,
    }
}

#[test]
fn a_context_holds_what_was_written_to_it_and_nothing_of_its_copies() {
    let ops = prop::collection::vec((0usize..MOST_CONTEXTS, op()), 1..40);
    let result = property::runner(CASES).run(&(shape(), ops), |(shape, ops)| {
        let kv = shape.empty();
        let model = Model::new(&shape);
        let mut world = World {
            shape,
            contexts: vec![(kv, model)],
            made: 0,
        };
        for (pick, op) in &ops {
            world.apply(*pick, op)?;
            world.check()?;
        }
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
