//! Files and buffers as memory mappings. The only unsafe code of the crate.

#![allow(unsafe_code, reason = "mapping a file is unsafe; it is done here only")]

use std::fs::File;
use std::ops::Range;
use std::path::Path;

#[cfg(unix)]
use memmap2::UncheckedAdvice;
use memmap2::{Mmap, MmapMut};

use crate::error::{Error, Result};
use crate::tensor::{Bytes, Owner};

/// Maps a file for reading. Nothing is read until it is looked at.
///
/// The file has to stay as it is: a change becomes visible in the mapping, and a page that is cut
/// off can no longer be read.
pub fn map(path: &Path) -> Result<Bytes> {
    let open = || {
        // Before opening, because opening a pipe would wait for its other end.
        if !path.metadata()?.is_file() {
            return Err(std::io::Error::other("not a regular file"));
        }
        let file = File::open(path)?;
        // SAFETY: the mapping is read-only and private to this process. That nobody truncates a
        // model under a running engine is a condition of use, stated above.
        unsafe { Mmap::map(&file) }
    };
    Ok(Bytes::owned(Mapping(open().map_err(|error| Error::Io(error).in_file(path))?)))
}

/// A mapped file.
struct Mapping(Mmap);

impl Owner for Mapping {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        {
            // Whole pages only: a page that is shared with a neighbour would only be read again.
            let (first, end) = (range.start.next_multiple_of(PAGE), range.end / PAGE * PAGE);
            if first < end {
                // SAFETY: the mapping is read-only and of a file, so that dropped pages come back with
                // the same bytes. A refusal costs only memory.
                let _ = unsafe {
                    self.0.unchecked_advise_range(UncheckedAdvice::DontNeed, first, end - first)
                };
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

/// The largest page size in use; advice is given for multiples of it.
#[cfg(unix)]
const PAGE: usize = 65536;

/// A zeroed buffer that begins at a page boundary.
pub fn buffer(len: usize) -> Result<MmapMut> {
    Ok(MmapMut::map_anon(len)?)
}
