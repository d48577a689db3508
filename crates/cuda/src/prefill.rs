//! Prefill on Hopper: how `kernels/project_tiles.cuh` and `kernels/attend_tiles.cu` are launched, whose operands arrive
//! and leave as boxes of tensors.

use std::ffi::c_void;

use engine::batch::BLOCK;
use engine::{BackendError, KvKind};
use model::{HEAD_DIM, KV_HEADS};

use crate::batch::heads_map;
use crate::driver::{Context, Element, Function, Promotion, Stream, TensorMap};
use crate::kernels::{Cache, Epilogue, Heads, each, launch};
use crate::weights::{Kind, Projection};

type Result<T> = std::result::Result<T, BackendError>;

/// Tokens of a projection from which on it is this class's.
pub const MANY: usize = 129;
/// What the L2 cache fetches at a time.
const PROMOTION: Promotion = Promotion::Bytes256;
/// Queries of one tile of attention.
pub const QUERIES: usize = 128;
/// Tokens of one tile of a projection.
const WIDTHS: [usize; 4] = [96, 128, 160, 256];
/// Those of a tall one, of fp16 weights.
const TALL: [usize; 2] = [160, 192];
/// Weight rows of a block's tile; a tall one has twice as many.
const ROWS: usize = 128;
/// Columns of a stage.
const DEPTH: usize = 64;
/// Bytes of activations that the L2 cache keeps while tiles of all rows pass by them.
const KEPT: usize = 20 << 20;
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
    /// By width and epilogue.
    tall: [[Function; 3]; TALL.len()],
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
    group: i32,
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
        let tiles = |kind: Kind, tile: Tile, epilogue: usize| {
            let source = format!("project_tiles_{}", kind.name().to_lowercase());
            let (tall, width) = (if tile.high == 2 { "_tall" } else { "" }, tile.width);
            let name = EPILOGUES[epilogue];
            let name = format!("project{tall}_tiles_{}_{width}_{name}", kind.name());
            let function = find(&source, &name)?;
            function.allow_shared(tile.shared(kind))?;
            Ok(function)
        };
        let project = each(|kind| {
            each(|i| {
                each(|epilogue| {
                    tiles(Kind::ALL[kind], Tile { high: 1, width: WIDTHS[i] }, epilogue)
                })
            })
        })?;
        let tall = each(|i| {
            each(|epilogue| tiles(Kind::F16, Tile { high: 2, width: TALL[i] }, epilogue))
        })?;
        let attend = match kv {
            KvKind::Bf16 => find("attend_tiles", "attend_tiles_BF16")?,
            KvKind::Q8_0 => find("attend_tiles", "attend_tiles_Q8_0")?,
        };
        attend.allow_shared(ATTEND_SHARED + ATTEND_RAW)?;
        let norm = find("norm_many", "rms_norm_many")?;
        let multiprocessors = context.device.multiprocessors as usize;
        Ok(Some(Prefill { project, tall, attend, norm, kv, multiprocessors }))
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
                TensorMap::boxes(out, Element::F16, [tokens, w.rows / 2], [width, 32], PROMOTION)
            }
            _ => TensorMap::boxes(out, Element::F32, [tokens, w.rows], [32, 32], PROMOTION),
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
        // Clusters place whole tiles of heads only.
        let whole = heads.heads == 0 || w.rows.is_multiple_of(4 * ROWS);
        let may_be_tall = matches!(w.kind, Kind::F16) && whole;
        let tile = Tile::choose(w.rows, tokens, clusters, may_be_tall);
        let width = tile.width;
        let maps = Maps {
            weights: match w.kind {
                _ if heads.heads > 0 => heads_map(w, DEPTH, PROMOTION)?,
                Kind::F16 => TensorMap::new(w.quants, w.rows, w.cols, ROWS)?,
                kind => {
                    let shape = [w.rows, kind.row_bytes(w.cols)];
                    let part = [ROWS, kind.row_bytes(DEPTH)];
                    TensorMap::boxes(w.quants, Element::U8, shape, part, PROMOTION)?
                }
            },
            x: TensorMap::new(x, tokens, w.cols, width / 2)?,
            out: out(width)?,
        };
        let (rows, cols, across) = (w.rows as i32, w.cols as i32, tokens.div_ceil(width));
        let group = across.div_ceil((tokens * w.cols * 2).div_ceil(KEPT)) as i32;
        let shape = Shape { scales: w.scales, factor, tokens: tokens as i32, rows, cols, group };
        let of = |widths: &[usize]| widths.iter().position(|&w| w == width).unwrap_or_default();
        let function = match tile.high {
            1 => self.project[w.kind as usize][of(&WIDTHS)][epilogue],
            _ => self.tall[of(&TALL)][epilogue],
        };
        let grid = [2 * clusters.min(tile.up(w.rows) * across) as u32, 1, 1];
        launch!(stream, function, grid, 384, tile.shared(w.kind), [maps, shape, heads])
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

