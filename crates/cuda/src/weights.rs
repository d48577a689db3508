//! Weights on their way to the device: from the mapping through pinned memory, in a pipeline, into one allocation in
//! the layout of `kernels/weights.cuh`. The pieces of the file are repacked on the device as they arrive.

use std::sync::Arc;
use std::{num::NonZero, thread};

use engine::BackendError;
use model::float::{f16_to_f32, f32_to_f16};
use model::{Matrix, Model, TensorType, Vector};

use crate::driver::{Buffer, Context, Event, Pinned, Stream};
use crate::kernels::{Kernels, Target};

type Result<T> = std::result::Result<T, BackendError>;

/// Bytes of one piece of the pipeline.
const PIECE: usize = 32 << 20;
/// Pieces in flight.
const PIECES: usize = 3;
/// The least scale, as fp16, that blocks of 4 bits may not have: 4, which the kernels of batches multiply by 2^14 in fp16
/// (`kernels/project_batch_products.cuh`).
const TOO_LARGE: u16 = 0x4400;
/// Alignment of everything in the allocation.
const ALIGNMENT: usize = 256;

/// Layout of a matrix on the device (`kernels/weights.cuh`, `enum Type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// fp16, from bfloat16; and what the device has no layout for, decoded.
    F16,
    /// Bytes and a scale a block of 32.
    Q8_0,
    /// Nibbles and a scale a block of 32.
    Q4_0,
    /// Nibbles, a scale and a minimum a block of 32.
    Q4_1,
}

impl Kind {
    /// In order of their numbers.
    pub const ALL: [Kind; 4] = [Kind::F16, Kind::Q8_0, Kind::Q4_0, Kind::Q4_1];
    /// As kernels are named.
    pub const NAMES: [&'static str; 4] = ["F16", "Q8_0", "Q4_0", "Q4_1"];

    fn of(ty: TensorType) -> Result<Self> {
        match ty {
            TensorType::Bf16
            | TensorType::F16
            | TensorType::Q4K
            | TensorType::Q5K
            | TensorType::Q6K => Ok(Kind::F16),
            TensorType::Q8_0 => Ok(Kind::Q8_0),
            TensorType::Q4_0 => Ok(Kind::Q4_0),
            TensorType::Q4_1 => Ok(Kind::Q4_1),
            TensorType::F32 => Err(BackendError::Unavailable("a projection in F32".into())),
        }
    }

    /// As kernels are named.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Bytes of the quants of a row.
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / 32 * self.block_bytes().0
    }

    /// Bytes of quants and of scales of a block of 32.
    pub const fn block_bytes(self) -> (usize, usize) {
        match self {
            Kind::F16 => (64, 0),
            Kind::Q8_0 => (32, 2),
            Kind::Q4_0 => (16, 2),
            Kind::Q4_1 => (16, 4),
        }
    }
}

/// What rows are handed to the device as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handed {
    /// What the file holds.
    Bf16,
    /// The same.
    Q8_0,
    /// The same.
    Q4_0,
    /// The same.
    Q4_1,
    /// What the host decoded, rounded.
    F16,
}

