//! Which gates a model file passed on this machine: `kipp verify` notes it beside the file, `kipp ls` shows it as long as
//! file, processor and program are the same.

use std::fs;
use std::path::Path;
use std::time::UNIX_EPOCH;

use anyhow::Result;
use serde_json::{Map, Value, json};

use crate::machine;
use crate::output::write_file;
use crate::store;

/// Notes what a whole run of the gates on a backend found.
pub fn note(file: &Path, backend: &str, held: bool) -> Result<()> {
    let mut notes = read(file);
    let note = json!({ "held": held, "of": subject(file)? });
    notes.insert(backend.into(), note);
    write_file(&store::gates_of(file), &Value::Object(notes).to_string())
}

/// Backends that were checked on this file, this machine and by this program, and whether all gates held.
pub fn known(file: &Path) -> Vec<(String, bool)> {
    let Ok(subject) = subject(file) else { return Vec::new() };
    let valid = read(file).into_iter().filter(|(_, note)| note["of"] == subject);
    valid.filter_map(|(backend, note)| Some((backend, note["held"].as_bool()?))).collect()
}

fn read(file: &Path) -> Map<String, Value> {
    let text = fs::read(store::gates_of(file)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// What a note is about.
fn subject(file: &Path) -> Result<Value> {
    let metadata = file.metadata()?;
    let modified = metadata.modified()?.duration_since(UNIX_EPOCH)?.as_secs();
    Ok(json!({
        "bytes": metadata.len(),
        "modified": modified,
        "processor": machine::processor(),
        "commit": env!("KIPP_COMMIT"),
    }))
}
