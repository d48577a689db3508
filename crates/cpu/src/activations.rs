//! Activations as the integer kernels take them: i16 codes with one f32 scale a block of 128.
//!
//! Sixteen bits, because eight do not pass the gates: see the crate's documentation.

use engine::BackendError;
use model::RMS_EPSILON;

use crate::memory::{BUFFERS, Shared};
use crate::simd::{LANES, Simd, exp};

/// Inputs that share one activation scale.
pub const WIDE: usize = 128;
/// Inputs that share one scale of a quantised weight.
pub const NARROW: usize = 32;

/// Sizes that a tile of tokens may have, largest first.
const TILES: [usize; 5] = [12, 8, 4, 2, 1];

/// A run of tokens whose codes are interleaved and multiplied together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    /// First token.
    pub start: usize,
    /// Tokens.
    pub len: usize,
}

/// Cuts `tokens` into tiles of at most `most` tokens.
pub fn tiles(tokens: usize, most: usize, out: &mut Vec<Tile>) {
    out.clear();
    let mut start = 0;
    for len in TILES.into_iter().filter(|&len| len <= most) {
        while tokens - start >= len {
            out.push(Tile { start, len });
            start += len;
        }
    }
}

/// Quantised activations of up to a fixed number of tokens.
///
/// Within a tile of n tokens an array holds element 0 of each token, then element 1 of each, and so on,
/// so that a kernel walks one pointer. Codes lie in pairs (k, k + 2), the order in which the weights of
/// four consecutive bytes unpack.
pub struct Activations {
    /// Pairs of i16, `[tile][cols / 2][n]`.
    pub codes: Shared<i32>,
    /// `[tile][cols / 128][n]`
    pub scales: Shared<f32>,
    /// -8 times the sum of a block's codes: what the offset of q4_0 comes to. `[tile][cols / 32][n]`
    pub offsets: Shared<i32>,
    /// Sums of a block's codes, times their scale. `[tile][cols / 32][n]`
    pub sums: Shared<f32>,
    /// -(x0 x1 + x2 x3 + ...) of a block's codes, modulo 2^32. `[tile][cols / 32][n]`
    pub crosses: Shared<i32>,
    /// Inputs a token.
    pub cols: usize,
    /// Largest code: see [`crate::panels::Format::levels`].
    pub levels: f32,
}

impl Activations {
    /// Room for `tokens` tokens of `cols` inputs, with codes of up to `levels`.
    pub fn new(tokens: usize, cols: usize, levels: f32) -> Result<Self, BackendError> {
        Ok(Activations {
            codes: Shared::new(tokens * cols / 2, BUFFERS)?,
            scales: Shared::new(tokens * cols.div_ceil(WIDE), BUFFERS)?,
            offsets: Shared::new(tokens * cols.div_ceil(NARROW), BUFFERS)?,
            sums: Shared::new(tokens * cols.div_ceil(NARROW), BUFFERS)?,
            crosses: Shared::new(tokens * cols.div_ceil(NARROW), BUFFERS)?,
            cols,
            levels,
        })
    }
}

/// Where tokens' rows come from: the first token's row, and the distance from one to the next.
#[derive(Clone, Copy)]
pub struct Source {
    /// What a row is made of.
    pub rows: Rows,
    /// Elements from a token's row to the next one's.
    pub stride: usize,
}

/// What a row is made of.
#[derive(Clone, Copy)]
pub enum Rows {
    /// As it is.
    Plain(*const f32),
    /// RMSNorm with these weights.
    Norm(*const f32, *const f32),
    /// silu(gate) * up.
    Gated(*const f32, *const f32),
}

