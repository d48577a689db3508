//! From a model in 16 bits to a GGUF in fewer.

use std::path::Path;

use model::layout::Tensor;
use model::source::{self, Source};
use model::{Error, Model, Result, Scheme};

use crate::importance::Importance;

/// Writes a model's GGUF with projections and head stored as `schemes` says; squared errors of the 4-bit schemes are
/// weighted by `importance`. Where the weights come from stays what it is. `progress` is told the bytes of tensors
/// written so far and in all.
pub fn quantize(
    model: &Model,
    schemes: (Scheme, Scheme),
    importance: Option<&Importance>,
    out: &Path,
    progress: impl FnMut(u64, u64),
) -> Result<()> {
    let checkpoint = model
        .checkpoint()
        .ok_or_else(|| Error::mismatch("checkpoint", "a registered one", "other dimensions"))?;
    if let Some(matrix) = model.weights.matrices().find(|matrix| !matrix.ty.is_wide()) {
        // What was rounded once would be rounded again, with a larger error than either alone.
        return Err(Error::mismatch("weights to quantise", "16 bits or more", matrix.ty));
    }
    let source = Weighted { model, importance };
    source::write(out, checkpoint, schemes, &model.origin, &source, progress)
}

/// A model's rows, with what is known of their importance.
struct Weighted<'a> {
    model: &'a Model,
    importance: Option<&'a Importance>,
}

impl Source for Weighted<'_> {
    fn row(&self, tensor: &Tensor, row: usize, out: &mut [f32]) {
        self.model.weights.row(tensor, row, out);
    }

    fn check(&self) -> Result<()> {
        self.model.weights.check()
    }

    fn importance(&self, tensor: &Tensor) -> Option<&[f32]> {
        self.importance?.of(&tensor.name)
    }
}
