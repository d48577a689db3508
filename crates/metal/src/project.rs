//! Projections: which kernel multiplies, with which pipeline, over which grid.

use std::collections::HashMap;

use engine::{BackendError, KvKind};
use model::Spec;

use crate::device::{Argument, Device, Slice};
use crate::kernels::{Class, Constants, Libraries, Stream, TENSOR, arguments};
use crate::weights::{Kind, Projection};

type Result<T> = std::result::Result<T, BackendError>;

/// Tokens up to which a projection streams its weights once for all of them.
const FEW: usize = 8;
/// Tokens that `project_few` reads the weights once for.
const TILES: [usize; 4] = [1, 2, 4, 8];
/// Weight rows of a threadgroup of `project_few`, and of `project_many` and `project_tensor`.
const FEW_ROWS: usize = 16;
const MANY_ROWS: usize = 64;
/// Bytes of the expanded weights in the latter two: 64 rows of 36 floats.
const TILE_BYTES: usize = MANY_ROWS * 36 * 4;

/// Pipelines of the matrices of a model.
pub struct Projections<D: Device> {
    /// By kind, columns and tile.
    few: HashMap<(Kind, usize, usize), D::Pipeline>,
    many: HashMap<(Kind, usize), D::Pipeline>,
    /// What `many` is made of.
    class: Class,
    /// One kernel for any number of tokens.
    deterministic: bool,
}

/// What a projection writes.
pub struct Target<'a, D: Device> {
    /// fp32 `[tokens, width]`, with room for whole tiles of 8 tokens.
    pub out: Slice<'a, D>,
    /// Whether sums are added to what is there.
    pub residual: bool,
}

impl<D: Device> Projections<D> {
    /// Makes the pipelines for matrices of these kinds and widths.
    pub fn new(
        device: &D,
        libraries: &Libraries<D>,
        spec: &Spec,
        shapes: &[(Kind, usize)],
        deterministic: bool,
    ) -> Result<Self> {
        let pipeline = |name, kind, cols, tile| {
            let constants = Constants { spec: *spec, kv: KvKind::Bf16, kind, cols, tile };
            libraries.pipeline(device, name, constants)
        };
        let class = libraries.class;
        let many = if class == Class::Tensor { TENSOR.0 } else { "project_many" };
        let mut made =
            Projections { few: HashMap::new(), many: HashMap::new(), class, deterministic };
        for &(kind, cols) in shapes {
            if made.many.contains_key(&(kind, cols)) {
                continue;
            }
            made.many.insert((kind, cols), pipeline(many, kind, cols, 0)?);
            for tile in TILES {
                made.few.insert((kind, cols, tile), pipeline("project_few", kind, cols, tile)?);
            }
        }
        Ok(made)
    }

    /// `out` = `x` W^T for `tokens` tokens and the matrices `parts`, at most three, as if they were one. Those that
    /// are stored alike share a launch; files of other programs mix types.
    pub fn project(
        &self,
        stream: &mut Stream<'_, D>,
        parts: &[(Projection, Slice<'_, D>)],
        x: Slice<'_, D>,
        target: Target<'_, D>,
        tokens: usize,
    ) -> Result<()> {
        let width = parts.iter().map(|(part, _)| part.rows).sum();
        let mut out = target.out;
        for alike in parts.chunk_by(|(a, _), (b, _)| a.kind == b.kind) {
            let rows = |part: usize| alike.get(part).map_or(0, |(p, _)| p.rows);
            let rows = [rows(0), rows(1), rows(2)];
            let shape = Shape { rows, first: 0, width, tokens, residual: target.residual };
            self.project_alike(stream, alike, x, out, shape)?;
            out = out.from(rows.iter().sum::<usize>() * 4);
        }
        Ok(())
    }

    /// Matrices of one kind.
    fn project_alike(
        &self,
        stream: &mut Stream<'_, D>,
        parts: &[(Projection, Slice<'_, D>)],
        x: Slice<'_, D>,
        out: Slice<'_, D>,
        mut shape: Shape,
    ) -> Result<()> {
        if shape.tokens <= FEW || self.deterministic {
            return self.project_few(stream, parts, x, out, shape);
        }
        self.project_many(stream, parts, x, out, shape)?;
        if self.class == Class::Tensor {
            return Ok(());
        }
        // Only a vocabulary that no checkpoint has is not made of whole matrices.
        shape.first = shape.rows[0] / 8 * 8;
        if shape.first < shape.rows[0] {
            shape.rows = [shape.rows[0], 0, 0];
            self.project_few(stream, parts, x, out, shape)?;
        }
        Ok(())
    }

    fn project_few(
        &self,
        stream: &mut Stream<'_, D>,
        parts: &[(Projection, Slice<'_, D>)],
        x: Slice<'_, D>,
        out: Slice<'_, D>,
        shape: Shape,
    ) -> Result<()> {
        let Projection { kind, cols, .. } = parts[0].0;
        let tile = shape.tokens.next_power_of_two().min(FEW);
        let grid = [shape.tiles(FEW_ROWS), shape.tokens.div_ceil(tile), 1];
        let (words, [a, b, c]) = (shape.words(), matrices(parts));
        let arguments = arguments!(a, b, c, x, out; &words);
        stream.launch(&self.few[&(kind, cols, tile)], &arguments, grid, 128, 0)
    }

    fn project_many(
        &self,
        stream: &mut Stream<'_, D>,
        parts: &[(Projection, Slice<'_, D>)],
        x: Slice<'_, D>,
        out: Slice<'_, D>,
        mut shape: Shape,
    ) -> Result<()> {
        let Projection { kind, cols, .. } = parts[0].0;
        if self.class == Class::Simdgroup {
            // Rows that are not whole matrices are left; the width of `out` stays.
            shape.rows = shape.rows.map(|rows| rows / 8 * 8);
        }
        let shared = if kind == Kind::Bf16 { 16 } else { TILE_BYTES };
        let tile = if (kind, self.class) == (Kind::Bf16, Class::Simdgroup) { 32 } else { 64 };
        let grid = [shape.tiles(MANY_ROWS), shape.tokens.div_ceil(tile), 1];
        let (words, [a, b, c]) = (shape.words(), matrices(parts));
        let arguments = arguments!(a, b, c, x, out; &words);
        stream.launch(&self.many[&(kind, cols)], &arguments, grid, 128, shared)
    }
}

/// Sizes of a projection (`kernels/projection.h`).
#[derive(Clone, Copy)]
struct Shape {
    rows: [usize; 3],
    first: usize,
    width: usize,
    tokens: usize,
    residual: bool,
}

impl Shape {
    /// Threadgroups of `size` rows each.
    fn tiles(&self, size: usize) -> usize {
        let [a, b, c] = self.rows;
        (a - self.first).div_ceil(size) + b.div_ceil(size) + c.div_ceil(size)
    }

    fn words(&self) -> [i32; 7] {
        let [a, b, c] = self.rows;
        let residual = usize::from(self.residual);
        [a, b, c, self.first, self.width, self.tokens, residual].map(|n| n as i32)
    }
}

/// Three matrices; where there are fewer, the first stands in and is not read.
fn matrices<'a, D: Device>(parts: &[(Projection, Slice<'a, D>)]) -> [Slice<'a, D>; 3] {
    std::array::from_fn(|i| parts.get(i).unwrap_or(&parts[0]).1)
}
