//! The bridge to NVIDIA's driver: contexts, memory, streams, events, graphs, and launches, each owned by a value that
//! frees it. The driver library is loaded when it is first needed; nothing else of CUDA is needed at run time.

use std::ffi::CStr;
use std::ptr;

use cudarc::driver::sys;
use engine::BackendError;

type Result<T> = std::result::Result<T, BackendError>;

/// What the driver's answer to `what` means.
fn check(what: &str, result: sys::CUresult) -> Result<()> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        error => {
            let mut text = ptr::null();
            // SAFETY: the driver writes a pointer to one of its own static strings, or null.
            let known = unsafe { sys::cuGetErrorString(error, &mut text) };
            let text = if known == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
                // SAFETY: the driver's strings end in a zero and live as long as the library.
                unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
            } else {
                format!("{error:?}")
            };
            Err(BackendError::Device(format!("{what}: {text}")))
        }
    }
}

/// Calls a driver function and names it where it fails.
macro_rules! driver {
    ($function:ident($($argument:expr),* $(,)?)) => {
        check(stringify!($function), sys::$function($($argument),*))
    };
}

mod device;
mod graph;
mod launch;
mod memory;
mod module;
mod stream;
mod tensor_map;

pub use device::{Context, Device, devices};
pub use graph::Graph;
pub use memory::{Buffer, Pinned};
pub use module::{Function, Module, kernels_hit};
pub use stream::{Event, Stream};
pub use tensor_map::{Element, Promotion, TensorMap};
