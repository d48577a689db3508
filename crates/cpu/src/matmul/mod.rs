//! The matrix product of packed weights and quantised activations.
//!
//! An output is, for every tile shape and class, the same sum: integer dot products over blocks, which
//! are exact whatever their order, then f32 multiply-adds in the order of the inputs. Few tokens wait for
//! the weights, which one pass streams (`stream`); many wait for the multipliers, and a unit's weights
//! are unpacked once for all of them (`tiled`).

pub mod block;
mod formats;
mod stream;
mod tiled;

use self::formats::{K8, Q8, Q40, Q41};
use crate::activations::{Activations, Tile};
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

/// What units of few tokens are a multiple of: streams of equal length in every class.
pub const STREAMS: usize = 2;

/// Elements of scratch that `count` panels and `tokens` tokens need, from a multiple of 64 bytes.
pub const fn scratch(count: usize, tokens: usize) -> usize {
    count * tokens * LANES + tiled::TOGETHER * tiled::PANEL
}

/// Computes panels `first .. first + count` for all tokens; `scratch` holds [`scratch`] elements.
///
/// # Safety
/// The activations were quantised for the weights' format and shape, `out` holds all outputs, no other
/// thread writes those of these panels, and the machine has the class's features.
#[inline(always)]
pub unsafe fn product<S: Simd>(job: &Product<'_>, first: usize, count: usize, scratch: &mut [f32]) {
    // SAFETY: the caller's.
    unsafe {
        if let [tile] = job.tiles {
            match job.weights.format {
                Format::Wide => stream::product::<S, stream::Wide>(job, *tile, first, count),
                Format::Q8 => stream::product::<S, Q8>(job, *tile, first, count),
                Format::Q41 => stream::product::<S, Q41>(job, *tile, first, count),
                Format::Q40 => stream::product::<S, Q40>(job, *tile, first, count),
                Format::K8 => stream::product::<S, K8>(job, *tile, first, count),
            }
        } else {
            tiled::product::<S>(job, first, count, scratch);
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
