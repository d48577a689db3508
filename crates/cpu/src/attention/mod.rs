//! Attention over the paged cache.
//!
//! The query heads of one KV head are rows of one product; tokens of a prompt add rows. A unit of work
//! walks the blocks of its context, keeping for each row a running maximum, sum and weighted values.
//! Every [`SPLIT`] positions these are folded into the row's total, whichever way the work is divided:
//! a long context may be spread over threads, one split a unit, and gives the same bits.

mod many;
mod one;

use model::{HEAD_DIM, KV_HEADS};

use crate::kv::Kv;
use crate::memory::Shared;
use crate::simd::{LANES, Simd, exp};

/// Positions between two merges; a multiple of the block.
pub const SPLIT: usize = 512;
/// Most rows of one unit.
pub const ROWS: usize = 96;
/// A row's result over some positions: maximum, sum, 14 unused, weighted values.
pub const PARTIAL: usize = LANES + HEAD_DIM;
/// The maximum of no positions: finite, so that differences are numbers.
const NOTHING: f32 = -1e30;

/// Scratch of one unit: queries, a split's results, the totals and what the walk needs.
pub const SCRATCH: usize = ROWS * (HEAD_DIM + 2 * PARTIAL) + many::SCRATCH;

/// Some tokens of one sequence.
#[derive(Clone, Copy)]
pub struct Unit {
    /// Sequence, for its block table.
    pub sequence: usize,
    /// KV head.
    pub head: usize,
    /// First token and how many.
    pub token: usize,
    /// At most [`ROWS`] / group.
    pub tokens: usize,
    /// First position and how many, whole splits but for the last.
    pub start: usize,
    /// End of the positions.
    pub end: usize,
    /// Where the first row's result goes in the partial results; `None` where the unit covers all positions.
    pub partial: Option<usize>,
}

/// Attention of one layer.
pub struct Attend<'a> {
    /// The cache.
    pub kv: &'a Kv,
    /// Index of the layer.
    pub layer: usize,
    /// `[tokens, stride]`, queries first, scaled.
    pub q: *const f32,
    /// Width of a row of `q`.
    pub stride: usize,
    /// Query heads.
    pub heads: usize,
    /// Position of each token.
    pub positions: &'a [u32],
    /// Block table of each sequence.
    pub tables: &'a [Vec<u32>],
    /// The work.
    pub units: &'a [Unit],
    /// `[tokens, out_stride]`
    pub out: *mut f32,
    /// Width of a row of `out`.
    pub out_stride: usize,
    /// Results of units that cover a split each, `[rows, PARTIAL]`.
    pub partials: &'a Shared<f32>,
    /// For each row to merge, (token, query head, its first partial, how many, distance).
    pub merges: &'a [Merge],
}

/// A row whose splits were computed apart.
#[derive(Clone, Copy)]
pub struct Merge {
    /// Token.
    pub token: usize,
    /// Query head.
    pub head: usize,
    /// Index of the first split's result.
    pub first: usize,
    /// Splits.
    pub splits: usize,
    /// Results between one split and the next.
    pub step: usize,
}

// SAFETY: threads read `q` and write disjoint rows of `out`.
unsafe impl Sync for Attend<'_> {}

/// Computes one unit.
///
/// # Safety
/// The unit's queries, context and output exist, nobody writes its context, no other thread writes its
/// output, `scratch` holds [`SCRATCH`] elements, and the machine has the class's features.
#[inline(always)]
pub unsafe fn attend<S: Simd>(job: &Attend<'_>, unit: usize, scratch: &mut [f32]) {
    let unit = job.units[unit];
    let group = job.heads / KV_HEADS;
    let rows = unit.tokens * group;
    let (queries, rest) = scratch.split_at_mut(ROWS * HEAD_DIM);
    let (split, rest) = rest.split_at_mut(ROWS * PARTIAL);
    let (total, rest) = rest.split_at_mut(ROWS * PARTIAL);
    let token_of = |row: usize| unit.token + row / group;
    let head_of = |row: usize| unit.head * group + row % group;
    // SAFETY: the caller's; the parts of the scratch hold ROWS rows each.
    unsafe {
        for row in 0..rows {
            let q = job.q.add(token_of(row) * job.stride + head_of(row) * HEAD_DIM);
            let to = queries[row * HEAD_DIM..].as_mut_ptr();
            std::ptr::copy_nonoverlapping(q, to, HEAD_DIM);
        }
        nothing(&mut total[..rows * PARTIAL]);
        for start in (unit.start..unit.end).step_by(SPLIT) {
            nothing(&mut split[..rows * PARTIAL]);
            let positions = start..unit.end.min(start + SPLIT);
            match unit.tokens {
                1 => one::walk::<S>(job, &unit, positions, queries, split, rest),
                _ => many::walk::<S>(job, &unit, positions, queries, split, rest),
            }
            for row in 0..rows {
                let part = &split[row * PARTIAL..][..PARTIAL];
                fold::<S>(&mut total[row * PARTIAL..][..PARTIAL], part.as_ptr());
            }
        }
        for row in 0..rows {
            let total = &total[row * PARTIAL..][..PARTIAL];
            match unit.partial {
                Some(first) => {
                    let to = job.partials.at((first + row) * PARTIAL);
                    std::ptr::copy_nonoverlapping(total.as_ptr(), to, PARTIAL);
                }
                None => finish::<S>(job, token_of(row), head_of(row), total.as_ptr()),
            }
        }
    }
}

