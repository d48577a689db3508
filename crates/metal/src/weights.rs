//! Weights where they are: buffers over the mapped file, without a copy.
//!
//! Tensors that lie next to each other share a buffer. It is cut, at a tensor's beginning, where it would pass the
//! largest buffer of the device; pieces overlap by the page that a cut falls into. Memory that the device does not take as
//! it is (it may belong to more than one mapping) is cut further, down to single tensors, and those are copied.

use std::sync::Arc;

use engine::BackendError;
use model::{Matrix, Model, TensorType, Vector};

use crate::device::{Device, Slice};

type Result<T> = std::result::Result<T, BackendError>;

/// Bytes between two tensors of a file: no more than its alignment.
const GAP: usize = 64;

/// How a matrix is stored (`kernels/weights.h`, `enum Type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// bfloat16.
    Bf16,
    /// Bytes and a scale a block of 32.
    Q8_0,
    /// Nibbles, a scale and a minimum a block of 32.
    Q4_1,
    /// Nibbles and a scale a block of 32.
    Q4_0,
    /// IEEE half precision.
    F16,
    /// K-quants: blocks of 256.
    Q4K,
    Q5K,
    Q6K,
}

impl Kind {
    fn of(ty: TensorType) -> Result<Self> {
        match ty {
            TensorType::Bf16 => Ok(Kind::Bf16),
            TensorType::Q8_0 => Ok(Kind::Q8_0),
            TensorType::Q4_1 => Ok(Kind::Q4_1),
            TensorType::Q4_0 => Ok(Kind::Q4_0),
            TensorType::F16 => Ok(Kind::F16),
            TensorType::Q4K => Ok(Kind::Q4K),
            TensorType::Q5K => Ok(Kind::Q5K),
            TensorType::Q6K => Ok(Kind::Q6K),
            other @ TensorType::F32 => {
                Err(BackendError::Unavailable(format!("Metal kernels for {other}")))
            }
        }
    }
}

/// Where a tensor lies.
#[derive(Debug, Clone, Copy, Default)]
pub struct Place {
    buffer: usize,
    offset: usize,
    bytes: usize,
}

/// A weight matrix.
#[derive(Debug, Clone, Copy)]
pub struct Projection {
    /// How it is stored.
    pub kind: Kind,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Where it lies.
    pub place: Place,
}

/// One transformer block.
pub struct Layer {
    pub attention_norm: Place,
    /// Q, K and V.
    pub qkv: [Projection; 3],
    pub q_norm: Place,
    pub k_norm: Place,
    pub o: Projection,
    pub ffn_norm: Place,
    pub gate_up: [Projection; 2],
    pub down: Projection,
}

/// All weights of a checkpoint, as a device sees them.
pub struct Weights<D: Device> {
    pub embedding: Projection,
    pub layers: Vec<Layer>,
    pub output_norm: Place,
    /// The embedding itself where the checkpoint is tied.
    pub head: Projection,
    /// Bytes that the device took as they lie, and bytes that had to be copied.
    pub shared: usize,
    pub copied: usize,
    buffers: Vec<D::Buffer>,
    /// Owns what the buffers lie over; after them, so that it outlives them.
    _model: Arc<Model>,
}

impl<D: Device> Weights<D> {
    /// Makes a model's weights visible to a device.
    pub fn share(device: &D, model: &Arc<Model>) -> Result<Self> {
        let mut tensors = tensors(model);
        tensors.sort_by_key(|bytes| bytes.as_ptr() as usize);
        tensors.dedup_by_key(|bytes| bytes.as_ptr() as usize);
        let mut pieces = Pieces { device, pieces: Vec::new(), shared: 0, copied: 0 };
        let adjacent = |a: &&[u8], b: &&[u8]| {
            let end = a.as_ptr() as usize + a.len();
            (end..end + GAP).contains(&(b.as_ptr() as usize))
        };
        for run in tensors.chunk_by(adjacent) {
            pieces.bring(run)?;
        }

        let vector = |vector: &Vector| {
            let values = vector.as_f32();
            pieces.find(values.as_ptr().cast(), size_of_val(values))
        };
        let matrix = |matrix: &Matrix| {
            let bytes = matrix.bytes();
            Ok(Projection {
                kind: Kind::of(matrix.ty)?,
                rows: matrix.rows,
                cols: matrix.cols,
                place: pieces.find(bytes.as_ptr(), bytes.len()),
            })
        };
        let layers = model.weights.layers.iter().map(|layer| {
            Ok(Layer {
                attention_norm: vector(&layer.attention_norm),
                qkv: [matrix(&layer.q)?, matrix(&layer.k)?, matrix(&layer.v)?],
                q_norm: vector(&layer.q_norm),
                k_norm: vector(&layer.k_norm),
                o: matrix(&layer.o)?,
                ffn_norm: vector(&layer.ffn_norm),
                gate_up: [matrix(&layer.gate)?, matrix(&layer.up)?],
                down: matrix(&layer.down)?,
            })
        });
        Ok(Weights {
            layers: layers.collect::<Result<_>>()?,
            embedding: matrix(&model.weights.embedding)?,
            output_norm: vector(&model.weights.output_norm),
            head: matrix(&model.weights.head)?,
            shared: pieces.shared,
            copied: pieces.copied,
            buffers: pieces.pieces.into_iter().map(|piece| piece.buffer).collect(),
            _model: Arc::clone(model),
        })
    }

