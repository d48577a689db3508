//! Loaded code, and which of its kernels were ever launched.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use engine::BackendError;

use super::{Context, Device, Result, check};

/// Every kernel that this process has looked up, and whether it was ever launched or recorded.
static LAUNCHED: Mutex<BTreeMap<String, &AtomicBool>> = Mutex::new(BTreeMap::new());

/// Names of the kernels that this process has launched or recorded so far.
pub fn kernels_hit() -> Vec<String> {
    let all = LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner);
    let hit = all.iter().filter(|(_, launched)| launched.load(Ordering::Relaxed));
    hit.map(|(name, _)| name.clone()).collect()
}

/// The mark of a kernel in `LAUNCHED`; there are as many as kernels, for as long as the process lives.
fn mark(name: &str) -> &'static AtomicBool {
    let mut all = LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner);
    all.entry(name.into()).or_insert_with(|| Box::leak(Box::default()))
}

/// A kernel of a loaded module.
#[derive(Debug, Clone, Copy)]
pub struct Function {
    pub(super) function: sys::CUfunction,
    pub(super) launched: &'static AtomicBool,
}

// SAFETY: a handle that lives as long as its module.
unsafe impl Send for Function {}

impl Function {
    /// Allows launches with more dynamic shared memory than the default 48 KB.
    pub fn allow_shared(self, bytes: u32) -> Result<()> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the module is loaded for as long as the backend lives.
        unsafe { driver!(cuFuncSetAttribute(self.function, attribute, bytes as i32)) }
    }
}

/// Kernels in machine code for the context's device.
pub struct Module {
    module: sys::CUmodule,
    _context: Arc<Context>,
}

// SAFETY: a driver handle, usable from any thread.
unsafe impl Send for Module {}

impl Module {
    /// Loads the code for this device from a fat binary.
    pub fn load(context: &Arc<Context>, image: &'static [u8]) -> Result<Self> {
        let mut module = ptr::null_mut();
        // SAFETY: a complete fat binary made by nvcc, which the driver copies.
        match unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) } {
            sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => {
                let Device { name, capability: (major, minor), .. } = &context.device;
                Err(BackendError::Unavailable(format!(
                    "{name}: this program holds no code for compute capability {major}.{minor}"
                )))
            }
            other => {
                check("cuModuleLoadData", other)?;
                Ok(Module { module, _context: context.clone() })
            }
        }
    }

    /// A kernel by name.
    pub fn function(&self, name: &str) -> Result<Function> {
        let symbol = CString::new(name).map_err(|e| BackendError::Device(e.to_string()))?;
        let mut function = ptr::null_mut();
        // SAFETY: a loaded module and a string that ends in a zero.
        let result =
            unsafe { sys::cuModuleGetFunction(&mut function, self.module, symbol.as_ptr()) };
        check(name, result).map(|()| Function { function, launched: mark(name) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}
