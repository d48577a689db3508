//! SHA-256 of files, in the form that sha256sum prints.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::thread;

use model::{Error, Result};
use sha2::{Digest, Sha256};

/// `<SHA-256>  <file name>`.
pub(crate) fn line(sha256: &str, path: &Path) -> String {
    format!("{sha256}  {}", path.file_name().unwrap_or_default().to_string_lossy())
}

/// The SHA-256 of every file, each hashed by its own thread.
pub(crate) fn of_files(files: &[PathBuf]) -> Result<Vec<String>> {
    let digest = |path: &Path| {
        let bytes = model::map(path)?;
        let digest = Sha256::digest(&*bytes);
        bytes.check()?;
        Ok::<_, Error>(hexadecimal(&digest))
    };
    thread::scope(|scope| {
        let workers: Vec<_> = files.iter().map(|path| scope.spawn(|| digest(path))).collect();
        let join = |worker: thread::ScopedJoinHandle<_>| match worker.join() {
            Ok(line) => line,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        workers.into_iter().map(join).collect()
    })
}

/// Bytes in lower-case hexadecimal.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        write!(text, "{byte:02x}").expect("writing to a string cannot fail");
    }
    text
}