    /// A tensor as a kernel's argument.
    pub fn slice(&self, place: Place) -> Slice<'_, D> {
        Slice { buffer: &self.buffers[place.buffer], offset: place.offset, bytes: place.bytes }
    }
}

/// The bytes of all tensors.
fn tensors(model: &Model) -> Vec<&[u8]> {
    let mut all = Vec::new();
    let vector = |vector: &'_ Vector| {
        let values = vector.as_f32();
        // SAFETY: floats seen as bytes; the lifetime is the model's, which the caller holds.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }
    };
    let w = &model.weights;
    all.extend([w.embedding.bytes(), w.head.bytes(), vector(&w.output_norm)]);
    for layer in &w.layers {
        let matrices =
            [&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down];
        all.extend(matrices.map(Matrix::bytes));
        let norms = [&layer.attention_norm, &layer.q_norm, &layer.k_norm, &layer.ffn_norm];
        all.extend(norms.map(vector));
    }
    all
}

/// A buffer and the addresses that it lies over.
struct Piece<D: Device> {
    start: usize,
    end: usize,
    buffer: D::Buffer,
}

struct Pieces<'a, D: Device> {
    device: &'a D,
    pieces: Vec<Piece<D>>,
    shared: usize,
    copied: usize,
}

impl<D: Device> Pieces<'_, D> {
    /// Brings neighbouring tensors to the device: in one buffer, or cut.
    fn bring(&mut self, run: &[&[u8]]) -> Result<()> {
        let [first, .., last] = run else {
            return self.one(run[0]);
        };
        if self.shares(first.as_ptr() as usize, last.as_ptr() as usize + last.len()) {
            return Ok(());
        }
        let (a, b) = run.split_at(run.len() / 2);
        self.bring(a)?;
        self.bring(b)
    }

    /// A tensor in a buffer of its own.
    fn one(&mut self, tensor: &[u8]) -> Result<()> {
        let start = tensor.as_ptr() as usize;
        if self.shares(start, start + tensor.len()) {
            return Ok(());
        }
        let largest = self.device.largest_buffer();
        if tensor.len() > largest {
            let (needed, free) = (tensor.len() as u64, largest as u64);
            return Err(BackendError::Memory { purpose: "a tensor in one buffer", needed, free });
        }
        let buffer = self.device.allocate(tensor.len(), "weights")?;
        self.device.write(&buffer, 0, tensor);
        self.copied += tensor.len();
        self.pieces.push(Piece { start, end: start + tensor.len(), buffer });
        Ok(())
    }

    /// Whether the device takes the memory between two addresses as it lies.
    fn shares(&mut self, start: usize, end: usize) -> bool {
        let page = self.device.page();
        let (first, last) = (start / page * page, end.next_multiple_of(page));
        if last - first > self.device.largest_buffer() {
            return false;
        }
        // SAFETY: whole pages of which each holds bytes of the model's tensors, or lies between two neighbours of one
        // mapping; the model is kept as long as the buffers, and nobody writes its weights.
        let Some(buffer) = (unsafe { self.device.share(first as *const u8, last - first) }) else {
            return false;
        };
        self.shared += end - start;
        self.pieces.push(Piece { start: first, end: last, buffer });
        true
    }

    /// Where the tensor at an address went.
    fn find(&self, start: *const u8, bytes: usize) -> Place {
        let start = start as usize;
        let holds = |piece: &Piece<D>| piece.start <= start && start + bytes <= piece.end;
        let buffer = self.pieces.iter().position(holds).expect("every tensor was brought");
        Place { buffer, offset: start - self.pieces[buffer].start, bytes }
    }
}
