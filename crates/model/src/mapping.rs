//! Files and buffers as memory mappings. The only unsafe code of the crate.

#![allow(unsafe_code)]

use std::fs::File;
use std::path::Path;

use memmap2::{Mmap, MmapMut};

use crate::error::{Error, Result};
use crate::tensor::Bytes;

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
    Ok(Bytes::new(open().map_err(|error| Error::Io(error).in_file(path))?))
}

/// A zeroed buffer that begins at a page boundary.
pub fn buffer(len: usize) -> Result<MmapMut> {
    Ok(MmapMut::map_anon(len)?)
}
