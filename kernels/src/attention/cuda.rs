//! Launches the block attention kernels (`cuda/attention*.cu`).

use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr};
use candle_core::cuda_backend::CudaDType;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor,
};
use half::{bf16, f16};

use super::plan::{cut, Cut, Load};
use super::{AttentionOptions, PagedContext, Sizes};
use crate::cuda::{
    address, aligned_rows, kernel, launch, lock_address, lock_optional, to_i32, Kernel, KernelSpec,
    Order,
};

/// The struct `AttentionParams` of `cuda/attention.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    q: u64,
    k_cache: u64,
    v_cache: u64,
    k_own: u64,
    v_own: u64,
    block_tables: u64,
    context_lens: u64,
    sinks: u64,
    out: u64,
    partial_out: u64,
    partial_sums: u64,
    q_strides: [i64; 2],
    k_strides: [i64; 2],
    v_strides: [i64; 2],
    batch: i32,
    rows: i32,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    block_size: i32,
    max_blocks: i32,
    num_blocks: i32,
    table_stride: i32,
    window: i32,
    causal: i32,
    tile: i32,
    row_tile: i32,
    row_tiles: i32,
    chunk: i32,
    splits: i32,
    pre_scale: f32,
    log2_scale: f32,
}

// SAFETY: plain numbers in C layout.
unsafe impl DeviceRepr for Params {}

/// Why no kernel covers these sizes.
pub(super) fn unsupported(sizes: &Sizes) -> Option<String> {
    let cache = &sizes.cache;
    if modules(cache.head_dim).is_none() {
        return Some(format!("head dim {} has no kernel", cache.head_dim));
    }
    if !cache.block_size.is_multiple_of(8) {
        let size = cache.block_size;
        return Some(format!("block size {size} is not a multiple of 8"));
    }
    let y = cache.kv_heads * (sizes.rows * sizes.heads / cache.kv_heads).div_ceil(32);
    if sizes.batch > 65_535 || y > 65_535 {
        return Some("more than 65535 sequences or heads".into());
    }
    None
}

/// Modules of a head dim of `head_dims.rs`: tensor cores, f32.
fn modules(head_dim: usize) -> Option<(&'static str, &'static str)> {
    Some(match head_dim {
        64 => ("attention_mma_64", "attention_f32_64"),
        80 => ("attention_mma_80", "attention_f32_80"),
        96 => ("attention_mma_96", "attention_f32_96"),
        128 => ("attention_mma_128", "attention_f32_128"),
        256 => ("attention_mma_256", "attention_f32_256"),
        _ => return None,
    })
}

/// One compiled kernel and the sizes that it was compiled for.
struct Variant {
    spec: KernelSpec,
    reduce: &'static str,
    /// Keys of a tile.
    tile: usize,
    /// Query rows of a thread block.
    row_tile: usize,
}

/// The variant for `m` query rows of a kv head; the table of `KERNELS` in `cuda/attention_mma.cu`.
fn variant(dtype: DType, head_dim: usize, m: usize) -> Result<Variant> {
    let Some((mma, f32_module)) = modules(head_dim) else {
        candle_core::bail!("no attention kernel for head dim {head_dim}");
    };
    if dtype == DType::F32 {
        let tile = if head_dim <= 128 { 32 } else { 16 };
        let (q, k) = (32 * (head_dim + 4), tile * head_dim);
        let (v, p) = (head_dim * (tile + 4), 32 * (tile + 4));
        return Ok(Variant {
            spec: KernelSpec {
                module: f32_module,
                name: "block_attention_f32",
                threads: 256,
                shared_bytes: 4 * (q + k + v + p),
            },
            reduce: "block_attention_reduce_f32",
            tile,
            row_tile: 32,
        });
    }
    let (smallest, largest, tile) = match head_dim {
        ..=128 => (16, 128, 64),
        _ => (32, 64, 32),
    };
    let row_tile = m.next_power_of_two().clamp(smallest, largest);
    let names = match row_tile {
        16 => ("block_attention_bf16_rows16", "block_attention_f16_rows16"),
        32 => ("block_attention_bf16_rows32", "block_attention_f16_rows32"),
        64 => ("block_attention_bf16_rows64", "block_attention_f16_rows64"),
        _ => (
            "block_attention_bf16_rows128",
            "block_attention_f16_rows128",
        ),
    };
    let (name, reduce) = match dtype {
        DType::BF16 => (names.0, "block_attention_reduce_bf16"),
        _ => (names.1, "block_attention_reduce_f16"),
    };
    let threads = if row_tile == 128 { 256 } else { 128 };
    // Q, two stages of K and V, the key groups of three tiles.
    let shared_bytes = 2 * head_dim * (row_tile + 4 * tile) + 3 * (tile / 8) * 16;
    Ok(Variant {
        spec: KernelSpec {
            module: mma,
            name,
            threads,
            shared_bytes,
        },
        reduce,
        tile,
        row_tile,
    })
}

