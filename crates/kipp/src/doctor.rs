//! `kipp doctor`: what this machine has, and what fits on it.

use anyhow::Result;
use engine::{KvConfig, KvKind};
use model::layout;
use model::registry::CHECKPOINTS;
use model::{Checkpoint, Scheme};
use serde_json::json;

use crate::backends;
use crate::machine;
use crate::output::{print, size};

/// Says what this machine has and what fits on it.
#[derive(clap::Args)]
pub struct Args {
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// Positions that "fits" allows for.
const CONTEXT: usize = 4096;

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let memory = machine::available_memory();
    let class = format!("{:?}", cpu::Class::best());
    let classes: Vec<String> = cpu::Class::available().iter().map(|c| format!("{c:?}")).collect();
    let gpus = [("cuda", backends::cuda_devices()), ("metal", backends::metal_devices())];
    let best = |checkpoint: &Checkpoint| {
        let fits = |scheme: &Scheme| memory.is_none_or(|free| needed(checkpoint, *scheme) <= free);
        Scheme::ALL.into_iter().find(fits)
    };
    if args.json {
        let models = CHECKPOINTS
            .iter()
            .map(|c| json!({ "id": c.id, "largest_scheme_that_fits": best(c).map(Scheme::name) }));
        let devices = |found: &Result<Vec<String>, String>| match found {
            Ok(devices) => json!({ "devices": devices }),
            Err(why) => json!({ "unavailable": why }),
        };
        let report = json!({
            "processor": machine::processor(),
            "threads": cpu::default_threads(),
            "instructions": class,
            "instruction_classes": classes,
            "available_memory_bytes": memory,
            "cuda": devices(&gpus[0].1),
            "metal": devices(&gpus[1].1),
            "models": models.collect::<Vec<_>>(),
        });
        return print(&format!("{report}\n"));
    }
    let mut text = format!(
        "processor    {}, {} threads\ninstructions {class} (of {})\nmemory       {}\n",
        machine::processor(),
        cpu::default_threads(),
        classes.join(", "),
        memory.map_or("unknown".to_string(), |bytes| size(bytes) + " available"),
    );
    for (name, found) in &gpus {
        match found {
            Ok(found) => found.iter().for_each(|device| text += &format!("{name:<12} {device}\n")),
            Err(why) => text += &format!("{name:<12} {why}\n"),
        }
    }
    text += &format!("\nwith {CONTEXT} positions in memory on the processor:\n");
    for checkpoint in &CHECKPOINTS {
        let fit = match best(checkpoint) {
            Some(scheme) => {
                format!("{} ({})", scheme.name(), size(needed(checkpoint, scheme)))
            }
            None => "does not fit".to_string(),
        };
        text += &format!("  {:<24} {fit}\n", checkpoint.id);
    }
    print(&text)
}

/// Bytes of weights and KV cache.
fn needed(checkpoint: &Checkpoint, scheme: Scheme) -> u64 {
    let tensors = layout::tensors(&checkpoint.spec, scheme, scheme.default_head());
    let weights: usize = tensors.iter().map(|tensor| tensor.bytes()).sum();
    let kv = KvConfig::for_positions(CONTEXT, KvKind::Bf16).bytes(checkpoint.spec.layers);
    weights as u64 + kv
}
