//! The kernels, and one function for each operation of the forward pass that knows how to launch it. An operation is
//! replaced by another kernel here and nowhere else; `kernels/*.cu` say what each computes, its shapes and its floor.

use std::ffi::c_void;
use std::sync::Arc;

use engine::{BackendError, KvKind};
use model::{KV_HEADS, Spec};

use crate::backend::Options;
use crate::batch::{BatchKernels, Residual, Use};
use crate::driver::{Buffer, Context, Function, Module, Stream};
use crate::prefill::{MANY, Prefill, QUERIES};
use crate::weights::{Handed, Kind, Projection};

type Result<T> = std::result::Result<T, BackendError>;

/// Fat binaries by the name of their source, made by build.rs.
static IMAGES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// The fat binary of a source.
pub fn image(source: &str) -> Result<&'static [u8]> {
    let missing = || BackendError::Device(format!("kernel source {source} is not embedded"));
    IMAGES.iter().find(|(name, _)| *name == source).map(|&(_, image)| image).ok_or_else(missing)
}

/// Tokens up to which a projection streams its weights once for all of them.
const FEW: usize = 64;
/// Tokens up to which a projection of few rows splits its columns over blocks.
const SPLIT: usize = 512;
/// Dynamic shared memory of `project_many` and of `attend_flash`: both hold 64 KB of tiles.
const TILES: u32 = 64 << 10;
/// Dynamic shared memory of `attend_split` and of `attend_batch`: four warps with two tiles of 8 KB, or two of 4 KB and one of 8.
const SPLIT_RINGS: u32 = 4 * 2 * (8 << 10);
/// Parts of a logits row in `logits_stats`.
pub const PARTS: usize = 32;
/// Tokens up to which a call's attention is spread over clusters of `CLUSTER` blocks: more keep the device busy without.
const CLUSTERED: usize = 16;
/// Blocks of a cluster of `attend_batch`.
const CLUSTER: usize = 4;
/// Output tiles that can be split at once.
const ARRIVALS: usize = 16 << 10;

/// Types of layers and head that `decode` serves: those that files have unless they are asked for another head.
const DECODED: [(Kind, Kind); 4] = [
    (Kind::F16, Kind::F16),
    (Kind::Q8_0, Kind::Q8_0),
    (Kind::Q4_0, Kind::Q8_0),
    (Kind::Q4_1, Kind::Q8_0),
];

/// Hidden width, FFN width and heads.
type Dimensions = (usize, usize, usize);
/// The checkpoints that `decode` is compiled for: the registry's.
const CHECKPOINTS: [Dimensions; 7] = [
    (256, 768, 16),
    (1024, 3072, 16),
    (2048, 6144, 16),
    (2560, 9728, 32),
    (4096, 12288, 32),
    (5120, 17408, 40),
    (5120, 25600, 64),
];

/// What becomes of a projection's sums.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Epilogue {
    /// fp32 `[tokens, rows]`.
    Store,
    /// Added, times a factor, to fp32 `[tokens, rows]`.
    Residual(f32),
    /// Rows are 8 of gate and 8 of up in turns: fp16 `[tokens, rows / 2]` of silu(gate) x up / 64.
    SwiGlu,
}

/// What SwiGLU products are multiplied with so that fp16 holds them.
pub const SWIGLU_FACTOR: f32 = 64.0;

impl Epilogue {
    const NAMES: [&'static str; 3] = ["STORE", "RESIDUAL", "SWIGLU"];

    /// Its place among the names.
    pub fn index(self) -> usize {
        match self {
            Epilogue::Store => 0,
            Epilogue::Residual(_) => 1,
            Epilogue::SwiGlu => 2,
        }
    }

    /// What sums are multiplied with.
    pub fn factor(self) -> f32 {
        if let Epilogue::Residual(factor) = self { factor } else { 1.0 }
    }
}

/// Keys or values of one layer, as kernels take them.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Cache {
    /// Head rows.
    pub values: u64,
    /// Their scales, if they are bytes.
    pub scales: u64,
}

/// Where heads go between the QKV projection and attention (`kernels/heads.cuh`), as kernels take it.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Heads {
    /// fp32 `[128]`.
    pub q_norm: u64,
    /// fp32 `[128]`.
    pub k_norm: u64,
    /// fp32 `[tokens, 64, 2]`.
    pub rotations: u64,
    /// fp16 `[tokens, heads x 128]`.
    pub q: u64,
    /// Of the layer.
    pub keys: Cache,
    /// Of the layer.
    pub values: Cache,
    /// The step's words.
    pub step: u64,
    /// Query heads.
    pub heads: i32,
    /// Whether the cache holds bytes.
    pub bytes: i32,
}