pub(super) fn run(
    q: &Tensor,
    context: &PagedContext,
    own: Option<(&Tensor, &Tensor)>,
    options: &AttentionOptions,
    sizes: &Sizes,
    splits: Option<usize>,
) -> Result<Tensor> {
    let own = match own {
        Some((k, v)) => Some((aligned_rows(k, 2)?, aligned_rows(v, 2)?)),
        None => None,
    };
    let tables = context.block_tables;
    let tables = match tables.layout().stride() {
        [_, 1] => tables.clone(),
        _ => tables.force_contiguous()?,
    };
    let sinks = match options.sinks {
        Some(sinks) => Some(sinks.contiguous()?),
        None => None,
    };
    let op = BlockAttention {
        keys: context.keys,
        values: context.values,
        tables,
        lens: context.context_lens.contiguous()?,
        longest: context.longest,
        own,
        sinks,
        options,
        sizes: *sizes,
        splits,
    };
    aligned_rows(q, 2)?.apply_op1_no_bwd(&op)
}

struct BlockAttention<'a> {
    keys: &'a Tensor,
    values: &'a Tensor,
    tables: Tensor,
    lens: Tensor,
    longest: Option<usize>,
    own: Option<(Tensor, Tensor)>,
    sinks: Option<Tensor>,
    options: &'a AttentionOptions<'a>,
    sizes: Sizes,
    splits: Option<usize>,
}

impl CustomOp1 for BlockAttention<'_> {
    fn name(&self) -> &'static str {
        "block-attention"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        candle_core::bail!("block attention on the CPU is a function of its own")
    }

    fn cuda_fwd(&self, q: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        match candle_core::backend::BackendStorage::dtype(q) {
            DType::BF16 => self.launch::<bf16>(q, layout),
            DType::F16 => self.launch::<f16>(q, layout),
            _ => self.launch::<f32>(q, layout),
        }
    }
}

