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

/// A device's limits.
#[derive(Debug, Clone, Copy)]
pub struct Peaks {
    /// Bytes a second read from its memory.
    pub read: f64,
    /// Operations a second of its tensor cores on fp16 with fp32 sums, two a product.
    pub operations: f64,
}

/// Measures device `ordinal`, which has 1 GiB free.
pub fn peaks(ordinal: usize) -> Result<Peaks> {
    let context = Context::open(ordinal)?;
    let stream = Stream::new(&context)?;
    let module = Module::load(&context, image("peaks")?)?;
    let blocks = context.device.multiprocessors as u32;
    Ok(Peaks {
        read: read(&context, &stream, &module, blocks)?,
        operations: products(&context, &stream, &module, blocks)?,
    })
}

/// The best of five launches.
fn read(context: &Arc<Context>, stream: &Stream, module: &Module, blocks: u32) -> Result<f64> {
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
        launch!(stream, function, [blocks, 1, 1], 512, 0, [from, count, passes, to])?;
        stream.wait()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(f64::from(PASSES) * BYTES as f64 / best)
}

fn products(context: &Arc<Context>, stream: &Stream, module: &Module, blocks: u32) -> Result<f64> {
    let function = module.function("peak_products")?;
    function.allow_shared(SHARED)?;
    let out = Buffer::new(context, 4, "a measurement")?;
    let (rounds, to) = (ROUNDS, out.address());
    let (mut launches, start) = (0.0, Instant::now());
    while start.elapsed().as_secs_f64() < LONG {
        launch!(stream, function, [blocks, 1, 1], 256, SHARED, [rounds, to])?;
        stream.wait()?;
        launches += 1.0;
    }
    let operations = launches * f64::from(blocks) * WARPS * f64::from(ROUNDS) * OPERATIONS;
    Ok(operations / start.elapsed().as_secs_f64())
}
