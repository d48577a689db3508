//! What a kipp says of Apple GPUs that was built without the backend for them.

use std::sync::Arc;

use engine::BackendError;
use model::Model;

use super::{Prepared, Settings};

const WHY: &str = "this kipp was built without Metal, which only macOS has";

pub fn prepare(
    _: &Arc<Model>,
    _: Settings,
    _: impl Fn() -> Option<u64>,
) -> Result<Prepared, BackendError> {
    Err(BackendError::Unavailable(WHY.into()))
}

pub fn devices() -> Result<Vec<String>, String> {
    Err(WHY.into())
}
