//! `kipp verify`: the conformance gates, on the user's own machine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use engine::conformance::{Finding, GATES, Gate, Rig, Subject};
use serde_json::{Value, json};

use crate::gates;
use crate::machine;
use crate::options::{ModelOptions, SyntheticOptions};
use crate::output::{origin, print, wrong_usage};
use crate::store::Reference;

/// Checks a backend against the scalar oracle on this machine.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    synthetic: SyntheticOptions,
    /// Largest normalised mean squared error of logits
    #[arg(long, default_value_t = 1e-4)]
    bound: f64,
    /// Run only the gates whose name contains this
    #[arg(long)]
    gate: Option<String>,
    /// Makes the random inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Also write a record to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let model = args.synthetic.open_or(&args.model)?;
    let name = model.checkpoint().map_or("unregistered dimensions", |c| c.id);
    print(&format!(
        "{name}, {} weights, {} layers, backend {}\n",
        model.scheme.name(),
        model.spec().layers,
        args.model.backend.name()
    ))?;
    let mut prepared = args.model.prepare(&model)?;
    let mut rig = Rig::new(Subject {
        model: Arc::clone(&model),
        make: &mut prepared.make,
        reproducibility: args.model.backend.reproducibility(),
        bound: args.bound,
        threads: args.model.threads(),
        seed: args.seed,
    });
    let wanted = |gate: &&Gate| args.gate.as_ref().is_none_or(|part| gate.name.contains(part));
    let mut gates = Vec::new();
    let mut failed = Vec::new();
    for gate in GATES.iter().filter(wanted) {
        let started = Instant::now();
        let finding = (gate.run)(&mut rig).with_context(|| gate.name)?;
        let seconds = started.elapsed().as_secs_f64();
        print(&row(gate, &finding, seconds))?;
        if !finding.holds() {
            failed.push(gate.name);
        }
        gates.push(record(gate, &finding, seconds));
    }
    if gates.is_empty() {
        return Err(wrong_usage("--gate: expected part of a gate's name, found none that matches"));
    }
    if let Some(path) = &args.json {
        let record = json!({
            "kind": "verify",
            "made": machine::provenance(),
            "checkpoint": name,
            "scheme": model.scheme.name(),
            "origin": origin(&model),
            "layers": model.spec().layers,
            "backend": args.model.backend.name(),
            "held": failed.is_empty(),
            "gates": gates,
        });
        let text = serde_json::to_string_pretty(&record)?;
        std::fs::write(path, text + "\n").with_context(|| path.display().to_string())?;
    }
    if args.gate.is_none()
        && args.synthetic.synthetic.is_none()
        && let Some(file) = Reference::parse(args.model.model.as_deref())?.kept()
    {
        gates::note(&file, args.model.backend.name(), failed.is_empty())?;
    }
    if !failed.is_empty() {
        bail!("{} of {} gates do not hold: {}", failed.len(), gates.len(), failed.join(", "));
    }
    print("all gates hold\n")
}

fn row(gate: &Gate, finding: &Finding, seconds: f64) -> String {
    let verdict = if finding.holds() { "holds" } else { "FAILS" };
    let comparison = if finding.holds() { "<=" } else { "> " };
    let mut row = format!(
        "{verdict}  {:<14} {:>9.2e} {comparison} {:<7.0e} {:<20} {seconds:>6.2} s  {}\n",
        gate.name,
        finding.figure,
        finding.bound,
        finding.unit.to_string(),
        gate.shows,
    );
    if !finding.holds() {
        row += &format!("       {}\n", finding.detail);
    }
    row
}

fn record(gate: &Gate, finding: &Finding, seconds: f64) -> Value {
    json!({
        "gate": gate.name,
        "shows": gate.shows,
        "holds": finding.holds(),
        "figure": finding.figure,
        "bound": finding.bound,
        "unit": finding.unit.to_string(),
        "worst": finding.detail,
        "seconds": seconds,
    })
}
