//! The quantised formats: how their codes unpack into pairs of i16.

use crate::simd::Simd;

/// A format whose blocks are 32 inputs. A vector of its codes unpacks into groups of four inputs k to k + 3 for
/// each lane: the pair (k, k + 2) and the pair (k + 1, k + 3).
pub trait Narrow {
    /// Vectors of codes of one block.
    const WORDS: usize;
    /// Groups of a vector; the second begins [`Self::WORDS`] groups after the first.
    const GROUPS: usize;
    /// Whether codes are stored 8 too large.
    const OFFSET: bool;
    /// Whether a block has a minimum.
    const MINIMUM: bool;
    /// Scales of a block, each of an equal part of it.
    const SCALES: usize = 1;
    /// Halves of scales and minimum of a block and row.
    const HALVES: usize = Self::SCALES + if Self::MINIMUM { 1 } else { 0 };

    /// The pairs of a vector's group.
    ///
    /// # Safety
    /// The machine has the class's features.
    unsafe fn pairs<S: Simd>(word: S::I, group: usize) -> [S::I; 2];
}

/// Pairs of bytes.
///
/// # Safety
/// As [`Narrow::pairs`].
#[inline(always)]
unsafe fn bytes<S: Simd>(word: S::I) -> [S::I; 2] {
    // SAFETY: the caller's.
    unsafe { [S::even_bytes(word), S::odd_bytes(word)] }
}

/// Pairs of nibbles: of the low ones, or of the high ones.
///
/// # Safety
/// As [`Narrow::pairs`].
#[inline(always)]
unsafe fn nibbles<S: Simd>(word: S::I, high: bool) -> [S::I; 2] {
    // SAFETY: the caller's.
    unsafe {
        match high {
            false => [S::nibbles::<0>(word), S::nibbles::<2>(word)],
            true => [S::nibbles::<1>(word), S::nibbles::<3>(word)],
        }
    }
}

/// q8_0.
pub struct Q8;

impl Narrow for Q8 {
    const WORDS: usize = 8;
    const GROUPS: usize = 1;
    const OFFSET: bool = false;
    const MINIMUM: bool = false;

    #[inline(always)]
    unsafe fn pairs<S: Simd>(word: S::I, _: usize) -> [S::I; 2] {
        // SAFETY: the caller's.
        unsafe { bytes::<S>(word) }
    }
}

/// Q5_K and Q6_K.
pub struct K8;

impl Narrow for K8 {
    const WORDS: usize = 8;
    const GROUPS: usize = 1;
    const OFFSET: bool = false;
    const MINIMUM: bool = true;
    const SCALES: usize = 2;

    #[inline(always)]
    unsafe fn pairs<S: Simd>(word: S::I, _: usize) -> [S::I; 2] {
        // SAFETY: the caller's.
        unsafe { bytes::<S>(word) }
    }
}

/// q4_0.
pub struct Q40;

impl Narrow for Q40 {
    const WORDS: usize = 4;
    const GROUPS: usize = 2;
    const OFFSET: bool = true;
    const MINIMUM: bool = false;

    #[inline(always)]
    unsafe fn pairs<S: Simd>(word: S::I, group: usize) -> [S::I; 2] {
        // SAFETY: the caller's.
        unsafe { nibbles::<S>(word, group == 1) }
    }
}

/// q4_1 and Q4_K.
pub struct Q41;

impl Narrow for Q41 {
    const WORDS: usize = 4;
    const GROUPS: usize = 2;
    const OFFSET: bool = false;
    const MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn pairs<S: Simd>(word: S::I, group: usize) -> [S::I; 2] {
        // SAFETY: the caller's.
        unsafe { nibbles::<S>(word, group == 1) }
    }
}
