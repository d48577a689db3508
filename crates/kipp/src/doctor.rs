//! `kipp doctor`: what this machine has, and what fits on it.

use anyhow::Result;
use engine::{KvConfig, KvKind};
use model::registry::CHECKPOINTS;
use model::{Checkpoint, Scheme, layout};
use serde_json::{Value, json};

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
    let found = Found::new();
    match args.json {
        true => print(&format!("{}\n", found.report(args.ctx))),
        false => print(&(found.text(args.ctx) + "\n")),
    }
}

/// A backend's devices, or why there are none.
type Devices = Result<Vec<String>, String>;

/// What this machine has.
struct Found {
    classes: Vec<String>,
    /// Bytes of memory that are available, where that is known.
    memory: Option<u64>,
    cuda: Devices,
    metal: Devices,
    /// Where models may be and how much memory is known to be there: the processor's, then each GPU's.
    places: Vec<(String, Option<u64>)>,
}

impl Found {
    fn new() -> Self {
        let memory = machine::available_memory();
        let cuda = backends::cuda::devices();
        let mut places = vec![("processor".to_string(), memory)];
        places.extend(cuda.iter().flatten().map(|gpu| (gpu.name.clone(), Some(gpu.memory))));
        Found {
            classes: cpu::Class::available().iter().map(|class| format!("{class:?}")).collect(),
            memory,
            cuda: cuda.map(|gpus| gpus.into_iter().map(|gpu| gpu.line).collect()),
            // A GPU behind Metal has the processor's memory, so it is no place of its own.
            metal: backends::metal::devices(),
            places,
        }
    }

    fn report(&self, context: usize) -> Value {
        let devices = |found: &Devices| match found {
            Ok(devices) => json!({ "devices": devices }),
            Err(why) => json!({ "unavailable": why }),
        };
        let models = CHECKPOINTS.iter().map(|checkpoint| {
            let fits = self.places.iter().map(|(place, memory)| {
                let best = largest(checkpoint, *memory, context);
                json!({
                    "on": place,
                    "largest_scheme": best.map(|(scheme, _)| scheme.name()),
                    "bytes": best.map(|(_, bytes)| bytes),
                })
            });
            json!({ "id": checkpoint.id, "fits": fits.collect::<Vec<_>>() })
        });
        json!({
            "processor": machine::processor(),
            "threads": cpu::default_threads(),
            "instructions": format!("{:?}", cpu::Class::best()),
            "instruction_classes": self.classes,
            "available_memory_bytes": self.memory,
            "cuda": devices(&self.cuda),
            "metal": devices(&self.metal),
            "context": context,
            "models": models.collect::<Vec<_>>(),
        })
    }

    fn text(&self, context: usize) -> String {
        let mut text = format!(
            "processor    {}, {} threads\ninstructions {:?} (of {})\nmemory       {}\n",
            machine::processor(),
            cpu::default_threads(),
            cpu::Class::best(),
            self.classes.join(", "),
            self.memory.map_or("unknown".to_string(), |bytes| size(bytes) + " available"),
        );
        for (name, found) in [("cuda", &self.cuda), ("metal", &self.metal)] {
            let lines = found.as_ref().map_or_else(std::slice::from_ref, Vec::as_slice);
            lines.iter().for_each(|line| text += &format!("{name:<12} {line}\n"));
        }
        text += &format!("\nlargest scheme that fits with {context} positions:\n  {:<24}", "");
        self.places.iter().for_each(|(place, _)| text += &format!(" {place:<20}"));
        for checkpoint in &CHECKPOINTS {
            text += &format!("\n  {:<24}", checkpoint.id);
            for (_, memory) in &self.places {
                let fit = match largest(checkpoint, *memory, context) {
                    Some((scheme, bytes)) => format!("{} ({})", scheme.name(), size(bytes)),
                    None => "none".to_string(),
                };
                text += &format!(" {fit:<20}");
            }
        }
        text
    }
}

/// The largest scheme whose weights and KV cache fit into `memory`, and their bytes.
fn largest(checkpoint: &Checkpoint, memory: Option<u64>, context: usize) -> Option<(Scheme, u64)> {
    let kv = KvConfig::for_positions(context, KvKind::Bf16).bytes(checkpoint.spec.layers);
    let needed = |scheme: Scheme| {
        (scheme, layout::bytes(&checkpoint.spec, scheme, scheme.default_head()) + kv)
    };
    let fits = |&(_, bytes): &(Scheme, u64)| memory.is_none_or(|free| bytes <= free);
    Scheme::ALL.into_iter().map(needed).find(fits)
}
