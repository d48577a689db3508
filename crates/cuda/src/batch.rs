//! Projections of a batch, 2 to 128 tokens, on Hopper: which kernel, how the matrix is shared out, and its launch
//! (`kernels/project_batch.cuh`).

use std::ffi::c_void;

use engine::BackendError;
use model::HEAD_DIM;

use crate::driver::{Element, Function, Promotion, Stream, TensorMap};
use crate::kernels::{Heads, each, launch};
use crate::weights::{Kind, Projection};

type Result<T> = std::result::Result<T, BackendError>;

/// Fewest tokens; one alone is the business of others.
const FROM: usize = 2;
/// Tokens up to which a kernel is made, the width of its products.
const WIDTHS: [usize; 4] = [16, 32, 64, 128];
/// Tokens of a batch at most.
pub const BATCHED: usize = WIDTHS[WIDTHS.len() - 1];
/// Weight rows of a unit, of which ranges are made.
const UNIT: usize = 16;
/// Units of the highest range that a kernel takes.
const HIGHEST: usize = 12;
/// Multiprocessors that work is shared out to. No property of the device at hand, so that sums are the same on all.
const SHARERS: usize = 132;
/// Stages of a ring at most.
const MOST_STAGES: usize = 16;
/// Bytes of a ring of which two find room on a multiprocessor, so that the next kernel's is full before this one ends.
const HALF_RING: usize = 104 << 10;
/// Bytes that a block reads of weights and activations, up to which its ring is a half one: where more is to come, a ring is
/// better as large as can be.
const HALVED: usize = 160 << 10;
/// Bytes past the ring that products of rows a tile does not have are made of.
const PAST: usize = 6 << 10;
/// What the L2 cache fetches at a time: the other half of 256 bytes is asked for soon enough as the next stage.
const PROMOTION: Promotion = Promotion::Bytes128;
/// Clusters of four blocks that find room at once.
const CLUSTERS: usize = 30;

/// What makes a scaled residual vector its norm (`kernels/normed.cuh`), as kernels take it.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Normed {
    /// fp32 `[parts, BATCHED]`.
    pub squares: u64,
    /// fp32 `[tokens]`.
    pub powers: u64,
    /// fp32 `[tokens]`, of the vectors after it.
    pub next: u64,
    /// Of the squares.
    pub parts: i32,
}

/// A residual vector that grows (`kernels/normed.cuh`), as kernels take it.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Residual {
    /// fp32 `[tokens, hidden]`.
    pub x: u64,
    /// fp16 `[tokens, hidden]`.
    pub scaled: u64,
    /// Of the next norm, fp32 `[hidden]`.
    pub weight: u64,
    /// fp32 `[tokens]`.
    pub powers: u64,
    /// fp32 `[parts, BATCHED]`.
    pub squares: u64,
    /// Of what is added.
    pub factor: f32,
}

/// What becomes of a projection's sums, and what that takes.
#[derive(Debug, Clone, Copy)]
pub enum Use {
    /// Queries, keys and values of a normed input go to their places.
    Heads(Normed, Heads),
    /// Added to the residual stream.
    Residual(Residual),
    /// Of a normed input with rows of 8 of gate and 8 of up in turns: fp16 `[tokens, rows / 2]` of silu(gate) x up / 64.
    SwiGlu(Normed, u64),
    /// fp32 `[tokens, rows]`.
    Store(u64),
}

/// What the kernels take beside their tensor maps.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Task {
    count: u64,
    scales: u64,
    rows: i32,
    cols: i32,
    ranges: i32,
    stages: i32,
    mailbox: i32,
    normed: Normed,
    residual: Residual,
    heads: Heads,
    out: u64,
}

/// The tensor maps that they take.
#[derive(Clone, Copy)]
#[repr(C)]
struct Maps {
    lower: TensorMap,
    upper: TensorMap,
    x: TensorMap,
}

/// The kernels by width, warpgroups of rows and use.
pub struct BatchKernels {
    functions: [[[[Option<Function>; 4]; 3]; WIDTHS.len()]; 4],
    multiprocessors: usize,
}

impl BatchKernels {
    /// Finds the kernels, by source and name.
    pub fn load(
        find: impl Fn(&str, &str) -> Result<Function>,
        multiprocessors: usize,
    ) -> Result<Self> {
        const USES: [&str; 4] = ["HEADS", "RESIDUAL", "SWIGLU", "STORE"];
        let function = |kind: Kind, width: usize, group: usize, then: usize| {
            let (tokens, groups) = (WIDTHS[width], group + 1);
            if (then == 0 && groups != 2) || (then == 3 && groups == 2) {
                return Ok(None);
            }
            let source = format!("project_batch_{}", kind.name().to_lowercase());
            let name = format!("project_batch_{}_{tokens}_{groups}_{}", kind.name(), USES[then]);
            let function = find(&source, &name)?;
            function.allow_shared((ring(kind) + PAST) as u32)?;
            Ok(Some(function))
        };
        let functions = each(|kind| {
            each(|width| each(|group| each(|then| function(Kind::ALL[kind], width, group, then))))
        })?;
        Ok(BatchKernels { functions, multiprocessors })
    }

