//! Launches of kernels.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::Ordering;

use cudarc::driver::sys;

use super::{Function, Result, Stream, check};

impl Stream {
    /// Queues a kernel with `shared` bytes of dynamic shared memory.
    ///
    /// # Safety
    /// `arguments` point to values of the kernel's parameter types, in order, and every address among them is of
    /// live memory as large as the kernel uses.
    pub unsafe fn launch(
        &self,
        function: Function,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let mut attributes = [overlapping()];
        let attributes = &mut attributes[..usize::from(self.overlap)];
        // SAFETY: the caller's.
        unsafe { self.launch_with(attributes, function, grid, threads, shared, arguments) }
    }

    /// The same in clusters of two blocks along x, of which there is an even number; only where kernels overlap.
    ///
    /// # Safety
    /// As for [`Stream::launch`].
    pub unsafe fn launch_pairs(
        &self,
        function: Function,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
        value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: 2, y: 1, z: 1 };
        let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        let pairs = sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let mut attributes = [overlapping(), pairs];
        // SAFETY: the caller's.
        unsafe { self.launch_with(&mut attributes, function, grid, threads, shared, arguments) }
    }

    /// Queues a kernel whose `blocks` blocks wait for each other: it starts when all of them fit on the device.
    ///
    /// # Safety
    /// As for [`Stream::launch`].
    pub unsafe fn launch_together(
        &self,
        function: Function,
        blocks: u32,
        threads: u32,
        shared: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { cooperative: 1 },
        };
        let grid = [blocks, 1, 1];
        // SAFETY: the caller's.
        unsafe { self.launch_with(&mut [attribute], function, grid, threads, shared, arguments) }
    }

    /// # Safety
    /// As for [`Stream::launch`].
    unsafe fn launch_with(
        &self,
        attributes: &mut [sys::CUlaunchAttribute],
        function: Function,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.stream,
            numAttrs: attributes.len() as u32,
            attrs: attributes.as_mut_ptr(),
        };
        function.launched.store(true, Ordering::Relaxed);
        let (function, arguments) = (function.function, arguments.as_mut_ptr());
        // SAFETY: the caller's; the attributes outlive the call.
        unsafe { driver!(cuLaunchKernelEx(&config, function, arguments, ptr::null_mut())) }
    }
}

/// Lets a kernel start while its predecessor drains.
fn overlapping() -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}
