//! The bridge to NVIDIA's driver: contexts, memory, streams, events, graphs, and launches, each owned by a value that
//! frees it. The driver library is loaded when it is first needed; nothing else of CUDA is needed at run time.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use engine::BackendError;

/// Machine code of a CUDA 13 compiler needs a driver of that major version.
const DRIVER_VERSION: i32 = 13_000;

type Result<T> = std::result::Result<T, BackendError>;

/// What the driver's answer to `what` means.
fn check(what: &str, result: sys::CUresult) -> Result<()> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        error => {
            let mut text = ptr::null();
            // SAFETY: the driver writes a pointer to one of its own static strings, or null.
            let known = unsafe { sys::cuGetErrorString(error, &mut text) };
            let text = if known == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
                // SAFETY: the driver's strings end in a zero and live as long as the library.
                unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
            } else {
                format!("{error:?}")
            };
            Err(BackendError::Device(format!("{what}: {text}")))
        }
    }
}

/// Calls a driver function and names it where it fails.
macro_rules! driver {
    ($function:ident($($argument:expr),* $(,)?)) => {
        check(stringify!($function), sys::$function($($argument),*))
    };
}

/// A device that the driver lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its number, for `--device`.
    pub ordinal: usize,
    /// The driver's name of it.
    pub name: String,
    /// Bytes of its memory.
    pub memory: u64,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: i32,
}

/// Loads the driver and starts it.
fn start() -> Result<()> {
    let unavailable = |why: &str| Err(BackendError::Unavailable(why.into()));
    // SAFETY: loading the driver's library runs its initialisers, which is what it is for.
    if !unsafe { sys::is_culib_present() } {
        return unavailable("no NVIDIA driver (libcuda) on this machine");
    }
    // SAFETY: the library is present; cuInit has no preconditions.
    if let Err(error) = unsafe { driver!(cuInit(0)) } {
        return unavailable(&format!("the NVIDIA driver does not start ({error})"));
    }
    let mut version = 0;
    // SAFETY: writes one integer.
    unsafe { driver!(cuDriverGetVersion(&mut version))? };
    if version < DRIVER_VERSION {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        return unavailable(&format!(
            "the NVIDIA driver serves CUDA {major}.{minor}, kipp needs 13.0 or later"
        ));
    }
    Ok(())
}

/// All devices of this machine.
pub fn devices() -> Result<Vec<Device>> {
    start()?;
    let mut count = 0;
    // SAFETY: the driver is started; writes one integer.
    unsafe { driver!(cuDeviceGetCount(&mut count))? };
    (0..count as usize).map(describe).collect()
}

fn describe(ordinal: usize) -> Result<Device> {
    let mut device = 0;
    let mut name = [0; 128];
    let mut memory = 0;
    // SAFETY: each call writes to a local of the type and length that it is told.
    unsafe {
        driver!(cuDeviceGet(&mut device, ordinal as i32))?;
        driver!(cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device))?;
        driver!(cuDeviceTotalMem_v2(&mut memory, device))?;
    }
    // SAFETY: the driver wrote a string that ends in a zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: writes one integer.
        unsafe { driver!(cuDeviceGetAttribute(&mut value, which, device)) }.map(|()| value)
    };
    use sys::CUdevice_attribute::*;
    Ok(Device {
        ordinal,
        name,
        memory: memory as u64,
        capability: (
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
    })
}

/// The primary context of a device.
pub struct Context {
    /// What the context is of.
    pub device: Device,
    raw: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for Context {}

impl Context {
    /// Opens a device and makes it current on this thread.
    pub fn open(ordinal: usize) -> Result<Arc<Self>> {
        let found = devices()?;
        let count = found.len();
        let device = found.into_iter().nth(ordinal).ok_or_else(|| {
            BackendError::Unavailable(match count {
                0 => "the NVIDIA driver lists no device".into(),
                _ => format!("device {ordinal} of {count}, counted from 0"),
            })
        })?;
        let mut raw = 0;
        let mut context = ptr::null_mut();
        // SAFETY: both calls write to locals of their types.
        unsafe {
            driver!(cuDeviceGet(&mut raw, ordinal as i32))?;
            driver!(cuDevicePrimaryCtxRetain(&mut context, raw))?;
        }
        let context = Arc::new(Context { device, raw, context });
        context.enter()?;
        Ok(context)
    }

    /// Makes this context current on this thread; every other call needs that.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained.
        unsafe { driver!(cuCtxSetCurrent(self.context)) }
    }

