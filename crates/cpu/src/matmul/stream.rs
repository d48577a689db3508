//! Few tokens: one tile, past which the weights stream from memory and are unpacked as they come.

use super::block::add_scaled;
use super::formats::Narrow;
use super::{Product, load, store};
use crate::activations::{NARROW, Tile, WIDE};
use crate::simd::{LANES, Simd};

/// How far ahead of the kernel weights are fetched, over all streams: what memory delivers during its latency.
const AHEAD: usize = 6 << 10;

/// Panels `first .. first + count` for the tile.
///
/// # Safety
/// As [`super::product`].
#[inline(always)]
pub unsafe fn product<S: Simd, B: Block>(
    job: &Product<'_>,
    tile: Tile,
    first: usize,
    count: usize,
) {
    // One stream is what memory delivers fastest; several tokens share what they broadcast between panels.
    let streams = if tile.len < 4 { 1 } else { S::TILE.0 };
    let step = count / streams;
    let mut done = 0;
    while done < count {
        // What no longer fills all streams goes panel by panel.
        let (together, panel) = if done < step * streams {
            (streams, Panel { first: first + done / streams, step })
        } else {
            (1, Panel { first: first + done, step })
        };
        // SAFETY: the caller's.
        unsafe {
            match together {
                2 if S::TILE.0 >= 2 => by_tokens::<S, B, 2>(job, panel, tile),
                _ => by_tokens::<S, B, 1>(job, panel, tile),
            }
        }
        done += together;
    }
}

/// Panels that are multiplied together: the first, and the distance to each next one.
#[derive(Clone, Copy)]
struct Panel {
    first: usize,
    step: usize,
}

/// # Safety
/// As [`super::product`].
#[inline(always)]
unsafe fn by_tokens<S: Simd, B: Block, const P: usize>(
    job: &Product<'_>,
    panel: Panel,
    tile: Tile,
) {
    // SAFETY: the caller's.
    unsafe {
        match tile.len {
            12 if S::TILE.1 >= 12 => one_tile::<S, B, P, 12>(job, panel, tile.start),
            8 if S::TILE.1 >= 8 => one_tile::<S, B, P, 8>(job, panel, tile.start),
            4 if S::TILE.1 >= 4 => one_tile::<S, B, P, 4>(job, panel, tile.start),
            2 => one_tile::<S, B, P, 2>(job, panel, tile.start),
            _ => one_tile::<S, B, P, 1>(job, panel, tile.start),
        }
    }
}

/// Activations of one tile at one block of 128 inputs.
pub struct Inputs {
    codes: *const i32,
    scales: *const f32,
    offsets: *const i32,
    sums: *const f32,
}

/// `P` panels by `T` tokens.
///
/// # Safety
/// As [`super::product`].
#[inline(always)]
unsafe fn one_tile<S: Simd, B: Block, const P: usize, const T: usize>(
    job: &Product<'_>,
    panel: Panel,
    token: usize,
) {
    let cols = job.weights.cols;
    let x = job.activations;
    // SAFETY: the caller's; the offsets stay inside the tile's and the panels' arrays.
    unsafe {
        let mut weights = [(std::ptr::null(), std::ptr::null()); P];
        for (p, weights) in weights.iter_mut().enumerate() {
            let (scales, codes) = job.weights.panel(panel.first + p * panel.step);
            *weights = (scales.cast_const(), codes.cast_const());
        }
        let mut inputs = Inputs {
            codes: x.codes.at(token * cols / 2),
            scales: x.scales.at(token * cols.div_ceil(WIDE)),
            offsets: x.offsets.at(token * cols / NARROW),
            sums: x.sums.at(token * cols / NARROW),
        };
        let mut total = [[S::splat(0.0); T]; P];
        if job.add {
            for (p, total) in total.iter_mut().enumerate() {
                for (t, total) in total.iter_mut().enumerate() {
                    *total = load::<S>(job, panel.first + p * panel.step, token + t);
                }
            }
        }
        for first in (0..cols).step_by(WIDE) {
            let width = WIDE.min(cols - first);
            B::add::<S, P, T>(&mut total, width, &mut weights, &mut inputs);
            inputs.scales = inputs.scales.add(T);
        }
        for (p, total) in total.iter().enumerate() {
            for (t, total) in total.iter().enumerate() {
                store::<S>(job, panel.first + p * panel.step, token + t, *total);
            }
        }
    }
}

/// A format's dot product over one block of up to 128 inputs.
pub trait Block {
    /// Adds the block's products to `total`, with all pointers but that to the activations' scale advanced past the block.
    ///
    /// # Safety
    /// As [`super::product`].
    unsafe fn add<S: Simd, const P: usize, const T: usize>(
        total: &mut [[S::F; T]; P],
        width: usize,
        weights: &mut [(*const u16, *const i32); P],
        inputs: &mut Inputs,
    );
}

