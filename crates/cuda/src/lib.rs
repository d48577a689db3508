//! The CUDA backend: evaluates batches on an NVIDIA GPU with this crate's own kernels (`kernels/*.cu`).
//!
//! Reading order: [`CudaBackend`] lays a batch out (`step`), queues the forward pass (`forward`) through one
//! function an operation (`kernels`; `prefill` on Hopper), and reads the answers back (`rows`); `weights` brings a model to the
//! device, `driver` is the only module that talks to CUDA, and `peaks` measures what kernels are held against.
//!
//! Numbers on the device are fp16 where they feed a tensor core and fp32 everywhere else (`kernels/common.cuh`).

mod backend;
mod batch;
mod decode;
mod driver;
mod forward;
mod kernels;
mod peaks;
mod prefill;
mod rows;
mod step;
mod weights;

pub use backend::{CudaBackend, CudaModel, Options};
pub use driver::{Device, devices, kernels_hit};
pub use peaks::{peak_operations, peak_read};
