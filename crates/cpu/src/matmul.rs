//! The matrix product of packed weights and quantised activations.
//!
//! An output is, for every tile shape and class, the same sum: integer dot products over blocks, which
//! are exact whatever their order, then one f32 multiply-add a block in the order of the inputs.

use std::slice;

use crate::activations::{Activations, NARROW, Tile, WIDE};
use crate::panels::{Format, Panels};
use crate::simd::{LANES, Simd};

/// A product to compute: `out[token][row] (+)= weights[row] . activations[token]`.
pub struct Product<'a> {
    /// The matrix.
    pub weights: &'a Panels,
    /// What it is multiplied with.
    pub activations: &'a Activations,
    /// How the tokens are cut.
    pub tiles: &'a [Tile],
    /// `[tokens, stride]`, at the column of the matrix's first row.
    pub out: *mut f32,
    /// Outputs of one token.
    pub stride: usize,
    /// Whether the result is added to what is there.
    pub add: bool,
}

// SAFETY: threads write disjoint panels through `out`.
unsafe impl Sync for Product<'_> {}

/// Computes panels `first .. first + count` for all tokens.
///
/// # Safety
/// The activations were quantised for the weights' format and shape, `out` holds all outputs, no other
/// thread writes those of these panels, and the machine has the class's features.
#[inline(always)]
pub unsafe fn product<S: Simd>(job: &Product<'_>, first: usize, count: usize) {
    // SAFETY: the caller's.
    unsafe {
        match job.weights.format {
            Format::Wide => all_tiles::<S, Wide>(job, first, count),
            Format::Q8 => all_tiles::<S, Q8>(job, first, count),
            Format::Q41 => all_tiles::<S, Q41>(job, first, count),
            Format::Q40 => all_tiles::<S, Q40>(job, first, count),
        }
    }
}

/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn all_tiles<S: Simd, B: Block>(job: &Product<'_>, first: usize, count: usize) {
    let end = first + count;
    for tile in job.tiles {
        let mut panel = first;
        while panel < end {
            let pair = S::TILE.0 >= 2 && panel + 2 <= end;
            // SAFETY: the caller's.
            unsafe {
                if pair {
                    by_tokens::<S, B, 2>(job, panel, *tile);
                } else {
                    by_tokens::<S, B, 1>(job, panel, *tile);
                }
            }
            panel += if pair { 2 } else { 1 };
        }
    }
}

/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn by_tokens<S: Simd, B: Block, const P: usize>(job: &Product<'_>, panel: usize, tile: Tile) {
    // SAFETY: the caller's.
    unsafe {
        match tile.len {
            12 if S::TILE.1 >= 12 => one_tile::<S, B, P, 12>(job, panel, tile.start),
            8 if S::TILE.1 >= 8 => one_tile::<S, B, P, 8>(job, panel, tile.start),
            4 => one_tile::<S, B, P, 4>(job, panel, tile.start),
            2 => one_tile::<S, B, P, 2>(job, panel, tile.start),
            _ => one_tile::<S, B, P, 1>(job, panel, tile.start),
        }
    }
}

/// Activations of one tile at one block of 128 inputs.
struct Inputs {
    codes: *const i32,
    offsets: *const i32,
    sums: *const f32,
}

/// `P` panels by `T` tokens.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn one_tile<S: Simd, B: Block, const P: usize, const T: usize>(
    job: &Product<'_>,
    panel: usize,
    token: usize,
) {
    let cols = job.weights.cols;
    let x = job.activations;
    // SAFETY: the caller's; the offsets stay inside the tile's and the panels' arrays.
    unsafe {
        let mut weights = [(std::ptr::null(), std::ptr::null()); P];
        for (p, weights) in weights.iter_mut().enumerate() {
            let (scales, codes) = job.weights.panel(panel + p);
            *weights = (scales.cast_const(), codes.cast_const());
        }
        let mut inputs = Inputs {
            codes: x.codes.at(token * cols / 2),
            offsets: x.offsets.at(token * cols / NARROW),
            sums: x.sums.at(token * cols / NARROW),
        };
        let scales: *const f32 = x.scales.at(token * cols.div_ceil(WIDE));
        let mut total = [[S::splat(0.0); T]; P];
        for (block, first) in (0..cols).step_by(WIDE).enumerate() {
            let width = WIDE.min(cols - first);
            let partial = B::dot::<S, P, T>(width, &mut weights, &mut inputs);
            for t in 0..T {
                let scale = S::splat(*scales.add(block * T + t));
                for p in 0..P {
                    total[p][t] = S::fma(partial[p][t], scale, total[p][t]);
                }
            }
        }
        store::<S, P, T>(job, panel, token, &total);
    }
}