/// Partial results of split attention.
#[derive(Debug, Clone, Copy)]
pub struct Partials {
    /// fp32 `[partials, heads, 128]`.
    pub sums: u64,
    /// fp32 `[partials, heads, 2]`.
    pub totals: u64,
    /// Chunks that are done, a counter a token and KV head; zero between launches.
    pub arrivals: u64,
}

/// A weight matrix by value, as kernels take it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Weights {
    quants: u64,
    scales: u64,
}

/// Where repacked rows go, as kernels take it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Target {
    /// Of the matrix.
    pub quants: u64,
    /// Of the matrix.
    pub scales: u64,
    /// Row of the matrix that the tensor's first row becomes.
    pub first: i32,
    /// Whether the tensor takes turns of 8 rows with another.
    pub turns: i32,
    /// Rows of the tensor before those that are moved.
    pub skipped: i32,
    /// Columns.
    pub cols: i32,
}

/// All kernels of a device.
pub struct Kernels {
    project_few: [[[Function; 3]; 4]; 4],
    project_many: [[Function; 3]; 4],
    /// Many tokens; only where the device has Hopper's instructions.
    prefill: Option<Prefill>,
    /// Batches, likewise.
    batch: Option<BatchKernels>,
    /// The whole step of one token by checkpoint and the types of layers and head, likewise.
    decode: Vec<((Dimensions, Kind, Kind), Function)>,
    embed: [Function; 4],
    /// By what is handed over.
    repack: [Function; 5],
    rms_norm: Function,
    rope: Function,
    attend_split: Function,
    /// The same by clusters, for calls of few tokens; where the device has Hopper's instructions.
    attend_batch: Option<Function>,
    attend_flash: Function,
    copy_blocks: Function,
    logits_stats: Function,
    sample: Function,
    /// fp32 parts of split projections, `[splits, tokens, rows]`.
    parts: Buffer,
    /// Blocks that finished their part, a counter a tile; zero between launches.
    arrivals: Buffer,
    /// One class of projection kernels for any number of tokens.
    deterministic: bool,
    _modules: Vec<Module>,
}

/// A launch whose arguments are locals of exactly the kernel's parameter types.
macro_rules! launch {
    ($stream:expr, $function:expr, $grid:expr, $threads:expr, $shared:expr, $arguments:tt) => {
        launch!(launch: $stream, $function, $grid, $threads, $shared, $arguments)
    };
    ($how:ident: $stream:expr, $function:expr, $grid:expr, $threads:expr, $shared:expr, [$($argument:ident),* $(,)?]) => {{
        let mut arguments = [$((&raw const $argument).cast_mut().cast::<c_void>()),*];
        // SAFETY: the arguments have the types of the kernel's parameters, checked against its source where each
        // launch is written; the addresses are of buffers that the backend sized for its limits and still owns.
        unsafe { $stream.$how($function, $grid, $threads, $shared, &mut arguments) }
    }};
}
pub(crate) use launch;