impl Handed {
    /// As kernels are named.
    pub const NAMES: [&'static str; 5] = ["BF16", "Q8_0", "Q4_0", "Q4_1", "F16"];

    /// For rows of this type that are to be of that kind.
    fn of(ty: TensorType, kind: Kind) -> Self {
        match (kind, ty) {
            (Kind::F16, TensorType::Bf16) => Handed::Bf16,
            (Kind::F16, _) => Handed::F16,
            (Kind::Q8_0, _) => Handed::Q8_0,
            (Kind::Q4_0, _) => Handed::Q4_0,
            (Kind::Q4_1, _) => Handed::Q4_1,
        }
    }

    /// Bytes of a row.
    fn row_bytes(self, ty: TensorType, cols: usize) -> usize {
        if self == Handed::F16 { cols * 2 } else { ty.row_bytes(cols) }
    }
}

/// A matrix on the device, or several on top of each other.
#[derive(Debug, Clone, Copy)]
pub struct Projection {
    /// Layout.
    pub kind: Kind,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Address of the quants.
    pub quants: u64,
    /// Address of the scales.
    pub scales: u64,
}

/// One transformer block; norms are addresses of fp32 vectors.
pub struct Layer {
    /// `[hidden]`
    pub attention_norm: u64,
    /// Q, K and V on top of each other, `[heads x 128 + 2048, hidden]`.
    pub qkv: Projection,
    /// `[128]`
    pub q_norm: u64,
    /// `[128]`
    pub k_norm: u64,
    /// `[hidden, heads x 128]`
    pub o: Projection,
    /// `[hidden]`
    pub ffn_norm: u64,
    /// 8 rows of gate and 8 of up in turns, `[2 ffn, hidden]`.
    pub gate_up: Projection,
    /// `[hidden, ffn]`
    pub down: Projection,
}

/// All weights of a checkpoint on the device.
pub struct Weights {
    /// `[vocab, hidden]`
    pub embedding: Projection,
    /// In order of the forward pass.
    pub layers: Vec<Layer>,
    /// `[hidden]`
    pub output_norm: u64,
    /// `[vocab, hidden]`; the embedding itself where the checkpoint is tied.
    pub head: Projection,
    _memory: Buffer,
}

/// Rows of a file's matrix and where they go.
struct Move<'a> {
    matrix: &'a Matrix,
    to: Projection,
    first: usize,
    turns: bool,
}

/// Lays everything out in one allocation; addresses are relative until it is made.
#[derive(Default)]
struct Plan<'a> {
    bytes: usize,
    moves: Vec<Move<'a>>,
    vectors: Vec<(&'a Vector, usize)>,
}

impl<'a> Plan<'a> {
    fn reserve(&mut self, bytes: usize) -> u64 {
        let at = self.bytes;
        self.bytes += bytes.next_multiple_of(ALIGNMENT);
        at as u64
    }

    fn vector(&mut self, vector: &'a Vector) -> u64 {
        let at = self.reserve(vector.as_f32().len() * 4);
        self.vectors.push((vector, at as usize));
        at
    }

    /// Matrices of one width as one: on top of each other, or two of them in turns of 8 rows.
    fn projection(&mut self, parts: &[&'a Matrix], turns: bool) -> Result<Projection> {
        let mut kind = Kind::of(parts[0].ty)?;
        for part in parts {
            if part.cols != parts[0].cols {
                return Err(BackendError::Unavailable(
                    "projections of a layer differ in width".into(),
                ));
            }
            // Files of other programs mix types in what is one matrix here.
            if Kind::of(part.ty)? != kind {
                kind = Kind::F16;
            }
        }
        let (rows, cols) = (parts.iter().map(|part| part.rows).sum(), parts[0].cols);
        let (quants, scales) = kind.block_bytes();
        let to = Projection {
            kind,
            rows,
            cols,
            quants: self.reserve(rows * cols / 32 * quants),
            scales: self.reserve(rows * cols / 32 * scales),
        };
        let mut above = 0;
        for (i, &matrix) in parts.iter().enumerate() {
            let first = if turns { i * 8 } else { above };
            self.moves.push(Move { matrix, to, first, turns });
            above += matrix.rows;
        }
        Ok(to)
    }

    fn weights(&mut self, model: &'a Model) -> Result<(Projection, Vec<Layer>, u64, Projection)> {
        let w = &model.weights;
        let embedding = self.projection(&[&w.embedding], false)?;
        let mut layers = Vec::with_capacity(w.layers.len());
        for layer in &w.layers {
            layers.push(Layer {
                attention_norm: self.vector(&layer.attention_norm),
                qkv: self.projection(&[&layer.q, &layer.k, &layer.v], false)?,
                q_norm: self.vector(&layer.q_norm),
                k_norm: self.vector(&layer.k_norm),
                o: self.projection(&[&layer.o], false)?,
                ffn_norm: self.vector(&layer.ffn_norm),
                gate_up: self.projection(&[&layer.gate, &layer.up], true)?,
                down: self.projection(&[&layer.down], false)?,
            });
        }
        let output_norm = self.vector(&w.output_norm);
        let head = match w.is_tied() {
            true => embedding,
            false => self.projection(&[&w.head], false)?,
        };
        Ok((embedding, layers, output_norm, head))
    }
}

impl Weights {
    /// Brings a model to the device. `progress` is told the bytes of the file moved so far and in all.
    pub fn upload(
        context: &Arc<Context>,
        stream: &Stream,
        kernels: &Kernels,
        model: &Model,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        let mut plan = Plan::default();
        let (mut embedding, mut layers, mut output_norm, mut head) = plan.weights(model)?;
        let memory = Buffer::new(context, plan.bytes, "weights")?;
        let base = memory.address();
        let mut pipeline = Pipeline::new(context)?;
        pipeline.vectors(stream, base, &plan)?;
        pipeline.matrices(stream, kernels, base, &plan, progress)?;
        stream.wait()?;
        model.weights.check().map_err(BackendError::weights)?;

        let place = |p: &mut Projection| {
            (p.quants, p.scales) = (p.quants + base, p.scales + base);
        };
        [&mut embedding, &mut head].into_iter().for_each(place);
        output_norm += base;
        for layer in &mut layers {
            let projections = [&mut layer.qkv, &mut layer.o, &mut layer.gate_up, &mut layer.down];
            projections.into_iter().for_each(place);
            for norm in [
                &mut layer.attention_norm,
                &mut layer.q_norm,
                &mut layer.k_norm,
                &mut layer.ffn_norm,
            ] {
                *norm += base;
            }
        }
        Ok(Weights { embedding, layers, output_norm, head, _memory: memory })
    }
}

/// Pieces that are filled by the processor, cross the bus and are unpacked, several at once.
struct Pipeline {
    stages: Vec<Stage>,
    next: usize,
}

struct Stage {
    host: Pinned,
    device: Buffer,
    /// Reached when the device is done with both.
    free: Event,
}

impl Pipeline {
    fn new(context: &Arc<Context>) -> Result<Self> {
        let stage = |_| {
            Ok(Stage {
                host: Pinned::new(context, PIECE)?,
                device: Buffer::new(context, PIECE, "upload")?,
                free: Event::new(context)?,
            })
        };
        Ok(Pipeline { stages: (0..PIECES).map(stage).collect::<Result<_>>()?, next: 0 })
    }

