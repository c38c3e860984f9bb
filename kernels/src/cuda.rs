//! What all kernels share on the host's side: modules, addresses, launches.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use candle_core::cuda_backend::cudarc::driver::sys::{
    self, CUdevice_attribute_enum as DeviceAttribute,
    CUfunction_attribute_enum as FunctionAttribute,
};
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr, DeviceRepr, SyncOnDrop,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice, DeviceId, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Error, Layout, Result, Shape, Storage, Tensor};

use crate::check::mismatch;

include!(concat!(env!("OUT_DIR"), "/modules.rs"));

/// Sequences that [`counters`] has room for.
pub(crate) const COUNTERS: usize = 65_535;

/// A loaded kernel.
pub(crate) struct Kernel {
    function: CudaFunction,
    threads: u32,
    shared_bytes: u32,
    /// Thread blocks that the whole GPU holds at a time.
    pub slots: usize,
    /// Multiprocessors of the GPU.
    pub multiprocessors: usize,
}

/// How to load a kernel.
#[derive(Clone, Copy)]
pub(crate) struct KernelSpec {
    pub module: &'static str,
    pub name: &'static str,
    pub threads: usize,
    pub shared_bytes: usize,
}

type KernelKey = (DeviceId, &'static str, &'static str, usize);

#[derive(Default)]
struct Loaded {
    modules: HashMap<(DeviceId, &'static str), Arc<CudaModule>>,
    kernels: HashMap<KernelKey, Arc<Kernel>>,
    counters: HashMap<DeviceId, CudaSlice<u32>>,
}

static LOADED: LazyLock<Mutex<Loaded>> = LazyLock::new(Mutex::default);

fn loaded() -> MutexGuard<'static, Loaded> {
    LOADED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Loads a kernel once for each device.
pub(crate) fn kernel(device: &CudaDevice, spec: KernelSpec) -> Result<Arc<Kernel>> {
    let mut loaded = loaded();
    let key = (device.id(), spec.module, spec.name, spec.shared_bytes);
    if let Some(kernel) = loaded.kernels.get(&key) {
        return Ok(kernel.clone());
    }
    let stream = device.cuda_stream();
    let context = stream.context();
    let module = match loaded.modules.get(&(device.id(), spec.module)) {
        Some(module) => module.clone(),
        None => {
            let image = module_image(spec.module)
                .ok_or_else(|| Error::Msg(format!("no kernel module {:?}", spec.module)).bt())?;
            let module = context.load_module(Ptx::from_binary(image.to_vec())).w()?;
            loaded
                .modules
                .insert((device.id(), spec.module), module.clone());
            module
        }
    };
    let function = module.load_function(spec.name).w()?;
    let (threads, shared_bytes) = (to_u32(spec.threads)?, to_u32(spec.shared_bytes)?);
    if spec.shared_bytes > 48 * 1024 {
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function
            .set_attribute(attribute, to_i32(spec.shared_bytes)?)
            .w()?;
    }
    let on_each = function
        .occupancy_max_active_blocks_per_multiprocessor(threads, spec.shared_bytes, None)
        .w()?;
    let attribute = DeviceAttribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let multiprocessors = context.attribute(attribute).w()?.max(1) as usize;
    let kernel = Arc::new(Kernel {
        function,
        threads,
        shared_bytes,
        slots: on_each.max(1) as usize * multiprocessors,
        multiprocessors,
    });
    loaded.kernels.insert(key, kernel.clone());
    Ok(kernel)
}

/// Bytes of shared memory that a thread block can have.
pub(crate) fn shared_limit(device: &CudaDevice) -> Result<usize> {
    let attribute = DeviceAttribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    let stream = device.cuda_stream();
    let limit = stream.context().attribute(attribute).w()?;
    Ok(usize::try_from(limit).unwrap_or(0))
}

/// Device address of [`COUNTERS`] zeros. Kernels that count there put them back to zero, and a candle
/// device has one stream, so all launches can share them.
pub(crate) fn counters(device: &CudaDevice) -> Result<u64> {
    let mut loaded = loaded();
    let stream = device.cuda_stream();
    if let Some(counters) = loaded.counters.get(&device.id()) {
        return Ok(counters.device_ptr(&stream).0);
    }
    let counters = device.alloc_zeros::<u32>(COUNTERS)?;
    let address = counters.device_ptr(&stream).0;
    loaded.counters.insert(device.id(), counters);
    Ok(address)
}

/// A tensor's first element in device memory, valid while the guard lives.
pub(crate) struct Address<'a> {
    pub at: u64,
    _guard: SyncOnDrop<'a>,
}

/// Address of what `layout` describes within `storage`.
pub(crate) fn address<'a>(
    storage: &'a CudaStorage,
    layout: &Layout,
    stream: &'a CudaStream,
) -> Result<Address<'a>> {
    let (base, guard) = match &storage.slice {
        CudaStorageSlice::U32(s) => s.device_ptr(stream),
        CudaStorageSlice::I64(s) => s.device_ptr(stream),
        CudaStorageSlice::BF16(s) => s.device_ptr(stream),
        CudaStorageSlice::F16(s) => s.device_ptr(stream),
        CudaStorageSlice::F32(s) => s.device_ptr(stream),
        _ => candle_core::bail!("kernels take u32, i64, bf16, f16 and f32 only"),
    };
    let size = candle_core::backend::BackendStorage::dtype(storage).size_in_bytes();
    Ok(Address {
        at: base + (layout.start_offset() * size) as u64,
        _guard: guard,
    })
}

/// Address of a tensor's first element. It stays valid as long as the tensor lives; work in the stream of
/// its device needs no other order.
pub(crate) fn address_of(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let storage = on_cuda("a kernel's input", &storage)?;
    let stream = storage.device.cuda_stream();
    let at = address(storage, layout, &stream)?.at;
    Ok(at)
}

