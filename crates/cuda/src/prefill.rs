//! Prefill on Hopper: how `kernels/project_tiles.cuh` and `kernels/attend_tiles.cu` are launched, whose operands arrive
//! and leave as boxes of tensors.

use std::ffi::c_void;

use engine::batch::BLOCK;
use engine::{BackendError, KvKind};
use model::{HEAD_DIM, KV_HEADS};

use crate::batch::heads_map;
use crate::driver::{Context, Element, Function, Stream, TensorMap};
use crate::kernels::{Cache, Epilogue, Heads, each, launch};
use crate::weights::{Kind, Projection};

type Result<T> = std::result::Result<T, BackendError>;

/// Tokens of a projection from which on it is this class's.
pub const MANY: usize = 129;
/// Queries of one tile of attention.
pub const QUERIES: usize = 128;
/// Tokens of one tile of a projection.
const WIDTHS: [usize; 4] = [96, 128, 160, 256];
/// Weight rows of a block's tile.
const ROWS: usize = 128;
/// Columns of a stage.
const DEPTH: usize = 64;
/// Bytes of sums on their way out.
const STAGING: usize = 32 << 10;
/// Dynamic shared memory of attention: queries, two tiles of keys and two of values, and their alignment; beside them a
/// tile of each as bytes with their scales.
const ATTEND_SHARED: u32 = 5 * (32 << 10) + 1024;
const ATTEND_RAW: u32 = 2 * ((16 << 10) + 512);

/// What becomes of a projection's sums, as kernels are named.
const EPILOGUES: [&str; 3] = ["HEADS", "RESIDUAL", "SWIGLU"];

/// The kernels.
pub struct Prefill {
    /// By type of weights, width and epilogue.
    project: [[[Function; 3]; WIDTHS.len()]; 4],
    /// For the cache's kind.
    attend: Function,
    norm: Function,
    kv: KvKind,
    multiprocessors: usize,
}

/// What `project_tiles` takes beside its tensor maps.
#[derive(Clone, Copy)]
#[repr(C)]
struct Shape {
    scales: u64,
    factor: f32,
    tokens: i32,
    rows: i32,
    cols: i32,
}

/// The tensor maps that it takes.
#[derive(Clone, Copy)]
#[repr(C)]
struct Maps {
    weights: TensorMap,
    x: TensorMap,
    out: TensorMap,
}

impl Prefill {
    /// Finds the kernels, where the device has them.
    pub fn load(
        context: &Context,
        kv: KvKind,
        find: impl Fn(&str, &str) -> Result<Function>,
    ) -> Result<Option<Self>> {
        if context.device.capability != (9, 0) {
            return Ok(None);
        }
        let project = each(|kind| {
            let source = format!("project_tiles_{}", Kind::NAMES[kind].to_lowercase());
            each(|width| {
                each(|epilogue| {
                    let (kind, tokens) = (Kind::ALL[kind], WIDTHS[width]);
                    let name = EPILOGUES[epilogue];
                    let name = format!("project_tiles_{}_{tokens}_{name}", kind.name());
                    let function = find(&source, &name)?;
                    function.allow_shared(shared(kind, tokens))?;
                    Ok(function)
                })
            })
        })?;
        let attend = match kv {
            KvKind::Bf16 => find("attend_tiles", "attend_tiles_BF16")?,
            KvKind::Q8_0 => find("attend_tiles", "attend_tiles_Q8_0")?,
        };
        attend.allow_shared(ATTEND_SHARED + ATTEND_RAW)?;
        let norm = find("norm_many", "rms_norm_many")?;
        let multiprocessors = context.device.multiprocessors as usize;
        Ok(Some(Prefill { project, attend, norm, kv, multiprocessors }))
    }

    /// RMSNorm of exactly `tokens` tokens to which nothing is left to be added.
    pub fn norm(
        &self,
        stream: &Stream,
        tokens: usize,
        x: u64,
        weight: u64,
        out: u64,
        hidden: usize,
    ) -> Result<()> {
        let (grid, hidden) = ([tokens as u32, 1, 1], hidden as i32);
        launch!(stream, self.norm, grid, 128, 0, [x, weight, out, hidden])
    }

    /// `out` = `x` W^T for exactly `tokens` tokens, added or as SwiGLU products.
    pub fn project(
        &self,
        stream: &Stream,
        w: &Projection,
        x: u64,
        out: u64,
        tokens: usize,
        epilogue: Epilogue,
    ) -> Result<()> {
        let out = |width: usize| match epilogue {
            Epilogue::SwiGlu => {
                TensorMap::boxes(out, Element::F16, [tokens, w.rows / 2], [width, 32])
            }
            _ => TensorMap::boxes(out, Element::F32, [tokens, w.rows], [32, 32]),
        };
        let (index, factor) = (epilogue.index(), epilogue.factor());
        self.tiles(stream, w, x, tokens, out, index, factor, Heads::default())
    }

