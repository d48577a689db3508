//! Memory that phases of a step share between threads.

use std::marker::PhantomData;
use std::ptr::NonNull;

use engine::BackendError;
use memmap2::MmapMut;

/// Large allocations start at a huge page and ask for huge pages: fewer faults when they are filled
/// and fewer misses of the address translation when they are streamed.
const HUGE: usize = 2 << 20;
/// What the activations' memory is for.
pub const BUFFERS: &str = "the forward pass";

/// A zeroed array, resident only where it was written, whose elements threads write in turns: each phase of a step gives every element at
/// most one writer, and a barrier lies between a write and any other access.
pub struct Shared<T> {
    start: NonNull<T>,
    len: usize,
    mapping: MmapMut,
    _holds: PhantomData<T>,
}

// SAFETY: the type hands out raw pointers only; whoever follows them upholds the discipline above.
unsafe impl<T: Copy + Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Copy + Send> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    /// `len` zeroed elements for a purpose; `T` must be a plain number.
    pub fn new(len: usize, purpose: &'static str) -> Result<Self, BackendError> {
        let bytes = len.max(1) * size_of::<T>();
        // Whole lines at the end, so that vectors may read past the last element.
        let size = bytes.next_multiple_of(4096) + if bytes >= HUGE { HUGE } else { 0 };
        let mut mapping = MmapMut::map_anon(size).map_err(|_| {
            let needed = size as u64;
            BackendError::Memory { purpose, needed, free: 0 }
        })?;
        let base = mapping.as_mut_ptr();
        let skip = if bytes >= HUGE { base.align_offset(HUGE) } else { 0 };
        // SAFETY: the mapping is larger than the array by as much as is skipped at most.
        let start = unsafe { NonNull::new_unchecked(base.add(skip)) };
        #[cfg(target_os = "linux")]
        if bytes >= HUGE {
            // SAFETY: the range is ours; the advice changes no byte. A refusal costs only speed.
            unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Ok(Shared { start: start.cast(), len, mapping, _holds: PhantomData })
    }

    /// Pointer to element `index`, which may be one past the end.
    pub fn at(&self, index: usize) -> *mut T {
        debug_assert!(index <= self.len, "{index} of {}", self.len);
        // SAFETY: inside the allocation or one past its end.
        unsafe { self.start.as_ptr().add(index) }
    }

    /// Bytes of the allocation.
    pub fn bytes(&self) -> usize {
        self.mapping.len()
    }
}