/// Writes a tile, without the rows that pad the last panel.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn store<S: Simd, const P: usize, const T: usize>(
    job: &Product<'_>,
    panel: usize,
    token: usize,
    total: &[[S::F; T]; P],
) {
    for (p, total) in total.iter().enumerate() {
        let row = (panel + p) * LANES;
        for (t, total) in total.iter().enumerate() {
            // SAFETY: the caller's; a last panel that is not full goes through `padded`.
            unsafe {
                let out = job.out.add((token + t) * job.stride + row);
                if row + LANES <= job.weights.rows {
                    let before = if job.add { S::load_f32(out) } else { S::splat(0.0) };
                    S::store(S::add(before, *total), out);
                } else {
                    let mut padded = [0.0; LANES];
                    S::store(*total, padded.as_mut_ptr());
                    let out = slice::from_raw_parts_mut(out, job.weights.rows - row);
                    for (out, x) in out.iter_mut().zip(padded) {
                        *out = if job.add { *out + x } else { 0.0 + x };
                    }
                }
            }
        }
    }
}

/// A format's dot product over one block of up to 128 inputs.
trait Block {
    /// The block's products, each scaled by its weights' scales but not by the activations', with all
    /// pointers advanced past the block.
    ///
    /// # Safety
    /// As [`product`].
    unsafe fn dot<S: Simd, const P: usize, const T: usize>(
        width: usize,
        weights: &mut [(*const u16, *const i32); P],
        inputs: &mut Inputs,
    ) -> [[S::F; T]; P];
}

/// acc\[p\]\[t\] += w\[p\] . codes\[t\] for one pair of inputs.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn dot_pair<S: Simd, const P: usize, const T: usize>(
    acc: &mut [[S::I; T]; P],
    w: [S::I; P],
    codes: *const i32,
) {
    for t in 0..T {
        for p in 0..P {
            // SAFETY: the caller's.
            acc[p][t] = unsafe { S::dot(acc[p][t], w[p], *codes.add(t)) };
        }
    }
}

struct Wide;

impl Block for Wide {
    #[inline(always)]
    unsafe fn dot<S: Simd, const P: usize, const T: usize>(
        width: usize,
        weights: &mut [(*const u16, *const i32); P],
        inputs: &mut Inputs,
    ) -> [[S::F; T]; P] {
        // SAFETY: the caller's.
        unsafe {
            let mut acc = [[S::splat_i(0); T]; P];
            for _ in 0..width / 2 {
                let mut w = [S::splat_i(0); P];
                for p in 0..P {
                    w[p] = S::load(weights[p].1);
                    weights[p].1 = weights[p].1.add(LANES);
                }
                dot_pair::<S, P, T>(&mut acc, w, inputs.codes);
                inputs.codes = inputs.codes.add(T);
            }
            let mut out = [[S::splat(0.0); T]; P];
            for p in 0..P {
                let scale = S::load_bf16(weights[p].0);
                weights[p].0 = weights[p].0.add(LANES);
                for t in 0..T {
                    out[p][t] = S::mul(S::to_f32(acc[p][t]), scale);
                }
            }
            out
        }
    }
}

/// The quantised formats share their walk over blocks of 32 and differ in how a block unpacks.
trait Narrow {
    /// Vectors of codes of one block.
    const WORDS: usize;
    /// Whether codes are stored 8 too large.
    const OFFSET: bool;
    /// Whether a block has a minimum.
    const MINIMUM: bool;

    /// Unpacks a vector of codes and adds its products to `acc`; `inputs` are those of the pair that its
    /// first bytes belong to.
    ///
    /// # Safety
    /// As [`product`].
    unsafe fn unpack<S: Simd, const P: usize, const T: usize>(
        acc: &mut [[S::I; T]; P],
        word: [S::I; P],
        inputs: *const i32,
    );
}

