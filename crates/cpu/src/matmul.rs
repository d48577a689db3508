//! The matrix product of packed weights and quantised activations.
//!
//! An output is, for every tile shape and class, the same sum: integer dot products over blocks, which
//! are exact whatever their order, then f32 multiply-adds in the order of the inputs.

use std::ops::Range;

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
    /// Distance between two tokens' outputs.
    pub stride: usize,
    /// Whether the sums begin with what is there instead of 0.
    pub add: bool,
}

// SAFETY: threads write disjoint panels through `out`.
unsafe impl Sync for Product<'_> {}

/// Computes panels `first .. first + count` for all tokens; `scratch` holds `count` x 16 sums a
/// token.
///
/// # Safety
/// The activations were quantised for the weights' format and shape, `out` holds all outputs, no other
/// thread writes those of these panels, and the machine has the class's features.
#[inline(always)]
pub unsafe fn product<S: Simd>(job: &Product<'_>, first: usize, count: usize, scratch: &mut [f32]) {
    // SAFETY: the caller's.
    unsafe {
        match job.weights.format {
            Format::Wide => all_tiles::<S, Wide>(job, first, count, scratch),
            Format::Q8 => all_tiles::<S, Q8>(job, first, count, scratch),
            Format::Q41 => all_tiles::<S, Q41>(job, first, count, scratch),
            Format::Q40 => all_tiles::<S, Q40>(job, first, count, scratch),
            Format::K8 => all_tiles::<S, K8>(job, first, count, scratch),
        }
    }
}

/// What units of few tokens are a multiple of: streams of equal length in every class.
pub const STREAMS: usize = 4;
/// How far ahead of the kernel weights are fetched: what memory delivers during its latency.
const AHEAD: usize = 2 << 10;

/// Inputs of which a tile of activations fits in the first-level cache while the unit's weights, in the
/// second-level cache, pass by.
const SLICE: usize = 1024;

/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn all_tiles<S: Simd, B: Block>(
    job: &Product<'_>,
    first: usize,
    count: usize,
    scratch: &mut [f32],
) {
    let cols = job.weights.cols;
    // Sums pass from one slice to the next through the scratch, and no bit changes.
    let slice = if job.tiles.len() == 1 { cols } else { SLICE };
    for start in (0..cols).step_by(slice) {
        let inputs = start..cols.min(start + slice);
        for tile in job.tiles {
            // The unit is read as some streams side by side: a core asks memory for more at once.
            let streams = if tile.len < 4 { S::STREAMS } else { S::TILE.0 };
            let step = count / streams;
            let mut done = 0;
            while done < count {
                // What no longer fills all streams goes panel by panel.
                let (together, panel) = if done < step * streams {
                    (streams, Panel { first: first + done / streams, step })
                } else {
                    (1, Panel { first: first + done, step })
                };
                let sums = (tile.start * count + done * tile.len) * LANES;
                let sums = scratch[sums..].as_mut_ptr();
                let inputs = inputs.clone();
                // SAFETY: the caller's.
                unsafe {
                    match together {
                        4 if S::STREAMS >= 4 => {
                            by_tokens::<S, B, 4>(job, panel, *tile, inputs, sums)
                        }
                        2 if S::TILE.0 >= 2 => {
                            by_tokens::<S, B, 2>(job, panel, *tile, inputs, sums)
                        }
                        _ => by_tokens::<S, B, 1>(job, panel, *tile, inputs, sums),
                    }
                }
                done += together;
            }
        }
    }
}

/// Panels that are multiplied together: the first, and the distance to each next one.
#[derive(Clone, Copy)]
struct Panel {
    first: usize,
    step: usize,
}

/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn by_tokens<S: Simd, B: Block, const P: usize>(
    job: &Product<'_>,
    panel: Panel,
    tile: Tile,
    inputs: Range<usize>,
    sums: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        match tile.len {
            12 if S::TILE.1 >= 12 && P < 4 => {
                one_tile::<S, B, P, 12>(job, panel, tile.start, inputs, sums)
            }
            8 if S::TILE.1 >= 8 && P < 4 => {
                one_tile::<S, B, P, 8>(job, panel, tile.start, inputs, sums)
            }
            4 if S::TILE.1 >= 4 && P < 4 => {
                one_tile::<S, B, P, 4>(job, panel, tile.start, inputs, sums)
            }
            2 => one_tile::<S, B, P, 2>(job, panel, tile.start, inputs, sums),
            _ => one_tile::<S, B, P, 1>(job, panel, tile.start, inputs, sums),
        }
    }
}

/// Activations of one tile at one block of 128 inputs.
struct Inputs {
    codes: *const i32,
    offsets: *const i32,
    sums: *const f32,
}