/// Quantises row `token`, of `tile`, of `source`; `row` is scratch for it.
///
/// # Safety
/// The source holds that row, `row` has `to.cols` elements (a multiple of 32), no other thread
/// touches this token's codes, and the machine has the class's features.
#[inline(always)]
pub unsafe fn quantise<S: Simd>(
    to: &Activations,
    tile: Tile,
    token: usize,
    source: &Source,
    row: &mut [f32],
) {
    let cols = to.cols;
    let row = row.as_mut_ptr();
    // SAFETY: the caller's; every index is below cols.
    unsafe {
        let first = token * source.stride;
        match source.rows {
            Rows::Plain(x) => std::ptr::copy_nonoverlapping(x.add(first), row, cols),
            Rows::Norm(x, weight) => rms_norm::<S>(x.add(first), weight, row, cols),
            Rows::Gated(gate, up) => {
                let (gate, up) = (gate.add(first), up.add(first));
                for i in (0..cols).step_by(LANES) {
                    let g = S::load_f32(gate.add(i));
                    let e = exp::<S>(S::sub(S::splat(0.0), g));
                    let silu = S::div(g, S::add(S::splat(1.0), e));
                    S::store(S::mul(silu, S::load_f32(up.add(i))), row.add(i));
                }
            }
        }
        let Tile { start, len } = tile;
        let lane = token - start;
        let codes = to.codes.at(start * cols / 2).add(lane);
        let scales = to.scales.at(start * cols.div_ceil(WIDE)).add(lane);
        let offsets = to.offsets.at(start * cols / NARROW).add(lane);
        let sums = to.sums.at(start * cols / NARROW).add(lane);
        let crosses = to.crosses.at(start * cols / NARROW).add(lane);
        for (block, first) in (0..cols).step_by(WIDE).enumerate() {
            let width = WIDE.min(cols - first);
            let mut most = S::splat(0.0);
            for i in (first..first + width).step_by(LANES) {
                most = S::max(most, S::abs(S::load_f32(row.add(i))));
            }
            let most = S::largest(most);
            let scale = most / to.levels;
            let inverse = S::splat(if most > 0.0 { to.levels / most } else { 0.0 });
            *scales.add(block * len) = scale;
            for narrow in (first..first + width).step_by(NARROW) {
                let mut codes = codes.add(narrow / 2 * len);
                let (mut sum, mut cross) = (S::splat(0.0), 0i32);
                for i in [0, LANES] {
                    let x = S::mul(S::load_f32(row.add(narrow + i)), inverse);
                    let code = S::to_i32(x);
                    // Exact, as everything below 2^24.
                    sum = S::add(sum, S::to_f32(code));
                    let mut pairs = [0i32; LANES];
                    S::store_i(S::pairs(code), pairs.as_mut_ptr());
                    for four in pairs.chunks_exact(4) {
                        let (even, odd) = (four[0], four[1]);
                        *codes = even;
                        *codes.add(len) = odd;
                        codes = codes.add(2 * len);
                        let low = i32::from(even as i16) * i32::from(odd as i16);
                        cross = cross.wrapping_sub(low).wrapping_sub((even >> 16) * (odd >> 16));
                    }
                }
                let sum = S::sum(sum);
                *offsets.add(narrow / NARROW * len) = (-8.0 * sum) as i32;
                *sums.add(narrow / NARROW * len) = sum * scale;
                *crosses.add(narrow / NARROW * len) = cross;
            }
        }
    }
}

/// out = x / rms(x) * weight, over `cols` elements, a multiple of 16.
///
/// # Safety
/// The pointers hold `cols` elements and the machine has the class's features.
#[inline(always)]
pub unsafe fn rms_norm<S: Simd>(x: *const f32, weight: *const f32, out: *mut f32, cols: usize) {
    // SAFETY: the caller's.
    unsafe {
        let mut squares = S::splat(0.0);
        for i in (0..cols).step_by(LANES) {
            let x = S::load_f32(x.add(i));
            squares = S::fma(x, x, squares);
        }
        let mean = S::sum(squares) / cols as f32;
        let scale = S::splat(1.0 / (mean + RMS_EPSILON).sqrt());
        for i in (0..cols).step_by(LANES) {
            let scaled = S::mul(S::load_f32(x.add(i)), scale);
            S::store(S::mul(scaled, S::load_f32(weight.add(i))), out.add(i));
        }
    }
}