    /// Q, K and V of exactly `tokens` tokens to where attention looks for them.
    pub fn heads(
        &self,
        stream: &Stream,
        qkv: &Projection,
        x: u64,
        tokens: usize,
        heads: Heads,
    ) -> Result<()> {
        let unused = |_| TensorMap::new(x, tokens, qkv.cols, 32);
        self.tiles(stream, qkv, x, tokens, unused, 0, 1.0, heads)
    }

    #[expect(clippy::too_many_arguments, reason = "the kernel's")]
    fn tiles(
        &self,
        stream: &Stream,
        w: &Projection,
        x: u64,
        tokens: usize,
        out: impl Fn(usize) -> Result<TensorMap>,
        epilogue: usize,
        factor: f32,
        heads: Heads,
    ) -> Result<()> {
        let clusters = self.multiprocessors / 2;
        let pairs = w.rows.div_ceil(2 * ROWS);
        let index = width(pairs, tokens, clusters);
        let width = WIDTHS[index];
        let maps = Maps {
            weights: match w.kind {
                _ if heads.heads > 0 => heads_map(w, DEPTH)?,
                Kind::F16 => TensorMap::new(w.quants, w.rows, w.cols, ROWS)?,
                kind => {
                    let shape = [w.rows, kind.row_bytes(w.cols)];
                    let part = [ROWS, kind.row_bytes(DEPTH)];
                    TensorMap::boxes(w.quants, Element::U8, shape, part)?
                }
            },
            x: TensorMap::new(x, tokens, w.cols, width / 2)?,
            out: out(width)?,
        };
        let (rows, cols, tiles) = (w.rows as i32, w.cols as i32, pairs * tokens.div_ceil(width));
        let shape = Shape { scales: w.scales, factor, tokens: tokens as i32, rows, cols };
        let function = self.project[w.kind as usize][index][epilogue];
        let grid = [2 * clusters.min(tiles) as u32, 1, 1];
        launch!(stream, function, grid, 384, shared(w.kind, width), [maps, shape, heads])
    }

    /// Attention of the sequences with many new tokens, `flashes` tiles of queries in all, over a cache of `cache_rows`
    /// head rows a layer.
    #[expect(clippy::too_many_arguments, reason = "the kernel's")]
    pub fn attend(
        &self,
        stream: &Stream,
        step: u64,
        flashes: usize,
        tokens: usize,
        q: u64,
        (keys, values): (Cache, Cache),
        cache_rows: usize,
        out: u64,
        heads: usize,
    ) -> Result<()> {
        let q = TensorMap::new(q, tokens, heads * HEAD_DIM, QUERIES)?;
        let (function, grid) = (self.attend, [heads as u32, flashes as u32, 1]);
        let (group, heads) = (heads / KV_HEADS, heads as i32);
        match self.kv {
            KvKind::Bf16 => {
                let boxes =
                    |cache: Cache| TensorMap::new(cache.values, cache_rows, HEAD_DIM, BLOCK);
                let (keys, values, shared) = (boxes(keys)?, boxes(values)?, ATTEND_SHARED);
                // Two heads of a group read the same keys and values.
                if group % 2 == 0 {
                    launch!(launch_pairs: stream, function, grid, 384, shared, [q, keys, values, out, step, heads])
                } else {
                    launch!(
                        stream,
                        function,
                        grid,
                        384,
                        shared,
                        [q, keys, values, out, step, heads]
                    )
                }
            }
            KvKind::Q8_0 => {
                let shared = ATTEND_SHARED + ATTEND_RAW;
                launch!(stream, function, grid, 384, shared, [q, keys, values, out, step, heads])
            }
        }
    }
}

/// Dynamic shared memory of `project_tiles`, as its `Ring` counts it.
const fn shared(kind: Kind, width: usize) -> u32 {
    let stage = ROWS * kind.row_bytes(DEPTH) + width * DEPTH * 2;
    let room = (232_448 - 2048 - STAGING) / stage;
    let stages = if room < 8 { room } else { 8 };
    (1024 + stages * stage + STAGING) as u32
}

/// Which width takes the least time: rounds of the device's clusters, each as long as its width and what a tile costs
/// beside its products. All widths give the same sums.
fn width(pairs: usize, tokens: usize, clusters: usize) -> usize {
    let cost = |width: usize| (pairs * tokens.div_ceil(width)).div_ceil(clusters) * (width + 16);
    (0..WIDTHS.len()).min_by_key(|&i| (cost(WIDTHS[i]), WIDTHS.len() - i)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel's `Ring` reserves fits a multiprocessor's 227 KB with the barriers.
    #[test]
    fn rings_fit_a_multiprocessor() {
        for kind in Kind::ALL {
            for width in WIDTHS {
                assert!(shared(kind, width) as usize + 1024 <= 232_448, "{kind:?} {width}");
            }
        }
    }

    /// The matrices of the 4B model at 2,048 tokens on 66 clusters.
    #[test]
    fn widths_fill_the_device() {
        let chosen = [6144, 2560, 19_456].map(|rows| WIDTHS[width(rows / 256, 2048, 66)]);
        assert_eq!(chosen, [256, 160, 160]);
    }
}
