//! The kernels, and one function for each operation of the forward pass that knows how to launch it. An operation is
//! replaced by another kernel here and nowhere else; `kernels/*.metal` say what each computes, its shapes and its floor.

use std::collections::HashMap;

use engine::{BackendError, KvKind};
use model::{KV_HEADS, Spec};

use crate::device::{Argument, Device, Launch, Slice};
use crate::project::{Projections, Target};
use crate::weights::{Kind, Projection};

type Result<T> = std::result::Result<T, BackendError>;

/// What multiplies the weights with many tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Simdgroup matrices, which every Apple GPU of this backend has.
    Simdgroup,
    /// The operations on tensors of Metal 4.
    Tensor,
}

impl Class {
    /// All of them.
    pub const ALL: [Class; 2] = [Class::Simdgroup, Class::Tensor];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Class::Simdgroup => "simdgroup",
            Class::Tensor => "tensor",
        }
    }
}

/// The kernel that takes `project_many`'s place in the class of tensors; it alone needs Metal 4.
pub const TENSOR: (&str, &str) =
    ("project_tensor", include_str!("../kernels/project_tensor.metal"));

/// The other kernels by name, in the order of the forward pass; each is the one function of its file.
pub const SOURCES: [(&str, &str); 12] = [
    ("copy_blocks", include_str!("../kernels/copy_blocks.metal")),
    ("embed", include_str!("../kernels/embed.metal")),
    ("norm", include_str!("../kernels/norm.metal")),
    ("project_few", include_str!("../kernels/project_few.metal")),
    ("project_many", include_str!("../kernels/project_many.metal")),
    ("rope", include_str!("../kernels/rope.metal")),
    ("attend_split", include_str!("../kernels/attend_split.metal")),
    ("attend_merge", include_str!("../kernels/attend_merge.metal")),
    ("attend_flash", include_str!("../kernels/attend_flash.metal")),
    ("swiglu", include_str!("../kernels/swiglu.metal")),
    ("logits_stats", include_str!("../kernels/logits_stats.metal")),
    ("sample", include_str!("../kernels/sample.metal")),
];

/// What the kernels include.
const HEADERS: [(&str, &str); 6] = [
    ("common.h", include_str!("../kernels/common.h")),
    ("weights.h", include_str!("../kernels/weights.h")),
    ("projection.h", include_str!("../kernels/projection.h")),
    ("tile.h", include_str!("../kernels/tile.h")),
    ("cache.h", include_str!("../kernels/cache.h")),
    ("sample.h", include_str!("../kernels/sample.h")),
];

/// A source with its headers in place, each once: the run-time compiler knows no files.
pub fn expand(source: &str) -> String {
    fn append(source: &str, done: &mut Vec<&'static str>, out: &mut String) {
        for line in source.lines() {
            let name = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
            match name.and_then(|name| HEADERS.iter().find(|(header, _)| *header == name)) {
                Some((header, text)) if !done.contains(header) => {
                    done.push(header);
                    append(text, done, out);
                }
                Some(_) => {}
                None if line == "#pragma once" => {}
                None => {
                    out.push_str(line);
                    out.push('\n');
                }
            }
        }
    }
    let mut out = String::new();
    append(source, &mut Vec::new(), &mut out);
    out
}

/// Parts of a logits row in `logits_stats`.
pub const PARTS: usize = 32;
/// Bytes of one part's statistics.
pub const STATS_BYTES: usize = 16;
/// Threadgroup memory of the kernels with a `Shared` of their own.
const SPLIT_BYTES: usize = 25_728;
const FLASH_BYTES: usize = 18_688;
const SAMPLE_BYTES: usize = 17_240;

/// Function constants by index (`kernels/common.h`).
#[derive(Debug, Clone, Copy)]
pub struct Constants {
    /// Dimensions of the model.
    pub spec: Spec,
    /// Of the cache.
    pub kv: KvKind,
    /// Of the weights.
    pub kind: Kind,
    /// Of the weights.
    pub cols: usize,
    /// Tokens that `project_few` reads the weights once for.
    pub tile: usize,
}

impl Constants {
    fn words(&self) -> [i32; 8] {
        let Spec { hidden, ffn, heads, vocab, .. } = self.spec;
        let kv = match self.kv {
            KvKind::Bf16 => 0,
            KvKind::Q8_0 => 1,
        };
        let numbers = [hidden, ffn, heads, vocab, kv, self.kind as usize, self.cols, self.tile];
        numbers.map(|n| n as i32)
    }
}

/// The compiled sources of a device.
pub struct Libraries<D: Device> {
    /// What multiplies many tokens.
    pub class: Class,
    by_name: HashMap<&'static str, D::Library>,
}

