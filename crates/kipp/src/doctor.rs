//! `kipp doctor`: what this machine has, and what fits on it.

use anyhow::Result;
use engine::{KvConfig, KvKind};
use model::layout;
use model::registry::CHECKPOINTS;
use model::{Checkpoint, Scheme};
use serde_json::json;

use crate::backends;
use crate::machine;
use crate::options::parse_size;
use crate::output::{print, size};

/// Says what this machine has and what fits on it.
#[derive(clap::Args)]
pub struct Args {
    /// Positions in the KV cache that "fits" allows for
    #[arg(long, default_value = "4096", value_parser = parse_size)]
    ctx: usize,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let memory = machine::available_memory();
    let class = format!("{:?}", cpu::Class::best());
    let classes: Vec<String> = cpu::Class::available().iter().map(|c| format!("{c:?}")).collect();
    let cuda = backends::cuda_devices();
    let lines = |gpus: &Vec<backends::Gpu>| gpus.iter().map(|gpu| gpu.line.clone()).collect();
    // A GPU behind Metal has the processor's memory.
    let gpus = [
        ("cuda", cuda.as_ref().map(lines).map_err(String::clone)),
        ("metal", backends::metal_devices()),
    ];
    // What is known of the memory that models may take: the processor's, then each GPU's.
    let memories = || cuda.iter().flatten().map(|gpu| (gpu.name.clone(), Some(gpu.memory)));
    let places: Vec<(String, Option<u64>)> =
        [("processor".to_string(), memory)].into_iter().chain(memories()).collect();
    let best = |checkpoint: &Checkpoint, memory: Option<u64>| {
        let fits = |scheme: &Scheme| {
            memory.is_none_or(|free| needed(checkpoint, *scheme, args.ctx) <= free)
        };
        Scheme::ALL.into_iter().find(fits)
    };
    if args.json {
        let devices = |found: &Result<Vec<String>, String>| match found {
            Ok(devices) => json!({ "devices": devices }),
            Err(why) => json!({ "unavailable": why }),
        };
        let models = CHECKPOINTS.iter().map(|c| {
            let fits = places.iter().map(|(place, memory)| {
                let scheme = best(c, *memory);
                json!({
                    "on": place,
                    "largest_scheme": scheme.map(Scheme::name),
                    "bytes": scheme.map(|scheme| needed(c, scheme, args.ctx)),
                })
            });
            json!({ "id": c.id, "fits": fits.collect::<Vec<_>>() })
        });
        let report = json!({
            "processor": machine::processor(),
            "threads": cpu::default_threads(),
            "instructions": class,
            "instruction_classes": classes,
            "available_memory_bytes": memory,
            "cuda": devices(&gpus[0].1),
            "metal": devices(&gpus[1].1),
            "context": args.ctx,
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
    text += &format!("\nlargest scheme that fits with {} positions:\n  {:<24}", args.ctx, "");
    places.iter().for_each(|(place, _)| text += &format!(" {place:<20}"));
    for checkpoint in &CHECKPOINTS {
        text += &format!("\n  {:<24}", checkpoint.id);
        for (_, memory) in &places {
            let fit = match best(checkpoint, *memory) {
                Some(scheme) => {
                    format!("{} ({})", scheme.name(), size(needed(checkpoint, scheme, args.ctx)))
                }
                None => "none".to_string(),
            };
            text += &format!(" {fit:<20}");
        }
    }
    print(&(text + "\n"))
}

/// Bytes of weights and KV cache.
fn needed(checkpoint: &Checkpoint, scheme: Scheme, context: usize) -> u64 {
    let weights = layout::bytes(&checkpoint.spec, scheme, scheme.default_head());
    let kv = KvConfig::for_positions(context, KvKind::Bf16).bytes(checkpoint.spec.layers);
    weights + kv
}