    /// Bytes of device memory that are free.
    pub fn free_memory(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { driver!(cuMemGetInfo_v2(&mut free, &mut total))? };
        Ok(free as u64)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once when opened. A failure leaves nothing to do.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.raw) };
    }
}

/// Device memory.
pub struct Buffer {
    address: sys::CUdeviceptr,
    bytes: usize,
    _context: Arc<Context>,
}

impl Buffer {
    /// `bytes` of memory with undefined content; `purpose` is what an error says that it was for.
    pub fn new(context: &Arc<Context>, bytes: usize, purpose: &'static str) -> Result<Self> {
        let mut address = 0;
        // SAFETY: writes one address.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) } {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(BackendError::Memory {
                purpose,
                needed: bytes as u64,
                free: context.free_memory()?,
            }),
            other => {
                check("cuMemAlloc", other)?;
                Ok(Buffer { address, bytes, _context: context.clone() })
            }
        }
    }

    /// Its first byte, as kernels take it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` and freed once; the driver waits for work that uses it.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Page-locked host memory, which the device copies from and to at full speed.
pub struct Pinned {
    address: *mut u8,
    bytes: usize,
    _context: Arc<Context>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// `bytes` of memory.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let mut address = ptr::null_mut();
        // SAFETY: writes one address.
        unsafe { driver!(cuMemHostAlloc(&mut address, bytes.max(1), 0))? };
        // SAFETY: that many bytes were just allocated.
        unsafe { ptr::write_bytes(address.cast::<u8>(), 0, bytes) };
        Ok(Pinned { address: address.cast(), bytes, _context: context.clone() })
    }
}

impl std::ops::Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialised memory of that length, owned by self. A copy in flight into it is awaited by its
        // stream's event before anything is read (Backend::collect, the upload pipeline).
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }
}

