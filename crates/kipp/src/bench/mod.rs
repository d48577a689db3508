//! `kipp bench`: how fast a backend reads prompts and generates, held against what the machine can do.

mod compare;
mod measure;
mod plot;
mod record;

use std::path::PathBuf;

use anyhow::{Context, Result};
use engine::KvConfig;
use engine::batch::BLOCK;

use self::measure::Case;
use self::record::{Entry, Record};
use crate::backends::Peaks;
use crate::machine;
use crate::options::{ModelOptions, SyntheticOptions, parse_size};
use crate::output::{check_target, print, write_file, wrong_usage};

/// Measures how fast a backend reads prompts and generates, or compares records of such measurements.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    synthetic: SyntheticOptions,
    /// Prompt lengths to read
    #[arg(long, value_delimiter = ',', default_value = "512", value_parser = parse_size)]
    pp: Vec<usize>,
    /// Numbers of tokens to generate
    #[arg(long, value_delimiter = ',', default_value = "64", value_parser = parse_size)]
    tg: Vec<usize>,
    /// Positions that are in the cache before
    #[arg(long, value_delimiter = ',', default_value = "0", value_parser = parse_size)]
    depth: Vec<usize>,
    /// Sequences that generate side by side
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = parse_size)]
    batch: Vec<usize>,
    /// Repetitions of each measurement, after one that does not count
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,
    /// GB/s that the machine reads at most; measured if left out, except on an Apple GPU
    #[arg(long, value_name = "GB/S", value_parser = parse_rate)]
    peak_read: Option<f64>,
    /// GOP/s that it multiplies and adds at most; likewise
    #[arg(long, value_name = "GOP/S", value_parser = parse_rate)]
    peak_operations: Option<f64>,
    /// Measure nothing; put these records, written with --json, side by side, the first as the base
    #[arg(long, value_name = "RECORD", num_args = 1..=6)]
    compare: Vec<PathBuf>,
    /// Also draw the rates against context and against batch, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print a record as JSON
    #[arg(long, conflicts_with = "compare")]
    json: bool,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let too_few =
        || wrong_usage("--plot: expected figures at two depths or two batch sizes, found fewer");
    if let Some(path) = &args.plot {
        check_target("--plot", path)?;
        if args.compare.is_empty() && args.depth.len() < 2 && args.batch.len() < 2 {
            return Err(too_few());
        }
    }
    let records = if args.compare.is_empty() {
        vec![(String::new(), measure(&args)?)]
    } else {
        let records = args.compare.iter().map(|path| record::read(path));
        let records = records.collect::<Result<Vec<_>>>()?;
        print(&compare::table(&records))?;
        records
    };
    let Some(path) = &args.plot else { return Ok(()) };
    let picture = plot::draw(&records).ok_or_else(too_few)?;
    write_file(path, &picture)
}

/// Measures and prints: a row as soon as it is known, or the record.
fn measure(args: &Args) -> Result<Record> {
    let model = args.synthetic.open_or(&args.model)?;
    let spec = model.spec();
    let cases = measure::cases(args);
    if args.batch.contains(&0) {
        return Err(wrong_usage("--batch: expected 1 sequence or more, found 0"));
    }
    let longest = cases.iter().map(Case::reach).max().unwrap_or(0);
    if longest == 0 || longest > spec.context {
        return Err(wrong_usage(format!(
            "--depth with --pp or --tg: expected 1 to {} positions, found {longest}",
            spec.context
        )));
    }
    let blocks = cases.iter().map(|c| c.sequences * c.reach().div_ceil(BLOCK)).max().unwrap_or(0);
    let kv = KvConfig { blocks, ..args.model.kv_config(longest) };
    // Before the model takes the memory that measuring needs.
    let known =
        Peaks { read: args.peak_read, operations: args.peak_operations, ..Peaks::default() };
    let peaks = args.model.backend.peaks(args.model.threads(), args.model.device, known)?;
    let mut backend = (args.model.prepare(&model)?.make)(kv)?;
    let kv_position = KvConfig { blocks: 1, ..kv }.bytes(spec.layers) as f64 / BLOCK as f64;

    let mut record = Record {
        kind: record::KIND.into(),
        made: machine::provenance(),
        checkpoint: model.checkpoint().map(|c| c.id.to_owned()),
        scheme: model.scheme.name().into(),
        backend: args.model.backend.name().into(),
        threads: args.model.threads(),
        kv: args.model.kv.name().into(),
        peak_read_bytes_per_s: peaks.read,
        peak_operations_per_s: peaks.operations,
        instruction_peaks: peaks.instructions.clone(),
        handover_s: peaks.handover,
        results: Vec::new(),
    };
    let mut table = record.heading();
    for case in &cases {
        let seconds = measure::measure(backend.as_mut(), spec, case, args.reps)?;
        let entry = Entry::new(case, seconds, &model, kv_position, &peaks);
        table += &entry.row();
        record.results.push(entry);
        if !args.json {
            print(&std::mem::take(&mut table))?;
        }
    }
    if args.json {
        print(&format!("{}\n", serde_json::to_string_pretty(&record)?))?;
    }
    Ok(record)
}

/// Units of 10^9 a second.
fn parse_rate(text: &str) -> Result<f64> {
    let rate: f64 = text.parse().context("expected a number")?;
    anyhow::ensure!(rate.is_finite() && rate > 0.0, "expected a number above 0");
    Ok(rate * 1e9)
}
