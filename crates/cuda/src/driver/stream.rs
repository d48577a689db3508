//! Queues of device work, their copies, and points in them.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, Pinned, Result, check};

/// A queue of device work, done in order.
pub struct Stream {
    pub(super) stream: sys::CUstream,
    /// Whether kernels may start while their predecessor drains (compute capability 9 and later).
    pub(super) overlap: bool,
    pub(super) context: Arc<Context>,
}

// SAFETY: a driver handle, usable from any thread.
unsafe impl Send for Stream {}

impl Stream {
    /// A queue of its own, apart from the default stream.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle.
        unsafe { driver!(cuStreamCreate(&mut stream, flags))? };
        let overlap = context.device.capability.0 >= 9;
        Ok(Stream { stream, overlap, context: context.clone() })
    }

    /// Waits until everything queued is done.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: a live stream.
        unsafe { driver!(cuStreamSynchronize(self.stream)) }
    }

    /// Sets `bytes` at `to` to zero.
    ///
    /// # Safety
    /// The range lies in a live buffer.
    pub unsafe fn zero(&self, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { driver!(cuMemsetD8Async(to, 0, bytes, self.stream)) }
    }

    /// Copies the first `bytes` of host memory to the device.
    ///
    /// # Safety
    /// `to` has room; `from` is neither changed nor freed before the copy is done.
    pub unsafe fn upload(&self, to: u64, from: &Pinned, bytes: usize) -> Result<()> {
        assert!(bytes <= from.bytes, "upload of {bytes} bytes from {}", from.bytes);
        // SAFETY: the caller's; the length is checked.
        unsafe {
            driver!(cuMemcpyHtoDAsync_v2(to, from.address.cast::<c_void>(), bytes, self.stream))
        }
    }

    /// Copies `bytes` from the device to `to[offset..]`.
    ///
    /// # Safety
    /// `from` is that long; `to` is not read, changed or freed before the copy is done.
    pub unsafe fn download(
        &self,
        to: &mut Pinned,
        offset: usize,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        assert!(
            offset + bytes <= to.bytes,
            "download of {bytes} bytes at {offset} to {}",
            to.bytes
        );
        // SAFETY: the caller's; the range is checked.
        unsafe {
            let to = to.address.add(offset).cast::<c_void>();
            driver!(cuMemcpyDtoHAsync_v2(to, from, bytes, self.stream))
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created once; queued work is finished first so that no copy outlives its memory.
        unsafe {
            let _ = sys::cuStreamSynchronize(self.stream);
            let _ = sys::cuStreamDestroy_v2(self.stream);
        }
    }
}

/// A point in a stream.
pub struct Event {
    event: sys::CUevent,
    _context: Arc<Context>,
}

// SAFETY: a driver handle, usable from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event that has not been recorded; waiting for it returns at once.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let mut event = ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { driver!(cuEventCreate(&mut event, 0))? };
        Ok(Event { event, _context: context.clone() })
    }

    /// Marks the point that the stream's queue has reached.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: live handles.
        unsafe { driver!(cuEventRecord(self.event, stream.stream)) }
    }

    /// Waits until the stream has passed the point.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: a live handle.
        unsafe { driver!(cuEventSynchronize(self.event)) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
    }
}