impl std::ops::DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` and freed once.
        let _ = unsafe { sys::cuMemFreeHost(self.address.cast()) };
    }
}

/// What a tensor map's matrix is made of.
#[derive(Debug, Clone, Copy)]
pub enum Element {
    /// fp16.
    F16,
    /// fp32.
    F32,
    /// Bytes.
    U8,
}

/// How the copy engine of Hopper finds boxes of a tensor; kernels take it by value.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// Boxes of 64 columns and `box_rows` rows of fp16 `[rows, cols]` at `address`, swizzled for wgmma; rows past the end
    /// are zeros.
    pub fn new(address: u64, rows: usize, cols: usize, box_rows: usize) -> Result<Self> {
        Self::boxes(address, Element::F16, [rows, cols], [box_rows, 64])
    }

    /// Boxes of `[rows, cols]` elements of a matrix of that `shape`. A box's rows lie 16, 32, 64 or 128 bytes apart in
    /// shared memory and are swizzled from 64 bytes on; what lies outside the matrix reads as zero and is not written.
    pub fn boxes(
        address: u64,
        element: Element,
        shape: [usize; 2],
        part: [usize; 2],
    ) -> Result<Self> {
        let bytes = match element {
            Element::F16 => 2,
            Element::F32 => 4,
            Element::U8 => 1,
        };
        let dims = shape.map(|n| n as u64);
        let part = part.map(|n| n as u32);
        let (dims, part) = ([dims[1], dims[0]], [part[1], part[0]]);
        Self::tensor(address, element, &dims, &[dims[0] * bytes], &part, true)
    }

    /// Boxes of `part` elements of a tensor of `dims` elements, the first dimension contiguous and the others `strides`
    /// bytes apart; `swizzled` as above by the first dimension of `part`, or plain.
    pub fn tensor(
        address: u64,
        element: Element,
        dims: &[u64],
        strides: &[u64],
        part: &[u32],
        swizzled: bool,
    ) -> Result<Self> {
        use sys::CUtensorMapDataType::*;
        use sys::CUtensorMapSwizzle::*;
        let (ty, bytes) = match element {
            Element::F16 => (CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2),
            Element::F32 => (CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4),
            Element::U8 => (CU_TENSOR_MAP_DATA_TYPE_UINT8, 1),
        };
        let swizzle = match part[0] * bytes {
            128 if swizzled => CU_TENSOR_MAP_SWIZZLE_128B,
            64 if swizzled => CU_TENSOR_MAP_SWIZZLE_64B,
            _ => CU_TENSOR_MAP_SWIZZLE_NONE,
        };
        let rank = dims.len();
        assert!(strides.len() + 1 == rank && part.len() == rank && rank <= 5);
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have as many elements as the rank says (strides one less) and are read during the call only.
        unsafe {
            driver!(cuTensorMapEncodeTiled(
                &mut map,
                ty,
                rank as u32,
                address as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                part.as_ptr(),
                [1; 5].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            ))?;
        }
        Ok(TensorMap(map))
    }
}

/// Every kernel that this process has looked up, and whether it was ever launched or recorded.
static LAUNCHED: Mutex<BTreeMap<String, &AtomicBool>> = Mutex::new(BTreeMap::new());

/// Names of the kernels that this process has launched or recorded so far.
pub fn kernels_hit() -> Vec<String> {
    let all = LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner);
    let hit = all.iter().filter(|(_, launched)| launched.load(Ordering::Relaxed));
    hit.map(|(name, _)| name.clone()).collect()
}

/// The mark of a kernel in `LAUNCHED`; there are as many as kernels, for as long as the process lives.
fn mark(name: &str) -> &'static AtomicBool {
    let mut all = LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner);
    all.entry(name.into()).or_insert_with(|| Box::leak(Box::default()))
}

/// A kernel of a loaded module.
#[derive(Debug, Clone, Copy)]
pub struct Function {
    function: sys::CUfunction,
    launched: &'static AtomicBool,
}

// SAFETY: a handle that lives as long as its module.
unsafe impl Send for Function {}

impl Function {
    /// Allows launches with more dynamic shared memory than the default 48 KB.
    pub fn allow_shared(self, bytes: u32) -> Result<()> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the module is loaded for as long as the backend lives.
        unsafe { driver!(cuFuncSetAttribute(self.function, attribute, bytes as i32)) }
    }
}

/// Kernels in machine code for the context's device.
pub struct Module {
    module: sys::CUmodule,
    _context: Arc<Context>,
}

// SAFETY: a driver handle, usable from any thread.
unsafe impl Send for Module {}

impl Module {
    /// Loads the code for this device from a fat binary.
    pub fn load(context: &Arc<Context>, image: &'static [u8]) -> Result<Self> {
        let mut module = ptr::null_mut();
        // SAFETY: a complete fat binary made by nvcc, which the driver copies.
        match unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) } {
            sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => {
                let Device { name, capability: (major, minor), .. } = &context.device;
                Err(BackendError::Unavailable(format!(
                    "{name}: this program holds no code for compute capability {major}.{minor}"
                )))
            }
            other => {
                check("cuModuleLoadData", other)?;
                Ok(Module { module, _context: context.clone() })
            }
        }
    }

    /// A kernel by name.
    pub fn function(&self, name: &str) -> Result<Function> {
        let symbol = CString::new(name).map_err(|e| BackendError::Device(e.to_string()))?;
        let mut function = ptr::null_mut();
        // SAFETY: a loaded module and a string that ends in a zero.
        let result =
            unsafe { sys::cuModuleGetFunction(&mut function, self.module, symbol.as_ptr()) };
        check(name, result).map(|()| Function { function, launched: mark(name) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}

/// A queue of device work, done in order.
pub struct Stream {
    stream: sys::CUstream,
    /// Whether kernels may start while their predecessor drains (compute capability 9 and later).
    overlap: bool,
    _context: Arc<Context>,
}

// SAFETY: a driver handle, usable from any thread.
unsafe impl Send for Stream {}

impl Stream {
    /// A queue of its own, apart from the default stream.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle.
        unsafe { driver!(cuStreamCreate(&mut stream, flags))? };
        let overlap = context.device.capability.0 >= 9;
        Ok(Stream { stream, overlap, _context: context.clone() })
    }

    /// Waits until everything queued is done.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: a live stream.
        unsafe { driver!(cuStreamSynchronize(self.stream)) }
    }

    /// Sets `bytes` at `to` to zero.
    ///
    /// # Safety
    /// The range lies in a live buffer.
    pub unsafe fn zero(&self, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { driver!(cuMemsetD8Async(to, 0, bytes, self.stream)) }
    }

    /// Copies the first `bytes` of host memory to the device.
    ///
    /// # Safety
    /// `to` has room; `from` is neither changed nor freed before the copy is done.
    pub unsafe fn upload(&self, to: u64, from: &Pinned, bytes: usize) -> Result<()> {
        assert!(bytes <= from.bytes, "upload of {bytes} bytes from {}", from.bytes);
        // SAFETY: the caller's; the length is checked.
        unsafe {
            driver!(cuMemcpyHtoDAsync_v2(to, from.address.cast::<c_void>(), bytes, self.stream))
        }
    }

    /// Copies `bytes` from the device to `to[offset..]`.
    ///
    /// # Safety
    /// `from` is that long; `to` is not read, changed or freed before the copy is done.
    pub unsafe fn download(
        &self,
        to: &mut Pinned,
        offset: usize,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        assert!(
            offset + bytes <= to.bytes,
            "download of {bytes} bytes at {offset} to {}",
            to.bytes
        );
        // SAFETY: the caller's; the range is checked.
        unsafe {
            let to = to.address.add(offset).cast::<c_void>();
            driver!(cuMemcpyDtoHAsync_v2(to, from, bytes, self.stream))
        }
    }

    /// Queues a kernel with `shared` bytes of dynamic shared memory.
    ///
    /// # Safety
    /// `arguments` point to values of the kernel's parameter types, in order, and every address among them is of
    /// live memory as large as the kernel uses.
    pub unsafe fn launch(
        &self,
        function: Function,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let mut attributes = [overlapping()];
        let attributes = &mut attributes[..usize::from(self.overlap)];
        // SAFETY: the caller's.
        unsafe { self.launch_with(attributes, function, grid, threads, shared, arguments) }
    }

    /// The same in clusters of two blocks along x, of which there is an even number; only where kernels overlap.
    ///
    /// # Safety
    /// As for [`Stream::launch`].
    pub unsafe fn launch_pairs(
        &self,
        function: Function,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
        value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: 2, y: 1, z: 1 };
        let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        let pairs = sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let mut attributes = [overlapping(), pairs];
        // SAFETY: the caller's.
        unsafe { self.launch_with(&mut attributes, function, grid, threads, shared, arguments) }
    }

    /// Queues a kernel whose `blocks` blocks wait for each other: it starts when all of them fit on the device.
    ///
    /// # Safety
    /// As for [`Stream::launch`].
    pub unsafe fn launch_together(
        &self,
        function: Function,
        blocks: u32,
        threads: u32,
        shared: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { cooperative: 1 },
        };
        let grid = [blocks, 1, 1];
        // SAFETY: the caller's.
        unsafe { self.launch_with(&mut [attribute], function, grid, threads, shared, arguments) }
    }

    /// # Safety
    /// As for [`Stream::launch`].
    unsafe fn launch_with(
        &self,
        attributes: &mut [sys::CUlaunchAttribute],
        function: Function,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.stream,
            numAttrs: attributes.len() as u32,
            attrs: attributes.as_mut_ptr(),
        };
        function.launched.store(true, Ordering::Relaxed);
        let (function, arguments) = (function.function, arguments.as_mut_ptr());
        // SAFETY: the caller's; the attributes outlive the call.
        unsafe { driver!(cuLaunchKernelEx(&config, function, arguments, ptr::null_mut())) }
    }

    /// Records what `work` queues instead of running it.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live stream; handles are written to locals, and the template is destroyed once instantiated.
        unsafe {
            driver!(cuStreamBeginCapture_v2(self.stream, mode))?;
            let worked = work();
            driver!(cuStreamEndCapture(self.stream, &mut graph))?;
            let instantiated = worked
                .and_then(|()| driver!(cuGraphInstantiateWithFlags(&mut executable, graph, 0)));
            driver!(cuGraphDestroy(graph))?;
            instantiated?;
        }
        Ok(Graph { executable, _context: self._context.clone() })
    }

    /// Queues a recorded piece of work.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        // SAFETY: what it touches lives as long as the backend that recorded it.
        unsafe { driver!(cuGraphLaunch(graph.executable, self.stream)) }
    }
}

/// Lets a kernel start while its predecessor drains.
fn overlapping() -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created once; queued work is finished first so that no copy outlives its memory.
        unsafe {
            let _ = sys::cuStreamSynchronize(self.stream);
            let _ = sys::cuStreamDestroy_v2(self.stream);
        }
    }
}

/// Recorded work of a stream.
pub struct Graph {
    executable: sys::CUgraphExec,
    _context: Arc<Context>,
}

// SAFETY: a driver handle, usable from any thread.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}

/// A point in a stream.
pub struct Event {
    event: sys::CUevent,
    _context: Arc<Context>,
}

// SAFETY: a driver handle, usable from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event that has not been recorded; waiting for it returns at once.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let mut event = ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { driver!(cuEventCreate(&mut event, 0))? };
        Ok(Event { event, _context: context.clone() })
    }

    /// Marks the point that the stream's queue has reached.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: live handles.
        unsafe { driver!(cuEventRecord(self.event, stream.stream)) }
    }

    /// Waits until the stream has passed the point.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: a live handle.
        unsafe { driver!(cuEventSynchronize(self.event)) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
    }
}
