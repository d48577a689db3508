//! `kipp ls`: the registry, and what of it is here.

use std::path::Path;

use anyhow::Result;
use model::registry::CHECKPOINTS;
use model::{Checkpoint, Scheme};
use serde_json::{Map, Value, json};

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

/// A checkpoint of the registry, and what of it is in the models' folder.
struct Entry {
    checkpoint: &'static Checkpoint,
    files: Vec<File>,
    /// Whether a pull of it can go on.
    unfinished: bool,
}

/// A file of a checkpoint.
struct File {
    scheme: Scheme,
    bytes: u64,
    /// Where its weights come from, or why it cannot be used.
    origin: Result<String, String>,
    /// Backends whose gates ran here, and whether all held.
    gates: Vec<(String, bool)>,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let folder = store::folder()?;
    let entries = CHECKPOINTS.iter().map(|checkpoint| Entry::new(checkpoint, &folder));
    let entries = entries.collect::<Result<Vec<_>>>()?;
    if args.json {
        return print(&format!("{}\n", entries.iter().map(Entry::value).collect::<Value>()));
    }
    if entries.iter().all(|entry| entry.files.is_empty()) {
        complain(&format!(
            "{} holds no models; `kipp pull MODEL:SCHEME` brings one, e.g. qwen3-0.6b:q8_0",
            folder.display()
        ));
    }
    let mut text = format!("{:<24} {:>7} {:>9}  {}\n", "MODEL", "CONTEXT", "BF16", "HERE");
    entries.iter().for_each(|entry| text += &entry.row());
    print(&text)
}

impl Entry {
    fn new(checkpoint: &'static Checkpoint, folder: &Path) -> Result<Self> {
        let mut files = Vec::new();
        for scheme in Scheme::ALL {
            files.extend(File::find(checkpoint, &store::path_of(checkpoint, scheme)?, scheme));
        }
        let unfinished = hub::pull::is_unfinished(folder, checkpoint);
        Ok(Entry { checkpoint, files, unfinished })
    }

    fn row(&self) -> String {
        let Entry { checkpoint, files, unfinished } = self;
        let mut here = Vec::new();
        if checkpoint.id == BUILTIN {
            here.push("built in".to_string());
        }
        here.extend(files.iter().map(|file| file.text(checkpoint)));
        if *unfinished {
            here.push("an unfinished pull".into());
        }
        let here = if here.is_empty() { "-".to_string() } else { here.join(", ") };
        let weights = size(2 * checkpoint.spec.matrix_weights() as u64);
        format!("{:<24} {:>7} {weights:>9}  {here}\n", checkpoint.id, checkpoint.spec.context)
    }

    fn value(&self) -> Value {
        let Entry { checkpoint, files, unfinished } = self;
        json!({
            "id": checkpoint.id,
            "repository": checkpoint.repository,
            "revision": checkpoint.revision,
            "context": checkpoint.spec.context,
            "parameters": checkpoint.spec.matrix_weights(),
            "built_in": checkpoint.id == BUILTIN,
            "unfinished_pull": unfinished,
            "files": files.iter().map(File::value).collect::<Vec<_>>(),
        })
    }
}

impl File {
    /// The file at this path, if there is one.
    fn find(checkpoint: &Checkpoint, path: &Path, scheme: Scheme) -> Option<Self> {
        let bytes = path.metadata().ok()?.len();
        let origin = store::open_kept(checkpoint, path).map(|model| origin(&model));
        let origin = origin.map_err(|error| error.to_string());
        Some(File { scheme, bytes, origin, gates: gates::known(path) })
    }

    fn text(&self, checkpoint: &Checkpoint) -> String {
        let mut parts = vec![size(self.bytes)];
        match &self.origin {
            Ok(origin) if origin.contains(checkpoint.revision) => {}
            Ok(origin) => parts.push(origin.clone()),
            Err(fault) => parts.push(format!("unusable: {fault}")),
        }
        if self.gates.is_empty() {
            parts.push("gates not run".into());
        }
        for (backend, held) in &self.gates {
            parts.push(format!("{backend} gates {}", if *held { "hold" } else { "FAIL" }));
        }
        format!("{} ({})", self.scheme.name(), parts.join("; "))
    }

    fn value(&self) -> Value {
        let gates = self.gates.iter().map(|(backend, held)| (backend.clone(), json!(held)));
        json!({
            "scheme": self.scheme.name(),
            "bytes": self.bytes,
            "origin": self.origin.as_ref().ok(),
            "fault": self.origin.as_ref().err(),
            "gates": gates.collect::<Map<_, _>>(),
        })
    }
}