impl<N: Narrow> Block for N {
    #[inline(always)]
    unsafe fn dot<S: Simd, const P: usize, const T: usize>(
        width: usize,
        weights: &mut [(*const u16, *const i32); P],
        inputs: &mut Inputs,
    ) -> [[S::F; T]; P] {
        // SAFETY: the caller's.
        unsafe {
            let mut out = [[S::splat(0.0); T]; P];
            for _ in 0..width / NARROW {
                let mut acc = [[S::splat_i(0); T]; P];
                if N::OFFSET {
                    for t in 0..T {
                        let offset = S::splat_i(*inputs.offsets.add(t));
                        for acc in &mut acc {
                            acc[t] = offset;
                        }
                    }
                }
                for word in 0..N::WORDS {
                    let mut w = [S::splat_i(0); P];
                    for p in 0..P {
                        w[p] = S::load(weights[p].1.add(word * LANES));
                    }
                    N::unpack::<S, P, T>(&mut acc, w, inputs.codes.add(2 * word * T));
                }
                for p in 0..P {
                    let scale = S::load_f16(weights[p].0);
                    for t in 0..T {
                        out[p][t] = S::fma(S::to_f32(acc[p][t]), scale, out[p][t]);
                    }
                    if N::MINIMUM {
                        let minimum = S::load_f16(weights[p].0.add(LANES));
                        for t in 0..T {
                            let sum = S::splat(*inputs.sums.add(t));
                            out[p][t] = S::fma(sum, minimum, out[p][t]);
                        }
                    }
                }
                for (scales, codes) in weights.iter_mut() {
                    *scales = scales.add(if N::MINIMUM { 2 * LANES } else { LANES });
                    *codes = codes.add(N::WORDS * LANES);
                }
                inputs.codes = inputs.codes.add(NARROW / 2 * T);
                inputs.offsets = inputs.offsets.add(T);
                inputs.sums = inputs.sums.add(T);
            }
            out
        }
    }
}

/// Four bytes: inputs k to k + 3.
struct Q8;

impl Narrow for Q8 {
    const WORDS: usize = 8;
    const OFFSET: bool = false;
    const MINIMUM: bool = false;

    #[inline(always)]
    unsafe fn unpack<S: Simd, const P: usize, const T: usize>(
        acc: &mut [[S::I; T]; P],
        word: [S::I; P],
        inputs: *const i32,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let (mut even, mut odd) = (word, word);
            for p in 0..P {
                even[p] = S::even_bytes(word[p]);
                odd[p] = S::odd_bytes(word[p]);
            }
            dot_pair::<S, P, T>(acc, even, inputs);
            dot_pair::<S, P, T>(acc, odd, inputs.add(T));
        }
    }
}

/// Four bytes of nibbles: inputs k to k + 3 in the low ones, k + 16 to k + 19 in the high ones.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn unpack_nibbles<S: Simd, const P: usize, const T: usize>(
    acc: &mut [[S::I; T]; P],
    word: [S::I; P],
    inputs: *const i32,
) {
    // SAFETY: the caller's.
    unsafe {
        let far = inputs.add(8 * T);
        nibble_pair::<S, P, T, 0>(acc, word, inputs);
        nibble_pair::<S, P, T, 1>(acc, word, far);
        nibble_pair::<S, P, T, 2>(acc, word, inputs.add(T));
        nibble_pair::<S, P, T, 3>(acc, word, far.add(T));
    }
}

/// Nibble `N` of every half lane.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn nibble_pair<S: Simd, const P: usize, const T: usize, const N: u32>(
    acc: &mut [[S::I; T]; P],
    word: [S::I; P],
    inputs: *const i32,
) {
    let mut w = word;
    // SAFETY: the caller's.
    unsafe {
        for p in 0..P {
            w[p] = S::nibbles::<N>(word[p]);
        }
        dot_pair::<S, P, T>(acc, w, inputs);
    }
}

struct Q40;

impl Narrow for Q40 {
    const WORDS: usize = 4;
    const OFFSET: bool = true;
    const MINIMUM: bool = false;

    #[inline(always)]
    unsafe fn unpack<S: Simd, const P: usize, const T: usize>(
        acc: &mut [[S::I; T]; P],
        word: [S::I; P],
        inputs: *const i32,
    ) {
        // SAFETY: the caller's.
        unsafe { unpack_nibbles::<S, P, T>(acc, word, inputs) }
    }
}

struct Q41;

impl Narrow for Q41 {
    const WORDS: usize = 4;
    const OFFSET: bool = false;
    const MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn unpack<S: Simd, const P: usize, const T: usize>(
        acc: &mut [[S::I; T]; P],
        word: [S::I; P],
        inputs: *const i32,
    ) {
        // SAFETY: the caller's.
        unsafe { unpack_nibbles::<S, P, T>(acc, word, inputs) }
    }
}
