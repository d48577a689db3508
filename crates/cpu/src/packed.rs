//! All weights of a model, packed into one arena.

use model::{Layer, Matrix, Model, TensorType};

use engine::BackendError;

use crate::kernels::Kernels;
use crate::memory::Shared;
use crate::panels::{Format, Panels};
use crate::pool::{Pool, Shares};
use crate::simd::LANES;

/// Packed matrices of one layer, in the order in which they are multiplied.
pub struct PackedLayer {
    /// Q, K and V.
    pub qkv: [Panels; 3],
    /// O.
    pub o: Panels,
    /// Gate and up.
    pub gate_up: [Panels; 2],
    /// Down.
    pub down: Panels,
}

/// Packed weights; norms and embedding stay where the model has them.
pub struct Packed {
    /// One a layer.
    pub layers: Vec<PackedLayer>,
    /// The head.
    pub head: Panels,
    /// Bytes of the arena.
    pub bytes: usize,
    _arena: Shared<u8>,
}

/// Matrices start at a page, so that the last page of one is not the first of the next.
const ALIGN: usize = 4096;
/// Bytes of the file between two times that pages are given back.
const SLAB: usize = 8 << 20;

impl Packed {
    /// Packs a model's matrices on all threads and gives back the pages of the mapping slab by slab, so that
    /// the file never counts twice. `progress` hears of the bytes done and their total.
    pub fn new(
        model: &Model,
        kernels: &Kernels,
        pool: &mut Pool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Packed, BackendError> {
        let weights = &model.weights;
        let mut matrices: Vec<_> = weights.layers.iter().flat_map(Layer::projections).collect();
        matrices.push(&weights.head);
        let mut places = Vec::new();
        let mut bytes = 0;
        for matrix in &matrices {
            let format = format_of(matrix)?;
            places.push((format, bytes));
            bytes += Panels::bytes(format, matrix.rows, matrix.cols).next_multiple_of(ALIGN);
        }
        let arena = Shared::<u8>::new(bytes, "the packed weights")?;
        let shares = Shares::new(pool.threads());
        let mut panels = Vec::new();
        for (matrix, (format, at)) in matrices.iter().zip(places) {
            let packed = Panels::new(format, matrix.rows, matrix.cols, arena.at(at));
            let row_bytes = matrix.bytes().len() / matrix.rows.max(1);
            let slab = (SLAB / (row_bytes * LANES).max(1)).max(1);
            for first in (0..packed.panels()).step_by(slab) {
                let end = packed.panels().min(first + slab);
                shares.reset();
                pool.run(&|thread, _| {
                    shares.take(thread, end - first, |unit| {
                        let panel = first + unit;
                        // SAFETY: the panel is this thread's, and the matrix has its format and shape.
                        unsafe { (kernels.pack)(&packed, matrix, panel) };
                    });
                })?;
                matrix.release(first * LANES..matrix.rows.min(end * LANES));
                progress((at + end * packed.panel_bytes()) as u64, bytes as u64);
            }
            panels.push(packed);
        }
        weights.check().map_err(BackendError::weights)?;
        // What is left of the file: the edges of what was given back, mapped again with what lay beside them.
        weights.release();
        progress(bytes as u64, bytes as u64);
        let mut panels = panels.into_iter();
        let mut next =
            || panels.next().ok_or_else(|| BackendError::Device("a matrix is missing".into()));
        let mut layers = Vec::new();
        for _ in &weights.layers {
            layers.push(PackedLayer {
                qkv: [next()?, next()?, next()?],
                o: next()?,
                gate_up: [next()?, next()?],
                down: next()?,
            });
        }
        Ok(Packed { layers, head: next()?, bytes, _arena: arena })
    }
}

fn format_of(matrix: &Matrix) -> Result<Format, BackendError> {
    let multiple = matrix.cols.is_multiple_of(crate::activations::NARROW);
    match Format::of(matrix.ty) {
        Some(format) if multiple => Ok(format),
        _ => Err(BackendError::Unavailable(format!(
            "the CPU backend multiplies all but {} of widths that are multiples of 32, not {} of width {}",
            TensorType::F32,
            matrix.ty,
            matrix.cols
        ))),
    }
}
