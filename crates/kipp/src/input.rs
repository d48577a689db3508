//! Texts from files and from stdin.

use std::io::{self, IsTerminal, Read};
use std::path::Path;

use anyhow::{Context, Result};

use crate::output::complain;

/// The text in a file.
pub fn read_file(path: &Path) -> Result<String> {
    let name = path.display().to_string();
    let bytes = std::fs::read(path).with_context(|| name.clone())?;
    text(&name, bytes)
}

/// The text on stdin, to its end. On a terminal somebody is told that `what` is waited for.
pub fn read_stdin(what: &str) -> Result<String> {
    let mut stdin = io::stdin().lock();
    if stdin.is_terminal() {
        complain(&format!(
            "kipp reads {what} from the terminal; Ctrl-D on a line of its own ends it"
        ));
    }
    let mut bytes = Vec::new();
    stdin.read_to_end(&mut bytes).context("stdin")?;
    text("stdin", bytes)
}

fn text(name: &str, bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow::anyhow!("{name}: expected UTF-8, found an invalid byte at offset {at}")
    })
}
