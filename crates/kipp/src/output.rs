//! Printing that survives a closed pipe.

use std::io::{self, ErrorKind, Write};

use anyhow::Result;

/// Writes to stdout and flushes, so that a stream is seen as it grows.
pub fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Writes a line to stderr; there is nobody to tell if that fails.
pub fn complain(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Whether an error only says that the reader of our output is gone.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
}

/// Bytes in the unit that suits them, e.g. `1.5 GB`.
pub fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for larger in ["kB", "MB", "GB", "TB"] {
        if value < 999.5 {
            break;
        }
        value /= 1000.0;
        unit = larger;
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.3$} {unit}", unit = unit, value = value, 3 = if value < 9.95 { 1 } else { 0 }) }
}
