//! The bridge to Metal: the only module that talks to Apple's API. Never run on a Mac yet; on Linux, CI checks its types
//! against objc2-metal (scripts/check-metal-bridge.sh).

use std::ffi::c_void;
use std::mem::size_of_val;
use std::ptr::NonNull;

use engine::BackendError;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::{
    MTLBuffer, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandEncoder, MTLCommandQueue,
    MTLCompileOptions, MTLComputeCommandEncoder, MTLComputePipelineState, MTLCopyAllDevices,
    MTLDataType, MTLDevice, MTLFunctionConstantValues, MTLGPUFamily, MTLLanguageVersion,
    MTLLibrary, MTLResourceOptions, MTLSize,
};

use crate::device::{Argument, Device, Launch};

type Result<T> = std::result::Result<T, BackendError>;
type Object<T> = Retained<ProtocolObject<T>>;

/// Pages of Apple silicon.
const PAGE: usize = 16 << 10;
/// Lanes of a simdgroup that the kernels are written for.
const WIDTH: usize = 32;

fn failed(what: impl std::fmt::Display) -> BackendError {
    BackendError::Device(format!("metal: {what}"))
}

fn refused(what: &str) -> BackendError {
    failed(format_args!("the device made no {what}"))
}

/// An Apple GPU.
pub struct Gpu {
    device: Object<dyn MTLDevice>,
}

/// A buffer in memory that the processor shares.
pub struct Memory(Object<dyn MTLBuffer>);

// SAFETY: Metal's buffers may be used from any thread; who writes when is the backend's to order.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// A kernel's compiled source.
pub struct Library {
    kernel: &'static str,
    library: Object<dyn MTLLibrary>,
}

/// A kernel with its constants.
pub struct Pipeline {
    kernel: &'static str,
    state: Object<dyn MTLComputePipelineState>,
}

// SAFETY: pipeline states do not change and may be used from any thread.
unsafe impl Send for Pipeline {}
// SAFETY: as above.
unsafe impl Sync for Pipeline {}

/// A command queue, and what is being encoded.
pub struct Queue {
    queue: Object<dyn MTLCommandQueue>,
    open: Option<(Object<dyn MTLCommandBuffer>, Object<dyn MTLComputeCommandEncoder>)>,
}

// SAFETY: an encoder may be used by one thread at a time, and a queue is handed to launches exclusively.
unsafe impl Send for Queue {}

/// Commands that were handed over.
pub struct Ticket(Object<dyn MTLCommandBuffer>);

// SAFETY: a committed command buffer may be waited for on any thread.
unsafe impl Send for Ticket {}

/// The devices of this machine, in the order of their numbers.
pub fn devices() -> Vec<Gpu> {
    MTLCopyAllDevices().iter().map(|device| Gpu { device }).collect()
}

impl Gpu {
    /// A device by number, if it has what the kernels need.
    pub fn open(number: usize) -> Result<Self> {
        let unavailable = |why: String| BackendError::Unavailable(why);
        let mut devices = devices();
        if number >= devices.len() {
            let found = devices.len();
            return Err(unavailable(format!(
                "device {number}: this machine has {found} Metal devices"
            )));
        }
        let gpu = devices.swap_remove(number);
        if !gpu.device.supportsFamily(MTLGPUFamily::Apple7) {
            return Err(unavailable(format!(
                "{}: expected an Apple GPU of family 7 (M1) or later",
                gpu.device.name()
            )));
        }
        Ok(gpu)
    }
}

impl Device for Gpu {
    type Buffer = Memory;
    type Library = Library;
    type Pipeline = Pipeline;
    type Queue = Queue;
    type Ticket = Ticket;

    fn describe(&self) -> String {
        let gigabytes = self.largest_buffer() as f64 / 1e9;
        format!("{}, buffers up to {gigabytes:.1} GB", self.device.name())
    }

    fn largest_buffer(&self) -> usize {
        self.device.maxBufferLength()
    }

    fn page(&self) -> usize {
        PAGE
    }

    fn allocate(&self, bytes: usize, purpose: &'static str) -> Result<Memory> {
        let options = MTLResourceOptions::StorageModeShared;
        // Metal hands out zeroed memory.
        let buffer = self.device.newBufferWithLength_options(bytes.max(1), options);
        let free = self.largest_buffer() as u64;
        buffer.map(Memory).ok_or(BackendError::Memory { purpose, needed: bytes as u64, free })
    }

    unsafe fn share(&self, start: *const u8, bytes: usize) -> Option<Memory> {
        let pointer = NonNull::new(start.cast_mut().cast::<c_void>())?;
        // SAFETY: whole pages that stay as they are, as the caller promises. Without a deallocator Metal leaves them be.
        let buffer = unsafe {
            self.device.newBufferWithBytesNoCopy_length_options_deallocator(
                pointer,
                bytes,
                MTLResourceOptions::StorageModeShared,
                None,
            )
        };
        buffer.map(Memory)
    }

    fn library(&self, kernel: &'static str, source: &str, tensors: bool) -> Result<Library> {
        if tensors && !self.device.supportsFamily(MTLGPUFamily::Metal4) {
            return Err(BackendError::Unavailable(
                "the device is not of the family Metal 4".into(),
            ));
        }
        autoreleasepool(|_| {
            let options = MTLCompileOptions::new();
            // bfloat needs 3.1, which is macOS 14; tensors need 4.0, which is macOS 26. Fast mathematics knows no infinities,
            // which the kernels use.
            options.setLanguageVersion(match tensors {
                true => MTLLanguageVersion::Version4_0,
                false => MTLLanguageVersion::Version3_1,
            });
            #[expect(deprecated, reason = "the newer call needs macOS 15")]
            options.setFastMathEnabled(false);
            let source = NSString::from_str(source);
            let library = self.device.newLibraryWithSource_options_error(&source, Some(&options));
            let library = library.map_err(|error| {
                failed(format_args!("kernel {kernel} does not compile: {error}"))
            })?;
            Ok(Library { kernel, library })
        })
    }

