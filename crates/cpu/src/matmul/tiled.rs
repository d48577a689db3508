//! Many tokens: a unit's weights are unpacked once into the second-level cache, then multiplied with tile after tile.
//!
//! # More products than the multipliers give
//!
//! For pairs of inputs (Winograd, "A new algorithm for inner product", 1968)
//!
//! ```text
//! x0 w0 + x1 w1 = (x0 + w1) (x1 + w0) - x0 x1 - w0 w1
//! ```
//!
//! One multiplication and two additions instead of two multiplications; the last two terms are sums of a
//! token's and of a row's own, computed once for all rows and all tokens. In 32-bit integers all of it is
//! exact modulo 2^32, whatever overflows on the way, and the result fits. So it is the same number that
//! the plain way gives, bit for bit, and a tile may do both: where a processor adds vectors beside
//! multiplying them, two of three tokens go this way and one the plain one, which uses all four units of a
//! Zen 5 core and multiplies 1.5 times as many pairs as its multipliers alone could.

use std::ops::Range;

use super::block::Block;
use super::formats::{K8, Narrow, Q8, Q40, Q41};
use super::{Product, load, store};
use crate::activations::{NARROW, Tile, WIDE};
use crate::panels::{Format, Panels};
use crate::simd::{LANES, Simd};

/// Inputs that are multiplied with all tiles before the next ones: two panels' codes stay in the first-level cache, all
/// tokens' activations in the second.
const SLICE: usize = 256;
/// Elements of a panel's codes: pairs (k, k + 2) and (k + 1, k + 3) in turn, a vector each.
const CODES: usize = SLICE / 2 * LANES;
/// Elements of a panel's factors: a scale a block and, as the format has them, the sum of w0 w1 + w2 w3 + ... over the
/// block and a minimum.
const FACTORS: usize = SLICE / NARROW * 3 * LANES;
/// Elements of an unpacked panel.
pub const PANEL: usize = CODES + FACTORS;
/// Most panels that are multiplied together.
pub const TOGETHER: usize = 2;

/// Panels `first .. first + count` for all tiles.
///
/// # Safety
/// As [`super::product`].
#[inline(always)]
pub unsafe fn product<S: Simd>(job: &Product<'_>, first: usize, count: usize, scratch: &mut [f32]) {
    let cols = job.weights.cols;
    let tokens: usize = job.tiles.iter().map(|tile| tile.len).sum();
    let (unpacked, sums) = scratch.split_at_mut(TOGETHER * PANEL);
    let (block, minimum) = match job.weights.format {
        Format::Wide => (WIDE, false),
        Format::Q8 | Format::Q40 => (NARROW, false),
        Format::Q41 => (NARROW, true),
        Format::K8 => (NARROW / 2, true),
    };
    // Sums pass from one slice to the next through the scratch, and no bit changes.
    for start in (0..cols).step_by(SLICE) {
        let inputs = start..cols.min(start + SLICE);
        let mut done = 0;
        while done < count {
            let together = if count - done >= S::TILE.0 { S::TILE.0 } else { 1 };
            for (p, to) in unpacked.chunks_exact_mut(PANEL).take(together).enumerate() {
                let (weights, panel, inputs) = (job.weights, first + done + p, inputs.clone());
                // SAFETY: the caller's.
                unsafe {
                    match weights.format {
                        Format::Wide => factors_of_wide::<S>(weights, panel, inputs, to),
                        Format::Q8 => unpack::<S, Q8>(weights, panel, inputs, to),
                        Format::Q41 => unpack::<S, Q41>(weights, panel, inputs, to),
                        Format::Q40 => unpack::<S, Q40>(weights, panel, inputs, to),
                        Format::K8 => unpack::<S, K8>(weights, panel, inputs, to),
                    }
                }
            }
            let sums = sums[done * tokens * LANES..].as_mut_ptr();
            let panels = Unpacked {
                job,
                first: first + done,
                inputs: inputs.clone(),
                block,
                minimum,
                panels: unpacked,
                sums,
            };
            for tile in job.tiles {
                // SAFETY: the caller's.
                unsafe {
                    match together {
                        2 if S::TILE.0 >= 2 => by_tokens::<S, 2>(&panels, *tile),
                        _ => by_tokens::<S, 1>(&panels, *tile),
                    }
                }
            }
            done += together;
        }
    }
}

