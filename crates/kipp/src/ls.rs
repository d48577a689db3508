//! `kipp ls`: the registry, and what of it is here.

use anyhow::Result;
use model::registry::CHECKPOINTS;
use model::{Checkpoint, Model, Scheme};
use serde_json::{Value, json};

use crate::output::{print, size};
use crate::store::{self, BUILTIN};

/// Lists the checkpoints that kipp runs.
#[derive(clap::Args)]
pub struct Args {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

/// A file of a checkpoint.
struct Here {
    scheme: Scheme,
    bytes: u64,
    /// Why it cannot be used, if it cannot.
    fault: Option<String>,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let mut rows = Vec::new();
    let mut values = Vec::new();
    for checkpoint in &CHECKPOINTS {
        let here = files(checkpoint)?;
        rows.push(row(checkpoint, &here));
        values.push(value(checkpoint, &here));
    }
    if args.json {
        return print(&format!("{}\n", Value::Array(values)));
    }
    let mut text = format!("{:<24} {:>7} {:>9}  {}\n", "MODEL", "CONTEXT", "WEIGHTS", "HERE");
    rows.iter().for_each(|row| text += row);
    print(&text)
}

/// The files of a checkpoint in the models' folder.
fn files(checkpoint: &Checkpoint) -> Result<Vec<Here>> {
    let mut here = Vec::new();
    for scheme in Scheme::ALL {
        let path = store::path_of(checkpoint, scheme)?;
        if let Ok(metadata) = path.metadata() {
            let fault = Model::open(&path).err().map(|error| error.to_string());
            here.push(Here { scheme, bytes: metadata.len(), fault });
        }
    }
    Ok(here)
}

/// Parameters of a checkpoint, norms left out.
fn parameters(checkpoint: &Checkpoint) -> u64 {
    let spec = &checkpoint.spec;
    let attention = 2 * spec.hidden * (spec.q_width() + spec.kv_width());
    let layer = attention + 3 * spec.hidden * spec.ffn;
    let tables = if spec.tied { 1 } else { 2 } * spec.vocab * spec.hidden;
    (spec.layers * layer + tables) as u64
}

fn row(checkpoint: &Checkpoint, here: &[Here]) -> String {
    let mut files: Vec<String> = Vec::new();
    if checkpoint.id == BUILTIN {
        files.push("built in".into());
    }
    files.extend(here.iter().map(|file| {
        let name = file.scheme.name();
        match &file.fault {
            None => format!("{name} ({})", size(file.bytes)),
            Some(fault) => format!("{name} (unusable: {fault})"),
        }
    }));
    let files = if files.is_empty() { "-".to_string() } else { files.join(", ") };
    let weights = size(2 * parameters(checkpoint));
    format!("{:<24} {:>7} {weights:>9}  {files}\n", checkpoint.id, checkpoint.spec.context)
}

fn value(checkpoint: &Checkpoint, here: &[Here]) -> Value {
    let files: Vec<Value> = here
        .iter()
        .map(|f| json!({ "scheme": f.scheme.name(), "bytes": f.bytes, "fault": f.fault }))
        .collect();
    json!({
        "id": checkpoint.id,
        "repository": checkpoint.repository,
        "revision": checkpoint.revision,
        "context": checkpoint.spec.context,
        "parameters": parameters(checkpoint),
        "built_in": checkpoint.id == BUILTIN,
        "files": files,
    })
}
