//! The table of kernels that an instruction class provides, and the macro that compiles it.

use crate::activations::{Activations, Source, Tile};
use crate::attention::Attend;
use crate::kv::{Append, Kv};
use crate::matmul::Product;
use crate::panels::Panels;

/// Entry points of one class. Callers uphold what the bodies' `# Safety` sections ask, and that the
/// machine has the class's features.
pub struct Kernels {
    /// Most tokens that one tile of the product holds; [`crate::activations::tiles`] cuts by it.
    pub tile_tokens: usize,
    /// Multiplies panels `first .. first + count` with all tokens.
    pub product: unsafe fn(&Product<'_>, first: usize, count: usize, scratch: &mut [f32]),
    /// Normalises or gates one token's row and quantises it.
    pub quantise: unsafe fn(&Activations, Tile, token: usize, &Source, row: &mut [f32]),
    /// Attention of some rows over some splits.
    pub attend: unsafe fn(&Attend<'_>, unit: usize, scratch: &mut [f32]),
    /// Merges the partial results of splits.
    pub merge: unsafe fn(&Attend<'_>, row: usize),
    /// QK-norm and RoPE of one token, and its keys and values into the cache.
    pub append: unsafe fn(&Kv, &Append<'_>, token: usize),
    /// Packs one panel of a matrix.
    pub pack: unsafe fn(&Panels, &model::Matrix, panel: usize),
    /// Dot products of the peak measurement.
    pub dot_peak: unsafe fn(rounds: usize) -> i32,
    /// Reads of the peak measurement.
    pub read_peak: unsafe fn(*const i32, lines: usize) -> f32,
}

/// Compiles all kernels for a class, under its target features, into `KERNELS`.
macro_rules! kernels {
    ($class:ident $(, $features:literal)?) => {
        /// This class's kernels.
        pub static KERNELS: crate::kernels::Kernels = {
            use crate::{activations, attention, kv, matmul, panels, peaks};
            $(#[target_feature(enable = $features)])?
            unsafe fn product(
                job: &matmul::Product<'_>,
                first: usize,
                count: usize,
                scratch: &mut [f32],
            ) {
                // SAFETY: the table's contract.
                unsafe { matmul::product::<$class>(job, first, count, scratch) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn quantise(
                to: &activations::Activations,
                tile: activations::Tile,
                token: usize,
                source: &activations::Source,
                row: &mut [f32],
            ) {
                // SAFETY: the table's contract.
                unsafe { activations::quantise::<$class>(to, tile, token, source, row) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn attend(job: &attention::Attend<'_>, unit: usize, scratch: &mut [f32]) {
                // SAFETY: the table's contract.
                unsafe { attention::attend::<$class>(job, unit, scratch) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn merge(job: &attention::Attend<'_>, row: usize) {
                // SAFETY: the table's contract.
                unsafe { attention::merge::<$class>(job, row) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn append(kv: &kv::Kv, job: &kv::Append<'_>, token: usize) {
                // SAFETY: the table's contract.
                unsafe { kv::append::<$class>(kv, job, token) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn pack(to: &panels::Panels, from: &model::Matrix, panel: usize) {
                // SAFETY: the table's contract.
                unsafe { panels::pack::<$class>(to, from, panel) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn dot_peak(rounds: usize) -> i32 {
                // SAFETY: the table's contract.
                unsafe { peaks::dot_peak::<$class>(rounds) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn read_peak(from: *const i32, lines: usize) -> f32 {
                // SAFETY: the table's contract.
                unsafe { peaks::read_peak::<$class>(from, lines) }
            }
            crate::kernels::Kernels {
                tile_tokens: <$class as crate::simd::Simd>::TILE.1,
                product,
                quantise,
                attend,
                merge,
                append,
                pack,
                dot_peak,
                read_peak,
            }
        };
    };
}
pub(crate) use kernels;