/// Panels that are multiplied together, unpacked over a slice of inputs.
struct Unpacked<'a> {
    job: &'a Product<'a>,
    first: usize,
    inputs: Range<usize>,
    /// Inputs that share a scale of the weights.
    block: usize,
    /// Whether weights have minima.
    minimum: bool,
    panels: &'a [f32],
    /// `[tiles]\[panels]\[tokens]\[16]`
    sums: *mut f32,
}

impl Unpacked<'_> {
    /// A panel's codes and factors.
    ///
    /// # Safety
    /// The panel exists.
    #[inline(always)]
    unsafe fn panel(&self, panel: usize) -> (*const i32, *const f32) {
        // SAFETY: the caller's.
        unsafe {
            let unpacked = self.panels.as_ptr().add(panel * PANEL);
            let factors = unpacked.add(CODES);
            match self.job.weights.format {
                // They lie in memory as they are needed.
                Format::Wide => {
                    let (_, codes) = self.job.weights.panel(self.first + panel);
                    (codes.add(self.inputs.start / 2 * LANES), factors)
                }
                _ => (unpacked.cast(), factors),
            }
        }
    }
}

/// Codes and factors of a quantised panel.
///
/// # Safety
/// As [`super::product`].
#[inline(always)]
unsafe fn unpack<S: Simd, N: Narrow>(
    weights: &Panels,
    panel: usize,
    inputs: Range<usize>,
    to: &mut [f32],
) {
    let (codes, factors) = to.split_at_mut(CODES);
    // SAFETY: the caller's; the slice has as many blocks as fit.
    unsafe {
        let (mut codes, mut factors) = (codes.as_mut_ptr().cast::<i32>(), factors.as_mut_ptr());
        let (scales, words) = weights.panel(panel);
        let offset = S::splat_i(-0x0007_0008); // -8 in both halves
        for block in inputs.start / NARROW..inputs.end / NARROW {
            let scales = scales.add(block * N::HALVES * LANES);
            let words = words.add(block * N::WORDS * LANES);
            let mut cross = S::splat_i(0);
            for word in 0..N::WORDS {
                for group in 0..N::GROUPS {
                    let mut w = N::pairs::<S>(S::load(words.add(word * LANES)), group);
                    if N::OFFSET {
                        w = w.map(|w| S::add_pairs(w, offset));
                    }
                    cross = S::dot(cross, w[0], w[1]);
                    let to = codes.add((word + group * N::WORDS) * 2 * LANES);
                    S::store_i(w[0], to);
                    S::store_i(w[1], to.add(LANES));
                }
            }
            codes = codes.add(NARROW / 2 * LANES);
            for part in 0..N::SCALES {
                S::store(S::load_f16(scales.add(part * LANES)), factors);
                factors = factors.add(LANES);
            }
            if N::SCALES == 1 {
                S::store_i(cross, factors.cast());
                factors = factors.add(LANES);
            }
            if N::MINIMUM {
                S::store(S::load_f16(scales.add(N::SCALES * LANES)), factors);
                factors = factors.add(LANES);
            }
        }
    }
}

/// Factors of a panel of 16-bit weights.
///
/// # Safety
/// As [`super::product`].
#[inline(always)]
unsafe fn factors_of_wide<S: Simd>(
    weights: &Panels,
    panel: usize,
    inputs: Range<usize>,
    to: &mut [f32],
) {
    // SAFETY: the caller's.
    unsafe {
        let mut factors = to[CODES..].as_mut_ptr();
        let (scales, codes) = weights.panel(panel);
        for first in inputs.clone().step_by(WIDE) {
            let mut cross = S::splat_i(0);
            for pair in (first / 2..inputs.end.min(first + WIDE) / 2).step_by(2) {
                let w = codes.add(pair * LANES);
                cross = S::dot(cross, S::load(w), S::load(w.add(LANES)));
            }
            S::store(S::load_bf16(scales.add(first / WIDE * LANES)), factors);
            S::store_i(cross, factors.add(LANES).cast());
            factors = factors.add(2 * LANES);
        }
    }
}