/// Partial results of no positions.
fn nothing(rows: &mut [f32]) {
    for row in rows.chunks_exact_mut(PARTIAL) {
        row.fill(0.0);
        row[0] = NOTHING;
    }
}

/// Merges the splits of one row, in order.
///
/// # Safety
/// All its splits are there and the machine has the class's features.
#[inline(always)]
pub unsafe fn merge<S: Simd>(job: &Attend<'_>, row: usize) {
    let row = job.merges[row];
    let mut total = [0.0f32; PARTIAL];
    total[0] = NOTHING;
    // SAFETY: the caller's.
    unsafe {
        for split in 0..row.splits {
            fold::<S>(&mut total, job.partials.at((row.first + split * row.step) * PARTIAL));
        }
        finish::<S>(job, row.token, row.head, total.as_ptr());
    }
}

/// Turns a row's 32 scores, of which the first `visible` count, into weights relative to its maximum so far, and
/// adds them to its sum. Returns what its weighted values so far are to be multiplied with.
///
/// # Safety
/// `scores` holds a block, `row` a partial result; the machine has the class's features.
#[inline(always)]
unsafe fn weigh<S: Simd>(scores: &mut [f32], visible: usize, row: &mut [f32]) -> f32 {
    scores[visible..].fill(f32::NEG_INFINITY);
    // SAFETY: the caller's.
    unsafe {
        let s = scores.as_mut_ptr();
        let (low, high) = (S::load_f32(s), S::load_f32(s.add(LANES)));
        let before = row[0];
        let most = before.max(S::largest(S::max(low, high)));
        let shift = S::splat(most);
        let (low, high) = (exp::<S>(S::sub(low, shift)), exp::<S>(S::sub(high, shift)));
        S::store(low, s);
        S::store(high, s.add(LANES));
        let mut kept = [1.0; LANES];
        if most > before {
            S::store(exp::<S>(S::splat(before - most)), kept.as_mut_ptr());
        }
        row[0] = most;
        row[1] = row[1] * kept[0] + S::sum(S::add(low, high));
        kept[0]
    }
}

/// Folds a split's result into a row's total.
///
/// # Safety
/// Both are partial results and the machine has the class's features.
#[inline(always)]
unsafe fn fold<S: Simd>(total: &mut [f32], part: *const f32) {
    // SAFETY: the caller's.
    unsafe {
        let most = total[0].max(*part);
        let old = exp::<S>(S::splat(total[0] - most));
        let new = exp::<S>(S::splat(*part - most));
        let to = total.as_mut_ptr();
        // The sum lies in a vector of its own: lane 1 of the first.
        for i in (0..PARTIAL).step_by(LANES) {
            let kept = S::mul(S::load_f32(to.add(i)), old);
            S::store(S::fma(S::load_f32(part.add(i)), new, kept), to.add(i));
        }
        total[0] = most;
    }
}

/// Writes a row's result: its weighted values over their sum.
///
/// # Safety
/// As [`attend`]; `total` is a partial result.
#[inline(always)]
unsafe fn finish<S: Simd>(job: &Attend<'_>, token: usize, head: usize, total: *const f32) {
    // SAFETY: the caller's.
    unsafe {
        let out = job.out.add(token * job.out_stride + head * HEAD_DIM);
        let inverse = S::splat(1.0 / *total.add(1));
        for d in (0..HEAD_DIM).step_by(LANES) {
            S::store(S::mul(S::load_f32(total.add(LANES + d)), inverse), out.add(d));
        }
    }
}
