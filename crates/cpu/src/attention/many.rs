//! Several tokens: a block's keys and values are decoded once for all rows, which are multiplied with them in tiles.

use std::ops::Range;

use engine::batch::BLOCK;
use model::{HEAD_DIM, KV_HEADS};

use super::{Attend, PARTIAL, ROWS, Unit, weigh};
use crate::kv::{Cells, Store};
use crate::simd::{LANES, Simd};

/// Scratch: decoded keys and values, and scores.
pub const SCRATCH: usize = 2 * BLOCK * HEAD_DIM + ROWS * BLOCK;

/// Adds some positions to the unit's rows; `results` are theirs so far.
///
/// # Safety
/// As [`super::attend`]; `scratch` holds [`SCRATCH`] elements.
#[inline(always)]
pub unsafe fn walk<S: Simd>(
    job: &Attend<'_>,
    unit: &Unit,
    positions: Range<usize>,
    queries: &[f32],
    results: &mut [f32],
    scratch: &mut [f32],
) {
    let group = job.heads / KV_HEADS;
    let rows = unit.tokens * group;
    let (keys, rest) = scratch.split_at_mut(BLOCK * HEAD_DIM);
    let (values, scores) = rest.split_at_mut(BLOCK * HEAD_DIM);
    let last = |row: usize| job.positions[unit.token + row / group] as usize;
    let table = &job.tables[unit.sequence];
    for first in positions.clone().step_by(BLOCK) {
        let count = BLOCK.min(positions.end - first);
        let head = job.kv.head(job.layer, table[first / BLOCK], unit.head);
        // SAFETY: the caller's.
        unsafe {
            match job.kv.store() {
                Store::Bf16(cells) => decode::<S, _>(cells, head, count, keys, values),
                Store::Q8(cells) => decode::<S, _>(cells, head, count, keys, values),
            }
            // Rows that end before this block are left out: it would not change their bits.
            let from = (0..rows).find(|&row| last(row) >= first).unwrap_or(rows);
            multiply::<S>(
                &queries[from * HEAD_DIM..],
                HEAD_DIM,
                keys.as_ptr(),
                BLOCK,
                &mut scores[from * BLOCK..],
                BLOCK,
                rows - from,
                HEAD_DIM,
                false,
            );
            for row in from..rows {
                let visible = BLOCK.min(last(row) + 1 - first);
                let scores = &mut scores[row * BLOCK..][..BLOCK];
                let result = &mut results[row * PARTIAL..][..PARTIAL];
                let keep = weigh::<S>(scores, visible, result);
                if keep < 1.0 {
                    let weighted = result.as_mut_ptr().add(LANES);
                    for d in (0..HEAD_DIM).step_by(LANES) {
                        let kept = S::mul(S::load_f32(weighted.add(d)), S::splat(keep));
                        S::store(kept, weighted.add(d));
                    }
                }
            }
            for d in (0..HEAD_DIM).step_by(2 * LANES) {
                let to = &mut results[from * PARTIAL + LANES + d..];
                multiply::<S>(
                    &scores[from * BLOCK..],
                    BLOCK,
                    values.as_ptr().add(d),
                    HEAD_DIM,
                    to,
                    PARTIAL,
                    rows - from,
                    BLOCK,
                    true,
                );
            }
        }
    }
}

/// Decodes the first `count` positions of a head of a block: `keys` as `[128][32]`, `values` as `[32][128]`.
/// What lies behind them is left as it was in `keys` and zero in `values`.
///
/// # Safety
/// As [`Cells`]; the outputs hold 4,096 elements each.
#[inline(always)]
unsafe fn decode<S: Simd, C: Cells>(
    cells: &C,
    head: usize,
    count: usize,
    keys: &mut [f32],
    values: &mut [f32],
) {
    // SAFETY: the caller's.
    unsafe {
        for (d, to) in keys.chunks_exact_mut(BLOCK).enumerate() {
            for (position, to) in (0..BLOCK).step_by(LANES).zip(to.chunks_exact_mut(LANES)) {
                S::store(cells.key::<S>(head, d, position), to.as_mut_ptr());
            }
        }
        for (position, to) in values.chunks_exact_mut(HEAD_DIM).take(count).enumerate() {
            for (d, to) in (0..HEAD_DIM).step_by(LANES).zip(to.chunks_exact_mut(LANES)) {
                S::store(cells.value::<S>(head, position, d), to.as_mut_ptr());
            }
        }
    }
    values[count * HEAD_DIM..].fill(0.0);
}

/// c\[rows\]\[32\] (+)= a\[rows\]\[n\] b\[n\]\[32\], each with its own distance between rows; every element is summed
/// in the order of n.
///
/// # Safety
/// The matrices hold those elements and the machine has the class's features.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "three matrices with their strides")]
unsafe fn multiply<S: Simd>(
    a: &[f32],
    a_stride: usize,
    b: *const f32,
    b_stride: usize,
    c: &mut [f32],
    c_stride: usize,
    rows: usize,
    n: usize,
    add: bool,
) {
    let (a, c) = (a.as_ptr(), c.as_mut_ptr());
    let mut row = 0;
    while row < rows {
        // SAFETY: the caller's.
        unsafe {
            let (a, c) = (a.add(row * a_stride), c.add(row * c_stride));
            row += match rows - row {
                12.. if S::TILE.1 >= 12 => {
                    tile::<S, 12>(a, a_stride, b, b_stride, c, c_stride, n, add);
                    12
                }
                8.. if S::TILE.1 >= 8 => {
                    tile::<S, 8>(a, a_stride, b, b_stride, c, c_stride, n, add);
                    8
                }
                4.. if S::TILE.1 >= 4 => {
                    tile::<S, 4>(a, a_stride, b, b_stride, c, c_stride, n, add);
                    4
                }
                2.. => {
                    tile::<S, 2>(a, a_stride, b, b_stride, c, c_stride, n, add);
                    2
                }
                _ => {
                    tile::<S, 1>(a, a_stride, b, b_stride, c, c_stride, n, add);
                    1
                }
            };
        }
    }
}

/// `R` rows of [`multiply`].
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "three matrices with their strides")]
unsafe fn tile<S: Simd, const R: usize>(
    a: *const f32,
    a_stride: usize,
    b: *const f32,
    b_stride: usize,
    c: *mut f32,
    c_stride: usize,
    n: usize,
    add: bool,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[S::splat(0.0); 2]; R];
        if add {
            for r in 0..R {
                for half in 0..2 {
                    sums[r][half] = S::load_f32(c.add(r * c_stride + half * LANES));
                }
            }
        }
        for i in 0..n {
            let b = b.add(i * b_stride);
            let (low, high) = (S::load_f32(b), S::load_f32(b.add(LANES)));
            for r in 0..R {
                let a = S::splat(*a.add(r * a_stride + i));
                sums[r][0] = S::fma(a, low, sums[r][0]);
                sums[r][1] = S::fma(a, high, sums[r][1]);
            }
        }
        for r in 0..R {
            for half in 0..2 {
                S::store(sums[r][half], c.add(r * c_stride + half * LANES));
            }
        }
    }
}
