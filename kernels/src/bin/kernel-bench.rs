//! Times the kernels on the first CUDA device against the time that memory alone would take.
//!
//! `kernel-bench [--sweep] [--json FILE]`: `--sweep` also times block attention for given numbers of
//! splits. Times are medians over replays of a CUDA graph that holds one call for each of several
//! input sets, together larger than the L2 cache; `eager` is the same without a graph, so with the
//! host's work and the launches.

use std::io::Write;

use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::cuda_backend::WrapErr;
use candle_core::{CudaDevice, DType, Device, Result, Tensor};
use dflash_kernels::{
    accept, argmax_last, block_attention_with_splits, gated_product, materialize, product,
    AttentionOptions, Kept, KvOrder, MaterializeSpec, PagedContext, Weight,
};

const REPLAYS: usize = 15;
/// Input sets of one benchmark hold at least this much.
const ROTATED_BYTES: usize = 256 << 20;

struct Bench {
    device: Device,
    cuda: CudaDevice,
    /// Bytes a second of a large copy, read and written bytes counted.
    bandwidth: f64,
    lines: Vec<String>,
}

struct Times {
    graph: f64,
    eager: f64,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let device = Device::new_cuda_with_stream(0)?;
    let Device::Cuda(cuda) = &device else {
        candle_core::bail!("no CUDA device");
    };
    // SAFETY: everything here is on one stream.
    unsafe { cuda.disable_event_tracking() };
    let mut bench = Bench {
        cuda: cuda.clone(),
        bandwidth: 1.0,
        device,
        lines: Vec::new(),
    };
    bench.measure_bandwidth()?;
    println!("copy bandwidth {:.0} GB/s", bench.bandwidth / 1e9);
    println!(
        "{:<58} {:>9} {:>9} {:>9} {:>6}",
        "", "graph us", "eager us", "floor us", "x"
    );
    bench.products()?;
    bench.materialize()?;
    bench.accept()?;
    bench.attention()?;
    if arguments.iter().any(|a| a == "--sweep") {
        bench.sweep()?;
    }
    if let Some(at) = arguments.iter().position(|a| a == "--json") {
        let path = arguments.get(at + 1).map_or("kernel-bench.json", |p| p);
        let mut file = std::fs::File::create(path)?;
        writeln!(file, "[\n{}\n]", bench.lines.join(",\n"))?;
    }
    Ok(())
}

/// A paged cache with every block in use, in random order, and queries for it.
struct Paged {
    q: Tensor,
    own: Option<(Tensor, Tensor)>,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lens: Tensor,
}

#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    rows: usize,
    block_size: usize,
    dtype: DType,
}

const QWEN3_8B: Shape = Shape {
    heads: 32,
    kv_heads: 8,
    dim: 128,
    rows: 16,
    block_size: 32,
    dtype: DType::BF16,
};

impl Bench {
    fn measure_bandwidth(&mut self) -> Result<()> {
        let bytes = 1usize << 30;
        let stream = self.cuda.cuda_stream();
        // SAFETY: the contents do not matter.
        let (from, mut to) =
            unsafe { (self.cuda.alloc::<u8>(bytes)?, self.cuda.alloc::<u8>(bytes)?) };
        let mut times = Vec::new();
        for _ in 0..10 {
            let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
            let start = stream.record_event(flags).w()?;
            self.cuda.memcpy_dtod(&from, &mut to)?;
            let end = stream.record_event(flags).w()?;
            times.push(start.elapsed_ms(&end).w()? as f64);
        }
        self.bandwidth = 2.0 * bytes as f64 / (median(&mut times) * 1e-3);
        Ok(())
    }