    /// Whether there is a kernel for so many tokens.
    pub fn serves(tokens: usize) -> bool {
        (FROM..=BATCHED).contains(&tokens)
    }

    /// `x` W^T of at most `tokens` tokens; how many there are is read at `count`.
    pub fn project(
        &self,
        stream: &Stream,
        w: &Projection,
        x: u64,
        tokens: usize,
        count: u64,
        then: Use,
    ) -> Result<()> {
        let width_index =
            WIDTHS.iter().position(|&width| tokens <= width).unwrap_or(WIDTHS.len() - 1);
        let width = WIDTHS[width_index];
        let mut task = Task {
            count,
            scales: w.scales,
            rows: w.rows as i32,
            cols: w.cols as i32,
            ranges: 0,
            stages: 0,
            mailbox: 0,
            normed: Normed::default(),
            residual: Residual::default(),
            heads: Heads::default(),
            out: 0,
        };
        let use_index = match then {
            Use::Heads(normed, heads) => {
                (task.normed, task.heads) = (normed, heads);
                0
            }
            Use::Residual(residual) => {
                task.residual = residual;
                1
            }
            Use::SwiGlu(normed, out) => {
                (task.normed, task.out) = (normed, out);
                2
            }
            Use::Store(out) => {
                task.out = out;
                3
            }
        };
        let shares = Shares::of(w.rows, use_index);
        let Shares { ranges, units } = shares;
        let depth = depth(w.kind, width);
        let stage = width * depth * 2 + units * UNIT * w.kind.row_bytes(depth);
        let mailbox = mailbox(use_index, width, units);
        let splits = [2, 4, 1, 1][use_index];
        let needed = (w.cols / depth).div_ceil(splits);
        let half = w.kind == Kind::F16 && width <= 32 && needed * stage <= HALVED;
        let ring = if half { HALF_RING } else { ring(w.kind) };
        let stages = ((ring - mailbox) / stage).min(MOST_STAGES).min(needed.max(2));
        (task.ranges, task.stages, task.mailbox) = (ranges as i32, stages as i32, mailbox as i32);
        let map = |units: usize| weights_map(w, units * UNIT, depth);
        let upper = match use_index {
            0 => heads_map(w, depth, PROMOTION)?,
            _ => map(units)?,
        };
        let x = TensorMap::boxes(x, Element::F16, [tokens, w.cols], [width, 64], PROMOTION)?;
        let maps = Maps { lower: map(units.max(2) - 1)?, upper, x };
        let grid = if use_index == 3 { ranges.min(self.multiprocessors) } else { splits * ranges };
        let groups = units.div_ceil(4);
        let teams = teams(w.kind, width, groups, use_index);
        let none = || BackendError::Device(format!("no projection of {width} x {groups}"));
        let function =
            self.functions[w.kind as usize][width_index][groups - 1][use_index].ok_or_else(none)?;
        let shared = (mailbox + stages * stage + PAST) as u32;
        let threads = 128 * (groups * teams + 1) as u32;
        launch!(stream, function, [grid as u32, 1, 1], threads, shared, [maps, task])
    }
}

/// Bytes of a ring's stages and of what blocks exchange: nearly all shared memory of a multiprocessor, but for the scales of quants.
const fn ring(kind: Kind) -> usize {
    match kind {
        Kind::F16 => 212 << 10,
        Kind::Q8_0 | Kind::Q4_0 => 188 << 10,
        Kind::Q4_1 => 164 << 10,
    }
}

/// Teams of warps that take the stages in turns (`teams` of the kernels, which a test compares).
const fn teams(kind: Kind, width: usize, groups: usize, use_index: usize) -> usize {
    if use_index == 3 {
        return 1;
    }
    let room = if groups == 3 { use_index == 2 && width == 16 } else { width <= 32 };
    if groups == 1 || (!matches!(kind, Kind::F16) && room) { 2 } else { 1 }
}

/// Columns of a stage: 128 bytes of a row of weights, since the memory takes as long for fewer, but for nibbles beside the
/// activations of 128 tokens.
const fn depth(kind: Kind, width: usize) -> usize {
    match kind {
        Kind::F16 => 64,
        Kind::Q4_0 | Kind::Q4_1 if width < BATCHED => 256,
        _ => 128,
    }
}

/// A matrix in boxes of `rows` rows and a stage's columns.
fn weights_map(w: &Projection, rows: usize, depth: usize) -> Result<TensorMap> {
    let (element, shape, part) = match w.kind {
        Kind::F16 => (Element::F16, [w.rows, w.cols], [rows, depth]),
        kind => {
            let (row, part) = (kind.row_bytes(w.cols), kind.row_bytes(depth));
            (Element::U8, [w.rows, row], [rows, part])
        }
    };
    TensorMap::boxes(w.quants, element, shape, part, PROMOTION)
}