impl<D: Device> Libraries<D> {
    /// Compiles everything that a class needs.
    pub fn compile(device: &D, class: Class) -> Result<Self> {
        let mut by_name = HashMap::new();
        // First, since it is what a device may not have.
        if class == Class::Tensor {
            let (name, source) = TENSOR;
            by_name.insert(name, device.library(name, &expand(source), true)?);
        }
        for (name, source) in SOURCES {
            by_name.insert(name, device.library(name, &expand(source), false)?);
        }
        Ok(Libraries { class, by_name })
    }

    /// A kernel with these constants.
    pub fn pipeline(&self, device: &D, name: &str, constants: Constants) -> Result<D::Pipeline> {
        device.pipeline(&self.by_name[name], &constants.words())
    }
}

/// The kernels of one model: a pipeline for each set of constants.
pub struct Kernels<D: Device> {
    spec: Spec,
    plain: HashMap<&'static str, D::Pipeline>,
    embed: D::Pipeline,
    projections: Projections<D>,
}

/// Keys or values of one layer.
pub struct Cache<'a, D: Device> {
    /// Head rows.
    pub values: Slice<'a, D>,
    /// Their scales; a word that nobody reads if they are not bytes.
    pub scales: Slice<'a, D>,
}

/// Partial results of split attention.
pub struct Partials<'a, D: Device> {
    /// fp32 `[partials, heads, 128]`.
    pub sums: Slice<'a, D>,
    /// fp32 `[partials, heads, 2]`.
    pub totals: Slice<'a, D>,
}

/// A queue being filled.
pub struct Stream<'a, D: Device> {
    pub device: &'a D,
    pub queue: &'a mut D::Queue,
    /// Words of the batch.
    pub step: Slice<'a, D>,
}

impl<D: Device> Stream<'_, D> {
    /// Appends a launch.
    pub fn launch(
        &mut self,
        pipeline: &D::Pipeline,
        arguments: &[Argument<'_, D>],
        grid: [usize; 3],
        threads: usize,
        shared: usize,
    ) -> Result<()> {
        let shared = shared.next_multiple_of(16);
        self.device.launch(self.queue, Launch { pipeline, arguments, shared, grid, threads })
    }
}

/// Slices and words as arguments.
macro_rules! arguments {
    ($($slice:expr),* ; $($words:expr),*) => {
        [$(Argument::Memory($slice),)* $(Argument::Words($words)),*]
    };
}
pub(crate) use arguments;

impl<D: Device> Kernels<D> {
    /// Makes the pipelines for a model whose matrices have these kinds and widths.
    pub fn new(
        device: &D,
        libraries: &Libraries<D>,
        spec: &Spec,
        kv: KvKind,
        embedding: Kind,
        shapes: &[(Kind, usize)],
        deterministic: bool,
    ) -> Result<Self> {
        let pipeline = |name| {
            let constants = Constants { spec: *spec, kv, kind: embedding, cols: 0, tile: 0 };
            libraries.pipeline(device, name, constants)
        };
        let projections = Projections::new(device, libraries, spec, shapes, deterministic)?;
        let (embed, mut plain) = (pipeline("embed")?, HashMap::new());
        for (name, _) in SOURCES {
            if !["embed", "project_few", "project_many"].contains(&name) {
                plain.insert(name, pipeline(name)?);
            }
        }
        Ok(Kernels { spec: *spec, plain, embed, projections })
    }

    /// Duplicates the step's copied blocks in `planes` planes of `blocks` blocks of `bytes`.
    pub fn copy_blocks(
        &self,
        stream: &mut Stream<'_, D>,
        copies: usize,
        pool: Slice<'_, D>,
        planes: usize,
        blocks: usize,
        bytes: usize,
    ) -> Result<()> {
        let words = bytes / 4;
        let shape = [copies as i32, blocks as i32, words as i32];
        let arguments = arguments!(pool, stream.step; &shape);
        let grid = [words.div_ceil(256), planes, 1];
        stream.launch(&self.plain["copy_blocks"], &arguments, grid, 256, 0)
    }

    /// Residual stream of `tokens` tokens.
    pub fn embed(
        &self,
        stream: &mut Stream<'_, D>,
        tokens: usize,
        table: Slice<'_, D>,
        drawn: Slice<'_, D>,
        x: Slice<'_, D>,
    ) -> Result<()> {
        stream.launch(
            &self.embed,
            &arguments!(table, stream.step, drawn, x;),
            [tokens, 1, 1],
            128,
            0,
        )
    }

