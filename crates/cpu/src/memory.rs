//! Memory that phases of a step share between threads.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Large allocations start at a huge page and ask for huge pages: fewer faults when they are filled
/// and fewer misses of the address translation when they are streamed.
const HUGE: usize = 2 << 20;
const CACHE_LINE: usize = 64;

/// A zeroed array whose elements threads write in turns: each phase of a step gives every element at
/// most one writer, and a barrier lies between a write and any other access.
pub struct Shared<T> {
    start: NonNull<T>,
    layout: Layout,
    len: usize,
    _owns: PhantomData<T>,
}

// SAFETY: the type hands out raw pointers only; whoever follows them upholds the discipline above.
unsafe impl<T: Copy + Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Copy + Send> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    /// `len` zeroed elements; `T` must be a plain number.
    pub fn new(len: usize) -> Self {
        let bytes = len.max(1) * size_of::<T>();
        let align = if bytes >= HUGE { HUGE } else { CACHE_LINE };
        // Whole alignment units, so that vectors may read past the last element.
        let Ok(layout) = Layout::from_size_align(bytes.next_multiple_of(align), align) else {
            panic!("an array of {bytes} bytes is larger than the address space");
        };
        // SAFETY: the size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        #[cfg(target_os = "linux")]
        if bytes >= HUGE {
            // SAFETY: the range is ours; the advice changes no byte. A refusal costs only speed.
            unsafe { libc::madvise(start.as_ptr().cast(), layout.size(), libc::MADV_HUGEPAGE) };
        }
        Shared { start: start.cast(), layout, len, _owns: PhantomData }
    }

    /// Pointer to element `index`, which may be one past the end.
    pub fn at(&self, index: usize) -> *mut T {
        debug_assert!(index <= self.len, "{index} of {}", self.len);
        // SAFETY: inside the allocation or one past its end.
        unsafe { self.start.as_ptr().add(index) }
    }

    /// Bytes of the allocation.
    pub fn bytes(&self) -> usize {
        self.layout.size()
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`.
        unsafe { dealloc(self.start.as_ptr().cast(), self.layout) }
    }
}