/// Heads, each piece of eight rows followed by the piece 64 rows further.
pub fn heads_map(w: &Projection, depth: usize, promotion: Promotion) -> Result<TensorMap> {
    let (element, bytes) = if w.kind == Kind::F16 { (Element::F16, 2) } else { (Element::U8, 1) };
    let (row, part) = (w.kind.row_bytes(w.cols) as u64, w.kind.row_bytes(depth) as u64);
    let dims = [row / bytes, 8, 2, 8, (w.rows / HEAD_DIM) as u64];
    let strides = [row, 64 * row, 8 * row, HEAD_DIM as u64 * row];
    let part = [(part / bytes) as u32, 8, 2, 8, 1];
    TensorMap::tensor(w.quants, element, &dims, &strides, &part, true, promotion)
}

/// Bytes of what a block of a cluster gets from the others.
fn mailbox(use_index: usize, width: usize, units: usize) -> usize {
    let bytes = match use_index {
        0 => width / 16 * units * 512,
        1 => width.div_ceil(32) * units * 512 * 3,
        _ => 0,
    };
    bytes.next_multiple_of(1024)
}

/// Parts of a residual vector of so many elements, of which squares are kept.
pub fn parts(hidden: usize) -> usize {
    Shares::of(hidden, 1).ranges
}

/// How the rows of a matrix are shared out: how many ranges, and units of the highest.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Shares {
    ranges: usize,
    units: usize,
}

impl Shares {
    fn of(rows: usize, use_index: usize) -> Self {
        let units = rows / UNIT;
        let ranges = match use_index {
            0 => rows / HEAD_DIM,
            1 => units.div_ceil(units.div_ceil(CLUSTERS)),
            _ => units.min(SHARERS * units.div_ceil(SHARERS).div_ceil(HIGHEST)),
        };
        Shares { ranges, units: units.div_ceil(ranges) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    /// Kernels exist for every share, and every ring has stages for two teams.
    #[test]
    fn shares_fit_kernels_and_rings() {
        for rows in (256..160_000).step_by(128) {
            for then in 0..4 {
                if then == 1 && rows > CLUSTERS * HIGHEST * UNIT {
                    continue;
                }
                let Shares { ranges, units } = Shares::of(rows, then);
                assert!(units <= HIGHEST && ranges * units * UNIT >= rows, "{rows} {then}");
                for (kind, width) in
                    Kind::ALL.iter().flat_map(|&kind| WIDTHS.map(|width| (kind, width)))
                {
                    let depth = depth(kind, width);
                    let stage = width * depth * 2 + units * UNIT * kind.row_bytes(depth);
                    let half = (kind == Kind::F16 && width <= 32).then_some(HALF_RING);
                    for ring in [ring(kind)].into_iter().chain(half) {
                        let stages = (ring - mailbox(then, width, units)) / stage;
                        assert!(stages >= 2, "{rows} {then} {kind:?} {width} {ring}: {stages}");
                    }
                }
                assert!(then != 1 || ranges <= CLUSTERS, "{rows}: {ranges}");
            }
        }
    }

    /// The kernels are compiled for as many threads as they are launched with: their own function, in a compiler's eyes.
    #[test]
    fn kernels_count_teams_alike() {
        let plan = include_str!("../kernels/project_batch_plan.cuh");
        let function =
            plan.split_once("constexpr int teams(").and_then(|at| at.1.split_once("\n}\n"));
        let function = function.expect("the function").0;
        let uses = ["HEADS", "RESIDUAL", "SWIGLU", "STORE"];
        let (types, epilogues) = (Kind::NAMES.join(", "), uses.join(", "));
        let mut code = format!(
            "enum Type {{ {types} }};\nenum Epilogue {{ {epilogues} }};\nconstexpr int teams({function}\n}}\n"
        );
        for (kind, width) in Kind::ALL.iter().flat_map(|&kind| WIDTHS.map(|width| (kind, width))) {
            for groups in 1..=HIGHEST / 4 {
                for (use_index, then) in uses.iter().enumerate() {
                    let (name, teams) = (kind.name(), teams(kind, width, groups, use_index));
                    code += &format!(
                        "static_assert(teams({name}, {width}, {groups}, {then}) == {teams}, \"\");\n"
                    );
                }
            }
        }
        let mut compiler = Command::new("c++");
        compiler.args(["-std=c++17", "-fsyntax-only", "-x", "c++", "-"]).stdin(Stdio::piped());
        let mut compiler = compiler.spawn().expect("a C++ compiler, which nvcc needs too");
        compiler.stdin.take().expect("piped").write_all(code.as_bytes()).expect("read");
        assert!(compiler.wait().expect("an end").success());
    }
}
