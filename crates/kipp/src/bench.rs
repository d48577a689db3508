//! `kipp bench`: how fast a backend reads prompts and generates, held against what the machine can do.

use std::time::Instant;

use anyhow::Result;
use engine::batch::BLOCK;
use engine::{Backend, Batch, Input, KvConfig, Output, Row, Sample, SamplingParams, Want};
use model::{Model, Spec};
use serde_json::{Value, json};

use crate::backends::Peaks;
use crate::machine;
use crate::options::{ModelOptions, SyntheticOptions, parse_size};
use crate::output::{print, wrong_usage};

/// Measures how fast a backend reads prompts and generates.
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
    /// Print a record as JSON
    #[arg(long)]
    json: bool,
}

/// One thing to measure.
struct Case {
    name: String,
    sequences: usize,
    /// Tokens a sequence that are read in one go, or generated one after the other.
    work: Work,
    depth: usize,
}

enum Work {
    Read(usize),
    Generate(usize),
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let model = args.synthetic.open_or(&args.model)?;
    let spec = model.spec();
    let cases = cases(&args);
    let reach = |case: &Case| case.depth + case.work.tokens();
    let longest = cases.iter().map(reach).max().unwrap_or(0);
    if longest == 0 || longest > spec.context {
        return Err(wrong_usage(format!(
            "--depth with --pp or --tg: expected 1 to {} positions, found {longest}",
            spec.context
        )));
    }
    let blocks = cases.iter().map(|c| c.sequences * reach(c).div_ceil(BLOCK)).max().unwrap_or(0);
    let kv = KvConfig { blocks, ..args.model.kv_config(longest) };
    let mut backend = args.model.maker(&model)?(kv)?;
    let peaks = args.model.backend.peaks(args.model.threads())?;
    let kv_position = KvConfig { blocks: 1, ..kv }.bytes(spec.layers) as f64 / BLOCK as f64;

    let mut records = Vec::new();
    let mut table = heading(&args, &model, &peaks);
    for case in &cases {
        let seconds = measure(backend.as_mut(), spec, case, args.reps)?;
        let figures = Figures::new(case, &seconds, &model, kv_position, &peaks);
        table += &figures.row(case);
        records.push(figures.record(case, &seconds));
        if !args.json {
            print(&std::mem::take(&mut table))?;
        }
    }
    if args.json {
        let record = json!({
            "kind": "bench",
            "made": machine::provenance(),
            "checkpoint": model.checkpoint().map(|c| c.id),
            "scheme": model.scheme.name(),
            "backend": args.model.backend.name(),
            "threads": args.model.threads(),
            "kv": args.model.kv.name(),
            "peak_read_bytes_per_s": peaks.read,
            "peak_operations_per_s": peaks.operations,
            "results": records,
        });
        print(&format!("{}\n", serde_json::to_string_pretty(&record)?))?;
    }
    Ok(())
}

/// All combinations that were asked for.
fn cases(args: &Args) -> Vec<Case> {
    let mut cases = Vec::new();
    for &depth in &args.depth {
        let at = if depth > 0 { format!(" @ d{depth}") } else { String::new() };
        for &tokens in args.pp.iter().filter(|&&tokens| tokens > 0) {
            let name = format!("pp{tokens}{at}");
            cases.push(Case { name, sequences: 1, work: Work::Read(tokens), depth });
        }
        for &tokens in args.tg.iter().filter(|&&tokens| tokens > 0) {
            for &sequences in args.batch.iter().filter(|&&sequences| sequences > 0) {
                let times = if sequences > 1 { format!(" x{sequences}") } else { String::new() };
                let name = format!("tg{tokens}{times}{at}");
                cases.push(Case { name, sequences, work: Work::Generate(tokens), depth });
            }
        }
    }
    cases
}

impl Work {
    /// Tokens a sequence.
    fn tokens(&self) -> usize {
        match *self {
            Work::Read(tokens) | Work::Generate(tokens) => tokens,
        }
    }
}

