//! Launches the block attention kernels (`cuda/attention*.cu`).

use std::sync::Arc;

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
pub(crate) struct Params {
    pub q: u64,
    pub k_cache: u64,
    pub v_cache: u64,
    pub k_own: u64,
    pub v_own: u64,
    pub block_tables: u64,
    pub context_lens: u64,
    pub sinks: u64,
    pub out: u64,
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
pub(crate) fn unsupported(sizes: &Sizes) -> Option<String> {
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

/// Sequences of a call up to which a row comes out bit by bit the same whatever the number of rows:
/// contexts are then cut alike.
const FEW_SEQUENCES: usize = 2;

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
    // From 64 rows on, one warp takes all keys of a tile, so that a row does not depend on the number of
    // rows; with fewer, kernels of several warps for the same rows were slower.
    let (row_tile, tile) = match head_dim {
        ..=128 if m > 64 => (128, 64),
        ..=128 => (64, 64),
        _ => (64, 32),
    };
    let names = match row_tile {
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
    let sinks = match options.sinks {
        Some(sinks) => Some(sinks.contiguous()?),
        None => None,
    };
    let op = BlockAttention {
        keys: context.keys,
        values: context.values,
        tables: dense_tables(context.block_tables)?,
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

/// Block tables whose rows are dense.
pub(crate) fn dense_tables(tables: &Tensor) -> Result<Tensor> {
    match tables.layout().stride() {
        [_, 1] => Ok(tables.clone()),
        _ => tables.force_contiguous(),
    }
}

/// A launch, all but its addresses.
pub(crate) struct Planned {
    variant: Variant,
    attend: Arc<Kernel>,
    reduce: Arc<Kernel>,
    row_tiles: usize,
    cut: Cut,
    sizes: Sizes,
}

/// What a launch depends on beside the sizes.
pub(crate) struct Wanted<'a> {
    pub options: &'a AttentionOptions<'a>,
    pub longest: Option<usize>,
    /// K and V of the block itself are given.
    pub own: bool,
    pub splits: Option<usize>,
}

impl Planned {
    pub fn new(device: &CudaDevice, dtype: DType, sizes: &Sizes, wanted: &Wanted) -> Result<Self> {
        let cache = &sizes.cache;
        let m = sizes.rows * sizes.heads / cache.kv_heads;
        let few = sizes.batch <= FEW_SEQUENCES && dtype != DType::F32;
        let variant = variant(dtype, cache.head_dim, m)?;
        let row_tiles = m.div_ceil(variant.row_tile);
        let attend = kernel(device, variant.spec)?;
        let cut = cut_of(&variant, &attend, dtype, sizes, wanted, (row_tiles, few));
        // Needed or not: a step that is recorded may need it first, and must load nothing then.
        let reduce = kernel(
            device,
            KernelSpec {
                module: "attention_reduce",
                name: variant.reduce,
                threads: 128,
                shared_bytes: 0,
            },
        )?;
        Ok(Self {
            attend,
            reduce,
            variant,
            row_tiles,
            cut,
            sizes: *sizes,
        })
    }

    fn units(&self) -> usize {
        self.sizes.batch * self.sizes.cache.kv_heads * self.row_tiles
    }

    fn partial_rows(&self) -> usize {
        match self.cut.splits {
            1 => 0,
            splits => self.units() * splits * self.variant.row_tile,
        }
    }

    /// f32 numbers of scratch memory that the launch needs.
    pub fn scratch(&self) -> usize {
        self.partial_rows() * (self.sizes.cache.head_dim + 2)
    }

    /// Launch it, with scratch memory at `scratch`.
    ///
    /// # Safety
    /// The addresses must be valid for what the kernels do.
    pub unsafe fn enqueue(
        &self,
        device: &CudaDevice,
        params: &mut Params,
        scratch: u64,
    ) -> Result<()> {
        let stream = device.cuda_stream();
        let cache = &self.sizes.cache;
        let m = self.sizes.rows * self.sizes.heads / cache.kv_heads;
        if self.partial_rows() > 0 {
            params.partial_out = scratch;
            params.partial_sums = scratch + (4 * self.partial_rows() * cache.head_dim) as u64;
        }
        let y = cache.kv_heads * self.row_tiles;
        let grid = [self.cut.splits, y, self.sizes.batch];
        // SAFETY: the kernel takes these parameters; the addresses are the caller's.
        unsafe { launch(&stream, &self.attend, grid, params, Order::Overlapping)? };
        if self.partial_rows() == 0 {
            return Ok(());
        }
        let grid = [m.div_ceil(4), cache.kv_heads, self.sizes.batch];
        // SAFETY: as above.
        unsafe { launch(&stream, &self.reduce, grid, params, Order::Overlapping) }
    }

    /// Everything but the addresses. Strides are those over batch and rows.
    pub fn params(
        &self,
        options: &AttentionOptions,
        q_strides: [i64; 2],
        own_strides: [[i64; 2]; 2],
        table_stride: usize,
    ) -> Result<Params> {
        let (sizes, cache, variant) = (&self.sizes, &self.sizes.cache, &self.variant);
        let log2_e = std::f32::consts::LOG2_E;
        let (pre_scale, log2_scale) = match options.softcap {
            Some(cap) => (options.scale / cap, cap * log2_e),
            None => (0.0, options.scale * log2_e),
        };
        // A window that reaches over any context is none.
        let window = options.window.map_or(0, |w| w.min(1 << 30));
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
            q_strides,
            k_strides: own_strides[0],
            v_strides: own_strides[1],
            batch: to_i32(sizes.batch)?,
            rows: to_i32(sizes.rows)?,
            heads: to_i32(sizes.heads)?,
            kv_heads: to_i32(cache.kv_heads)?,
            head_dim: to_i32(cache.head_dim)?,
            block_size: to_i32(cache.block_size)?,
            max_blocks: to_i32(sizes.max_blocks)?,
            num_blocks: to_i32(cache.num_blocks)?,
            table_stride: to_i32(table_stride)?,
            window: to_i32(window)?,
            causal: i32::from(options.causal),
            tile: to_i32(variant.tile)?,
            row_tile: to_i32(variant.row_tile)?,
            row_tiles: to_i32(self.row_tiles)?,
            chunk: to_i32(self.cut.chunk)?,
            splits: to_i32(self.cut.splits)?,
            pre_scale,
            log2_scale,
        })
    }
}

fn cut_of(
    variant: &Variant,
    kernel: &Kernel,
    dtype: DType,
    sizes: &Sizes,
    wanted: &Wanted,
    (row_tiles, few): (usize, bool),
) -> Cut {
    let cache = &sizes.cache;
    let places = sizes.max_blocks * cache.block_size;
    let mut keys = wanted.longest.map_or(places, |longest| longest.min(places));
    if let Some(window) = wanted.options.window {
        keys = keys.min(window.saturating_add(sizes.rows + variant.tile));
    }
    let own_tiles = match wanted.own {
        true => sizes.rows.div_ceil(variant.tile),
        false => 0,
    };
    let load = Load {
        tiles: keys.div_ceil(variant.tile) + own_tiles,
        units: sizes.batch * cache.kv_heads * row_tiles,
        slots: kernel.slots,
        multiprocessors: kernel.multiprocessors,
        tile_bytes: 2 * variant.tile * cache.head_dim * dtype.size_in_bytes(),
        row_tile: variant.row_tile,
    };
    match few && !wanted.own {
        true => cut(
            load.whatever_the_rows(sizes.batch * cache.kv_heads),
            wanted.splits,
        ),
        false => cut(load, wanted.splits),
    }
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
        let own = self.own.as_ref();
        let wanted = Wanted {
            options: self.options,
            longest: self.longest,
            own: own.is_some(),
            splits: self.splits,
        };
        let planned = Planned::new(device, self.keys.dtype(), &self.sizes, &wanted)?;

        // SAFETY: the kernel writes every element.
        let out = unsafe { device.alloc::<T>(q_layout.shape().elem_count())? };
        // SAFETY: the reduction reads only what the attention kernel has written.
        let partials = match planned.scratch() {
            0 => None,
            floats => Some(unsafe { device.alloc::<f32>(floats)? }),
        };
        let strides = |layout: &Layout| [layout.stride()[0] as i64, layout.stride()[1] as i64];
        let own_strides = own.map_or([[0; 2]; 2], |(k, v)| {
            [strides(k.layout()), strides(v.layout())]
        });
        let table_stride = self.tables.layout().stride()[0];
        let mut params =
            planned.params(self.options, strides(q_layout), own_strides, table_stride)?;
        {
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
            let scratch = partial_guard.as_ref().map_or(0, |(at, _)| *at);
            // SAFETY: the addresses live until the guards drop.
            unsafe { planned.enqueue(device, &mut params, scratch)? };
        }
        let storage = CudaStorage::wrap_cuda_slice(out, device.clone());
        Ok((storage, q_layout.shape().clone()))
    }
}
