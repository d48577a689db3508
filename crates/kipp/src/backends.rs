//! The backends of this binary, by name.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Result;
use clap::ValueEnum;
use cpu::{Cpu, Options};
use engine::conformance::Reproducibility;
use engine::{Backend, BackendError, KvConfig, Oracle};
use model::Model;

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// This machine's processor, with the best instructions that it has
    Cpu,
    /// An NVIDIA GPU
    Cuda,
    /// The scalar definition of the model: slow, for reference
    Oracle,
}

/// How a backend is to run.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "some fields are a GPU's alone"))]
pub struct Settings {
    /// Threads on the processor.
    pub threads: usize,
    /// Number of the GPU.
    pub device: usize,
    /// Whether a GPU is to use one class of kernels whatever the size of a batch.
    pub deterministic: bool,
}

/// Makes backends of one model with different KV caches.
pub type Maker = Box<dyn FnMut(KvConfig) -> Result<Box<dyn Backend>, BackendError>>;

/// Upper limits of a machine, where they can be measured.
#[derive(Debug, Clone, Default)]
pub struct Peaks {
    /// Bytes a second from memory.
    pub read: Option<f64>,
    /// Multiplications and additions a second of what the backend multiplies with.
    pub operations: Option<f64>,
    /// The same for all instructions that it could have used, by name.
    pub instructions: BTreeMap<String, f64>,
}

impl BackendName {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            BackendName::Cpu => "cpu",
            BackendName::Cuda => "cuda",
            BackendName::Oracle => "oracle",
        }
    }

    /// What it promises about its own sums.
    pub fn reproducibility(self) -> Reproducibility {
        match self {
            BackendName::Cpu | BackendName::Oracle => Reproducibility::Bitwise,
            BackendName::Cuda => Reproducibility::WithinClass,
        }
    }

    /// Prepares the model once and makes backends of it.
    pub fn maker(self, model: &Arc<Model>, settings: Settings) -> Result<Maker, BackendError> {
        let model = Arc::clone(model);
        let threads = settings.threads;
        match self {
            BackendName::Cpu => {
                let options = Options { threads, ..Options::default() };
                Ok(Box::new(move |kv| {
                    Ok(Box::new(Cpu::new(Arc::clone(&model), kv, options, &mut |_, _| {})?))
                }))
            }
            BackendName::Cuda => cuda_maker(&model, settings),
            BackendName::Oracle => {
                Ok(Box::new(move |kv| Ok(Box::new(Oracle::new(Arc::clone(&model), kv, threads)))))
            }
        }
    }

    /// What the machine can do at most with this backend's instructions, measured now.
    pub fn peaks(self, threads: usize) -> Result<Peaks> {
        match self {
            BackendName::Cpu => {
                let peaks = cpu::peaks::measure(Options::default().class, threads)?;
                let instructions = cpu::peaks::instructions(threads)?;
                let instructions = instructions.map(|(name, rate)| (name.to_owned(), rate));
                Ok(Peaks {
                    read: Some(peaks.read),
                    operations: Some(peaks.dot),
                    instructions: instructions.collect(),
                })
            }
            BackendName::Cuda | BackendName::Oracle => Ok(Peaks::default()),
        }
    }
}

#[cfg(feature = "cuda")]
fn cuda_maker(model: &Model, settings: Settings) -> Result<Maker, BackendError> {
    let Settings { device, deterministic, .. } = settings;
    let options = cuda::Options { device, deterministic, ..cuda::Options::default() };
    let model = cuda::CudaModel::load(model, options, &mut |_, _| {})?;
    Ok(Box::new(move |kv| Ok(Box::new(cuda::CudaBackend::new(&model, kv)?))))
}

#[cfg(not(feature = "cuda"))]
fn cuda_maker(_model: &Model, _settings: Settings) -> Result<Maker, BackendError> {
    Err(BackendError::Unavailable("this kipp was built without the feature `cuda`".into()))
}

/// What `--backend cuda` could run on, a line a device, or why on none.
#[cfg(feature = "cuda")]
pub fn cuda_devices() -> Result<Vec<String>, String> {
    let devices = cuda::devices().map_err(|error| error.to_string())?;
    let line = |device: &cuda::Device| {
        let (major, minor) = device.capability;
        let memory = crate::output::size(device.memory);
        format!("device {}: {}, {memory}, compute {major}.{minor}", device.ordinal, device.name)
    };
    Ok(devices.iter().map(line).collect())
}

/// What `--backend cuda` could run on, a line a device, or why on none.
#[cfg(not(feature = "cuda"))]
pub fn cuda_devices() -> Result<Vec<String>, String> {
    Err("this kipp was built without the feature `cuda`".into())
}
