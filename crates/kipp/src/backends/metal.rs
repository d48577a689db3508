//! The backend for Apple GPUs, in a kipp that was built with it.

use std::sync::Arc;

use engine::BackendError;
use metal::{Class, Device, Gpu, MetalBackend, MetalModel, Options};
use model::Model;

use super::{MetalClass, Prepared, Settings};
use crate::output::complain;

/// Brings the weights to where the GPU sees them. Processor and GPU share the machine's memory, of which `room` tells.
pub fn prepare(
    model: &Arc<Model>,
    settings: Settings,
    room: impl Fn() -> Option<u64> + 'static,
) -> Result<Prepared, BackendError> {
    let Settings { device, deterministic, metal_class, .. } = settings;
    let class = metal_class.map(|class| match class {
        MetalClass::Simdgroup => Class::Simdgroup,
        MetalClass::Tensor => Class::Tensor,
    });
    let options = Options { deterministic, class, ..Options::default() };
    let model = MetalModel::load(Gpu::open(device)?, model, options)?;
    complain(&format!("metal: {}", model.describe()));
    Ok(Prepared {
        make: Box::new(move |kv| Ok(Box::new(MetalBackend::new(&model, kv)?))),
        room: Box::new(room),
    })
}

/// What `--backend metal` could run on, a line a device, or why on none.
pub fn devices() -> Result<Vec<String>, String> {
    let devices = metal::devices();
    let line = |(i, device): (usize, &Gpu)| format!("device {i}: {}", Device::describe(device));
    Ok(devices.iter().enumerate().map(line).collect())
}