/// The CUDA storage behind a locked tensor.
pub(crate) fn on_cuda<'a>(what: &str, storage: &'a Storage) -> Result<&'a CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        _ => Err(mismatch(
            what,
            "a tensor on a CUDA device",
            "another device",
        )),
    }
}

/// `let $name = ` the address of a tensor, with its lock and guard kept until the end of the scope.
macro_rules! lock_address {
    ($name:ident, $tensor:expr, $stream:expr) => {
        let locked = $tensor.storage_and_layout();
        let storage = $crate::cuda::on_cuda(stringify!($name), &locked.0)?;
        let $name = $crate::cuda::address(storage, locked.1, $stream)?;
    };
}
pub(crate) use lock_address;

/// `let $name = ` the device address in an optional tensor, 0 without one; lock and guard are kept
/// until the end of the scope.
macro_rules! lock_optional {
    ($name:ident, $tensor:expr, $stream:expr) => {
        let locked = $tensor.map(|tensor| tensor.storage_and_layout());
        let guard = match &locked {
            Some((storage, layout)) => {
                let storage = $crate::cuda::on_cuda(stringify!($name), storage)?;
                Some($crate::cuda::address(storage, layout, $stream)?)
            }
            None => None,
        };
        let $name = guard.as_ref().map_or(0, |address| address.at);
    };
}
pub(crate) use lock_optional;

/// A tensor whose first dims may have any strides and whose last `dense` dims are dense, with rows that
/// start at multiples of 16 bytes; copied if it is not like that.
pub(crate) fn aligned_rows(tensor: &Tensor, dense: usize) -> Result<Tensor> {
    let layout = tensor.layout();
    let piece = 16 / tensor.dtype().size_in_bytes();
    let free = tensor.rank().saturating_sub(dense);
    let mut expected = 1;
    let mut is_dense = true;
    for (dim, stride) in tensor.dims().iter().zip(layout.stride()).skip(free).rev() {
        is_dense &= *stride == expected || *dim == 1;
        expected *= dim;
    }
    let is_aligned = layout.start_offset().is_multiple_of(piece)
        && layout
            .stride()
            .iter()
            .take(free)
            .all(|s| s.is_multiple_of(piece));
    match is_dense && is_aligned {
        true => Ok(tensor.clone()),
        false => tensor.force_contiguous(),
    }
}

/// How a launch is ordered behind the one before it in the stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Behind all that came before.
    After,
    /// May start while the kernel before is still running, since it waits for that one itself
    /// (`wait_for_previous`) before it reads its results. Where the GPU cannot do that: as `After`.
    Overlapping,
}

/// Whether the kernels were compiled with `wait_for_previous`; they are not in PTX for older GPUs, even
/// when it is translated for newer ones.
fn can_overlap() -> bool {
    env!("DFLASH_KERNELS_ARCH")
        .trim_end_matches(char::is_alphabetic)
        .parse::<u32>()
        .is_ok_and(|arch| arch >= 90)
}

/// Launches a kernel whose one parameter is a struct.
///
/// # Safety
/// The kernel must take `P` by value, and all addresses in it must be valid for what the kernel does.
pub(crate) unsafe fn launch<P: DeviceRepr>(
    stream: &CudaStream,
    kernel: &Kernel,
    grid: [usize; 3],
    params: &P,
    order: Order,
) -> Result<()> {
    // SAFETY: zero is a valid value of every field.
    let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
    attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    let overlaps = order == Order::Overlapping && can_overlap();
    let config = sys::CUlaunchConfig {
        gridDimX: to_u32(grid[0])?,
        gridDimY: to_u32(grid[1])?,
        gridDimZ: to_u32(grid[2])?,
        blockDimX: kernel.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: kernel.shared_bytes,
        hStream: stream.cu_stream(),
        attrs: &mut attribute,
        numAttrs: u32::from(overlaps),
    };
    let mut arguments = [params as *const P as *mut c_void];
    stream.context().bind_to_thread().w()?;
    // SAFETY: the caller's; `config` and `arguments` outlive the call, which copies the parameters.
    unsafe {
        sys::cuLaunchKernelEx(
            &config,
            kernel.function.cu_function(),
            arguments.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    }
    .result()
    .w()
}

/// Launches a kernel that waits for the one before it itself; it is loaded if it is not yet.
///
/// # Safety
/// As [`launch`].
pub(crate) unsafe fn enqueue<P: DeviceRepr>(
    device: &CudaDevice,
    spec: KernelSpec,
    grid: [usize; 3],
    params: &P,
) -> Result<()> {
    let kernel = kernel(device, spec)?;
    // SAFETY: the caller's.
    unsafe {
        launch(
            &device.cuda_stream(),
            &kernel,
            grid,
            params,
            Order::Overlapping,
        )
    }
}

/// The name for bf16, f16 or f32.
pub(crate) fn by_dtype(dtype: DType, names: [&'static str; 3]) -> &'static str {
    match dtype {
        DType::BF16 => names[0],
        DType::F16 => names[1],
        _ => names[2],
    }
}

/// A contiguous tensor of what was written to `memory`.
pub(crate) fn tensor_of<T: CudaDType>(
    memory: CudaSlice<T>,
    device: CudaDevice,
    shape: impl Into<Shape>,
) -> Tensor {
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(memory, device));
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}

pub(crate) fn to_i32(value: usize) -> Result<i32> {
    i32::try_from(value)
        .map_err(|_| mismatch("a size passed to a kernel", "below 2^31", value.to_string()))
}

fn to_u32(value: usize) -> Result<u32> {
    u32::try_from(value)
        .map_err(|_| mismatch("a size passed to a launch", "below 2^32", value.to_string()))
}
