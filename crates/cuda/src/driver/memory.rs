//! Memory of the device, and of the host where the device copies from and to.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use engine::BackendError;

use super::{Context, Result, check};

/// Device memory.
pub struct Buffer {
    address: sys::CUdeviceptr,
    bytes: usize,
    _context: Arc<Context>,
}

impl Buffer {
    /// `bytes` of memory with undefined content; `purpose` is what an error says that it was for.
    pub fn new(context: &Arc<Context>, bytes: usize, purpose: &'static str) -> Result<Self> {
        let mut address = 0;
        // SAFETY: writes one address.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) } {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(BackendError::Memory {
                purpose,
                needed: bytes as u64,
                free: context.free_memory()?,
            }),
            other => {
                check("cuMemAlloc", other)?;
                Ok(Buffer { address, bytes, _context: context.clone() })
            }
        }
    }

    /// Its first byte, as kernels take it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` and freed once; the driver waits for work that uses it.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Page-locked host memory, which the device copies from and to at full speed.
pub struct Pinned {
    pub(super) address: *mut u8,
    pub(super) bytes: usize,
    _context: Arc<Context>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// `bytes` of memory.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let mut address = ptr::null_mut();
        // SAFETY: writes one address.
        unsafe { driver!(cuMemHostAlloc(&mut address, bytes.max(1), 0))? };
        // SAFETY: that many bytes were just allocated.
        unsafe { ptr::write_bytes(address.cast::<u8>(), 0, bytes) };
        Ok(Pinned { address: address.cast(), bytes, _context: context.clone() })
    }

    /// Where kernels find it: page-locked memory has one address on both sides.
    pub fn device_address(&self) -> u64 {
        self.address as u64
    }
}

impl std::ops::Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialised memory of that length, owned by self. A copy into it, or a kernel's write, is awaited by its
        // stream's event before anything is read (Backend::collect, the upload pipeline).
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }
}

impl std::ops::DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` and freed once.
        let _ = unsafe { sys::cuMemFreeHost(self.address.cast()) };
    }
}
