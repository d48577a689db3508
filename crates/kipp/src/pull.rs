//! `kipp pull`: the pinned revision of a checkpoint is fetched, checked and converted.

use std::path::Path;

use anyhow::Result;
use hub::Hub;
use hub::pull::Stage;
use model::{Checkpoint, Model, Scheme, layout};

use crate::output::{complain, print, size, wrong_usage};
use crate::progress::Meter;
use crate::store::{self, BUILTIN, Reference, parse_scheme};

/// Downloads a checkpoint's pinned revision and converts it.
#[derive(clap::Args)]
pub struct Args {
    /// Registry id with an optional :scheme
    model: String,
    /// How the projections are stored: bf16, q8_0, q4_1 or q4_0
    #[arg(long)]
    scheme: Option<String>,
    /// How the embedding and the head are stored; q8_0 if the projections are quantised, else bf16
    #[arg(long)]
    head: Option<String>,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let Reference::Registered(checkpoint, named) = Reference::parse(Some(&args.model))? else {
        return Err(wrong_usage(format!(
            "model: expected a registry id, as `kipp ls` lists them, found `{}`",
            args.model
        )));
    };
    let wanted = args.scheme.as_deref().map(|name| parse_scheme("--scheme", name)).transpose()?;
    let scheme = agreed(named, wanted)?;
    let schemes = store::schemes(scheme.unwrap_or(Scheme::Bf16), args.head.as_deref())?;
    let out = store::path_of(checkpoint, schemes.0)?;
    if out.exists() {
        store::open_kept(checkpoint, &out)?;
        return print(&format!("{} is here\n", out.display()));
    }
    if checkpoint.id == BUILTIN && schemes.0 == Scheme::Bf16 {
        return print(&format!("{BUILTIN} is built in\n"));
    }
    store::made_folder()?;
    if checkpoint.id == BUILTIN {
        hub::quantize(&Model::builtin()?, schemes, None, &out, |_, _| {})?;
    } else {
        if scheme.is_none() {
            tell_schemes(checkpoint);
        }
        download(checkpoint, schemes, &out)?;
    }
    print(&format!("{}\n", out.display()))
}

/// The scheme that the model's name or the flag says, if either does.
fn agreed(named: Option<Scheme>, wanted: Option<Scheme>) -> Result<Option<Scheme>> {
    match (named, wanted) {
        (Some(named), Some(wanted)) if named != wanted => Err(wrong_usage(format!(
            "--scheme: expected {}, as the model says, found {}",
            named.name(),
            wanted.name()
        ))),
        (named, wanted) => Ok(named.or(wanted)),
    }
}

/// Says what could have been asked for, with its size.
fn tell_schemes(checkpoint: &Checkpoint) {
    let sized = |scheme: Scheme| {
        let bytes = layout::bytes(&checkpoint.spec, scheme, scheme.default_head());
        format!("{} {}", scheme.name(), size(bytes))
    };
    complain(&format!(
        "no scheme named: bf16 it is, as published; {}:SCHEME names one of {}",
        checkpoint.id,
        Scheme::ALL.map(sized).join(", "),
    ));
}

/// Brings the checkpoint to `out`, and tells what its files were not checked for.
fn download(checkpoint: &'static Checkpoint, schemes: (Scheme, Scheme), out: &Path) -> Result<()> {
    // Whatever has come is journalled, so that ending at once loses nothing.
    ctrlc::set_handler(|| {
        complain("\nkipp: stopped; what has come is kept, run it again to go on");
        std::process::exit(1);
    })?;
    let mut meter = Meter::new();
    let mut progress = |stage, done, total| {
        let what = match stage {
            Stage::Fetching => "fetching",
            Stage::Converting => "converting",
        };
        meter.show(what, done, total);
    };
    let pulled = hub::pull(&Hub::from_env(), checkpoint, schemes, out, &mut progress)?;
    meter.end();
    if let Some(cache) = pulled.cache {
        complain(&format!("taken from {}, hashes as the hub tells them", cache.display()));
    }
    for file in pulled.unhashed {
        complain(&format!("{file}: the hub told no hash; only its form was checked"));
    }
    Model::open(out)?;
    Ok(())
}
