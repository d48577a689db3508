//! Files and buffers as memory mappings. The only unsafe code of the crate is here and in [`guard`].

#![allow(unsafe_code, reason = "mapping a file is unsafe; it is done here only")]

#[cfg(unix)]
mod guard;

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

#[cfg(unix)]
use memmap2::UncheckedAdvice;
use memmap2::{Mmap, MmapMut};

use crate::error::{Error, Result};
use crate::tensor::{Bytes, Owner};

/// Maps a file for reading. Nothing is read until it is looked at.
///
/// The file has to stay as it is: a change becomes visible in the mapping. If it is cut off, what is gone
/// reads as zeros and [`Bytes::check`] tells.
pub fn map(path: &Path) -> Result<Bytes> {
    let open = || {
        // Before opening, because opening a pipe would wait for its other end.
        let metadata = path.metadata()?;
        if !metadata.is_file() {
            let found = if metadata.is_dir() { "a folder" } else { "a pipe or a device" };
            return Err(Error::mismatch("kind", "a regular file", found));
        }
        let file = File::open(path)?;
        // SAFETY: the mapping is read-only and private to this process. That nobody writes to a model under a
        // running engine is a condition of use, stated above; one that is cut off is guarded against.
        Ok(unsafe { Mmap::map(&file) }?)
    };
    let map = open().map_err(|error| error.in_file(path))?;
    Ok(Bytes::owned(Mapping {
        #[cfg(unix)]
        guard: guard::Guard::new(&map),
        map,
        path: path.to_owned(),
    }))
}

/// A mapped file.
struct Mapping {
    // Dropped first: what is no longer mapped is not watched.
    #[cfg(unix)]
    guard: guard::Guard,
    map: Mmap,
    path: PathBuf,
}

impl Owner for Mapping {
    fn bytes(&self) -> &[u8] {
        &self.map
    }

    fn check(&self) -> Result<()> {
        #[cfg(unix)]
        if self.guard.lost() {
            let (field, expected) = ("size while in use", format!("{} bytes", self.map.len()));
            return Err(Error::mismatch(field, expected, "fewer").in_file(&self.path));
        }
        Ok(())
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
                    self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, first, end - first)
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
