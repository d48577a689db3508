//! From a published folder to a GGUF.

use std::path::{Path, PathBuf};

use model::{Checkpoint, Origin, Result, Scheme, source};

use crate::digest;
use crate::folder::Folder;

/// Converts a published folder to a GGUF in which projections and head are stored as `schemes`
/// says, and says what is known of where the folder comes from. `progress` is told the bytes of
/// tensors written so far and in all.
pub fn convert(
    dir: &Path,
    checkpoint: &'static Checkpoint,
    schemes: (Scheme, Scheme),
    out: &Path,
    progress: impl FnMut(u64, u64),
) -> Result<Origin> {
    let folder = Folder::open(dir, checkpoint)?;
    let hashes = digest::of_files(&folder.files)?;
    let proven = hashes == [checkpoint.revision]
        || is_pinned_snapshot(dir, &folder.files, &hashes, checkpoint);
    let sha256 =
        hashes.iter().zip(&folder.files).map(|(hash, path)| digest::line(hash, path)).collect();
    let origin = if proven { Origin::Pinned { sha256 } } else { Origin::Unproven { sha256 } };
    source::write(out, checkpoint, schemes, &origin, &folder, progress)?;
    Ok(origin)
}

/// Whether the folder is the pinned revision's in the cache of Hugging Face's programs, which names the folder by the
/// revision and every large file, to which the folder links, by its hash.
fn is_pinned_snapshot(
    dir: &Path,
    files: &[PathBuf],
    hashes: &[String],
    checkpoint: &Checkpoint,
) -> bool {
    let Ok(dir) = dir.canonicalize() else { return false };
    let pinned = crate::pull::snapshot(Path::new(""), checkpoint);
    dir.ends_with(pinned)
        && files.iter().zip(hashes).all(|(file, hash)| {
            file.canonicalize().is_ok_and(|target| target.ends_with(Path::new("blobs").join(hash)))
        })
}
