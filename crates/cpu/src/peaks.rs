//! What this machine can do at most: the figures that the backend's speed is held against.

use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use engine::BackendError;

use crate::chains;
use crate::memory::Shared;
use crate::pool::{Panicked, Pool};
use crate::simd::{Class, Simd};

/// Products of a round of the peak loop.
const CHAINS: usize = 12;

/// Multiplications and additions a second of the class's i16 dot product, on all threads together.
pub fn dot(class: Class, threads: usize) -> Result<f64, BackendError> {
    let mut pool = Pool::new(threads)?;
    let kernels = class.required()?;
    let rounds = 1 << 16;
    let seconds = best_of(8, || {
        pool.run(&|_, _| {
            // SAFETY: the machine has the class.
            black_box(unsafe { (kernels.dot_peak)(rounds) });
        })
    })?;
    let products = rounds * CHAINS * 2 * crate::simd::LANES;
    Ok((2 * products * pool.threads()) as f64 / seconds)
}

/// Bytes a second that all threads together read from memory, of which 512 MiB must be free.
pub fn read(class: Class, threads: usize) -> Result<f64, BackendError> {
    let mut pool = Pool::new(threads)?;
    let kernels = class.required()?;
    let bytes = 512 << 20;
    let buffer = Shared::<u64>::new(bytes / 8, "measuring")?;
    let read = |thread: usize, threads: usize| {
        let lines = bytes / 64;
        let (start, end) = (lines * thread / threads, lines * (thread + 1) / threads);
        // SAFETY: inside the buffer, which nobody writes now, and the machine has the class.
        unsafe { (kernels.read_peak)(buffer.at(start * 8).cast(), end - start) }
    };
    // SAFETY: nobody else has the buffer; written so that its pages exist.
    unsafe { buffer.at(0).write_bytes(1, bytes / 8) };
    let seconds = best_of(6, || {
        pool.run(&|thread, team| {
            black_box(read(thread, team.threads()));
        })
    })?;
    Ok(bytes as f64 / seconds)
}

/// Multiplications and additions a second of single instructions that a matrix product could be made of, on all
/// threads together: of those that this processor has, in about a tenth of a second each.
pub fn instructions(threads: usize) -> Result<Vec<(&'static str, f64)>, BackendError> {
    let mut pool = Pool::new(threads)?;
    let mut rates = Vec::new();
    for chain in chains::available() {
        let rounds = 1 << 22;
        // SAFETY: the processor has the instruction.
        let seconds = best_of(8, || pool.run(&|_, _| unsafe { (chain.run)(rounds) }))?;
        let operations = rounds * chains::CHAINS * chain.operations * pool.threads();
        rates.push((chain.name, operations as f64 / seconds));
    }
    Ok(rates)
}

/// Seconds until one thread sees what another wrote to a cache line: half of the quickest round trips. What a barrier
/// costs at least, and on virtual machines a sign of where the host has put the processors.
pub fn handover() -> Result<f64, BackendError> {
    /// Round trips that are timed together.
    const TRIPS: u32 = 100;
    const LONGEST: Duration = Duration::from_millis(20);
    let ball = AtomicU32::new(0);
    let quickest = Mutex::new(f64::INFINITY);
    Pool::new(2)?.run(&|thread, _| {
        let pass = |from: u32| {
            while ball.load(SeqCst) != from {
                if ball.load(SeqCst) == u32::MAX {
                    return false;
                }
                std::hint::spin_loop();
            }
            ball.store(from + 1, SeqCst);
            true
        };
        if thread == 1 {
            (0..).step_by(2).all(|trip| pass(trip + 1));
            return;
        }
        let started = Instant::now();
        let mut best = f64::INFINITY;
        let mut trips = (0..).step_by(2);
        while started.elapsed() < LONGEST {
            let start = Instant::now();
            for trip in trips.by_ref().take(TRIPS as usize) {
                pass(trip);
            }
            best = best.min(start.elapsed().as_secs_f64() / f64::from(2 * TRIPS));
        }
        // Only once the other has answered, which would otherwise hide it.
        while ball.load(SeqCst) % 2 == 1 {
            std::hint::spin_loop();
        }
        ball.store(u32::MAX, SeqCst);
        *quickest.lock().unwrap_or_else(PoisonError::into_inner) = best;
    })?;
    Ok(quickest.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn best_of(times: usize, mut run: impl FnMut() -> Result<(), Panicked>) -> Result<f64, Panicked> {
    let mut best = f64::INFINITY;
    for _ in 0..times {
        let start = Instant::now();
        run()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Streams that are read side by side.
const STREAMS: usize = 4;

/// Reads `lines` cache lines.
///
/// # Safety
/// They exist, and the machine has the class's features.
#[inline(always)]
pub unsafe fn read_peak<S: Simd>(from: *const i32, lines: usize) -> f32 {
    // SAFETY: the caller's; a line is 16 words.
    unsafe {
        let each = lines / STREAMS;
        let mut most = [S::splat(0.0); STREAMS];
        for line in 0..each {
            for (stream, most) in most.iter_mut().enumerate() {
                let at = from.add((stream * each + line) * crate::simd::LANES);
                S::prefetch(at.wrapping_add(2048));
                *most = S::max(*most, S::load_f32(at.cast()));
            }
        }
        most.into_iter().map(|x| S::largest(x)).sum()
    }
}

/// Independent chains of dot products: as many as hide the latency of two units, and as stay in registers where a
/// vector takes two.
///
/// # Safety
/// The machine has the class's features.
#[inline(always)]
pub unsafe fn dot_peak<S: Simd>(rounds: usize) -> i32 {
    // SAFETY: the caller's.
    unsafe {
        let w = S::splat_i(black_box(0x0003_0005));
        let mut sums = [S::splat_i(black_box(1)); CHAINS];
        let independent = if S::TILE.0 * S::TILE.1 < CHAINS { CHAINS / 2 } else { CHAINS };
        for _ in 0..rounds {
            for chain in 0..CHAINS {
                let sum = &mut sums[chain % independent];
                // Of the sum itself: a product of the same two would be computed once.
                *sum = S::dot(*sum, w, *sum);
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

#[cfg(test)]
mod tests {
    /// On whatever machine, loaded or not.
    #[test]
    fn a_line_passes_between_threads_in_more_than_no_time() {
        let seconds = super::handover().expect("two threads");
        assert!(seconds > 1e-9 && seconds < 1.0, "{seconds}");
    }
}