impl Kernels {
    /// Loads the code for the context's device.
    pub fn load(
        context: &Arc<Context>,
        stream: &Stream,
        kv: KvKind,
        options: &Options,
    ) -> Result<Self> {
        let mut modules = Vec::new();
        let mut named = Vec::new();
        for &(name, image) in IMAGES {
            named.push((name, modules.len()));
            modules.push(Module::load(context, image)?);
        }
        let find = |source: &str, name: &str| {
            let index = named.iter().find(|(n, _)| *n == source).map(|&(_, index)| index);
            let missing =
                || BackendError::Device(format!("kernel source {source} is not embedded"));
            modules[index.ok_or_else(missing)?].function(name)
        };
        let kinds = |source: &str| -> Result<[Function; 4]> {
            each(|kind| find(source, &format!("{source}_{}", Kind::NAMES[kind])))
        };
        let few = |kind: usize| {
            each(|tiles| {
                each(|epilogue| {
                    let (kind, epilogue) = (Kind::NAMES[kind], Epilogue::NAMES[epilogue]);
                    find("project_few", &format!("project_few_{kind}_{}_{epilogue}", 1 << tiles))
                })
            })
        };
        let many = |kind: usize| {
            each(|epilogue| {
                let (kind, epilogue) = (Kind::NAMES[kind], Epilogue::NAMES[epilogue]);
                let function = find("project_many", &format!("project_many_{kind}_{epilogue}"))?;
                function.allow_shared(TILES)?;
                Ok(function)
            })
        };
        let by_kv = |source: &str| {
            let kind = match kv {
                KvKind::Bf16 => "BF16",
                KvKind::Q8_0 => "Q8_0",
            };
            find(source, &format!("{source}_{kind}"))
        };
        let attend_flash = by_kv("attend_flash")?;
        attend_flash.allow_shared(TILES)?;
        let hopper = context.device.capability == (9, 0) && !options.generic;
        let attend_split = by_kv("attend_split")?;
        attend_split.allow_shared(SPLIT_RINGS)?;
        let attend_batch = by_kv("attend_batch")?;
        attend_batch.allow_shared(SPLIT_RINGS)?;
        let decode = |(&checkpoint, &(layers, head)): (&Dimensions, &(Kind, Kind))| {
            let [name, head_name] = [layers, head].map(|kind| Kind::NAMES[kind as usize]);
            let source = format!("decode_{}", name.to_lowercase());
            let (hidden, ffn, heads) = checkpoint;
            let kernel = format!("decode_{hidden}_{ffn}_{heads}_{name}_{head_name}");
            Ok(((checkpoint, layers, head), find(&source, &kernel)?))
        };
        let multiprocessors = context.device.multiprocessors as usize;
        // splits x rows is at most 160 x 128 wherever `project_many` splits (`splits`).
        let parts = Buffer::new(context, SPLIT * 160 * 128 * 4, "partial sums")?;
        let arrivals = Buffer::new(context, ARRIVALS * 4, "counters")?;
        // SAFETY: the whole of a live buffer.
        unsafe { stream.zero(arrivals.address(), arrivals.bytes())? };
        Ok(Kernels {
            project_few: each(few)?,
            project_many: each(many)?,
            prefill: if hopper { Prefill::load(context, kv, find)? } else { None },
            batch: match hopper && !options.deterministic {
                true => Some(BatchKernels::load(find, multiprocessors)?),
                false => None,
            },
            decode: match hopper && !options.deterministic {
                true => CHECKPOINTS
                    .iter()
                    .flat_map(|c| DECODED.iter().map(move |kinds| (c, kinds)))
                    .map(decode)
                    .collect::<Result<_>>()?,
                false => Vec::new(),
            },
            embed: kinds("embed")?,
            repack: each(|kind| find("repack", &format!("repack_{}", Handed::NAMES[kind])))?,
            rms_norm: find("norm", "rms_norm")?,
            rope: find("rope", "rope")?,
            attend_split,
            attend_batch: (hopper && !options.deterministic).then_some(attend_batch),
            attend_flash,
            copy_blocks: find("copy_blocks", "copy_blocks")?,
            logits_stats: find("logits_stats", "logits_stats")?,
            sample: find("sample", "sample")?,
            parts,
            arrivals,
            deterministic: options.deterministic,
            _modules: modules,
        })
    }

    /// The kernel of a one-token step, if there is one for these dimensions and types.
    pub fn decode(&self, spec: &Spec, layers: Kind, head: Kind) -> Option<Function> {
        let wanted = ((spec.hidden, spec.ffn, spec.heads), layers, head);
        self.decode.iter().find(|(which, _)| *which == wanted).map(|&(_, function)| function)
    }

    /// `blocks` blocks of 32 elements of whole rows of a file to their place in a matrix.
    pub fn repack(
        &self,
        stream: &Stream,
        handed: Handed,
        from: u64,
        to: Target,
        blocks: usize,
    ) -> Result<()> {
        let grid = [blocks.div_ceil(256) as u32, 1, 1];
        let blocks = blocks as i64;
        launch!(stream, self.repack[handed as usize], grid, 256, 0, [from, to, blocks])
    }

    /// Duplicates the step's copied blocks in `planes` planes of `blocks` blocks of `bytes`.
    pub fn copy_blocks(
        &self,
        stream: &Stream,
        step: u64,
        pool: u64,
        planes: usize,
        blocks: usize,
        bytes: usize,
    ) -> Result<()> {
        let grid = [(bytes / 16).div_ceil(256) as u32, planes as u32, 1];
        let (blocks, bytes) = (blocks as i32, bytes as i32);
        launch!(stream, self.copy_blocks, grid, 256, 0, [pool, step, blocks, bytes])
    }

    /// Residual stream and rotations of `tokens` tokens.
    #[expect(clippy::too_many_arguments, reason = "the kernel's")]
    pub fn embed(
        &self,
        stream: &Stream,
        step: u64,
        tokens: usize,
        table: &Projection,
        frequencies: u64,
        drawn: u64,
        x: Residual,
        parts: usize,
        rotations: u64,
    ) -> Result<()> {
        let parts = parts as i32;
        let function = self.embed[table.kind as usize];
        let (grid, hidden) = ([tokens as u32, 1, 1], table.cols as i32);
        let table = Weights { quants: table.quants, scales: table.scales };
        launch!(
            stream,
            function,
            grid,
            256,
            0,
            [table, frequencies, drawn, x, parts, rotations, step, hidden]
        )
    }

