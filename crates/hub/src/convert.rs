//! From a published folder to a GGUF.

use std::fmt::Write as _;
use std::path::Path;
use std::thread;

use model::{Checkpoint, Error, Origin, Result, Scheme, source};
use sha2::{Digest, Sha256};

use crate::folder::Folder;

/// Converts a published folder to a GGUF in which projections and head are stored as `schemes`
/// says. `progress` is told the bytes of tensors written so far and in all.
pub fn convert(
    dir: &Path,
    checkpoint: &'static Checkpoint,
    schemes: (Scheme, Scheme),
    out: &Path,
    progress: impl FnMut(u64, u64),
) -> Result<()> {
    let folder = Folder::open(dir, checkpoint)?;
    let sha256 = digests(&folder)?;
    source::write(out, checkpoint, schemes, &Origin::Pinned { sha256 }, &folder, progress)
}

/// `<SHA-256>  <file name>` of every file, each hashed by its own thread.
fn digests(folder: &Folder) -> Result<Vec<String>> {
    let digest = |path: &Path| {
        let bytes = model::map(path)?;
        let mut line = String::new();
        for byte in Sha256::digest(&*bytes) {
            write!(line, "{byte:02x}").expect("writing to a string cannot fail");
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Ok::<_, Error>(line + "  " + &name)
    };
    thread::scope(|scope| {
        let workers: Vec<_> =
            folder.files.iter().map(|path| scope.spawn(|| digest(path))).collect();
        let join = |worker: thread::ScopedJoinHandle<_>| match worker.join() {
            Ok(line) => line,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        workers.into_iter().map(join).collect()
    })
}