    /// The next piece, free to be filled.
    fn stage(&mut self) -> Result<&mut Stage> {
        let stage = &mut self.stages[self.next];
        self.next = (self.next + 1) % PIECES;
        stage.free.wait()?;
        Ok(stage)
    }

    /// Norms need no conversion.
    fn vectors(&mut self, stream: &Stream, base: u64, plan: &Plan<'_>) -> Result<()> {
        for (vector, at) in &plan.vectors {
            let stage = self.stage()?;
            let values = vector.as_f32();
            for (to, value) in stage.host.chunks_exact_mut(4).zip(values) {
                to.copy_from_slice(&value.to_le_bytes());
            }
            // SAFETY: the vector's place in the allocation; the piece is not touched before its event.
            unsafe { stream.upload(base + *at as u64, &stage.host, values.len() * 4)? };
            stage.free.record(stream)?;
        }
        Ok(())
    }

    fn matrices(
        &mut self,
        stream: &Stream,
        kernels: &Kernels,
        base: u64,
        plan: &Plan<'_>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<()> {
        let total = plan.moves.iter().map(|m| m.matrix.bytes().len() as u64).sum();
        let mut done = 0;
        for Move { matrix, to, first, turns } in &plan.moves {
            let handed = Handed::of(matrix.ty, to.kind);
            let row_bytes = handed.row_bytes(matrix.ty, matrix.cols);
            let rows_at_once = PIECE / row_bytes;
            for skipped in (0..matrix.rows).step_by(rows_at_once) {
                let rows = rows_at_once.min(matrix.rows - skipped);
                let stage = self.stage()?;
                fill(&mut stage.host[..rows * row_bytes], matrix, handed, skipped)?;
                // SAFETY: at most a piece; it is not touched before its event.
                unsafe { stream.upload(stage.device.address(), &stage.host, rows * row_bytes)? };
                let target = Target {
                    quants: base + to.quants,
                    scales: base + to.scales,
                    first: *first as i32,
                    turns: i32::from(*turns),
                    skipped: skipped as i32,
                    cols: to.cols as i32,
                };
                let blocks = rows * to.cols / 32;
                kernels.repack(stream, handed, stage.device.address(), target, blocks)?;
                stage.free.record(stream)?;
                done += (rows * matrix.ty.row_bytes(matrix.cols)) as u64;
                progress(done, total);
            }
        }
        Ok(())
    }
}

/// Rows of a matrix from `first` on: as they lie in the file, or decoded and rounded to fp16.
fn fill(to: &mut [u8], matrix: &Matrix, handed: Handed, first: usize) -> Result<()> {
    let row_bytes = handed.row_bytes(matrix.ty, matrix.cols);
    if handed != Handed::F16 {
        copy(to, &matrix.bytes()[first * row_bytes..][..to.len()]);
        return if matches!(handed, Handed::Q4_0 | Handed::Q4_1) {
            check_scales(to, matrix)
        } else {
            Ok(())
        };
    }
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let rows = (to.len() / row_bytes).div_ceil(threads);
    thread::scope(|scope| {
        for (i, to) in to.chunks_mut(rows * row_bytes).enumerate() {
            scope.spawn(move || {
                let mut row = vec![0.0; matrix.cols];
                for (at, to) in (first + i * rows..).zip(to.chunks_exact_mut(row_bytes)) {
                    matrix.row_f32(at, &mut row);
                    for (to, &weight) in to.chunks_exact_mut(2).zip(&row) {
                        to.copy_from_slice(&f32_to_f16(weight).to_le_bytes());
                    }
                }
            });
        }
    });
    Ok(())
}

/// Whether the scales of rows of 4 bits are such that kernels can use them.
fn check_scales(rows: &[u8], matrix: &Matrix) -> Result<()> {
    let block = matrix.ty.row_bytes(matrix.ty.block());
    let largest = |part: &[u8]| {
        part.chunks_exact(block).map(|b| u16::from_le_bytes([b[0], b[1]]) & 0x7fff).max()
    };
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(8);
    let part = (rows.len() / block).div_ceil(threads) * block;
    let found = thread::scope(|scope| {
        let parts: Vec<_> =
            rows.chunks(part).map(|part| scope.spawn(move || largest(part))).collect();
        parts.into_iter().filter_map(|part| part.join().expect("the largest of a part")).max()
    });
    match found {
        Some(found) if found >= TOO_LARGE => Err(BackendError::Unavailable(format!(
            "scales of a [{}, {}] matrix of {}: expected below {}, found {}",
            matrix.rows,
            matrix.cols,
            matrix.ty,
            f16_to_f32(TOO_LARGE),
            f16_to_f32(found),
        ))),
        _ => Ok(()),
    }
}

/// Copies with several threads: one alone does not keep up with the bus.
fn copy(to: &mut [u8], from: &[u8]) {
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(8);
    let part = from.len().div_ceil(threads).max(1 << 20);
    thread::scope(|scope| {
        for (to, from) in to.chunks_mut(part).zip(from.chunks(part)) {
            scope.spawn(move || to.copy_from_slice(from));
        }
    });
}

#[cfg(test)]
mod tests {
    use model::tensor::Bytes;

    use super::*;

    #[test]
    fn scales_of_4_bits_have_a_bound() {
        for ty in [TensorType::Q4_0, TensorType::Q4_1] {
            let rows = |scale: u16| {
                let mut rows = vec![0x11; 3 * ty.row_bytes(64)];
                for block in rows.chunks_exact_mut(ty.row_bytes(32)) {
                    block[..2].copy_from_slice(&0x2000u16.to_le_bytes());
                }
                let last = rows.len() - ty.row_bytes(32);
                rows[last..last + 2].copy_from_slice(&scale.to_le_bytes());
                rows
            };
            let check = |scale: u16| {
                let rows = rows(scale);
                check_scales(&rows, &Matrix::new(ty, 3, 64, Bytes::new(rows.clone())).unwrap())
            };
            assert!(check(TOO_LARGE - 1).is_ok());
            for (scale, named) in [(0x4400, "found 4"), (0xc500, "found 5"), (0x7c00, "found inf")]
            {
                let error = check(scale).unwrap_err().to_string();
                assert!(error.contains("expected below 4") && error.contains(named), "{error}");
            }
        }
    }
}