/// Seconds of each counted repetition.
fn measure(backend: &mut dyn Backend, spec: &Spec, case: &Case, reps: u32) -> Result<Vec<f64>> {
    let mut bench = Bench::new(backend, spec, case);
    bench.fill(case.depth)?;
    let mut seconds = Vec::new();
    for rep in 0..=reps {
        let started = Instant::now();
        match case.work {
            Work::Read(tokens) => bench.read(case.depth, tokens)?,
            Work::Generate(tokens) => bench.generate(case.depth, tokens)?,
        }
        if rep > 0 {
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    Ok(seconds)
}

/// Sequences with blocks of their own, evaluated on pseudo-random tokens.
struct Bench<'a> {
    backend: &'a mut dyn Backend,
    vocab: usize,
    tables: Vec<Vec<u32>>,
    batch: Batch,
    output: Output,
}

impl<'a> Bench<'a> {
    fn new(backend: &'a mut dyn Backend, spec: &Spec, case: &Case) -> Self {
        let blocks = (case.depth + case.work.tokens()).div_ceil(BLOCK) as u32;
        let table = |s| (s * blocks..(s + 1) * blocks).collect();
        Bench {
            backend,
            vocab: spec.vocab,
            tables: (0..case.sequences as u32).map(table).collect(),
            batch: Batch::default(),
            output: Output::default(),
        }
    }

    /// Puts `depth` positions into every sequence's cache.
    fn fill(&mut self, depth: usize) -> Result<()> {
        for sequence in 0..self.tables.len() {
            self.read_into(sequence, 0, depth)?;
        }
        Ok(())
    }

    /// Reads a prompt into the first sequence.
    fn read(&mut self, depth: usize, tokens: usize) -> Result<()> {
        self.read_into(0, depth, tokens)
    }

    fn read_into(&mut self, sequence: usize, start: usize, tokens: usize) -> Result<()> {
        let most = self.backend.limits().tokens;
        let end = start + tokens;
        for position in (start..end).step_by(most) {
            let count = most.min(end - position);
            self.batch.clear();
            let inputs = (position..position + count).map(|p| Input::Token(self.token(p)));
            let inputs: Vec<Input> = inputs.collect();
            let first = self.batch.push(inputs, position, &self.tables[sequence]);
            if position + count == end {
                self.batch.rows.push(draw(first + count - 1, end));
            }
            self.backend.forward(&self.batch, &mut self.output)?;
        }
        Ok(())
    }

    /// Generates in all sequences, each step from the draws of the one before, as the engine does.
    fn generate(&mut self, depth: usize, tokens: usize) -> Result<()> {
        let queue = self.backend.limits().queue;
        let mut behind = 0;
        for step in 0..tokens {
            self.batch.clear();
            for (row, table) in self.tables.iter().enumerate() {
                let first = Input::Token(self.token(depth + row));
                let input = if step == 0 { first } else { Input::Sampled(row) };
                let token = self.batch.push([input], depth + step, table);
                self.batch.rows.push(draw(token, depth + step + 1));
            }
            self.backend.submit(&self.batch)?;
            behind += 1;
            if behind == queue {
                self.backend.collect(&mut self.output)?;
                behind -= 1;
            }
        }
        for _ in 0..behind {
            self.backend.collect(&mut self.output)?;
        }
        Ok(())
    }

    fn token(&self, position: usize) -> u32 {
        (position.wrapping_mul(7919) % self.vocab) as u32
    }
}

/// A greedy draw after a token.
fn draw(token: usize, position: usize) -> Row {
    let sample = Sample::new(SamplingParams::default(), position as u32);
    Row { token, want: Want::Sample(Box::new(sample)) }
}

/// What a case's times come to.
struct Figures {
    /// Tokens a second, all sequences together: mean and standard deviation.
    rate: (f64, f64),
    /// Bytes of weights and KV cache a second that generating reads.
    bytes: Option<f64>,
    /// Operations a second of the projections in reading a prompt.
    operations: Option<f64>,
    /// Percent of what the machine can do.
    percent: Option<f64>,
}

impl Figures {
    fn new(case: &Case, seconds: &[f64], model: &Model, kv_position: f64, peaks: &Peaks) -> Self {
        let tokens = (case.sequences * case.work.tokens()) as f64;
        let rates: Vec<f64> = seconds.iter().map(|s| tokens / s).collect();
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        let square = |rate: &f64| (rate - mean) * (rate - mean);
        let variance = rates.iter().map(square).sum::<f64>() / rates.len() as f64;
        let rate = (mean, variance.sqrt());
        let percent = |figure: f64, peak: Option<f64>| Some(100.0 * figure / peak?);
        match case.work {
            Work::Read(_) => {
                let operations = 2.0 * projection_weights(model.spec()) as f64 * mean;
                let percent = percent(operations, peaks.operations);
                Figures { rate, bytes: None, operations: Some(operations), percent }
            }
            Work::Generate(tokens) => {
                let positions = case.depth as f64 + (tokens + 1) as f64 / 2.0;
                let kv = positions * kv_position * case.sequences as f64;
                let step = step_bytes(model) as f64 + kv;
                let bytes = step * mean / case.sequences as f64;
                let percent = percent(bytes, peaks.read);
                Figures { rate, bytes: Some(bytes), operations: None, percent }
            }
        }
    }

    fn row(&self, case: &Case) -> String {
        let giga =
            |x: Option<f64>, unit| x.map_or(String::new(), |x| format!("{:.1} {unit}", x / 1e9));
        let rate = format!("{:.2} +- {:.2}", self.rate.0, self.rate.1);
        let used = giga(self.bytes, "GB/s") + &giga(self.operations, "GOP/s");
        let percent = self.percent.map_or(String::new(), |p| format!("{p:.1} %"));
        format!("| {:<20} | {rate:>20} | {used:>13} | {percent:>12} |\n", case.name)
    }

    fn record(&self, case: &Case, seconds: &[f64]) -> Value {
        json!({
            "name": case.name,
            "sequences": case.sequences,
            "depth": case.depth,
            "tokens": case.work.tokens(),
            "tokens_per_s": self.rate.0,
            "deviation": self.rate.1,
            "bytes_per_s": self.bytes,
            "operations_per_s": self.operations,
            "percent_of_peak": self.percent,
            "seconds": seconds,
        })
    }
}

/// Weights of all projections, the head left out.
fn projection_weights(spec: &Spec) -> usize {
    let attention = 2 * spec.hidden * (spec.q_width() + spec.kv_width());
    spec.layers * (attention + 3 * spec.hidden * spec.ffn)
}

/// Bytes of weights that one step of generating reads.
fn step_bytes(model: &Model) -> usize {
    let layers = model.weights.layers.iter().flat_map(|layer| {
        [&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down]
    });
    layers.map(|matrix| matrix.bytes().len()).sum::<usize>() + model.weights.head.bytes().len()
}

fn heading(args: &Args, model: &Model, peaks: &Peaks) -> String {
    let peak =
        |x: Option<f64>, unit| x.map_or(String::new(), |x| format!(", {:.1} {unit}", x / 1e9));
    format!(
        "{}, {} weights, {} KV, backend {}, {} threads{}{}\n\n\
         | {:<20} | {:>20} | {:>13} | {:>12} |\n|{:-<22}|{:->21}:|{:->14}:|{:->13}:|\n",
        model.checkpoint().map_or("unregistered dimensions", |c| c.id),
        model.scheme.name(),
        args.model.kv.name(),
        args.model.backend.name(),
        args.model.threads(),
        peak(peaks.read, "GB/s read peak"),
        peak(peaks.operations, "GOP/s peak"),
        "test",
        "tokens/s",
        "used",
        "of the peak",
        "",
        "",
        "",
        "",
    )
}