    fn pipeline(&self, library: &Library, constants: &[i32]) -> Result<Pipeline> {
        let kernel = library.kernel;
        let broken =
            |error: &dyn std::fmt::Display| failed(format_args!("kernel {kernel}: {error}"));
        autoreleasepool(|_| {
            let values = MTLFunctionConstantValues::new();
            for (index, constant) in constants.iter().enumerate() {
                // SAFETY: an int, which is copied during the call.
                unsafe {
                    let value = NonNull::from(constant).cast();
                    values.setConstantValue_type_atIndex(value, MTLDataType::Int, index);
                }
            }
            let name = NSString::from_str(kernel);
            let function = library
                .library
                .newFunctionWithName_constantValues_error(&name, &values)
                .map_err(|error| broken(&error))?;
            let state = self
                .device
                .newComputePipelineStateWithFunction_error(&function)
                .map_err(|error| broken(&error))?;
            if state.threadExecutionWidth() != WIDTH {
                let width = state.threadExecutionWidth();
                return Err(broken(&format_args!("simdgroups of {width} lanes, expected {WIDTH}")));
            }
            Ok(Pipeline { kernel, state })
        })
    }

    fn queue(&self) -> Result<Queue> {
        let queue = self.device.newCommandQueue().ok_or_else(|| refused("command queue"))?;
        Ok(Queue { queue, open: None })
    }

    fn launch(&self, queue: &mut Queue, launch: Launch<'_, Self>) -> Result<()> {
        let Pipeline { kernel, state } = launch.pipeline;
        let most = state.maxTotalThreadsPerThreadgroup();
        if launch.threads > most {
            return Err(failed(format_args!(
                "kernel {kernel}: {} threads a threadgroup, the device allows {most}",
                launch.threads
            )));
        }
        autoreleasepool(|_| {
            let encoder = queue.encoder()?;
            encoder.setComputePipelineState(state);
            for (index, argument) in launch.arguments.iter().enumerate() {
                // SAFETY: the arguments have the types of the kernel's parameters, checked against its source where each
                // launch is written and by the emulator; slices lie in their buffers; words are copied.
                unsafe {
                    match argument {
                        Argument::Memory(part) => {
                            let buffer = Some(&*part.buffer.0);
                            encoder.setBuffer_offset_atIndex(buffer, part.offset, index);
                        }
                        Argument::Words(words) => {
                            let bytes = NonNull::from(*words).cast();
                            encoder.setBytes_length_atIndex(bytes, size_of_val(*words), index);
                        }
                    }
                }
            }
            if launch.shared > 0 {
                // SAFETY: kernels have one threadgroup parameter at most.
                unsafe { encoder.setThreadgroupMemoryLength_atIndex(launch.shared, 0) };
            }
            let [width, height, depth] = launch.grid;
            encoder.dispatchThreadgroups_threadsPerThreadgroup(
                MTLSize { width, height, depth },
                MTLSize { width: launch.threads, height: 1, depth: 1 },
            );
            Ok(())
        })
    }

    fn commit(&self, queue: &mut Queue) -> Result<Ticket> {
        autoreleasepool(|_| {
            queue.encoder()?;
            let (buffer, encoder) = queue.open.take().ok_or_else(|| refused("command buffer"))?;
            encoder.endEncoding();
            buffer.commit();
            Ok(Ticket(buffer))
        })
    }

    fn wait(&self, Ticket(buffer): Ticket) -> Result<()> {
        autoreleasepool(|_| {
            buffer.waitUntilCompleted();
            if buffer.status() == MTLCommandBufferStatus::Completed {
                return Ok(());
            }
            let why = buffer.error().map_or("no reason given".into(), |error| error.to_string());
            Err(failed(format_args!("a batch failed: {why}")))
        })
    }

    fn bytes(&self, buffer: &Memory) -> usize {
        buffer.0.length()
    }

    fn write(&self, buffer: &Memory, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= buffer.0.length());
        // SAFETY: inside the buffer's memory, which the device does not use at the moment.
        unsafe {
            buffer
                .0
                .contents()
                .cast::<u8>()
                .add(at)
                .copy_from(NonNull::from(bytes).cast(), bytes.len())
        };
    }

    fn read(&self, buffer: &Memory, at: usize, out: &mut [u8]) {
        assert!(at + out.len() <= buffer.0.length());
        // SAFETY: inside the buffer's memory, which the device does not write at the moment.
        unsafe {
            buffer
                .0
                .contents()
                .cast::<u8>()
                .add(at)
                .copy_to(NonNull::from(&mut *out).cast(), out.len())
        };
    }
}

impl Queue {
    /// What is encoded to; launches run one after the other, each after the writes of those before.
    fn encoder(&mut self) -> Result<&ProtocolObject<dyn MTLComputeCommandEncoder>> {
        if self.open.is_none() {
            let buffer = self.queue.commandBuffer().ok_or_else(|| refused("command buffer"))?;
            let encoder = buffer.computeCommandEncoder().ok_or_else(|| refused("encoder"))?;
            self.open = Some((buffer, encoder));
        }
        let (_, encoder) = self.open.as_ref().ok_or_else(|| refused("encoder"))?;
        Ok(encoder)
    }
}

impl Drop for Queue {
    /// An encoder that is open has to be ended before it goes.
    fn drop(&mut self) {
        if let Some((_, encoder)) = self.open.take() {
            encoder.endEncoding();
        }
    }
}