/// acc\[p\]\[t\] += w\[p\] . codes\[t\] for one pair of inputs.
///
/// # Safety
/// As [`super::product`].
#[inline(always)]
unsafe fn dot_pair<S: Simd, const P: usize, const T: usize>(
    acc: &mut [[S::I; T]; P],
    w: [S::I; P],
    codes: *const i32,
) {
    for t in 0..T {
        for p in 0..P {
            // SAFETY: the caller's.
            acc[p][t] = unsafe { S::dot(acc[p][t], w[p], S::splat_i(*codes.add(t))) };
        }
    }
}

/// The same for a group of four.
///
/// # Safety
/// As [`super::product`].
#[inline(always)]
unsafe fn dot_group<S: Simd, N: Narrow, const P: usize, const T: usize>(
    acc: &mut [[S::I; T]; P],
    word: [S::I; P],
    group: usize,
    codes: *const i32,
) {
    let mut w = [word; 2];
    // SAFETY: the caller's.
    unsafe {
        for p in 0..P {
            [w[0][p], w[1][p]] = N::pairs::<S>(word[p], group);
        }
        dot_pair::<S, P, T>(acc, w[0], codes);
        dot_pair::<S, P, T>(acc, w[1], codes.add(T));
    }
}

/// 16-bit weights.
pub struct Wide;

impl Block for Wide {
    #[inline(always)]
    unsafe fn add<S: Simd, const P: usize, const T: usize>(
        total: &mut [[S::F; T]; P],
        width: usize,
        weights: &mut [(*const u16, *const i32); P],
        inputs: &mut Inputs,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let mut acc = [[S::splat_i(0); T]; P];
            for _ in 0..width / 2 {
                let mut w = [S::splat_i(0); P];
                for p in 0..P {
                    S::prefetch(weights[p].1.wrapping_byte_add(AHEAD / P));
                    w[p] = S::load(weights[p].1);
                    weights[p].1 = weights[p].1.add(LANES);
                }
                dot_pair::<S, P, T>(&mut acc, w, inputs.codes);
                inputs.codes = inputs.codes.add(T);
            }
            let own = weights.map(|w| S::load_bf16(w.0));
            add_scaled::<S, P, T>(total, acc, own, inputs.scales);
            for weights in weights {
                weights.0 = weights.0.add(LANES);
            }
        }
    }
}

impl<N: Narrow> Block for N {
    #[inline(always)]
    unsafe fn add<S: Simd, const P: usize, const T: usize>(
        total: &mut [[S::F; T]; P],
        width: usize,
        weights: &mut [(*const u16, *const i32); P],
        inputs: &mut Inputs,
    ) {
        // SAFETY: the caller's.
        unsafe {
            for _ in 0..width / NARROW {
                for part in 0..N::SCALES {
                    let mut acc = [[S::splat_i(0); T]; P];
                    if N::OFFSET {
                        for t in 0..T {
                            let offset = S::splat_i(*inputs.offsets.add(t));
                            for acc in &mut acc {
                                acc[t] = offset;
                            }
                        }
                    }
                    let words = N::WORDS / N::SCALES;
                    for word in part * words..(part + 1) * words {
                        let mut w = [S::splat_i(0); P];
                        for p in 0..P {
                            S::prefetch(
                                weights[p].1.add(word * LANES).wrapping_byte_add(AHEAD / P),
                            );
                            w[p] = S::load(weights[p].1.add(word * LANES));
                        }
                        let codes = inputs.codes.add(2 * word * T);
                        dot_group::<S, N, P, T>(&mut acc, w, 0, codes);
                        if N::GROUPS == 2 {
                            let codes = codes.add(2 * N::WORDS * T);
                            dot_group::<S, N, P, T>(&mut acc, w, 1, codes);
                        }
                    }
                    let own = weights.map(|w| S::load_f16(w.0.add(part * LANES)));
                    add_scaled::<S, P, T>(total, acc, own, inputs.scales);
                }
                if N::MINIMUM {
                    for p in 0..P {
                        let minimum = S::load_f16(weights[p].0.add(N::SCALES * LANES));
                        for t in 0..T {
                            let sum = S::splat(*inputs.sums.add(t));
                            total[p][t] = S::fma(sum, minimum, total[p][t]);
                        }
                    }
                }
                for (scales, codes) in weights.iter_mut() {
                    *scales = scales.add(N::HALVES * LANES);
                    *codes = codes.add(N::WORDS * LANES);
                }
                inputs.codes = inputs.codes.add(NARROW / 2 * T);
                inputs.offsets = inputs.offsets.add(T);
                inputs.sums = inputs.sums.add(T);
            }
        }
    }
}
