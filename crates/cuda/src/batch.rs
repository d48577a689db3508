//! Projections of a batch, 2 to 256 tokens, on Hopper: which kernel, how the matrix is shared out, and its launch
//! (`kernels/project_batch.cu`, `project_batch_quants.cu`).

use std::ffi::c_void;

use engine::BackendError;

use crate::driver::{Function, Stream, TensorMap};
use crate::kernels::{Epilogue, Parts, each};
use crate::weights::{Kind, Projection};

type Result<T> = std::result::Result<T, BackendError>;

/// Fewest tokens; one alone is the business of others.
const FROM: usize = 2;
/// Tokens up to which a kernel is made, the width of its products.
const WIDTHS: [usize; 5] = [16, 32, 64, 128, 256];
/// Those of them that quantised weights have.
const QUANT_WIDTHS: usize = 4;
/// Weight rows of a unit, of which ranges are made.
const UNIT: usize = 16;
/// Multiprocessors that work is shared out to. No property of the device at hand, so that sums are the same on all.
const SHARERS: usize = 132;
/// Parts of a sum at most.
const MOST_PARTS: usize = 16;
/// Stages of a ring at most.
const MOST_STAGES: usize = 16;

/// What the kernels take beside their operands (`kernels/batch.cuh`).
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Shape {
    out: u64,
    count: u64,
    rows: i32,
    cols: i32,
    ranges: i32,
    splits: i32,
    plane: i32,
    stages: i32,
}

/// A quantised matrix by value.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Quants {
    quants: u64,
    scales: u64,
}

/// The kernels by width.
pub struct BatchKernels {
    /// By warpgroups and epilogue: sums, SwiGLU. 256 tokens have no third.
    f16: [[[Option<Function>; 2]; 3]; WIDTHS.len()],
    /// By kind and epilogue.
    quants: [[[Function; 2]; QUANT_WIDTHS]; 3],
    multiprocessors: usize,
}

impl BatchKernels {
    /// Finds the kernels, by source and name.
    pub fn load(
        find: impl Fn(&str, &str) -> Result<Function>,
        multiprocessors: usize,
    ) -> Result<Self> {
        const EPILOGUES: [&str; 2] = ["STORE", "SWIGLU"];
        let find = |source: &str, name: String| {
            let function = find(source, &name)?;
            function.allow_shared(MOST_SHARED as u32)?;
            Ok(function)
        };
        let f16 = |width: usize| {
            each(|group| {
                each(|i| {
                    let (tokens, groups, epilogue) = (WIDTHS[width], group + 1, EPILOGUES[i]);
                    if groups * 4 > highest(tokens, Kind::F16).next_multiple_of(4) {
                        return Ok(None);
                    }
                    let name = format!("project_batch_{tokens}_{groups}_{epilogue}");
                    find("project_batch", name).map(Some)
                })
            })
        };
        let quants = |kind: usize| {
            each(|width| {
                each(|i| {
                    let (kind, tokens) = (Kind::NAMES[kind + 1], WIDTHS[width]);
                    let name = format!("project_batch_{kind}_{tokens}_{}", EPILOGUES[i]);
                    find("project_batch_quants", name)
                })
            })
        };
        Ok(BatchKernels { f16: each(f16)?, quants: each(quants)?, multiprocessors })
    }

    /// Whether there is a kernel for so many tokens.
    pub fn serves(kind: Kind, tokens: usize) -> bool {
        let most = if kind == Kind::F16 { WIDTHS.len() } else { QUANT_WIDTHS };
        (FROM..=WIDTHS[most - 1]).contains(&tokens)
    }

    /// `out` = `x` W^T, or parts of it at `parts` if the matrix is shared out by columns; says where the sums are.
    #[expect(clippy::too_many_arguments, reason = "the kernel's")]
    pub fn project(
        &self,
        stream: &Stream,
        w: &Projection,
        x: u64,
        out: u64,
        parts: u64,
        tokens: usize,
        count: u64,
        epilogue: Epilogue,
    ) -> Result<Parts> {
        let width_index =
            WIDTHS.iter().position(|&width| tokens <= width).unwrap_or(WIDTHS.len() - 1);
        let width = WIDTHS[width_index];
        let whole = matches!(epilogue, Epilogue::Store | Epilogue::SwiGlu);
        let shares = Shares::of(w, width, whole);
        // Sums that wait for the residual stream are parts, be it a single one.
        let left = shares.splits > 1 || matches!(epilogue, Epilogue::Residual(_));
        let f16 = w.kind == Kind::F16;
        let units = shares.highest(w.rows);
        let stage = if f16 { (width + units * UNIT) * 128 } else { width * 256 };
        let stages = (RING / stage).min(MOST_STAGES);
        let shape = Shape {
            out: if left { parts } else { out },
            count,
            rows: w.rows as i32,
            cols: w.cols as i32,
            ranges: shares.ranges as i32,
            splits: shares.splits as i32,
            plane: (tokens * w.rows) as i32,
            stages: stages as i32,
        };
        let grid = self.multiprocessors.min(shares.ranges * shares.splits) as u32;
        let shared = (stages * stage + PAST) as u32;
        let x = TensorMap::new(x, tokens, w.cols, width)?;
        let swiglu = usize::from(epilogue == Epilogue::SwiGlu);
        let launch = |function, threads: usize, arguments: &mut [*mut c_void]| {
            // SAFETY: the parameters of the kernels below; the backend sized what the addresses are of.
            unsafe { stream.launch(function, [grid, 1, 1], threads as u32, shared, arguments) }
        };
        if f16 {
            let map = |units: usize| TensorMap::new(w.quants, w.rows, w.cols, units * UNIT);
            let (lower, upper) = (map(units.max(2) - 1)?, map(units)?);
            let groups = units.div_ceil(4);
            let function = self.f16[width_index][groups - 1][swiglu];
            let none = || BackendError::Device(format!("no projection of {width} x {groups}"));
            launch(
                function.ok_or_else(none)?,
                groups * 128 + 32,
                &mut [
                    (&raw const lower).cast_mut().cast(),
                    (&raw const upper).cast_mut().cast(),
                    (&raw const x).cast_mut().cast(),
                    (&raw const shape).cast_mut().cast(),
                ],
            )?;
        } else {
            let weights = Quants { quants: w.quants, scales: w.scales };
            let function = self.quants[w.kind as usize - 1][width_index][swiglu];
            launch(
                function,
                (units * teams(width) + 1) * 32,
                &mut [
                    (&raw const weights).cast_mut().cast(),
                    (&raw const x).cast_mut().cast(),
                    (&raw const shape).cast_mut().cast(),
                ],
            )?;
        }
        Ok(Parts { at: shape.out, count: shape.splits, plane: shape.plane })
    }
}