    /// Microseconds of one of `calls` calls of `run`.
    fn time(&self, calls: usize, run: &dyn Fn(usize) -> Result<()>) -> Result<Times> {
        let stream = self.cuda.cuda_stream();
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let all = || (0..calls).try_for_each(run);
        all()?;
        let mut eager = Vec::new();
        for _ in 0..5 {
            let start = stream.record_event(flags).w()?;
            all()?;
            let end = stream.record_event(flags).w()?;
            eager.push(start.elapsed_ms(&end).w()? as f64);
        }
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        stream.begin_capture(mode).w()?;
        let captured = all();
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).w()?;
        captured?;
        let Some(graph) = graph else {
            candle_core::bail!("nothing was captured");
        };
        let mut replays = Vec::new();
        for replay in 0..REPLAYS + 3 {
            let start = stream.record_event(flags).w()?;
            graph.launch().w()?;
            let end = stream.record_event(flags).w()?;
            if replay >= 3 {
                replays.push(start.elapsed_ms(&end).w()? as f64);
            }
        }
        let each = 1e3 / calls as f64;
        Ok(Times {
            graph: median(&mut replays) * each,
            eager: median(&mut eager) * each,
        })
    }

    fn report(&mut self, name: &str, bytes: usize, times: &Times) {
        let floor = bytes as f64 / self.bandwidth * 1e6;
        println!(
            "{name:<58} {:>9.2} {:>9.2} {floor:>9.2} {:>6.2}",
            times.graph,
            times.eager,
            times.graph / floor
        );
        self.lines.push(format!(
            "{{\"name\": {name:?}, \"graph_us\": {:.3}, \"eager_us\": {:.3}, \"floor_us\": {floor:.3}, \"bytes\": {bytes}}}",
            times.graph, times.eager
        ));
    }

    fn random(&self, dims: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::randn(0f32, 1f32, dims, &self.device)?.to_dtype(dtype)
    }

    fn paged(&self, shape: Shape, batch: usize, context: usize, own: bool) -> Result<Paged> {
        let Shape {
            heads,
            kv_heads,
            dim,
            rows,
            block_size,
            dtype,
        } = shape;
        let blocks = context.div_ceil(block_size);
        let x = 16 / dtype.size_in_bytes();
        let num_blocks = batch * blocks;
        // A step coprime with the count visits all blocks in an order far from theirs.
        let mut step = 7919 % num_blocks.max(2);
        while gcd(step, num_blocks) != 1 {
            step += 1;
        }
        let tables: Vec<u32> = (0..num_blocks)
            .map(|i| ((i * step) % num_blocks) as u32)
            .collect();
        let own = match own {
            true => Some((
                self.random(&[batch, rows, kv_heads, dim], dtype)?,
                self.random(&[batch, rows, kv_heads, dim], dtype)?,
            )),
            false => None,
        };
        Ok(Paged {
            q: self.random(&[batch, rows, heads, dim], dtype)?,
            own,
            keys: self.random(&[num_blocks, kv_heads, dim / x, block_size, x], dtype)?,
            values: self.random(&[num_blocks, kv_heads, dim, block_size], dtype)?,
            tables: Tensor::from_vec(tables, (batch, blocks), &self.device)?,
            lens: Tensor::full(context as u32, batch, &self.device)?,
        })
    }

    fn time_attention(
        &self,
        shape: Shape,
        batch: usize,
        context: usize,
        own: bool,
        splits: &[Option<usize>],
    ) -> Result<(usize, Vec<Times>)> {
        let size = shape.dtype.size_in_bytes();
        let kv = 2 * batch * context * shape.kv_heads * shape.dim * size;
        let block = batch * shape.rows * shape.dim * size;
        let own_bytes = if own { 2 * block * shape.kv_heads } else { 0 };
        let bytes = kv + 2 * block * shape.heads + own_bytes;
        let sets = (ROTATED_BYTES / bytes).clamp(1, 36);
        let inputs = (0..sets)
            .map(|_| self.paged(shape, batch, context, own))
            .collect::<Result<Vec<_>>>()?;
        let options = AttentionOptions {
            causal: !own,
            ..AttentionOptions::new(shape.dim)
        };
        let times = splits.iter().map(|splits| {
            self.time(sets, &|i| {
                let paged = &inputs[i];
                let context = PagedContext {
                    keys: &paged.keys,
                    values: &paged.values,
                    block_tables: &paged.tables,
                    context_lens: &paged.lens,
                    longest: None,
                };
                let own = paged.own.as_ref().map(|(k, v)| (k, v));
                block_attention_with_splits(&paged.q, &context, own, &options, *splits)?;
                Ok(())
            })
        });
        Ok((bytes, times.collect::<Result<Vec<_>>>()?))
    }

    fn attention(&mut self) -> Result<()> {
        for (own, name) in [(false, "verify attention"), (true, "draft attention")] {
            for context in [1024, 4096, 16384] {
                for batch in [1, 4, 8, 32] {
                    let (bytes, times) =
                        self.time_attention(QWEN3_8B, batch, context, own, &[None])?;
                    let name =
                        format!("{name} 32/8x128 bf16, 16 rows, ctx {context}, batch {batch}");
                    self.report(&name, bytes, &times[0]);
                }
            }
        }
        for (label, shape) in [
            (
                "1 row",
                Shape {
                    rows: 1,
                    ..QWEN3_8B
                },
            ),
            (
                "8 rows",
                Shape {
                    rows: 8,
                    ..QWEN3_8B
                },
            ),
            (
                "32 rows",
                Shape {
                    rows: 32,
                    ..QWEN3_8B
                },
            ),
            (
                "16 rows, blocks of 16",
                Shape {
                    block_size: 16,
                    ..QWEN3_8B
                },
            ),
            (
                "16 rows, f16",
                Shape {
                    dtype: DType::F16,
                    ..QWEN3_8B
                },
            ),
            (
                "10 rows, 64/8x64",
                Shape {
                    heads: 64,
                    dim: 64,
                    rows: 10,
                    ..QWEN3_8B
                },
            ),
            (
                "16 rows, 24/4x256",
                Shape {
                    heads: 24,
                    kv_heads: 4,
                    dim: 256,
                    ..QWEN3_8B
                },
            ),
            (
                "16 rows, 9/3x64 f32",
                Shape {
                    heads: 9,
                    kv_heads: 3,
                    dim: 64,
                    dtype: DType::F32,
                    ..QWEN3_8B
                },
            ),
        ] {
            for batch in [1, 8] {
                let (bytes, times) = self.time_attention(shape, batch, 4096, false, &[None])?;
                let name = format!("verify attention, {label}, ctx 4096, batch {batch}");
                self.report(&name, bytes, &times[0]);
            }
        }
        Ok(())
    }

    fn sweep(&self) -> Result<()> {
        let splits = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128];
        println!("\nmicroseconds by splits: {splits:?}");
        let wanted: Vec<Option<usize>> = splits.iter().map(|s| Some(*s)).collect();
        for (batch, context) in [
            (1, 1024),
            (1, 4096),
            (1, 16384),
            (4, 1024),
            (4, 4096),
            (4, 16384),
            (8, 1024),
            (8, 16384),
            (16, 4096),
            (32, 1024),
        ] {
            let (_, times) = self.time_attention(QWEN3_8B, batch, context, false, &wanted)?;
            let times: Vec<String> = times.iter().map(|t| format!("{:.1}", t.graph)).collect();
            println!("batch {batch:>2} ctx {context:>5}: {}", times.join(" "));
        }
        Ok(())
    }

    /// Qwen3-8B's products of few rows, and beyond what the kernel takes cuBLAS's.
    fn products(&mut self) -> Result<()> {
        let dtype = DType::BF16;
        for (name, width, outputs, is_gated) in [
            ("q, k, v", 4096, vec![4096, 1024, 1024], false),
            ("o", 4096, vec![4096], false),
            ("gate, up", 4096, vec![12288, 12288], true),
            ("down", 12288, vec![4096], false),
            ("head", 4096, vec![151_936], false),
        ] {
            let all: usize = outputs.iter().sum();
            let bytes = all * width * dtype.size_in_bytes();
            let sets = (4 * ROTATED_BYTES / bytes).clamp(1, 24);
            let weights = (0..sets).map(|_| {
                let one = |outputs: &usize| self.random(&[*outputs, width], dtype);
                outputs.iter().map(one).collect::<Result<Vec<_>>>()
            });
            let weights = weights.collect::<Result<Vec<_>>>()?;
            for rows in [1, 8, 16, 17, 64] {
                let x = self.random(&[rows, width], dtype)?;
                let times = self.time(sets, &|i| {
                    let plain = |weight| Weight { weight, bias: None };
                    let weights: Vec<Weight> = weights[i].iter().map(plain).collect();
                    match weights[..] {
                        [gate, up] if is_gated => gated_product(&x, gate, up).map(drop),
                        _ => product(&x, &weights).map(drop),
                    }
                })?;
                self.report(&format!("product {name}, bf16, {rows} rows"), bytes, &times);
            }
        }
        Ok(())
    }

    fn materialize(&mut self) -> Result<()> {
        let (layers, kv_heads, dim, rows, block_size) = (5, 8, 128, 16, 32);
        let dtype = DType::BF16;
        let k_norm = self.random(&[layers, dim], DType::F32)?;
        let table = self.random(&[4096, dim / 2], DType::F32)?;
        let spec = MaterializeSpec {
            k_norm: &k_norm,
            cos: &table,
            sin: &table,
            interleaved: false,
            eps: 1e-6,
            order: KvOrder::KeysThenValues,
        };
        let num_blocks = 4096;
        let cache_dims = (
            [num_blocks, kv_heads, dim / 8, block_size, 8],
            [num_blocks, kv_heads, dim, block_size],
        );
        let caches = (0..layers)
            .map(|_| {
                Ok((
                    Tensor::zeros(&cache_dims.0, dtype, &self.device)?,
                    Tensor::zeros(&cache_dims.1, dtype, &self.device)?,
                ))
            })
            .collect::<Result<Vec<_>>>()?;
        for batch in [1, 4, 8, 16, 32, 256] {
            let tokens = batch * rows;
            let width = layers * 2 * kv_heads * dim;
            let bytes = 2 * tokens * width * dtype.size_in_bytes();
            let sets = (ROTATED_BYTES / bytes).clamp(1, 32);
            let inputs = (0..sets)
                .map(|set| {
                    // Each sequence's rows lie side by side, from the middle of a block on.
                    let slots: Vec<i64> = (0..tokens)
                        .map(|t| {
                            let (sequence, row) = (t / rows, t % rows);
                            let start =
                                (sequence * 97 + set * 31) % (num_blocks - 2) * block_size + 9;
                            (start + row) as i64
                        })
                        .collect();
                    let positions: Vec<u32> = (0..tokens).map(|t| (t % 4096) as u32).collect();
                    Ok((
                        self.random(&[tokens, width], dtype)?,
                        Tensor::from_vec(positions, tokens, &self.device)?,
                        Tensor::from_vec(slots, tokens, &self.device)?,
                        Tensor::full(rows as u32, batch, &self.device)?,
                    ))
                })
                .collect::<Result<Vec<_>>>()?;
            let times = self.time(sets, &|i| {
                let (kv, positions, slots, kept) = &inputs[i];
                materialize(kv, &spec, positions, slots, Some(Kept::Rows(kept)), &caches)
            })?;
            let name = format!("materialize 5 layers 8x128 bf16, {rows} rows, batch {batch}");
            self.report(&name, bytes, &times);
        }
        Ok(())
    }

    fn accept(&mut self) -> Result<()> {
        let (vocab, rows) = (151_936, 16);
        for dtype in [DType::BF16, DType::F32] {
            for batch in [1, 8, 32] {
                let bytes = batch * rows * vocab * dtype.size_in_bytes();
                let sets = (ROTATED_BYTES / bytes).clamp(1, 32);
                let inputs = (0..sets)
                    .map(|_| self.random(&[batch, rows, vocab], dtype))
                    .collect::<Result<Vec<_>>>()?;
                let drafts = Tensor::zeros((batch, rows - 1), DType::U32, &self.device)?;
                let times = self.time(sets, &|i| accept(&inputs[i], &drafts).map(drop))?;
                let name = format!("accept {dtype:?}, 16 rows of {vocab}, batch {batch}");
                self.report(&name, bytes, &times);
                let times = self.time(sets, &|i| {
                    argmax_last(&inputs[i].reshape((batch * rows, vocab))?).map(drop)
                })?;
                let name = format!("argmax {dtype:?}, {} rows of {vocab}", batch * rows);
                self.report(&name, bytes, &times);
            }
        }
        Ok(())
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 {
        a
    } else {
        gcd(b, a % b)
    }
}
