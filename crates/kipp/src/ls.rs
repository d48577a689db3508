//! `kipp ls`: the registry, and what of it is here.

use anyhow::Result;
use model::registry::CHECKPOINTS;
use model::{Checkpoint, Model, Scheme};
use serde_json::{Value, json};

use crate::gates;
use crate::output::{complain, origin, print, size};
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
    /// Where its weights come from, or why it cannot be used.
    model: Result<String, String>,
    /// Backends whose gates ran here, and whether all held.
    gates: Vec<(String, bool)>,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let mut rows = Vec::new();
    let mut values = Vec::new();
    for checkpoint in &CHECKPOINTS {
        let here = files(checkpoint)?;
        let unfinished = hub::pull::is_unfinished(&store::folder()?, checkpoint);
        rows.push(row(checkpoint, &here, unfinished));
        values.push(value(checkpoint, &here, unfinished));
    }
    if args.json {
        return print(&format!("{}\n", Value::Array(values)));
    }
    if values.iter().all(|value| value["files"].as_array().is_some_and(Vec::is_empty)) {
        let folder = store::folder()?;
        complain(&format!(
            "{} holds no models; `kipp pull MODEL:SCHEME` brings one, e.g. qwen3-0.6b:q8_0",
            folder.display()
        ));
    }
    let mut text = format!("{:<24} {:>7} {:>9}  {}\n", "MODEL", "CONTEXT", "BF16", "HERE");
    rows.iter().for_each(|row| text += row);
    print(&text)
}

/// The files of a checkpoint in the models' folder.
fn files(checkpoint: &Checkpoint) -> Result<Vec<Here>> {
    let mut here = Vec::new();
    for scheme in Scheme::ALL {
        let path = store::path_of(checkpoint, scheme)?;
        if let Ok(metadata) = path.metadata() {
            let model = Model::open(&path).map(|model| origin(&model));
            let model = model.map_err(|error| error.to_string());
            let gates = gates::known(&path);
            here.push(Here { scheme, bytes: metadata.len(), model, gates });
        }
    }
    Ok(here)
}

fn row(checkpoint: &Checkpoint, here: &[Here], unfinished: bool) -> String {
    let mut files: Vec<String> = Vec::new();
    if checkpoint.id == BUILTIN {
        files.push("built in".into());
    }
    files.extend(here.iter().map(|file| {
        let mut parts = vec![size(file.bytes)];
        match &file.model {
            Ok(origin) if origin.contains(checkpoint.revision) => {}
            Ok(origin) => parts.push(origin.clone()),
            Err(fault) => parts.push(format!("unusable: {fault}")),
        }
        if file.gates.is_empty() {
            parts.push("gates not run".into());
        }
        for (backend, held) in &file.gates {
            parts.push(format!("{backend} gates {}", if *held { "hold" } else { "FAIL" }));
        }
        format!("{} ({})", file.scheme.name(), parts.join("; "))
    }));
    if unfinished {
        files.push("an unfinished pull".into());
    }
    let files = if files.is_empty() { "-".to_string() } else { files.join(", ") };
    let weights = size(2 * checkpoint.spec.matrix_weights() as u64);
    format!("{:<24} {:>7} {weights:>9}  {files}\n", checkpoint.id, checkpoint.spec.context)
}

fn value(checkpoint: &Checkpoint, here: &[Here], unfinished: bool) -> Value {
    let file = |file: &Here| {
        let gates: serde_json::Map<String, Value> =
            file.gates.iter().map(|(backend, held)| (backend.clone(), json!(held))).collect();
        json!({
            "scheme": file.scheme.name(),
            "bytes": file.bytes,
            "origin": file.model.as_ref().ok(),
            "fault": file.model.as_ref().err(),
            "gates": gates,
        })
    };
    json!({
        "id": checkpoint.id,
        "repository": checkpoint.repository,
        "revision": checkpoint.revision,
        "context": checkpoint.spec.context,
        "parameters": checkpoint.spec.matrix_weights(),
        "built_in": checkpoint.id == BUILTIN,
        "unfinished_pull": unfinished,
        "files": here.iter().map(file).collect::<Vec<_>>(),
    })
}