/// Bytes of a ring's stages: nearly all shared memory of a multiprocessor.
const RING: usize = 200 << 10;
/// Bytes past the ring that products of rows a tile does not have are made of.
const PAST: usize = 6 << 10;
/// Dynamic shared memory at most.
const MOST_SHARED: usize = RING + PAST;

/// Units of the highest range that a kernel takes: as many as its registers allow.
fn highest(width: usize, kind: Kind) -> usize {
    match (kind, width) {
        (Kind::F16, ..256) => 12,
        (Kind::F16, _) => 8,
        (_, ..128) => 11,
        _ => 7,
    }
}

/// Warps that share 16 rows of quantised weights.
fn teams(width: usize) -> usize {
    if width <= 16 { 2 } else { 1 }
}

/// How a matrix is shared out: ranges of rows, and splits of columns.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Shares {
    ranges: usize,
    splits: usize,
}

impl Shares {
    fn of(w: &Projection, width: usize, whole: bool) -> Self {
        Self::cheapest(w.rows, w.cols, w.kind, highest(width, w.kind), whole)
    }

    /// The shares whose largest is smallest. Its cost is counted in 16 x 64 weights: those it reads, about one for the
    /// activations that go with a step, and a few for each part that is written and read.
    fn cheapest(rows: usize, cols: usize, kind: Kind, highest: usize, whole: bool) -> Self {
        let (units, depth) = (rows / UNIT, if kind == Kind::F16 { 64 } else { 128 });
        let steps = cols / depth;
        let most_splits = if whole { 1 } else { MOST_PARTS.min(cols / 128) };
        let cost = |s: &Shares| {
            let rounds = (s.ranges * s.splits).div_ceil(SHARERS);
            let activations = if kind == Kind::F16 { 1 } else { 3 };
            rounds * steps.div_ceil(s.splits) * (units.div_ceil(s.ranges) + activations)
                + 3 * s.splits
        };
        (1..=most_splits)
            .map(|splits| {
                let sharers = SHARERS / splits;
                let rounds = units.div_ceil(sharers).div_ceil(highest);
                Shares { ranges: units.min(sharers * rounds), splits }
            })
            .filter(|s| s.splits == 1 || s.ranges * s.splits <= SHARERS)
            .min_by_key(cost)
            .unwrap_or(Shares { ranges: units, splits: 1 })
    }

    /// Units of the highest range.
    fn highest(self, rows: usize) -> usize {
        (rows / UNIT).div_ceil(self.ranges)
    }
}

/// Bytes of the parts of any projection of any model: `splits x rows` is at most what the sharers hold at once.
pub const PARTS_BYTES: usize = SHARERS * 12 * UNIT * WIDTHS[WIDTHS.len() - 1] * 4;

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernels exist for every share, the parts have room, and no part is without columns.
    #[test]
    fn shares_fit_kernels_and_scratch() {
        for kind in [Kind::F16, Kind::Q4_0] {
            for rows in (256..160_000).step_by(128) {
                for cols in [256, 768, 1024, 2560, 25_600] {
                    for (width, whole) in
                        WIDTHS.map(|width| [(width, true), (width, false)]).as_flattened()
                    {
                        let highest = highest(*width, kind);
                        let shares = Shares::cheapest(rows, cols, kind, highest, *whole);
                        assert!((1..=cols / 128).contains(&shares.splits), "{rows} x {cols}");
                        assert!(shares.ranges <= rows / UNIT, "{rows} x {cols}: {shares:?}");
                        assert!(shares.highest(rows) <= highest, "{rows} x {cols}: {shares:?}");
                        if shares.splits > 1 {
                            assert!(shares.splits * rows * width * 4 <= PARTS_BYTES, "{rows}");
                        }
                    }
                }
            }
        }
    }

    /// What is spread over the multiprocessors is spread evenly, for the shapes of the 4B.
    #[test]
    fn shares_are_even() {
        for (rows, cols, whole) in
            [(6144, 2560, false), (2560, 4096, false), (19_456, 2560, true), (2560, 9728, false)]
        {
            let shares = Shares::cheapest(rows, cols, Kind::F16, 12, whole);
            let most = shares.highest(rows) * (cols / 64).div_ceil(shares.splits);
            let even = (rows / UNIT * cols / 64).div_ceil(SHARERS);
            assert!(most * 100 <= even * 115, "{rows} x {cols}: {shares:?}, {most} for {even}");
        }
    }
}
