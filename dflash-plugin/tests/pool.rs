//! Drafting through the worker: what a block is made of, and sequences side by side, in buffers of their
//! own and in the blocks of a pool.

mod common;

use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};
use common::fixtures;
use dflash_plugin::checkpoint::Checkpoint;
use dflash_plugin::draft::DraftModel;
use dflash_plugin::kv::SequenceKv;
use dflash_plugin::pool::{DraftPool, PooledContexts};
use dflash_plugin::worker::{DFlashWorker, DraftJob, TargetHead};

const CPU: Device = Device::Cpu;
const VOCAB: usize = 160;
const MASK: u32 = 150;
/// Rows of a block of drafts.
const ROWS: usize = 8;
/// Positions of a block of the pool.
const SIZE: usize = 8;
const BLOCKS: usize = 16;
/// Contexts of a batch, and the blocks of each. The longest has block 0, with which shorter tables are
/// filled up.
const LENS: [usize; 4] = [5, 40, 0, 16];
const TABLES: [&[usize]; 4] = [&[9], &[0, 7, 3, 12, 1], &[], &[5, 14]];

fn model(dialect: &str) -> DraftModel {
    let checkpoint = Checkpoint::open(&fixtures().join("dialects").join(dialect)).unwrap();
    checkpoint.load(DType::F32, &CPU).unwrap()
}

fn worker(dialect: &str) -> DFlashWorker {
    DFlashWorker::new(model(dialect), MASK, ROWS).unwrap()
}

fn random(shape: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1.0, shape, &CPU).unwrap()
}

/// The target's embedding and head, which notes what it is asked for.
struct Ends {
    embedding: Tensor,
    head: Tensor,
    embedded: Mutex<Vec<u32>>,
}

impl Ends {
    fn new(hidden: usize) -> Self {
        Self {
            embedding: random(&[VOCAB, hidden]),
            head: random(&[VOCAB, hidden]),
            embedded: Mutex::default(),
        }
    }
}

impl TargetHead for Ends {
    fn embed(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        *self.embedded.lock().unwrap() = ids.to_vec1()?;
        self.embedding.index_select(ids, 0)
    }

    fn logits(&self, hidden: &Tensor) -> candle_core::Result<Tensor> {
        hidden.matmul(&self.head.t()?)
    }
}

/// Chooses the mask token always.
struct MasksOnly(Ends);

impl TargetHead for MasksOnly {
    fn embed(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        self.0.embed(ids)
    }

    fn logits(&self, hidden: &Tensor) -> candle_core::Result<Tensor> {
        let rows = hidden.dim(0)?;
        let of_row = (0..VOCAB).map(|id| f32::from(u8::from(id as u32 == MASK)));
        Tensor::from_iter(of_row, &CPU)?.broadcast_as((rows, VOCAB))
    }
}

fn drafts(found: Tensor) -> Vec<Vec<u32>> {
    found.to_vec2().unwrap()
}

/// Random contexts of [`LENS`] rows: taps, and K/V in buffers of their own.
fn contexts(worker: &DFlashWorker, width: usize) -> Vec<(Tensor, SequenceKv)> {
    let context = |len: usize| {
        let mut kv = worker.new_kv().unwrap();
        let taps = random(&[len.max(1), width]);
        if len > 0 {
            worker.materialize(&mut kv, &taps).unwrap();
        }
        (taps, kv)
    };
    LENS.map(context).into()
}

fn slots(table: &[usize], positions: impl Iterator<Item = usize>) -> Vec<usize> {
    let slot = |position: usize| table[position / SIZE] * SIZE + position % SIZE;
    positions.map(slot).collect()
}

/// All rows of a pool, `[layers][K and V]`, with the slots as the last dimension.
fn rows_of(pool: &DraftPool) -> Vec<[Vec<Vec<f32>>; 2]> {
    let by_slot = |t: &Tensor, dims: &[usize]| {
        let t = t.permute(dims).unwrap().contiguous().unwrap();
        t.reshape((BLOCKS * SIZE, ())).unwrap().to_vec2().unwrap()
    };
    let layers = pool.layers().iter();
    // [blocks, kv_heads, head_dim / x, size, x] and [blocks, kv_heads, head_dim, size]
    layers
        .map(|(k, v)| [by_slot(k, &[0, 3, 1, 2, 4]), by_slot(v, &[0, 3, 1, 2])])
        .collect()
}

#[test]
fn the_block_is_the_anchor_and_masks_and_the_mask_may_be_drafted_and_be_the_anchor() {
    let worker = worker("v1_top_level");
    let ends = MasksOnly(Ends::new(64));
    let kv = worker.new_kv().unwrap();
    for (anchor, rows) in [(11, 2), (11, ROWS), (MASK, ROWS)] {
        let jobs = [DraftJob { anchor, kv: &kv }];
        let found = worker.draft(&ends, &jobs, rows).unwrap();
        assert_eq!(drafts(found), [vec![MASK; rows - 1]]);
        let mut block = vec![MASK; rows];
        block[0] = anchor;
        assert_eq!(*ends.0.embedded.lock().unwrap(), block);
    }
}

