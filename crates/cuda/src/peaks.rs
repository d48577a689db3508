//! What a device can do at most, measured now: the floors that its kernels are held against.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

use engine::BackendError;

use crate::driver::{Buffer, Context, Module, Stream};
use crate::kernels::{image, launch};

type Result<T> = std::result::Result<T, BackendError>;

/// Bytes that are read, far more than caches hold, and how often by a launch.
const BYTES: usize = 1 << 30;
const PASSES: i32 = 16;
/// Rounds of products of a launch, and operations of a warp in each (`kernels/peaks.cu`).
const ROUNDS: i32 = 10_000;
const OPERATIONS: f64 = 524_288.0;
const WARPS: f64 = 8.0;
/// Dynamic shared memory of the products.
const SHARED: u32 = 49 << 10;
/// Seconds that products go on: the device's power is then at its limit, as it is in a long prompt.
const LONG: f64 = 0.3;

/// Where the kernels of this file are launched.
struct Rig {
    module: Module,
    stream: Stream,
    context: Arc<Context>,
}

impl Rig {
    fn open(ordinal: usize) -> Result<Self> {
        let context = Context::open(ordinal)?;
        let stream = Stream::new(&context)?;
        let module = Module::load(&context, image("peaks")?)?;
        Ok(Rig { module, stream, context })
    }

    /// One block a multiprocessor.
    fn blocks(&self) -> u32 {
        self.context.device.multiprocessors as u32
    }
}

/// Bytes a second that device `ordinal`, which has 1 GiB free, reads from its memory: in the best of five launches.
pub fn peak_read(ordinal: usize) -> Result<f64> {
    let rig = Rig::open(ordinal)?;
    let Rig { module, stream, context } = &rig;
    let function = module.function("peak_read")?;
    let buffer = Buffer::new(context, BYTES, "a measurement")?;
    let out = Buffer::new(context, 4, "a measurement")?;
    // SAFETY: the whole of a live buffer.
    unsafe { stream.zero(buffer.address(), BYTES)? };
    let (from, count, passes, to) = (buffer.address(), (BYTES / 16) as u64, PASSES, out.address());
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        stream.wait()?;
        let start = Instant::now();
        launch!(stream, function, [rig.blocks(), 1, 1], 512, 0, [from, count, passes, to])?;
        stream.wait()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(f64::from(PASSES) * BYTES as f64 / best)
}

/// Operations a second of its tensor cores on fp16 with fp32 sums, two a product.
pub fn peak_operations(ordinal: usize) -> Result<f64> {
    let rig = Rig::open(ordinal)?;
    let Rig { module, stream, context } = &rig;
    let function = module.function("peak_products")?;
    function.allow_shared(SHARED)?;
    let out = Buffer::new(context, 4, "a measurement")?;
    let (rounds, to) = (ROUNDS, out.address());
    let (mut launches, start) = (0.0, Instant::now());
    while start.elapsed().as_secs_f64() < LONG {
        launch!(stream, function, [rig.blocks(), 1, 1], 256, SHARED, [rounds, to])?;
        stream.wait()?;
        launches += 1.0;
    }
    let operations = launches * f64::from(rig.blocks()) * WARPS * f64::from(ROUNDS) * OPERATIONS;
    Ok(operations / start.elapsed().as_secs_f64())
}
