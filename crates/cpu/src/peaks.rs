//! What this machine can do at most: the figures that the backend's speed is held against.

use std::hint::black_box;
use std::time::Instant;

use crate::memory::Shared;
use crate::pool::Pool;
use crate::simd::{Class, Simd};

/// Accumulators of the peak loop: enough to hide the latency of two units.
const CHAINS: usize = 16;

/// Rates of a number of threads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peaks {
    /// Bytes a second that all threads together read from memory.
    pub read: f64,
    /// Multiplications and additions a second of the class's i16 dot product.
    pub dot: f64,
}

/// Measures both in about half a second.
pub fn measure(class: Class, threads: usize) -> std::io::Result<Peaks> {
    let mut pool = Pool::new(threads)?;
    let kernels = class.kernels().ok_or_else(|| std::io::Error::other("class not available"))?;
    let rounds = 1 << 16;
    let seconds = best_of(8, || {
        pool.run(&|_, _| {
            // SAFETY: the machine has the class.
            black_box(unsafe { (kernels.dot_peak)(rounds) });
        });
    });
    let products = rounds * CHAINS * 2 * crate::simd::LANES;
    let dot = (2 * products * pool.threads()) as f64 / seconds;

    let bytes = 512 << 20;
    let buffer = Shared::<u64>::new(bytes / 8);
    let read = |thread: usize, threads: usize| {
        let words = bytes / 8;
        let (start, end) = (words * thread / threads, words * (thread + 1) / threads);
        // SAFETY: inside the buffer, which nobody writes now.
        let words = unsafe { std::slice::from_raw_parts(buffer.at(start), end - start) };
        let mut sums = [0u64; 32];
        for chunk in words.chunks_exact(32) {
            for (sum, word) in sums.iter_mut().zip(chunk) {
                *sum ^= word;
            }
        }
        sums.iter().fold(0, |a, b| a ^ b)
    };
    // SAFETY: nobody else has the buffer; written so that its pages exist.
    unsafe { buffer.at(0).write_bytes(1, bytes / 8) };
    let seconds = best_of(6, || {
        pool.run(&|thread, team| {
            black_box(read(thread, team.threads()));
        });
    });
    Ok(Peaks { read: bytes as f64 / seconds, dot })
}

fn best_of(times: usize, mut run: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..times {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// Independent chains of dot products.
///
/// # Safety
/// The machine has the class's features.
#[inline(always)]
pub unsafe fn dot_peak<S: Simd>(rounds: usize) -> i32 {
    // SAFETY: the caller's.
    unsafe {
        let w = S::splat_i(black_box(0x0003_0005));
        let mut sums = [S::splat_i(0); CHAINS];
        for _ in 0..rounds {
            let a = black_box(7);
            for sum in &mut sums {
                *sum = S::dot(*sum, w, a);
            }
        }
        let mut total = 0i32;
        for sum in sums {
            let mut lanes = [0i32; crate::simd::LANES];
            S::store_i(sum, lanes.as_mut_ptr());
            total = lanes.iter().fold(total, |a, b| a.wrapping_add(*b));
        }
        total
    }
}

pub fn micro(class: Class) {
    use crate::activations::*; use crate::panels::*; use crate::matmul::*;
    let k = class.kernels().unwrap();
    for (cols, tokens, panels) in [(1024, 12, 2), (1024, 96, 4), (1024, 504, 8), (3072, 504, 8)] {
    for format in [Format::Wide, Format::Q8, Format::Q41, Format::Q40] {
        let mem = Shared::<u8>::new(Panels::bytes(format, panels * 16, cols));
        let w = Panels::new(format, panels * 16, cols, mem.at(0));
        let acts = Activations::new(tokens, cols, 8191.0);
        let mut scr = vec![0f32; 512*64]; let mut t = Vec::new(); tiles(tokens, k.tile_tokens, &mut t);
        let out = Shared::<f32>::new(tokens * panels * 16);
        let p = Product { weights: &w, activations: &acts, tiles: &t, out: out.at(0), stride: panels * 16, add: false };
        let reps = 1 + (100_000_000 / (cols * tokens * panels * 16));
        let (mut a, mut b) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..15 {
            let s = Instant::now(); black_box(unsafe { (k.dot_peak)(1 << 17) }); a = a.min(s.elapsed().as_secs_f64());
            let s = Instant::now(); for _ in 0..reps { unsafe { (k.product)(&p, 0, panels, &mut scr) } } b = b.min(s.elapsed().as_secs_f64());
        }
        let peak = (2 * (1 << 17) * CHAINS * 2 * 16) as f64 / a;
        let rate = (2 * reps * cols * tokens * panels * 16) as f64 / b;
        println!("{format:?} cols {cols} tokens {tokens}: peak {:.0} product {:.0} = {:.1} %", peak / 1e9, rate / 1e9, rate / peak * 100.0);
    } }
}