/// `P` panels by `T` tokens over a range of inputs that begins at a block.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn one_tile<S: Simd, B: Block, const P: usize, const T: usize>(
    job: &Product<'_>,
    panel: Panel,
    token: usize,
    range: Range<usize>,
    sums: *mut f32,
) {
    let cols = job.weights.cols;
    let x = job.activations;
    // SAFETY: the caller's; the offsets stay inside the tile's and the panels' arrays.
    unsafe {
        let mut weights = [(std::ptr::null(), std::ptr::null()); P];
        for (p, weights) in weights.iter_mut().enumerate() {
            let (scales, codes) = job.weights.panel(panel.first + p * panel.step);
            *weights = (scales.add(B::scales(range.start)), codes.add(B::words(range.start)));
        }
        let mut inputs = Inputs {
            codes: x.codes.at(token * cols / 2).add(range.start / 2 * T),
            offsets: x.offsets.at(token * cols / NARROW).add(range.start / NARROW * T),
            sums: x.sums.at(token * cols / NARROW).add(range.start / NARROW * T),
        };
        let mut scales = x.scales.at(token * cols.div_ceil(WIDE)).add(range.start / WIDE * T);
        let mut total = [[S::splat(0.0); T]; P];
        for (p, total) in total.iter_mut().enumerate() {
            for (t, total) in total.iter_mut().enumerate() {
                if range.start > 0 {
                    *total = S::load_f32(sums.add((t * P + p) * LANES));
                } else if job.add {
                    *total = load::<S>(job, panel.first + p * panel.step, token + t);
                }
            }
        }
        for first in range.clone().step_by(WIDE) {
            let width = WIDE.min(range.end - first);
            let partial = B::dot::<S, P, T>(width, &mut weights, &mut inputs);
            for t in 0..T {
                let scale = S::splat(*scales.add(t));
                for p in 0..P {
                    total[p][t] = S::fma(partial[p][t], scale, total[p][t]);
                }
            }
            scales = scales.add(T);
        }
        for (p, total) in total.iter().enumerate() {
            for (t, total) in total.iter().enumerate() {
                if range.end < cols {
                    S::store(*total, sums.add((t * P + p) * LANES));
                } else {
                    store::<S>(job, panel.first + p * panel.step, token + t, *total);
                }
            }
        }
    }
}

/// Where a panel's outputs for a token lie, and how many there are.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn place(job: &Product<'_>, panel: usize, token: usize) -> (*mut f32, usize) {
    let row = panel * LANES;
    // SAFETY: the caller's.
    (unsafe { job.out.add(token * job.stride + row) }, LANES.min(job.weights.rows - row))
}

/// The sums so far.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn load<S: Simd>(job: &Product<'_>, panel: usize, token: usize) -> S::F {
    // SAFETY: the caller's; a last panel that is not full goes through an array.
    unsafe {
        let (out, rows) = place(job, panel, token);
        if rows == LANES {
            return S::load_f32(out);
        }
        let mut padded = [0.0; LANES];
        std::ptr::copy_nonoverlapping(out, padded.as_mut_ptr(), rows);
        S::load_f32(padded.as_ptr())
    }
}

/// Writes sums, without the rows that pad the last panel.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn store<S: Simd>(job: &Product<'_>, panel: usize, token: usize, sums: S::F) {
    // SAFETY: the caller's.
    unsafe {
        let (out, rows) = place(job, panel, token);
        if rows == LANES {
            return S::store(sums, out);
        }
        let mut padded = [0.0; LANES];
        S::store(sums, padded.as_mut_ptr());
        std::ptr::copy_nonoverlapping(padded.as_ptr(), out, rows);
    }
}

/// A format's dot product over one block of up to 128 inputs.
trait Block {
    /// Halves of scales before input `first` of a panel.
    fn scales(first: usize) -> usize;
    /// Words of codes before input `first` of a panel.
    fn words(first: usize) -> usize;

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
    fn scales(first: usize) -> usize {
        first / WIDE * LANES
    }
    #[inline(always)]
    fn words(first: usize) -> usize {
        first / 2 * LANES
    }
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
                    S::prefetch(weights[p].1.wrapping_byte_add(AHEAD));
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
    /// Scales of a block, each of an equal part of it.
    const SCALES: usize = 1;
    /// Halves of scales and minimum of a block and row.
    const HALVES: usize = Self::SCALES + if Self::MINIMUM { 1 } else { 0 };

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
    fn scales(first: usize) -> usize {
        first / NARROW * N::HALVES * LANES
    }
    #[inline(always)]
    fn words(first: usize) -> usize {
        first / NARROW * N::WORDS * LANES
    }
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
                            S::prefetch(weights[p].1.add(word * LANES).wrapping_byte_add(AHEAD));
                            w[p] = S::load(weights[p].1.add(word * LANES));
                        }
                        N::unpack::<S, P, T>(&mut acc, w, inputs.codes.add(2 * word * T));
                    }
                    for p in 0..P {
                        let scale = S::load_f16(weights[p].0.add(part * LANES));
                        for t in 0..T {
                            out[p][t] = S::fma(S::to_f32(acc[p][t]), scale, out[p][t]);
                        }
                    }
                }
                if N::MINIMUM {
                    for p in 0..P {
                        let minimum = S::load_f16(weights[p].0.add(N::SCALES * LANES));
                        for t in 0..T {
                            let sum = S::splat(*inputs.sums.add(t));
                            out[p][t] = S::fma(sum, minimum, out[p][t]);
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
            out
        }
    }
}

/// Four bytes: inputs k to k + 3.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn unpack_bytes<S: Simd, const P: usize, const T: usize>(
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
        unsafe { unpack_bytes::<S, P, T>(acc, word, inputs) }
    }
}

struct K8;

impl Narrow for K8 {
    const WORDS: usize = 8;
    const OFFSET: bool = false;
    const MINIMUM: bool = true;
    const SCALES: usize = 2;

    #[inline(always)]
    unsafe fn unpack<S: Simd, const P: usize, const T: usize>(
        acc: &mut [[S::I; T]; P],
        word: [S::I; P],
        inputs: *const i32,
    ) {
        // SAFETY: the caller's.
        unsafe { unpack_bytes::<S, P, T>(acc, word, inputs) }
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
