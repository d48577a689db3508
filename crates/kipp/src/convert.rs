//! `kipp convert`: a published folder of safetensors becomes one GGUF file.

use std::path::PathBuf;

use anyhow::Result;
use model::Origin;

use crate::output::{check_target, complain};
use crate::progress::Meter;
use crate::store::{parse_id, parse_scheme, schemes};

/// Converts a published folder of safetensors to GGUF.
#[derive(clap::Args)]
pub struct Args {
    /// Folder with config.json, tokenizer.json and the safetensors files
    #[arg(required_unless_present = "synthetic")]
    dir: Option<PathBuf>,
    /// Make weights up instead, with the checkpoint's dimensions, to measure with
    #[arg(long, conflicts_with = "dir")]
    synthetic: bool,
    /// Registry id of the checkpoint that the folder holds
    #[arg(long)]
    checkpoint: String,
    /// How the projections are stored: bf16, q8_0, q4_1 or q4_0
    #[arg(long, default_value = "bf16")]
    scheme: String,
    /// How the embedding and the head are stored; q8_0 if the projections are quantised, else bf16
    #[arg(long)]
    head: Option<String>,
    /// The file to write
    #[arg(long)]
    out: PathBuf,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    check_target("--out", &args.out)?;
    let checkpoint = parse_id("--checkpoint", &args.checkpoint)?;
    let schemes = schemes(parse_scheme("--scheme", &args.scheme)?, args.head.as_deref())?;
    let mut meter = Meter::new();
    let progress = |done, total| meter.show("converting", done, total);
    let unproven = match &args.dir {
        Some(dir) => {
            let origin = hub::convert(dir, checkpoint, schemes, &args.out, progress)?;
            matches!(origin, Origin::Unproven { .. })
        }
        None => {
            model::synthetic::write(&args.out, checkpoint, schemes, 0, progress)?;
            false
        }
    };
    meter.end();
    if unproven {
        complain(&format!(
            "dimensions, tensors and tokenizer are {}'s; nothing shows whether the weights are those of its revision {}",
            checkpoint.id, checkpoint.revision
        ));
    }
    Ok(())
}
