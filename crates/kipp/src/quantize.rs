//! `kipp quantize`: a GGUF in 16 bits becomes one in fewer.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use hub::Importance;
use model::Scheme;

use crate::output::{check_target, print};
use crate::progress::Meter;
use crate::store::{self, Reference, parse_scheme};

/// Stores the weights of a 16-bit GGUF in fewer bits.
#[derive(clap::Args)]
pub struct Args {
    /// A GGUF with bf16 or f16 weights, or a registry id
    model: String,
    /// How the projections are to be stored: q8_0, q4_1 or q4_0; bf16 makes kipp's own file of a foreign one
    #[arg(long)]
    scheme: String,
    /// How the embedding and the head are stored; q8_0 if the projections are quantised, else bf16
    #[arg(long)]
    head: Option<String>,
    /// What `kipp imatrix` wrote: 4-bit errors are weighted by it
    #[arg(long)]
    imatrix: Option<PathBuf>,
    /// The file to write; beside the model, named after the scheme, if left out
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let reference = Reference::parse(Some(&args.model))?;
    let model = reference.open()?;
    let scheme = parse_scheme("--scheme", &args.scheme)?;
    let schemes = store::schemes(scheme, args.head.as_deref())?;
    let out = match (args.out, &reference) {
        (Some(out), _) => out,
        (None, Reference::File(path)) => beside(path, scheme)?,
        (None, Reference::Registered(checkpoint, _)) => {
            store::made_folder()?;
            store::path_of(checkpoint, scheme)?
        }
    };
    check_target("--out", &out)?;
    let importance = args.imatrix.as_deref().map(|path| Importance::read(path, model.spec()));
    let importance = importance.transpose()?;
    let mut meter = Meter::new();
    hub::quantize(&model, schemes, importance.as_ref(), &out, |done, total| {
        meter.show("quantising", done, total);
    })?;
    meter.end();
    print(&format!("{}\n", out.display()))
}

/// `qwen3-4b-q4_0.gguf` for `qwen3-4b-bf16.gguf` or `qwen3-4b.gguf`.
fn beside(path: &Path, scheme: Scheme) -> Result<PathBuf> {
    let stem = path.file_stem().and_then(|stem| stem.to_str());
    let stem = stem.with_context(|| format!("{}: expected a name in UTF-8", path.display()))?;
    let plain = ["-bf16", "-BF16", "-f16", "-F16"].iter().find_map(|end| stem.strip_suffix(end));
    Ok(path.with_file_name(format!("{}-{}.gguf", plain.unwrap_or(stem), scheme.name())))
}
