//! The backend for NVIDIA GPUs, in a kipp that was built with it.

use std::sync::Arc;

use anyhow::Result;
use cuda::{CudaBackend, CudaModel, Device, Options};
use engine::BackendError;
use model::{Model, TensorType};

use super::{Gpu, Peaks, Prepared, Progress, Settings, part};
use crate::output::{complain, size};

/// The part of a GPU's free memory that a KV cache may take; activations need some of the rest.
const FREE_PART: (u64, u64) = (4, 5);

/// Brings the weights to the GPU.
pub fn prepare(
    model: &Model,
    settings: Settings,
    progress: &mut Progress<'_>,
) -> Result<Prepared, BackendError> {
    let Settings { device, deterministic, .. } = settings;
    let options = Options { device, deterministic, ..Options::default() };
    let decoded =
        |ty| matches!(ty, TensorType::F16 | TensorType::Q4K | TensorType::Q5K | TensorType::Q6K);
    if model.weights.matrices().any(|matrix| decoded(matrix.ty)) {
        complain("weights: some are of types that become fp16 on the GPU");
    }
    let model = CudaModel::load(model, options, progress)?;
    let weights = Arc::clone(&model);
    Ok(Prepared {
        make: Box::new(move |kv| Ok(Box::new(CudaBackend::new(&weights, kv)?))),
        room: Box::new(move || model.free_memory().ok().map(|free| part(free, FREE_PART))),
    })
}

/// What the GPU can do at most: what is `known` of it, the rest measured now.
pub fn peaks(device: usize, known: Peaks) -> Result<Peaks> {
    let read = known.read.map_or_else(|| cuda::peak_read(device), Ok)?;
    let operations = known.operations.map_or_else(|| cuda::peak_operations(device), Ok)?;
    Ok(Peaks { read: Some(read), operations: Some(operations), ..known })
}

/// Names of the kernels that this process has used so far.
pub fn kernels_hit() -> Vec<String> {
    cuda::kernels_hit()
}

/// What `--backend cuda` could run on, or why on none.
pub fn devices() -> Result<Vec<Gpu>, String> {
    let devices = cuda::devices().map_err(|error| error.to_string())?;
    let gpu = |device: &Device| {
        let (major, minor) = device.capability;
        let size = size(device.memory);
        let name = format!("device {}", device.ordinal);
        let line = format!("{name}: {}, {size}, compute {major}.{minor}", device.name);
        Gpu { name, line, memory: device.memory }
    };
    Ok(devices.iter().map(gpu).collect())
}
