//! `kipp verify`: the conformance gates, on the user's own machine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::ValueEnum;
use engine::BackendError;
use engine::conformance::{AGAINST_BF16, Finding, GATES, Gate, Rig, Subject};
use model::{Model, Origin, Scheme, layout};
use serde_json::{Value, json};

use crate::backends::{BackendName, MetalClass, Prepared};
use crate::gates;
use crate::machine;
use crate::options::{KvName, ModelOptions, SyntheticOptions, Threads, parse_size};
use crate::output::{check_target, origin, print, write_file, wrong_usage};
use crate::store::Reference;

/// The bound of `--bound` by default.
const BOUND: f64 = 1e-4;

/// Checks backends against the scalar oracle on this machine.
#[derive(clap::Args)]
pub struct Args {
    /// Registry id with an optional :scheme, or a GGUF file; kipp-tiny, which is built in, if left out
    model: Option<String>,
    #[command(flatten)]
    synthetic: SyntheticOptions,
    /// What is checked
    #[arg(long, value_enum, default_value = "all")]
    backend: Checked,
    #[command(flatten)]
    threads: Threads,
    /// Number of the GPU, counted from 0
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// On a GPU, check the one class of kernels that --deterministic uses
    #[arg(long)]
    deterministic: bool,
    /// On an Apple GPU, what multiplies many tokens; the best that computes a probe exactly if left out
    #[arg(long, value_enum)]
    metal_class: Option<MetalClass>,
    /// Positions that the gate for long contexts goes to, e.g. 32k; the oracle takes long over many
    #[arg(long, value_parser = parse_size)]
    ctx: Option<usize>,
    /// How keys and values are stored in the gates that are not about that
    #[arg(long, value_enum, default_value_t = KvName::Bf16)]
    kv: KvName,
    /// Largest normalised mean squared error of logits
    #[arg(long, default_value_t = BOUND, allow_negative_numbers = true)]
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

/// A backend, or all of them.
#[derive(Debug, Clone, Copy)]
enum Checked {
    All,
    One(BackendName),
}

impl ValueEnum for Checked {
    fn value_variants<'a>() -> &'a [Self] {
        static VARIANTS: std::sync::OnceLock<Vec<Checked>> = std::sync::OnceLock::new();
        let named = || BackendName::value_variants().iter().map(|&name| Checked::One(name));
        VARIANTS.get_or_init(|| [Checked::All].into_iter().chain(named()).collect())
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        match self {
            Checked::All => {
                let help =
                    "Every backend of this binary; what the machine lacks is said and left out";
                Some(clap::builder::PossibleValue::new("all").help(help))
            }
            Checked::One(name) => name.to_possible_value(),
        }
    }
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    args.json.iter().try_for_each(|path| check_target("--json", path))?;
    if !(args.bound > 0.0 && args.bound.is_finite()) {
        let found = args.bound;
        return Err(wrong_usage(format!("--bound: expected a number above 0, found {found}")));
    }
    let options = args.options(BackendName::Cpu);
    let model = args.synthetic.open_or(&options)?;
    options.context(&model)?;
    let counterpart = args.counterpart(&model)?;
    let wanted = |gate: &&Gate| args.gate.as_ref().is_none_or(|part| gate.name.contains(part));
    let against = counterpart.is_some().then_some(&AGAINST_BF16);
    let gates: Vec<&Gate> = GATES.iter().chain(against).filter(wanted).collect();
    if gates.is_empty() {
        return Err(wrong_usage("--gate: expected part of a gate's name, found none that matches"));
    }
    print(&format!(
        "{}, {} weights, {} layers, {} KV\n",
        name_of(&model),
        model.scheme.name(),
        model.spec().layers,
        args.kv.name(),
    ))?;
    let (backends, all) = match args.backend {
        Checked::One(backend) => (vec![backend], false),
        Checked::All => (BackendName::built_in(), true),
    };
    let mut failed = Vec::new();
    let mut records = Vec::new();
    for backend in backends {
        let before = failed.len();
        let mut record = match Check::new(&args, &model, counterpart.as_ref(), backend) {
            Ok(check) => {
                let record = check.run(&gates, &mut failed)?;
                args.note(backend, failed.len() == before)?;
                record
            }
            // What nobody asked for by name may be absent.
            Err(BackendError::Unavailable(why)) if all => {
                print(&format!("\nbackend {}: not run: {why}\n", backend.name()))?;
                json!({"ran": false, "why": why})
            }
            Err(error) => {
                print(&format!("\nbackend {}: FAILS: {error}\n", backend.name()))?;
                failed.push(backend.name().to_string());
                json!({"ran": false, "why": error.to_string()})
            }
        };
        record["backend"] = backend.name().into();
        record["kernels"] = backend.kernels_hit().into();
        if let Some(device) = backend.device(args.device) {
            record["device"] = device.into();
        }
        records.push(record);
    }
    if let Some(path) = &args.json {
        let record = args.record(&model, failed.is_empty(), records);
        let text = serde_json::to_string_pretty(&record)?;
        write_file(path, &(text + "\n"))?;
    }
    if !failed.is_empty() {
        bail!("{} failed: {}", failed.len(), failed.join(", "));
    }
    print("\nall gates hold\n")
}

impl Args {
    fn options(&self, backend: BackendName) -> ModelOptions {
        ModelOptions {
            model: self.model.clone(),
            backend,
            threads: self.threads,
            device: self.device,
            deterministic: self.deterministic,
            metal_class: self.metal_class,
            ctx: self.ctx,
            kv: self.kv,
        }
    }