/// # Safety
/// As [`super::product`], and the panels are unpacked.
#[inline(always)]
unsafe fn by_tokens<S: Simd, const P: usize>(panels: &Unpacked<'_>, tile: Tile) {
    // SAFETY: the caller's.
    unsafe {
        match tile.len {
            12 if S::TILE.1 >= 12 => one_tile::<S, P, 12>(panels, tile.start),
            8 if S::TILE.1 >= 8 => one_tile::<S, P, 8>(panels, tile.start),
            4 if S::TILE.1 >= 4 => one_tile::<S, P, 4>(panels, tile.start),
            2 => one_tile::<S, P, 2>(panels, tile.start),
            _ => one_tile::<S, P, 1>(panels, tile.start),
        }
    }
}

/// `P` panels by `T` tokens.
///
/// # Safety
/// As [`by_tokens`].
#[inline(always)]
unsafe fn one_tile<S: Simd, const P: usize, const T: usize>(panels: &Unpacked<'_>, token: usize) {
    let (job, Range { start, end }) = (panels.job, panels.inputs.clone());
    let (cols, x) = (job.weights.cols, job.activations);
    // Sums of fewer inputs are not at hand.
    let winograd = S::WINOGRAD && panels.block >= NARROW;
    // SAFETY: the caller's; the offsets stay inside the tile's and the panels' arrays.
    unsafe {
        let at = token * cols / NARROW + start / NARROW * T;
        let (crosses, mut narrow_sums) = (x.crosses.at(at), x.sums.at(at));
        let mut block = Block {
            weights: [std::ptr::null(); P],
            factors: [std::ptr::null(); P],
            inputs: x.codes.at(token * cols / 2).add(start / 2 * T),
            ahead: 2 * cols * T,
            scales: x.scales.at(token * cols.div_ceil(WIDE)).add(start / WIDE * T),
            crosses,
            groups: 0,
        };
        for p in 0..P {
            (block.weights[p], block.factors[p]) = panels.panel(p);
        }
        let total = &mut *panels.sums.add(token * P * LANES).cast::<[[S::F; T]; P]>();
        if start == 0 {
            for (p, total) in total.iter_mut().enumerate() {
                for (t, total) in total.iter_mut().enumerate() {
                    *total = match job.add {
                        true => load::<S>(job, panels.first + p, token + t),
                        false => S::splat(0.0),
                    };
                }
            }
        }
        for first in (start..end).step_by(panels.block) {
            let width = panels.block.min(end - first);
            block.groups = width / 4;
            let crosses = crosses.add((first - start) / NARROW * T);
            if !winograd {
                S::products(total, &block);
            } else if width == NARROW {
                block.crosses = crosses;
                S::fewer_products(total, &block);
            } else {
                let mut together = [0i32; T];
                for narrow in 0..width / NARROW {
                    for (t, cross) in together.iter_mut().enumerate() {
                        *cross = cross.wrapping_add(*crosses.add(narrow * T + t));
                    }
                }
                block.crosses = together.as_ptr();
                S::fewer_products(total, &block);
            }
            let factors = if panels.block < NARROW { 1 } else { 2 };
            block.weights = block.weights.map(|w| w.add(width / 2 * LANES));
            block.factors = block.factors.map(|f| f.add(factors * LANES));
            block.inputs = block.inputs.add(width / 2 * T);
            let next = first + width;
            if panels.minimum && next.is_multiple_of(NARROW) {
                for p in 0..P {
                    let minimum = S::load_f32(block.factors[p]);
                    for t in 0..T {
                        let sum = S::splat(*narrow_sums.add(t));
                        total[p][t] = S::fma(sum, minimum, total[p][t]);
                    }
                }
                block.factors = block.factors.map(|f| f.add(LANES));
                narrow_sums = narrow_sums.add(T);
            }
            if next.is_multiple_of(WIDE) {
                block.scales = block.scales.add(T);
            }
        }
        if end == cols {
            for (p, total) in total.iter().enumerate() {
                for (t, total) in total.iter().enumerate() {
                    store::<S>(job, panels.first + p, token + t, *total);
                }
            }
        }
    }
}
