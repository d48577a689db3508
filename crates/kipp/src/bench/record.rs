//! What is kept of a measurement.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use model::{Layer, Model};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::measure::{Case, Work};
use crate::backends::Peaks;

/// What a record's `kind` says.
pub const KIND: &str = "bench";

/// One run of `kipp bench`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Record {
    pub kind: String,
    /// Machine, commit and command.
    pub made: Value,
    pub checkpoint: Option<String>,
    pub scheme: String,
    pub backend: String,
    pub threads: usize,
    pub kv: String,
    pub peak_read_bytes_per_s: Option<f64>,
    pub peak_operations_per_s: Option<f64>,
    /// Operations a second of instructions that matrix products could be made of.
    #[serde(default)]
    pub instruction_peaks: BTreeMap<String, f64>,
    /// Seconds until one thread sees what another wrote.
    #[serde(default)]
    pub handover_s: Option<f64>,
    pub results: Vec<Entry>,
}

/// One thing that was measured.
#[derive(Debug, Serialize, Deserialize)]
pub struct Entry {
    pub name: String,
    pub sequences: usize,
    pub depth: usize,
    /// Tokens a sequence.
    pub tokens: usize,
    /// All sequences together: mean and standard deviation.
    pub tokens_per_s: f64,
    pub deviation: f64,
    /// Bytes of weights and KV cache a second that generating reads.
    pub bytes_per_s: Option<f64>,
    /// Operations a second of the projections in reading a prompt.
    pub operations_per_s: Option<f64>,
    /// The rate at which the peak would be reached.
    #[serde(default)]
    pub floor_tokens_per_s: Option<f64>,
    pub percent_of_peak: Option<f64>,
    /// Of each repetition.
    pub seconds: Vec<f64>,
}

/// Reads a record; its name is the file's.
pub fn read(path: &Path) -> Result<(String, Record)> {
    let name = || path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(name)?;
    let record: Record = serde_json::from_str(&text)
        .with_context(|| format!("{}: expected a record of `kipp bench --json`", name()))?;
    if record.kind != KIND {
        bail!("{}: kind: expected {KIND}, found {}", name(), record.kind);
    }
    let whole = |entry: &Entry| {
        let seconds = entry.seconds.iter();
        !entry.seconds.is_empty() && seconds.copied().all(|s| s.is_finite() && s > 0.0)
    };
    if let Some(entry) = record.results.iter().find(|entry| !whole(entry)) {
        bail!("{}: seconds of {}: expected times above 0, found none", name(), entry.name);
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok((stem, record))
}

impl Record {
    /// What was measured, on what.
    pub fn subject(&self) -> String {
        format!(
            "{}, {} weights, {} KV, backend {}, {} threads",
            self.checkpoint.as_deref().unwrap_or("unregistered dimensions"),
            self.scheme,
            self.kv,
            self.backend,
            self.threads,
        )
    }

    /// The subject, the machine's peaks and the head of the table.
    pub fn heading(&self) -> String {
        let mut peaks = Vec::new();
        peaks.extend(self.peak_read_bytes_per_s.map(|x| format!("reads {:.1} GB/s", x / 1e9)));
        peaks.extend(
            self.peak_operations_per_s.map(|x| format!("dot product {:.1} GOP/s", x / 1e9)),
        );
        let instructions = self.instruction_peaks.iter();
        peaks.extend(instructions.map(|(name, x)| format!("{name} {:.1} GOP/s", x / 1e9)));
        peaks.extend(self.handover_s.map(|x| format!("core to core {:.0} ns", x * 1e9)));
        let peaks = match peaks.is_empty() {
            true => String::new(),
            false => format!("peaks: {}\n", peaks.join(", ")),
        };
        format!(
            "{}\n{peaks}\n| {:<20} | {:>20} | {:>13} | {:>10} | {:>12} |\n\
             |{:-<22}|{:->21}:|{:->14}:|{:->11}:|{:->13}:|\n",
            self.subject(),
            "test",
            "tokens/s",
            "used",
            "floor",
            "of the floor",
            "",
            "",
            "",
            "",
            "",
        )
    }
}

impl Entry {
    /// What a case's times come to.
    pub fn new(
        case: &Case,
        seconds: Vec<f64>,
        model: &Model,
        kv_position: f64,
        peaks: &Peaks,
    ) -> Self {
        let tokens = (case.sequences * case.work.tokens()) as f64;
        let rates: Vec<f64> = seconds.iter().map(|s| tokens / s).collect();
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        let square = |rate: &f64| (rate - mean) * (rate - mean);
        let variance = rates.iter().map(square).sum::<f64>() / rates.len() as f64;
        // What a token costs, of what there is a peak of.
        let (bytes, operations) = match case.work {
            Work::Read(_) => (None, Some(2.0 * model.spec().projection_weights() as f64)),
            Work::Generate(tokens) => {
                let positions = case.depth as f64 + (tokens + 1) as f64 / 2.0;
                let weights = step_bytes(model) as f64 / case.sequences as f64;
                (Some(weights + positions * kv_position), None)
            }
        };
        let floor = |peak: Option<f64>, cost: Option<f64>| Some(peak? / cost?);
        let floor = floor(peaks.read, bytes).or(floor(peaks.operations, operations));
        Entry {
            name: case.name.clone(),
            sequences: case.sequences,
            depth: case.depth,
            tokens: case.work.tokens(),
            tokens_per_s: mean,
            deviation: variance.sqrt(),
            bytes_per_s: bytes.map(|cost| cost * mean),
            operations_per_s: operations.map(|cost| cost * mean),
            floor_tokens_per_s: floor,
            percent_of_peak: floor.map(|floor| 100.0 * mean / floor),
            seconds,
        }
    }

    /// Its line of the table.
    pub fn row(&self) -> String {
        let giga =
            |x: Option<f64>, unit| x.map_or(String::new(), |x| format!("{:.1} {unit}", x / 1e9));
        let rate = format!("{:.2} +- {:.2}", self.tokens_per_s, self.deviation);
        let used = giga(self.bytes_per_s, "GB/s") + &giga(self.operations_per_s, "GOP/s");
        let floor = self.floor_tokens_per_s.map_or(String::new(), |x| format!("{x:.1}"));
        let percent = self.percent_of_peak.map_or(String::new(), |p| format!("{p:.1} %"));
        format!("| {:<20} | {rate:>20} | {used:>13} | {floor:>10} | {percent:>12} |\n", self.name)
    }

    /// Whether it generates; otherwise it reads a prompt.
    pub fn generates(&self) -> bool {
        self.name.starts_with("tg")
    }

    /// Tokens a second of the slowest, the median and the fastest repetition.
    pub fn rates(&self) -> [f64; 3] {
        let tokens = (self.sequences * self.tokens) as f64;
        let mut rates: Vec<f64> = self.seconds.iter().map(|s| tokens / s).collect();
        rates.sort_by(f64::total_cmp);
        let at = |index: usize| rates.get(index).copied().unwrap_or_default();
        let last = rates.len().saturating_sub(1);
        [at(0), (at(last / 2) + at(last.div_ceil(2))) / 2.0, at(last)]
    }
}

/// Bytes of weights that one step of generating reads.
fn step_bytes(model: &Model) -> usize {
    let layers = model.weights.layers.iter().flat_map(Layer::projections);
    layers.map(|matrix| matrix.bytes().len()).sum::<usize>() + model.weights.head.bytes().len()
}
