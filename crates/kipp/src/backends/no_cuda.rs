//! What a kipp says of NVIDIA GPUs that was built without the backend for them.

use anyhow::Result;
use engine::BackendError;
use model::Model;

use super::{Gpu, Peaks, Prepared, Progress, Settings};

const WHY: &str = "this kipp was built without the feature `cuda`";

pub fn prepare(_: &Model, _: Settings, _: &mut Progress<'_>) -> Result<Prepared, BackendError> {
    Err(BackendError::Unavailable(WHY.into()))
}

pub fn peaks(_: usize, known: Peaks) -> Result<Peaks> {
    Ok(known)
}

pub fn kernels_hit() -> Vec<String> {
    Vec::new()
}

pub fn devices() -> Result<Vec<Gpu>, String> {
    Err(WHY.into())
}