    /// RMSNorm of all `count` tokens, or of `count` answer rows from `first` on.
    #[expect(clippy::too_many_arguments, reason = "the kernel's")]
    pub fn rms_norm(
        &self,
        stream: &Stream,
        step: u64,
        count: usize,
        first: Option<usize>,
        x: u64,
        weight: u64,
        out: u64,
        hidden: usize,
    ) -> Result<()> {
        if let (Some(prefill), None) = (self.prefill(count), first) {
            return prefill.norm(stream, count, x, weight, out, hidden);
        }
        let quads = hidden.div_ceil(4);
        let threads = if quads > 640 { quads.div_ceil(2) } else { quads }.next_multiple_of(32);
        let (grid, hidden) = ([count as u32, 1, 1], hidden as i32);
        let first = first.map_or(-1, |first| first as i32);
        launch!(
            stream,
            self.rms_norm,
            grid,
            threads as u32,
            0,
            [x, weight, out, step, hidden, first]
        )
    }

    /// The kernels of batches, if they serve so many tokens.
    pub fn batch(&self, tokens: usize) -> Option<&BatchKernels> {
        self.batch.as_ref().filter(|_| BatchKernels::serves(tokens))
    }

    /// `out` = `x` W^T for at most `tokens` tokens; how many there are is read at `count`.
    #[expect(clippy::too_many_arguments, reason = "the kernel's")]
    pub fn project(
        &self,
        stream: &Stream,
        w: &Projection,
        x: u64,
        out: u64,
        tokens: usize,
        count: u64,
        epilogue: Epilogue,
    ) -> Result<()> {
        if let (Some(batch), Epilogue::Store) = (self.batch(tokens), epilogue) {
            return batch.project(stream, w, x, tokens, count, Use::Store(out));
        }
        if let Some(prefill) = self.prefill(tokens) {
            return prefill.project(stream, w, x, out, tokens, epilogue);
        }
        let (rows, cols) = (w.rows as i32, w.cols as i32);
        let weights = Weights { quants: w.quants, scales: w.scales };
        let factor = epilogue.factor();
        if tokens <= FEW || self.deterministic {
            let tiles = tokens.div_ceil(8).next_power_of_two().min(8);
            let function =
                self.project_few[w.kind as usize][tiles.ilog2() as usize][epilogue.index()];
            let grid = [w.rows as u32 / 16, tokens.div_ceil(8 * tiles) as u32, 1];
            launch!(stream, function, grid, 256, 0, [weights, x, out, factor, rows, cols, count])
        } else {
            let function = self.project_many[w.kind as usize][epilogue.index()];
            let splits = if tokens <= SPLIT { splits(w.rows, w.cols) } else { 1 };
            let grid = [tokens.div_ceil(128) as u32, w.rows as u32 / 128, splits as u32];
            let (parts, arrivals) = (self.parts.address(), self.arrivals.address());
            launch!(
                stream,
                function,
                grid,
                256,
                TILES,
                [weights, x, out, factor, rows, cols, count, parts, arrivals]
            )
        }
    }

    /// Queries, keys and values of normed tokens `x`: projection, norm and rotation of queries and keys, and the append of
    /// keys and values to the cache. `qkv` has room for the sums.
    pub fn project_heads(
        &self,
        stream: &Stream,
        w: &Projection,
        x: u64,
        qkv: u64,
        tokens: usize,
        heads: Heads,
    ) -> Result<()> {
        if let Some(prefill) = self.prefill(tokens) {
            return prefill.heads(stream, w, x, tokens, heads);
        }
        self.project(stream, w, x, qkv, tokens, heads.step, Epilogue::Store)?;
        let grid = [tokens as u32, (heads.heads as usize + 2 * KV_HEADS) as u32 / 8, 1];
        launch!(stream, self.rope, grid, 256, 0, [qkv, heads])
    }

    /// The class of many tokens, where the device has it.
    fn prefill(&self, tokens: usize) -> Option<&Prefill> {
        self.prefill.as_ref().filter(|_| tokens >= MANY && !self.deterministic)
    }

