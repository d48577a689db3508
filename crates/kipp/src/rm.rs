//! `kipp rm`: removes models from the models' folder.

use std::fs;

use anyhow::{Context, Result, bail};

use crate::output::{print, size, wrong_usage};
use crate::store::{self, Reference};

/// Removes a checkpoint's files, and what unfinished pulls left of it.
#[derive(clap::Args)]
pub struct Args {
    /// Registry id; with :scheme only that file
    model: String,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let Reference::Registered(checkpoint, scheme) = Reference::parse(Some(&args.model))? else {
        return Err(wrong_usage(format!(
            "model: expected a registry id, found `{}`; other files are yours",
            args.model
        )));
    };
    let mut text = String::new();
    if scheme.is_none() {
        // First, because it refuses while a pull is at it, whose files would be taken away.
        let bytes = hub::pull::forget(&store::folder()?, checkpoint)?;
        if bytes > 0 {
            text += &format!("an unfinished pull ({})\n", size(bytes));
        }
    }
    let _idle = hub::pull::hold(&store::folder()?, checkpoint)?;
    for scheme in store::schemes_of(scheme) {
        let path = store::path_of(checkpoint, scheme)?;
        for file in [path.clone(), store::gates_of(&path), path.with_added_extension("part")] {
            let Ok(metadata) = file.metadata() else { continue };
            fs::remove_file(&file).with_context(|| file.display().to_string())?;
            text += &format!("{} ({})\n", file.display(), size(metadata.len()));
        }
    }
    if text.is_empty() {
        bail!("model: {} is not in {}", args.model, store::folder()?.display());
    }
    print(&text)
}