impl BlockAttention<'_> {
    fn launch<T: CudaDType + DeviceRepr>(
        &self,
        q_storage: &CudaStorage,
        q_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let device: &CudaDevice = &q_storage.device;
        let stream = device.cuda_stream();
        let dtype = self.keys.dtype();
        let (sizes, cache) = (&self.sizes, &self.sizes.cache);
        let m = sizes.rows * sizes.heads / cache.kv_heads;
        let variant = variant(dtype, cache.head_dim, m)?;
        let row_tiles = m.div_ceil(variant.row_tile);
        let attend = kernel(device, variant.spec)?;
        let units = sizes.batch * cache.kv_heads * row_tiles;
        let cut = self.cut(&variant, units, &attend, dtype);

        // SAFETY: the kernel writes every element.
        let out = unsafe { device.alloc::<T>(q_layout.shape().elem_count())? };
        let partial_rows = match cut.splits {
            1 => 0,
            splits => units * splits * variant.row_tile,
        };
        // SAFETY: the reduction reads only what the attention kernel has written.
        let partials = match partial_rows {
            0 => None,
            rows => Some(unsafe { device.alloc::<f32>(rows * (cache.head_dim + 2))? }),
        };
        let mut params = self.params(&variant, row_tiles, cut, q_layout)?;
        {
            let own = self.own.as_ref();
            lock_address!(k_cache, self.keys, &stream);
            lock_address!(v_cache, self.values, &stream);
            lock_address!(tables, self.tables, &stream);
            lock_address!(lens, self.lens, &stream);
            lock_optional!(k_own, own.map(|(k, _)| k), &stream);
            lock_optional!(v_own, own.map(|(_, v)| v), &stream);
            lock_optional!(sinks, self.sinks.as_ref(), &stream);
            let q = address(q_storage, q_layout, &stream)?;
            let (out_at, _out_guard) = out.device_ptr(&stream);
            let partial_guard = partials.as_ref().map(|p| p.device_ptr(&stream));
            (params.q, params.out) = (q.at, out_at);
            (params.k_cache, params.v_cache) = (k_cache.at, v_cache.at);
            (params.block_tables, params.context_lens) = (tables.at, lens.at);
            (params.k_own, params.v_own, params.sinks) = (k_own, v_own, sinks);
            if let Some((at, _)) = &partial_guard {
                params.partial_out = *at;
                params.partial_sums = *at + (4 * partial_rows * cache.head_dim) as u64;
            }
            let grid = [cut.splits, cache.kv_heads * row_tiles, sizes.batch];
            // SAFETY: the kernel takes these parameters; the addresses live until the guards drop.
            unsafe { launch(&stream, &attend, grid, &params, Order::After)? };
            if partial_rows > 0 {
                let reduce = kernel(
                    device,
                    KernelSpec {
                        module: "attention_reduce",
                        name: variant.reduce,
                        threads: 128,
                        shared_bytes: 0,
                    },
                )?;
                let grid = [m.div_ceil(4), cache.kv_heads, sizes.batch];
                // SAFETY: as above.
                unsafe { launch(&stream, &reduce, grid, &params, Order::Overlapping)? };
            }
        }
        let storage = CudaStorage::wrap_cuda_slice(out, device.clone());
        Ok((storage, q_layout.shape().clone()))
    }

    fn cut(&self, variant: &Variant, units: usize, kernel: &Kernel, dtype: DType) -> Cut {
        let cache = &self.sizes.cache;
        let places = self.sizes.max_blocks * cache.block_size;
        let mut keys = self.longest.map_or(places, |longest| longest.min(places));
        if let Some(window) = self.options.window {
            keys = keys.min(window.saturating_add(self.sizes.rows + variant.tile));
        }
        let own_tiles = match self.own {
            Some(_) => self.sizes.rows.div_ceil(variant.tile),
            None => 0,
        };
        let load = Load {
            tiles: keys.div_ceil(variant.tile) + own_tiles,
            units,
            slots: kernel.slots,
            multiprocessors: kernel.multiprocessors,
            tile_bytes: 2 * variant.tile * cache.head_dim * dtype.size_in_bytes(),
            row_tile: variant.row_tile,
        };
        cut(load, self.splits)
    }

    /// Everything but the addresses.
    fn params(
        &self,
        variant: &Variant,
        row_tiles: usize,
        cut: Cut,
        q_layout: &Layout,
    ) -> Result<Params> {
        let (sizes, cache) = (&self.sizes, &self.sizes.cache);
        let strides = |layout: &Layout| [layout.stride()[0] as i64, layout.stride()[1] as i64];
        let (k_strides, v_strides) = match &self.own {
            Some((k, v)) => (strides(k.layout()), strides(v.layout())),
            None => ([0; 2], [0; 2]),
        };
        let log2_e = std::f32::consts::LOG2_E;
        let (pre_scale, log2_scale) = match self.options.softcap {
            Some(cap) => (self.options.scale / cap, cap * log2_e),
            None => (0.0, self.options.scale * log2_e),
        };
        // A window that reaches over any context is none.
        let window = self.options.window.map_or(0, |w| w.min(1 << 30));
        Ok(Params {
            q: 0,
            k_cache: 0,
            v_cache: 0,
            k_own: 0,
            v_own: 0,
            block_tables: 0,
            context_lens: 0,
            sinks: 0,
            out: 0,
            partial_out: 0,
            partial_sums: 0,
            q_strides: strides(q_layout),
            k_strides,
            v_strides,
            batch: to_i32(sizes.batch)?,
            rows: to_i32(sizes.rows)?,
            heads: to_i32(sizes.heads)?,
            kv_heads: to_i32(cache.kv_heads)?,
            head_dim: to_i32(cache.head_dim)?,
            block_size: to_i32(cache.block_size)?,
            max_blocks: to_i32(sizes.max_blocks)?,
            num_blocks: to_i32(cache.num_blocks)?,
            table_stride: to_i32(self.tables.layout().stride()[0])?,
            window: to_i32(window)?,
            causal: i32::from(self.options.causal),
            tile: to_i32(variant.tile)?,
            row_tile: to_i32(variant.row_tile)?,
            row_tiles: to_i32(row_tiles)?,
            chunk: to_i32(cut.chunk)?,
            splits: to_i32(cut.splits)?,
            pre_scale,
            log2_scale,
        })
    }
}
