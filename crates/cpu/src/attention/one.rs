//! One token: keys and values go from the cache into registers, where some blocks' scores and all sums are, so that a
//! long context is read at the memory's rate.

use std::ops::Range;

use engine::batch::BLOCK;
use model::{HEAD_DIM, KV_HEADS};

use super::{Attend, PARTIAL, Unit, weigh};
use crate::kv::{Cells, Store};
use crate::simd::{LANES, Simd};

/// Adds some positions to the rows of the unit's token; `results` are theirs so far.
///
/// # Safety
/// As [`super::many::walk`].
#[inline(always)]
pub unsafe fn walk<S: Simd>(
    job: &Attend<'_>,
    unit: &Unit,
    positions: Range<usize>,
    queries: &[f32],
    results: &mut [f32],
    scratch: &mut [f32],
) {
    // SAFETY: the caller's.
    unsafe {
        match job.kv.store() {
            Store::Bf16(cells) => {
                let context = Context { cells, job, unit, positions };
                context.by_rows::<S>(queries, results, scratch);
            }
            Store::Q8(cells) => {
                let context = Context { cells, job, unit, positions };
                context.by_rows::<S>(queries, results, scratch);
            }
        }
    }
}

/// Positions of a KV head.
struct Context<'a, C> {
    cells: &'a C,
    job: &'a Attend<'a>,
    unit: &'a Unit,
    positions: Range<usize>,
}

impl<C: Cells> Context<'_, C> {
    /// # Safety
    /// As [`walk`].
    #[inline(always)]
    unsafe fn by_rows<S: Simd>(&self, queries: &[f32], results: &mut [f32], scores: &mut [f32]) {
        let rows = self.job.heads / KV_HEADS;
        let mut row = 0;
        while row < rows {
            let queries = queries[row * HEAD_DIM..].as_ptr();
            let results = &mut results[row * PARTIAL..];
            // Sums that hide the latency of adding to them and leave registers for what is added.
            let wide = S::TILE.1 >= 12;
            // SAFETY: the caller's.
            row += unsafe {
                match rows - row {
                    4.. if wide => self.add::<S, 4, 2, 4>(queries, results, scores),
                    2.. if wide => self.add::<S, 2, 4, 8>(queries, results, scores),
                    _ if wide => self.add::<S, 1, 8, 8>(queries, results, scores),
                    2.. => self.add::<S, 2, 1, 2>(queries, results, scores),
                    _ => self.add::<S, 1, 2, 4>(queries, results, scores),
                }
            };
        }
    }

    /// Adds the positions to `R` rows, the scores of `B` blocks and `V` vectors of a value at a time. Returns `R`.
    ///
    /// # Safety
    /// As [`walk`].
    #[inline(always)]
    unsafe fn add<S: Simd, const R: usize, const B: usize, const V: usize>(
        &self,
        queries: *const f32,
        results: &mut [f32],
        scores: &mut [f32],
    ) -> usize {
        let Range { start, end } = self.positions;
        for first in (start..end).step_by(B * BLOCK) {
            let blocks = B.min((end - first).div_ceil(BLOCK));
            let (heads, next) = (self.heads::<B>(first), self.heads::<B>(first + B * BLOCK));
            let count = |block: usize| BLOCK.min(end - first - block * BLOCK);
            // SAFETY: the caller's.
            unsafe {
                self.score::<S, R, B>(queries, heads, scores.as_mut_ptr());
                let mut keep = [[1.0; R]; B];
                for (block, keep) in keep.iter_mut().take(blocks).enumerate() {
                    for (r, keep) in keep.iter_mut().enumerate() {
                        let scores = &mut scores[(block * R + r) * BLOCK..][..BLOCK];
                        let result = &mut results[r * PARTIAL..];
                        *keep = weigh::<S>(scores, count(block), result);
                    }
                }
                for d in (0..HEAD_DIM).step_by(V * LANES) {
                    let weighted = results[LANES + d..].as_mut_ptr();
                    let mut sums = [[S::splat(0.0); V]; R];
                    for (r, sums) in sums.iter_mut().enumerate() {
                        for (v, sum) in sums.iter_mut().enumerate() {
                            *sum = S::load_f32(weighted.add(r * PARTIAL + v * LANES));
                        }
                    }
                    for block in 0..blocks {
                        let weights = scores[block * R * BLOCK..].as_ptr();
                        for (sums, keep) in sums.iter_mut().zip(keep[block]) {
                            for sum in sums {
                                *sum = S::mul(*sum, S::splat(keep));
                            }
                        }
                        let ahead = self.cells.start(next[block]);
                        let ahead = ahead.wrapping_byte_add(d * C::KEY_BYTES);
                        for position in 0..count(block) {
                            // The next keys, 128 times KEY_BYTES, in as many parts as there are positions and passes.
                            let part = V * LANES * C::KEY_BYTES / BLOCK;
                            for line in (0..part).step_by(64) {
                                S::prefetch(ahead.wrapping_byte_add(position * part + line));
                            }
                            let mut value = [S::splat(0.0); V];
                            for (v, value) in value.iter_mut().enumerate() {
                                let d = d + v * LANES;
                                *value = self.cells.value::<S>(heads[block], position, d);
                            }
                            for (r, sums) in sums.iter_mut().enumerate() {
                                let weight = S::splat(*weights.add(r * BLOCK + position));
                                for (sum, value) in sums.iter_mut().zip(value) {
                                    *sum = S::fma(weight, value, *sum);
                                }
                            }
                        }
                    }
                    for (r, sums) in sums.iter().enumerate() {
                        for (v, sum) in sums.iter().enumerate() {
                            S::store(*sum, weighted.add(r * PARTIAL + v * LANES));
                        }
                    }
                }
            }
        }
        R
    }

    /// `[B][R][32]` scores of blocks.
    ///
    /// # Safety
    /// As [`walk`].
    #[inline(always)]
    unsafe fn score<S: Simd, const R: usize, const B: usize>(
        &self,
        queries: *const f32,
        heads: [usize; B],
        scores: *mut f32,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [[[S::splat(0.0); 2]; R]; B];
            for d in 0..HEAD_DIM {
                for (sums, head) in sums.iter_mut().zip(heads) {
                    // Its values, which lie as far behind the keys as these are long.
                    let ahead = self.cells.start(head);
                    S::prefetch(ahead.wrapping_byte_add((HEAD_DIM + d) * C::KEY_BYTES));
                    let key =
                        [self.cells.key::<S>(head, d, 0), self.cells.key::<S>(head, d, LANES)];
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let query = S::splat(*queries.add(r * HEAD_DIM + d));
                        *sums = [S::fma(query, key[0], sums[0]), S::fma(query, key[1], sums[1])];
                    }
                }
            }
            for (i, sums) in sums.iter().flatten().enumerate() {
                S::store(sums[0], scores.add(i * BLOCK));
                S::store(sums[1], scores.add(i * BLOCK + LANES));
            }
        }
    }

    /// Where the KV head's part of some blocks from a position lies: of the last block again where there are fewer,
    /// and of the next head's first ones behind all, which are likely to be read next.
    fn heads<const B: usize>(&self, first: usize) -> [usize; B] {
        let Unit { sequence, head, start, end, .. } = *self.unit;
        let (first, head) =
            if first < end { (first, head) } else { (start, (head + 1) % KV_HEADS) };
        let table = &self.job.tables[sequence];
        std::array::from_fn(|block| {
            let block = (first / BLOCK + block).min((end - 1) / BLOCK);
            self.job.kv.head(self.job.layer, table[block], head)
        })
    }
}