    /// RMSNorm of all `count` tokens, or of `count` answer rows from `first` on.
    pub fn norm(
        &self,
        stream: &mut Stream<'_, D>,
        count: usize,
        first: Option<usize>,
        x: Slice<'_, D>,
        weight: Slice<'_, D>,
        out: Slice<'_, D>,
    ) -> Result<()> {
        let first = [first.map_or(-1, |first| first as i32)];
        let arguments = arguments!(x, weight, out, stream.step; &first);
        stream.launch(&self.plain["norm"], &arguments, [count, 1, 1], 128, 16)
    }

    /// `out` = `x` W^T for `tokens` tokens and the matrices `parts`.
    pub fn project(
        &self,
        stream: &mut Stream<'_, D>,
        parts: &[(Projection, Slice<'_, D>)],
        x: Slice<'_, D>,
        target: Target<'_, D>,
        tokens: usize,
    ) -> Result<()> {
        self.projections.project(stream, parts, x, target, tokens)
    }

    /// Norm and rotation of queries and keys, and the append of keys and values to the cache.
    pub fn rope(
        &self,
        stream: &mut Stream<'_, D>,
        tokens: usize,
        qkv: Slice<'_, D>,
        norms: [Slice<'_, D>; 2],
        [keys, values]: &[Cache<'_, D>; 2],
    ) -> Result<()> {
        let [q, k] = norms;
        let arguments = arguments!(
            qkv, q, k, keys.values, keys.scales, values.values, values.scales, stream.step;
        );
        let grid = [tokens, (self.spec.heads + 2 * KV_HEADS) / 8, 1];
        stream.launch(&self.plain["rope"], &arguments, grid, 256, 0)
    }

    /// Attention of sequences with few new tokens, chunk by chunk.
    pub fn attend_split(
        &self,
        stream: &mut Stream<'_, D>,
        splits: usize,
        qkv: Slice<'_, D>,
        [keys, values]: &[Cache<'_, D>; 2],
        attended: Slice<'_, D>,
        partials: &Partials<'_, D>,
    ) -> Result<()> {
        let arguments = arguments!(
            qkv, keys.values, keys.scales, values.values, values.scales, attended,
            partials.sums, partials.totals, stream.step;
        );
        let grid = [splits, KV_HEADS, 1];
        stream.launch(&self.plain["attend_split"], &arguments, grid, 128, SPLIT_BYTES)
    }

    /// The chunks of split attention put together.
    pub fn attend_merge(
        &self,
        stream: &mut Stream<'_, D>,
        merges: usize,
        partials: &Partials<'_, D>,
        attended: Slice<'_, D>,
    ) -> Result<()> {
        let arguments = arguments!(partials.sums, partials.totals, attended, stream.step;);
        let grid = [merges, self.spec.heads, 1];
        stream.launch(&self.plain["attend_merge"], &arguments, grid, 128, 0)
    }

    /// Attention of sequences with many new tokens.
    pub fn attend_flash(
        &self,
        stream: &mut Stream<'_, D>,
        flashes: usize,
        qkv: Slice<'_, D>,
        [keys, values]: &[Cache<'_, D>; 2],
        attended: Slice<'_, D>,
    ) -> Result<()> {
        let arguments = arguments!(
            qkv, keys.values, keys.scales, values.values, values.scales, attended, stream.step;
        );
        let grid = [flashes, self.spec.heads, 1];
        stream.launch(&self.plain["attend_flash"], &arguments, grid, 128, FLASH_BYTES)
    }

    /// silu(gate) x up.
    pub fn swiglu(
        &self,
        stream: &mut Stream<'_, D>,
        tokens: usize,
        gate_up: Slice<'_, D>,
        products: Slice<'_, D>,
    ) -> Result<()> {
        let grid = [self.spec.ffn.div_ceil(256), tokens, 1];
        stream.launch(&self.plain["swiglu"], &arguments!(gate_up, products;), grid, 256, 0)
    }

    /// Statistics of `rows` rows of logits.
    pub fn logits_stats(
        &self,
        stream: &mut Stream<'_, D>,
        rows: usize,
        logits: Slice<'_, D>,
        stats: Slice<'_, D>,
    ) -> Result<()> {
        let arguments = arguments!(logits, stats;);
        stream.launch(&self.plain["logits_stats"], &arguments, [PARTS, rows, 1], 128, 32)
    }

    /// Answers of `rows` answer rows from `first` on, whose logits lie at the beginning of `logits`.
    pub fn sample(
        &self,
        stream: &mut Stream<'_, D>,
        (first, rows): (usize, usize),
        logits: Slice<'_, D>,
        stats: Slice<'_, D>,
        answers: [Slice<'_, D>; 3],
    ) -> Result<()> {
        let [answers, tops, drawn] = answers;
        let first = [first as i32];
        let arguments = arguments!(logits, stats, answers, tops, drawn, stream.step; &first);
        stream.launch(&self.plain["sample"], &arguments, [rows, 1, 1], 256, SAMPLE_BYTES)
    }
}