    /// Attention of the sequences with few new tokens.
    #[expect(clippy::too_many_arguments, reason = "the kernel's")]
    pub fn attend_split(
        &self,
        stream: &Stream,
        step: u64,
        tokens: usize,
        splits: usize,
        q: u64,
        keys: Cache,
        values: Cache,
        out: u64,
        partials: Partials,
        heads: usize,
    ) -> Result<()> {
        let (function, blocks) = match self.attend_batch(tokens) {
            Some(function) => (function, CLUSTER),
            None => (self.attend_split, 1),
        };
        let grid = [(blocks * splits) as u32, KV_HEADS as u32, 1];
        let Partials { sums, totals, arrivals } = partials;
        let heads = heads as i32;
        launch!(
            stream,
            function,
            grid,
            128,
            SPLIT_RINGS,
            [q, keys, values, out, sums, totals, arrivals, step, heads]
        )
    }

    /// Attention by clusters, if it serves calls of so many tokens.
    fn attend_batch(&self, tokens: usize) -> Option<Function> {
        self.attend_batch.filter(|_| tokens <= CLUSTERED)
    }

    /// Whether clusters of blocks take the attention of few new tokens, in calls of so many tokens.
    pub fn clusters(&self, tokens: usize) -> bool {
        self.attend_batch(tokens).is_some()
    }

    /// Queries of one tile of attention of many new tokens.
    pub fn queries(&self) -> usize {
        if self.prefill.is_some() { QUERIES } else { 64 }
    }

    /// Attention of the sequences with many new tokens, over a cache of `cache_rows` head rows a layer.
    #[expect(clippy::too_many_arguments, reason = "the kernel's")]
    pub fn attend_many(
        &self,
        stream: &Stream,
        step: u64,
        flashes: usize,
        tokens: usize,
        q: u64,
        keys: Cache,
        values: Cache,
        cache_rows: usize,
        out: u64,
        heads: usize,
    ) -> Result<()> {
        if let Some(prefill) = &self.prefill {
            let cache = (keys, values);
            return prefill.attend(stream, step, flashes, tokens, q, cache, cache_rows, out, heads);
        }
        let grid = [heads as u32, flashes as u32, 1];
        let heads = heads as i32;
        launch!(stream, self.attend_flash, grid, 128, TILES, [q, keys, values, out, step, heads])
    }

    /// Statistics of `rows` logits rows, the answers from `first` on.
    #[expect(clippy::too_many_arguments, reason = "the kernel's")]
    pub fn logits_stats(
        &self,
        stream: &Stream,
        step: u64,
        rows: usize,
        first: usize,
        logits: u64,
        stats: u64,
        vocab: usize,
    ) -> Result<()> {
        let grid = [PARTS as u32, rows as u32, 1];
        let (vocab, first) = (vocab as i32, first as i32);
        launch!(stream, self.logits_stats, grid, 256, 0, [logits, stats, step, vocab, first])
    }

    /// Answers of `rows` rows from `first` on, whose statistics come in `parts` parts a row.
    #[expect(clippy::too_many_arguments, reason = "the kernel's")]
    pub fn sample(
        &self,
        stream: &Stream,
        step: u64,
        rows: usize,
        first: usize,
        logits: u64,
        stats: u64,
        parts: usize,
        tops: u64,
        drawn: u64,
        vocab: usize,
    ) -> Result<()> {
        let grid = [rows as u32, 1, 1];
        let (vocab, first, parts) = (vocab as i32, first as i32, parts as i32);
        launch!(
            stream,
            self.sample,
            grid,
            1024,
            0,
            [logits, stats, parts, tops, drawn, step, vocab, first]
        )
    }
}

/// Blocks over which a projection's columns are spread: enough for about 160 blocks a 128 tokens. A function of the
/// matrix alone, so that a token's sum does not depend on its batch mates.
fn splits(rows: usize, cols: usize) -> usize {
    (160 * 128 / rows).clamp(1, 8).min(cols / 128).max(1)
}

/// An array whose elements may fail.
pub fn each<T, const N: usize>(make: impl Fn(usize) -> Result<T>) -> Result<[T; N]> {
    let made: Vec<T> = (0..N).map(make).collect::<Result<_>>()?;
    match made.try_into() {
        Ok(array) => Ok(array),
        Err(_) => unreachable!("N elements were made"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `Kernels::parts` and `arrivals` have room for every split projection.
    #[test]
    fn splits_fit_their_scratch() {
        for rows in (256..160_000).step_by(128) {
            for cols in [256, 768, 1024, 2560, 25_600] {
                let splits = splits(rows, cols);
                if splits > 1 {
                    assert!(splits * rows <= 160 * 128, "{rows} x {cols}: {splits}");
                    assert!(SPLIT / 128 * rows / 128 <= ARRIVALS);
                }
                assert!(splits <= cols / 32);
            }
        }
    }
}