    /// Keeps beside kipp's own file of a model what all gates said of it.
    /// A run with a bound or a cache of its own says nothing of the usual one.
    fn note(&self, backend: BackendName, held: bool) -> Result<()> {
        if self.gate.is_none()
            && self.bound == BOUND
            && self.kv == KvName::Bf16
            && self.synthetic.synthetic.is_none()
            && let Some(file) = Reference::parse(self.model.as_deref())?.kept()
        {
            gates::note(&file, backend.name(), held)?;
        }
        Ok(())
    }

    /// What `--json` writes, around what each backend's gates found.
    fn record(&self, model: &Model, held: bool, backends: Vec<Value>) -> Value {
        json!({
            "kind": "verify",
            "made": machine::provenance(),
            "checkpoint": name_of(model),
            "weights": match model.origin {
                Origin::Synthetic { .. } => "synthetic",
                Origin::Foreign => "foreign",
                Origin::Pinned { .. } | Origin::Unproven { .. } => "checkpoint's",
            },
            "scheme": model.scheme.name(),
            "origin": origin(model),
            "layers": model.spec().layers,
            "kv": self.kv.name(),
            "held": held,
            "backends": backends,
        })
    }

    /// The same checkpoint in bf16, where it is at hand and fits into memory beside the other.
    fn counterpart(&self, model: &Model) -> Result<Option<Arc<Model>>> {
        if model.scheme == Scheme::Bf16 {
            return Ok(None);
        }
        if self.synthetic.synthetic.is_some() {
            let needed = layout::bytes(model.spec(), Scheme::Bf16, Scheme::Bf16);
            let fits = machine::available_memory().is_none_or(|free| needed < free / 2);
            let exact = SyntheticOptions { scheme: "bf16".into(), ..self.synthetic.clone() };
            return fits.then(|| exact.open_or(&self.options(BackendName::Cpu))).transpose();
        }
        let bf16 = |checkpoint| Reference::Registered(checkpoint, Some(Scheme::Bf16)).open().ok();
        Ok(model.checkpoint().and_then(bf16))
    }
}

fn name_of(model: &Model) -> &'static str {
    model.checkpoint().map_or("unregistered dimensions", |checkpoint| checkpoint.id)
}

/// One backend under check.
struct Check<'a> {
    args: &'a Args,
    backend: BackendName,
    model: &'a Arc<Model>,
    counterpart: Option<&'a Arc<Model>>,
    prepared: Prepared,
}

impl<'a> Check<'a> {
    fn new(
        args: &'a Args,
        model: &'a Arc<Model>,
        counterpart: Option<&'a Arc<Model>>,
        backend: BackendName,
    ) -> Result<Self, BackendError> {
        let prepared = args.options(backend).prepare(model)?;
        Ok(Check { args, backend, model, counterpart, prepared })
    }

    /// Runs the gates one after the other; those that fail are added to `failed`. A gate that cannot be
    /// run to its end has failed, and the next one is run.
    fn run(mut self, gates: &[&Gate], failed: &mut Vec<String>) -> Result<Value> {
        print(&format!("\nbackend {}\n", self.backend.name()))?;
        let args = self.args;
        let mut rig = Rig::new(Subject {
            model: Arc::clone(self.model),
            make: &mut self.prepared.make,
            reproducibility: self.backend.reproducibility(),
            bound: args.bound,
            threads: args.threads.count(),
            seed: args.seed,
        });
        rig = rig.with_kv(args.kv.kind());
        if let Some(ctx) = args.ctx {
            rig = rig.with_longest(ctx);
        }
        if let Some(exact) = self.counterpart {
            rig = rig.with_counterpart(Arc::clone(exact));
        }
        let mut records = Vec::new();
        for gate in gates {
            let started = Instant::now();
            let found = (gate.run)(&mut rig);
            let seconds = started.elapsed().as_secs_f64();
            print(&gate_row(gate, &found, seconds))?;
            if !found.as_ref().is_ok_and(Finding::holds) {
                failed.push(format!("{} on {}", gate.name, self.backend.name()));
            }
            records.push(gate_record(gate, &found, seconds));
        }
        Ok(json!({"ran": true, "longest": rig.longest(), "gates": records}))
    }
}

fn gate_row(gate: &Gate, found: &Result<Finding, BackendError>, seconds: f64) -> String {
    let finding = match found {
        Ok(finding) => finding,
        Err(error) => {
            let error = error.to_string();
            return format!("FAILS  {:<14} {error}  {seconds:>6.2} s  {}\n", gate.name, gate.shows);
        }
    };
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

fn gate_record(gate: &Gate, found: &Result<Finding, BackendError>, seconds: f64) -> Value {
    let mut record = json!({"gate": gate.name, "shows": gate.shows, "seconds": seconds});
    match found {
        Ok(finding) => {
            record["holds"] = finding.holds().into();
            record["figure"] = finding.figure.into();
            record["bound"] = finding.bound.into();
            record["unit"] = finding.unit.to_string().into();
            record["worst"] = finding.detail.clone().into();
        }
        Err(error) => {
            record["holds"] = false.into();
            record["error"] = error.to_string().into();
        }
    }
    record
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_that_cannot_be_run_is_a_failure_like_any_other() {
        let found = Err(BackendError::Device("no answer".into()));
        let row = gate_row(&GATES[0], &found, 1.0);
        assert!(row.starts_with("FAILS  logits") && row.contains("device: no answer"), "{row}");
        let record = gate_record(&GATES[0], &found, 1.0);
        assert_eq!(
            (&record["holds"], &record["error"]),
            (&json!(false), &json!("device: no answer"))
        );
    }
}
