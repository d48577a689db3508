//! `kipp pull`: the pinned revision of a checkpoint is fetched, checked and converted.

use anyhow::Result;
use hub::Hub;
use hub::pull::Stage;
use model::{Model, Scheme, layout};

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
    let scheme =
        match (named, args.scheme.as_deref().map(|s| parse_scheme("--scheme", s)).transpose()?) {
            (Some(named), Some(scheme)) if named != scheme => {
                let (named, scheme) = (named.name(), scheme.name());
                return Err(wrong_usage(format!(
                    "--scheme: expected {named}, as the model says, found {scheme}"
                )));
            }
            (named, scheme) => named.or(scheme),
        };
    let unsaid = scheme.is_none();
    let scheme = scheme.unwrap_or(Scheme::Bf16);
    let schemes = store::schemes(scheme, args.head.as_deref())?;
    let out = store::path_of(checkpoint, scheme)?;
    if out.exists() {
        Model::open(&out)?;
        return print(&format!("{} is here\n", out.display()));
    }
    store::made_folder()?;
    let mut meter = Meter::new();
    if checkpoint.id == BUILTIN {
        if scheme == Scheme::Bf16 {
            return print(&format!("{BUILTIN} is built in\n"));
        }
        hub::quantize(&Model::builtin()?, schemes, None, &out, |done, total| {
            meter.show("converting", done, total);
        })?;
        return print(&format!("{}\n", out.display()));
    }
    if unsaid {
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
    // Whatever has come is journalled, so that ending at once loses nothing.
    ctrlc::set_handler(|| {
        complain("\nkipp: stopped; what has come is kept, run it again to go on");
        std::process::exit(1);
    })?;
    let pulled =
        hub::pull(&Hub::from_env(), checkpoint, schemes, &out, &mut |stage, done, total| {
            let what = match stage {
                Stage::Fetching => "fetching",
                Stage::Converting => "converting",
            };
            meter.show(what, done, total);
        })?;
    meter.end();
    if let Some(cache) = pulled.cache {
        complain(&format!("taken from {}, hashes as the hub tells them", cache.display()));
    }
    for file in pulled.unhashed {
        complain(&format!("{file}: the hub told no hash; only its form was checked"));
    }
    Model::open(&out)?;
    print(&format!("{}\n", out.display()))
}
