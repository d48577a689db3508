//! What devices there are, and the context of the one that is used.

use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use engine::BackendError;

use super::{Result, check};

/// Machine code of a CUDA 13 compiler needs a driver of that major version.
const DRIVER_VERSION: i32 = 13_000;

/// A device that the driver lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its number, for `--device`.
    pub ordinal: usize,
    /// The driver's name of it.
    pub name: String,
    /// Bytes of its memory.
    pub memory: u64,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: i32,
}

/// Loads the driver and starts it.
fn start() -> Result<()> {
    let unavailable = |why: &str| Err(BackendError::Unavailable(why.into()));
    // SAFETY: loading the driver's library runs its initialisers, which is what it is for.
    if !unsafe { sys::is_culib_present() } {
        return unavailable("no NVIDIA driver (libcuda) on this machine");
    }
    // SAFETY: the library is present; cuInit has no preconditions.
    if let Err(error) = unsafe { driver!(cuInit(0)) } {
        return unavailable(&format!("the NVIDIA driver does not start ({error})"));
    }
    let mut version = 0;
    // SAFETY: writes one integer.
    unsafe { driver!(cuDriverGetVersion(&mut version))? };
    if version < DRIVER_VERSION {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        return unavailable(&format!(
            "the NVIDIA driver serves CUDA {major}.{minor}, kipp needs 13.0 or later"
        ));
    }
    Ok(())
}

/// All devices of this machine.
pub fn devices() -> Result<Vec<Device>> {
    start()?;
    let mut count = 0;
    // SAFETY: the driver is started; writes one integer.
    unsafe { driver!(cuDeviceGetCount(&mut count))? };
    (0..count as usize).map(describe).collect()
}

fn describe(ordinal: usize) -> Result<Device> {
    let mut device = 0;
    let mut name = [0; 128];
    let mut memory = 0;
    // SAFETY: each call writes to a local of the type and length that it is told.
    unsafe {
        driver!(cuDeviceGet(&mut device, ordinal as i32))?;
        driver!(cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device))?;
        driver!(cuDeviceTotalMem_v2(&mut memory, device))?;
    }
    // SAFETY: the driver wrote a string that ends in a zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: writes one integer.
        unsafe { driver!(cuDeviceGetAttribute(&mut value, which, device)) }.map(|()| value)
    };
    use sys::CUdevice_attribute::*;
    Ok(Device {
        ordinal,
        name,
        memory: memory as u64,
        capability: (
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
    })
}

/// The primary context of a device.
pub struct Context {
    /// What the context is of.
    pub device: Device,
    raw: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for Context {}

impl Context {
    /// Opens a device and makes it current on this thread.
    pub fn open(ordinal: usize) -> Result<Arc<Self>> {
        let found = devices()?;
        let count = found.len();
        let device = found.into_iter().nth(ordinal).ok_or_else(|| {
            BackendError::Unavailable(match count {
                0 => "the NVIDIA driver lists no device".into(),
                _ => format!("device {ordinal} of {count}, counted from 0"),
            })
        })?;
        let mut raw = 0;
        let mut context = ptr::null_mut();
        // SAFETY: both calls write to locals of their types.
        unsafe {
            driver!(cuDeviceGet(&mut raw, ordinal as i32))?;
            driver!(cuDevicePrimaryCtxRetain(&mut context, raw))?;
        }
        let context = Arc::new(Context { device, raw, context });
        context.enter()?;
        Ok(context)
    }

    /// Makes this context current on this thread; every other call needs that.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained.
        unsafe { driver!(cuCtxSetCurrent(self.context)) }
    }

    /// Bytes of device memory that are free.
    pub fn free_memory(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { driver!(cuMemGetInfo_v2(&mut free, &mut total))? };
        Ok(free as u64)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once when opened. A failure leaves nothing to do.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.raw) };
    }
}