/// What a block computes at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Tile {
    /// In `ROWS`.
    high: usize,
    /// In tokens.
    width: usize,
}

impl Tile {
    /// Which takes the least time: rounds of the device's clusters, each as long as its products, what a tile costs beside
    /// them, and what a multiprocessor takes in for them. All give the same sums.
    fn choose(rows: usize, tokens: usize, clusters: usize, may_be_tall: bool) -> Tile {
        let tall = TALL.iter().filter(|_| may_be_tall).map(|&width| Tile { high: 2, width });
        let tiles = WIDTHS.iter().map(|&width| Tile { high: 1, width }).chain(tall);
        let cost = |tile: &Tile| {
            let Tile { high, width } = *tile;
            let rounds = (tile.up(rows) * tokens.div_ceil(width)).div_ceil(clusters);
            let kilobytes = high * ROWS / 8 + width / 8; // of a stage, each as long as a token
            (rounds * (high * (width + 16) + kilobytes), usize::MAX - width)
        };
        tiles.min_by_key(cost).unwrap_or(Tile { high: 1, width: WIDTHS[0] })
    }

    /// Tiles of clusters, one above the other, that cover so many rows.
    fn up(self, rows: usize) -> usize {
        rows.div_ceil(2 * ROWS * self.high)
    }

    /// Dynamic shared memory of `project_tiles`, as its `Ring` counts it.
    const fn shared(self, kind: Kind) -> u32 {
        let stage = self.high * ROWS * kind.row_bytes(DEPTH) + self.width * DEPTH * 2;
        let staging = (self.high + 1) << 14;
        let room = (232_448 - 2048 - staging) / stage;
        let stages = if room < 8 { room } else { 8 };
        (1024 + stages * stage + staging) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel's `Ring` reserves fits a multiprocessor's 227 KB with the barriers.
    #[test]
    fn rings_fit_a_multiprocessor() {
        let fits = |tile: Tile, kind| tile.shared(kind) as usize + 1024 <= 232_448;
        for kind in Kind::ALL {
            assert!(WIDTHS.iter().all(|&width| fits(Tile { high: 1, width }, kind)), "{kind:?}");
        }
        assert!(TALL.iter().all(|&width| fits(Tile { high: 2, width }, Kind::F16)));
    }

    /// The matrices of the 4B model on 66 clusters.
    #[test]
    fn tiles_fill_the_device() {
        let chosen = |tokens, may_be_tall| {
            [6144, 2560, 19_456].map(|rows| {
                let tile = Tile::choose(rows, tokens, 66, may_be_tall);
                (tile.high, tile.width)
            })
        };
        assert_eq!(chosen(2048, false), [(1, 256), (1, 160), (1, 160)]);
        assert_eq!(chosen(4096, true), [(2, 192), (2, 160), (2, 160)]);
    }
}