#[test]
fn sequences_of_unequal_length_draft_what_each_drafts_alone_in_buffers_and_in_a_pool() {
    for dialect in ["v1_top_level", "mixed_sliding", "bias_yarn"] {
        let (worker, width) = (worker(dialect), model(dialect).taps_width());
        let ends = Ends::new(64);
        let contexts = contexts(&worker, width);
        let anchors = [3, 77, MASK, 9];
        let jobs: Vec<DraftJob> = (contexts.iter().zip(anchors))
            .map(|((_, kv), anchor)| DraftJob { anchor, kv })
            .collect();
        let together = drafts(worker.draft(&ends, &jobs, ROWS).unwrap());

        let pool = worker.new_pool(BLOCKS, SIZE).unwrap();
        for ((taps, _), (len, table)) in contexts.iter().zip(LENS.into_iter().zip(TABLES)) {
            if len > 0 {
                let positions: Vec<usize> = (0..len).collect();
                worker
                    .materialize_slots(&pool, &positions, &slots(table, 0..len), taps)
                    .unwrap();
            }
        }
        let pooled = |of: &[usize]| {
            let contexts = PooledContexts {
                pool: &pool,
                tables: of.iter().map(|i| TABLES[*i].to_vec()).collect(),
                lens: of.iter().map(|i| LENS[*i]).collect(),
            };
            let anchors: Vec<u32> = of.iter().map(|i| anchors[*i]).collect();
            drafts(
                worker
                    .draft_pooled(&ends, &anchors, &contexts, ROWS)
                    .unwrap(),
            )
        };
        assert_eq!(
            pooled(&[0, 1, 2, 3]),
            together,
            "{dialect}: pool and buffers"
        );
        for i in 0..LENS.len() {
            let alone = drafts(worker.draft(&ends, &jobs[i..=i], ROWS).unwrap());
            assert_eq!(together[i], alone[0], "{dialect}: context of {}", LENS[i]);
            assert_eq!(pooled(&[i])[0], alone[0], "{dialect}: in the pool alone");
        }
    }
}

#[test]
fn rows_go_to_the_slots_that_are_named_and_to_no_others() {
    let (worker, width) = (worker("mixed_sliding"), model("mixed_sliding").taps_width());
    let pool = worker.new_pool(BLOCKS, SIZE).unwrap();
    // Of a neighbour, with which the first block is shared.
    let own = slots(&[7, 2], 0..2 * SIZE);
    let positions: Vec<usize> = (0..2 * SIZE).collect();
    worker
        .materialize_slots(&pool, &positions, &own, &random(&[2 * SIZE, width]))
        .unwrap();
    let before = rows_of(&pool);
    // A verify pass from position 12 on, over the border of blocks 4 and 0.
    let written = slots(&[7, 4, 0], 12..12 + ROWS);
    let positions: Vec<usize> = (12..12 + ROWS).collect();
    worker
        .materialize_slots(&pool, &positions, &written, &random(&[ROWS, width]))
        .unwrap();
    for (layer, (before, after)) in before.iter().zip(rows_of(&pool)).enumerate() {
        for (before, after) in before.iter().zip(after) {
            for slot in 0..BLOCKS * SIZE {
                let is_same = before[slot] == after[slot];
                let expected = !written.contains(&slot);
                assert_eq!(is_same, expected, "layer {layer}, slot {slot}");
            }
        }
    }
}

#[test]
fn a_block_that_took_rows_without_draft_rows_is_incomplete_until_it_begins_anew() {
    let worker = worker("v1_top_level");
    let pool = worker.new_pool(BLOCKS, SIZE).unwrap();
    assert!(!pool.is_complete(&[4]), "never written");
    assert!(pool.is_complete(&[]));
    pool.wrote(&slots(&[4, 6], 0..10));
    assert!(pool.is_complete(&[4, 6]));
    pool.mark_incomplete(&[6]);
    assert!(pool.is_complete(&[4]) && !pool.is_complete(&[4, 6]));
    // Behind the gap.
    pool.wrote(&slots(&[4, 6], 12..16));
    assert!(!pool.is_complete(&[6]));
    // Another sequence has got the block.
    pool.wrote(&slots(&[6], 0..3));
    assert!(pool.is_complete(&[4, 6]));
    // A block that there is not is never complete, and marking it does nothing.
    pool.mark_incomplete(&[BLOCKS]);
    assert!(!pool.is_complete(&[BLOCKS]));
}
