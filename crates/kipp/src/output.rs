//! What goes out: lines that survive a closed pipe, files that are whole, wrong usage, and words that several verbs use.

use std::error::Error;
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result};
use model::{Model, Origin, Part};

/// Writes to stdout and flushes, so that a stream is seen as it grows.
pub fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("stdout")
}

/// Writes a line to stderr; there is nobody to tell if that fails.
pub fn complain(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// A name or a flag's value that has no meaning, alone or with this model: the program exits with 2.
#[derive(Debug)]
pub struct WrongUsage(String);

impl fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for WrongUsage {}

/// Wrong usage that names the flag, what was expected and what was found.
pub fn wrong_usage(message: impl Into<String>) -> anyhow::Error {
    WrongUsage(message.into()).into()
}

/// Refuses a place where no file can be written, before the work begins whose result is to go there. A file that is
/// there stays: what takes long to make is not lost to a slip of the pen.
pub fn check_target(flag: &str, path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let expected = if path.is_dir() || folder.is_some_and(|folder| !folder.is_dir()) {
        "a file in a folder that is there"
    } else if path.exists() {
        "a name that is free"
    } else {
        return Ok(());
    };
    Err(wrong_usage(format!("{flag}: expected {expected}, found {}", path.display())))
}

/// Writes a text to a file, which appears under its name when it is whole.
pub fn write_file(path: &Path, text: &str) -> Result<()> {
    Part::write(path, text.as_bytes()).with_context(|| path.display().to_string())
}

/// Whether an error only says that the reader of our output is gone.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
}

/// Where a model's weights come from, in words.
pub fn origin(model: &Model) -> String {
    let entry = |revision| {
        let repository = model.checkpoint().map_or("", |checkpoint| checkpoint.repository);
        format!("{repository} at {revision}")
    };
    match &model.origin {
        Origin::Pinned { .. } => entry(model.checkpoint().map_or("", |c| c.revision)),
        Origin::Unproven { .. } => entry("a revision that nothing shows"),
        Origin::Synthetic { seed } => format!("synthetic, seed {seed}"),
        Origin::Foreign => "foreign, not pinned".to_string(),
    }
}

/// Bytes in the unit that suits them, e.g. `1.5 GB`.
pub fn size(bytes: u64) -> String {
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1000.0;
    let mut units = ["kB", "MB", "GB", "TB"].into_iter();
    let mut unit = units.next();
    while value >= 999.5
        && let Some(larger) = units.next()
    {
        value /= 1000.0;
        unit = Some(larger);
    }
    let decimals = usize::from(value < 99.95);
    format!("{value:.decimals$} {}", unit.unwrap_or_default())
}
