//! The backends of this binary, by name.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Result;
use clap::ValueEnum;
use cpu::{Cpu, CpuModel, Options};
use engine::conformance::Reproducibility;
use engine::{Backend, BackendError, KvConfig, Oracle};
use model::Model;

use crate::machine;
use crate::progress::Meter;

#[cfg_attr(not(feature = "cuda"), path = "no_cuda.rs")]
pub mod cuda;
#[cfg_attr(not(all(feature = "metal", target_os = "macos")), path = "no_metal.rs")]
pub mod metal;

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// This machine's processor, with the best instructions that it has
    Cpu,
    /// An NVIDIA GPU
    Cuda,
    /// An Apple GPU; never run on one yet
    Metal,
    /// The scalar definition of the model: slow, for reference
    Oracle,
}

/// What multiplies many tokens on an Apple GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MetalClass {
    /// Simdgroup matrices, which every Apple GPU from M1 on has
    Simdgroup,
    /// The operations on tensors of Metal 4
    Tensor,
}

/// How a backend is to run.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(all(feature = "metal", target_os = "macos")),
    expect(dead_code, reason = "some fields are a GPU's alone")
)]
pub struct Settings {
    /// Threads on the processor.
    pub threads: usize,
    /// Number of the GPU.
    pub device: usize,
    /// Whether a GPU is to use one class of kernels whatever the size of a batch.
    pub deterministic: bool,
    /// What multiplies many tokens on an Apple GPU, if not what a probe chooses.
    pub metal_class: Option<MetalClass>,
}

/// A model whose weights are where a backend wants them.
pub struct Prepared {
    /// Makes backends of it with different KV caches.
    pub make: Box<Make>,
    /// Bytes that a KV cache may take by now, where that can be told.
    pub room: Box<dyn Fn() -> Option<u64>>,
}

type Make = dyn FnMut(KvConfig) -> Result<Box<dyn Backend>, BackendError>;

/// Told of bytes that are done, and of all.
type Progress<'a> = dyn FnMut(u64, u64) + 'a;

/// A GPU that `--backend cuda` could run on.
pub struct Gpu {
    /// `device 0`
    pub name: String,
    /// Its name, memory and capability.
    pub line: String,
    /// Bytes of its memory.
    pub memory: u64,
}

/// The part of the machine's free memory that a KV cache may take: other programs want some.
const HOST_PART: (u64, u64) = (1, 2);

/// Upper limits of a machine, where they can be measured.
#[derive(Debug, Clone, Default)]
pub struct Peaks {
    /// Bytes a second from memory.
    pub read: Option<f64>,
    /// Multiplications and additions a second of what the backend multiplies with.
    pub operations: Option<f64>,
    /// The same for all instructions that it could have used, by name.
    pub instructions: BTreeMap<String, f64>,
    /// Seconds until one thread sees what another wrote, where several compute.
    pub handover: Option<f64>,
}

impl BackendName {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            BackendName::Cpu => "cpu",
            BackendName::Cuda => "cuda",
            BackendName::Metal => "metal",
            BackendName::Oracle => "oracle",
        }
    }

    /// The backends of this binary that are to be checked: all but the one they are checked against.
    pub fn built_in() -> Vec<BackendName> {
        let mut names = vec![BackendName::Cpu];
        if cfg!(feature = "cuda") {
            names.push(BackendName::Cuda);
        }
        if cfg!(all(feature = "metal", target_os = "macos")) {
            names.push(BackendName::Metal);
        }
        names
    }

    /// What it promises about its own sums.
    pub fn reproducibility(self) -> Reproducibility {
        match self {
            BackendName::Cpu | BackendName::Oracle => Reproducibility::Bitwise,
            BackendName::Cuda | BackendName::Metal => Reproducibility::WithinClass,
        }
    }

    /// Brings the weights to where the backend wants them; a line on the terminal shows how far that is.
    pub fn prepare(self, model: &Arc<Model>, settings: Settings) -> Result<Prepared, BackendError> {
        let model = Arc::clone(model);
        let threads = settings.threads;
        let host = || machine::available_memory().map(|free| part(free, HOST_PART));
        let mut meter = Meter::passing();
        let mut progress = |done, total| meter.show("loading", done, total);
        let make: Box<Make> = match self {
            BackendName::Cpu => {
                let options = Options { threads, ..Options::default() };
                let weights = CpuModel::load(model, options, &mut progress)?;
                Box::new(move |kv| Ok(Box::new(Cpu::new(&weights, kv)?)))
            }
            BackendName::Cuda => return cuda::prepare(&model, settings, &mut progress),
            BackendName::Metal => return metal::prepare(&model, settings, host),
            BackendName::Oracle => {
                Box::new(move |kv| Ok(Box::new(Oracle::new(Arc::clone(&model), kv, threads))))
            }
        };
        Ok(Prepared { make, room: Box::new(host) })
    }

    /// Names of the device's kernels that this process has used so far; none for a processor.
    pub fn kernels_hit(self) -> Vec<String> {
        match self {
            BackendName::Cuda => cuda::kernels_hit(),
            BackendName::Cpu | BackendName::Metal | BackendName::Oracle => Vec::new(),
        }
    }

    /// What the driver says of the device, if this backend runs on an NVIDIA GPU.
    pub fn device(self, ordinal: usize) -> Option<String> {
        match self {
            BackendName::Cuda => Some(cuda::devices().ok()?.into_iter().nth(ordinal)?.line),
            BackendName::Cpu | BackendName::Metal | BackendName::Oracle => None,
        }
    }

    /// What the machine can do at most with this backend's instructions: what is `known` of it, the rest measured now.
    pub fn peaks(self, threads: usize, device: usize, known: Peaks) -> Result<Peaks> {
        match self {
            BackendName::Cpu => {
                let class = Options::default().class;
                let read = || cpu::peaks::read(class, threads);
                let operations = || cpu::peaks::dot(class, threads);
                let instructions = cpu::peaks::instructions(threads)?.into_iter();
                let instructions = instructions.map(|(name, rate)| (name.to_owned(), rate));
                Ok(Peaks {
                    read: Some(known.read.map_or_else(read, Ok)?),
                    operations: Some(known.operations.map_or_else(operations, Ok)?),
                    instructions: instructions.collect(),
                    handover: if threads > 1 { Some(cpu::peaks::handover()?) } else { None },
                })
            }
            BackendName::Cuda => cuda::peaks(device, known),
            BackendName::Metal | BackendName::Oracle => Ok(known),
        }
    }
}

fn part(of: u64, (some, all): (u64, u64)) -> u64 {
    of / all * some
}
