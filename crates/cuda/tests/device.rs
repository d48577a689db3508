//! The conformance gates and timings on a real device. Without one this says so and passes: nothing of the backend
//! can run there.
//!
//!     device                                     gates of kipp-tiny's dimensions, every scheme
//!     device gates MODEL [GATE,..]               gates of a synthetic checkpoint as ID[:SCHEME[:LAYERS[:HEAD[:VOCAB]]]],
//!                                                or of a GGUF file
//!     device speculation COUNT                   answers of the built-in model with and without drafts
//!     device write ID[:SCHEME] FILE              a synthetic checkpoint as a GGUF file
//!     device first FILE                          how long the first token of a file takes, by stage
//!     device time MODEL[:SCHEME[:LAYERS]] [pp=N,..] [tg=N] [depth=N,..] [batch=N,..]
//!
//! Every figure is also printed as a line of JSON, and last the kernels that the gates have used. KIPP_DETERMINISTIC
//! and KIPP_GENERIC, if set, choose those options, KIPP_KV_Q8 times with 8-bit keys and values.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use cuda::{CudaBackend, CudaModel, Options};
use engine::conformance::{GATES, Reproducibility, Rig, Subject, identity};
use engine::{
    Answer, Backend, Batch, Input, KvConfig, KvKind, Output, Row, Sample, SamplingParams, Want,
};
use model::{Checkpoint, Model, Scheme};

/// Tokens of stories, two bytes each.
const STORY: &[u8] = include_bytes!("../../engine/tests/data/goldens/valid.u16");

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let devices = match cuda::devices() {
        Ok(devices) if !devices.is_empty() => devices,
        Ok(_) => return no_device("the driver lists none"),
        Err(error) => return no_device(&error.to_string()),
    };
    for device in &devices {
        let (major, minor) = device.capability;
        println!(
            "device {}: {}, {major}.{minor}, {} bytes",
            device.ordinal, device.name, device.memory
        );
    }
    let mut failed = 0;
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            for scheme in ["bf16", "q8_0", "q4_1", "q4_0"] {
                failed += gates(&format!("kipp-tiny:{scheme}"), "")?;
            }
        }
        ["gates", model] => failed += gates(model, "")?,
        ["gates", model, only] => failed += gates(model, only)?,
        ["speculation", count] => failed += speculation(count.parse()?)?,
        ["time", model, ref settings @ ..] => time(model, settings)?,
        ["write", model, file] => write(model, file)?,
        ["first", file] => first(file)?,
        _ => return Err("arguments: none, gates, time, write or first (see the source)".into()),
    }
    if !matches!(arguments.first().map(String::as_str), Some("time")) {
        let kernels = cuda::kernels_hit();
        println!("{{\"kernels\": {kernels:?}}}");
    }
    if failed > 0 { Err(format!("{failed} gates do not hold").into()) } else { Ok(()) }
}

fn no_device(why: &str) -> Outcome<()> {
    println!("no CUDA device ({why}): nothing of the backend was run");
    Ok(())
}

/// A GGUF file, or a synthetic checkpoint as `ID[:SCHEME[:LAYERS[:HEAD[:VOCAB]]]]`: fewer layers, the head in another
/// scheme, or fewer tokens, which take the oracle most of its time. Nothing between colons leaves what is.
fn open(name: &str) -> Outcome<Model> {
    if name.ends_with(".gguf") {
        return Ok(Model::open(name.as_ref())?);
    }
    let mut parts = name.split(':').map(|part| (!part.is_empty()).then_some(part));
    let mut next = || parts.next().flatten();
    let id = next().unwrap_or_default();
    let checkpoint = Checkpoint::find(id).ok_or_else(|| format!("no checkpoint `{id}`"))?;
    let named = |name: &str| Scheme::from_name(name).ok_or_else(|| format!("no scheme `{name}`"));
    let scheme = named(next().unwrap_or("bf16"))?;
    let mut spec = checkpoint.spec;
    if let Some(layers) = next() {
        spec.layers = layers.parse()?;
    }
    let head = next().map_or(Ok(scheme.default_head()), named)?;
    if let Some(vocab) = next() {
        spec.vocab = vocab.parse()?;
    }
    Ok(Model::synthetic(spec, (scheme, head), 7)?)
}

fn load(model: &Model, tokens: usize) -> Outcome<Arc<CudaModel>> {
    let deterministic = std::env::var_os("KIPP_DETERMINISTIC").is_some();
    let generic = std::env::var_os("KIPP_GENERIC").is_some();
    let options = Options { tokens, deterministic, generic, ..Options::default() };
    let start = Instant::now();
    let mut bytes = 0;
    let loaded = CudaModel::load(model, options, &mut |_, total| bytes = total)?;
    let seconds = start.elapsed().as_secs_f64();
    println!("{{\"loaded\": {bytes}, \"seconds\": {seconds:.3}}}");
    Ok(loaded)
}

/// Runs the gates (those named in `only`, if any); returns how many do not hold.
fn gates(name: &str, only: &str) -> Outcome<usize> {
    let model = Arc::new(open(name)?);
    let loaded = load(&model, 2048)?;
    let mut failed = 0;
    for gate in
        GATES.iter().filter(|gate| only.is_empty() || only.split(',').any(|n| n == gate.name))
    {
        let mut make = |kv| Ok(Box::new(CudaBackend::new(&loaded, kv)?) as Box<dyn Backend>);
        let start = Instant::now();
        let found = (gate.run)(&mut Rig::new(Subject {
            model: Arc::clone(&model),
            make: &mut make,
            reproducibility: Reproducibility::WithinClass,
            bound: if name.contains(":q") { 3e-5 } else { 1e-5 },
            threads: std::thread::available_parallelism()?.get(),
            seed: 11,
        }));
        let seconds = start.elapsed().as_secs_f64();
        match found {
            Ok(found) => {
                let holds = found.holds();
                failed += usize::from(!holds);
                println!(
                    "{{\"model\": \"{name}\", \"gate\": \"{}\", \"holds\": {holds}, \"figure\": {}, \"bound\": {:e}, \"unit\": \"{}\", \"seconds\": {seconds:.2}, \"detail\": {:?}}}",
                    gate.name,
                    number(found.figure),
                    found.bound,
                    found.unit,
                    found.detail
                );
            }
            Err(error) => {
                failed += 1;
                println!(
                    "{{\"model\": \"{name}\", \"gate\": \"{}\", \"error\": {:?}}}",
                    gate.name,
                    error.to_string()
                );
            }
        }
    }
    if only.is_empty() || only.split(',').any(|n| n == "mates") {
        let differing = mates(&loaded)?;
        failed += usize::from(differing > 0);
        println!(
            "{{\"model\": \"{name}\", \"gate\": \"mates\", \"holds\": {}, \"figure\": {differing}, \"bound\": 0, \"unit\": \"values that differ\"}}",
            differing == 0
        );
    }
    Ok(failed)
}

/// Compares the answers to `count` prompts by every method of speculation with those of plain decoding; returns how many
/// methods have answers that are neither the same nor part at a tie.
fn speculation(count: usize) -> Outcome<usize> {
    let model = Arc::new(Model::builtin()?);
    let small = Arc::new(model.requantised(Scheme::Q4_0)?);
    let story: Vec<u32> =
        STORY.chunks_exact(2).map(|b| u32::from(b[0]) | u32::from(b[1]) << 8).collect();
    let (loaded, drafts) = (load(&model, 2048)?, load(&small, 2048)?);
    let mut make = |kv| Ok(Box::new(CudaBackend::new(&loaded, kv)?) as Box<dyn Backend>);
    let mut rig = Rig::new(Subject {
        model: Arc::clone(&model),
        make: &mut make,
        reproducibility: Reproducibility::WithinClass,
        bound: 1e-5,
        threads: 1,
        seed: 77,
    });
    let kv = KvConfig { blocks: 300, kind: KvKind::Bf16 };
    let mut small = || Ok(Box::new(CudaBackend::new(&drafts, kv)?) as Box<dyn Backend>);
    let mut failed = 0;
    for drafted in identity(&mut rig, &story, count, &mut small)? {
        failed += usize::from(!drafted.wrong.is_empty());
        println!(
            "{{\"method\": \"{}\", \"answers\": {count}, \"same\": {}, \"ties\": {}, \"wrong\": {:?}, \"passes\": {}, \"plain_passes\": {}, \"drafted\": {}, \"accepted\": {}}}",
            drafted.name,
            drafted.same,
            drafted.ties,
            drafted.wrong,
            drafted.load.steps,
            drafted.plain,
            drafted.load.drafted,
            drafted.load.accepted
        );
    }
    Ok(failed)
}

/// Within a class, a token's logits do not depend on its batch mates: how many values differ between a prompt read
/// alone and behind others, whose number changes the kernels' tiles.
fn mates(loaded: &Arc<CudaModel>) -> Outcome<usize> {
    let mut backend = CudaBackend::new(loaded, KvConfig { blocks: 128, kind: KvKind::Bf16 })?;
    let generic = std::env::var_os("KIPP_GENERIC").is_some();
    let most = if generic { 512 } else { backend.limits().tokens };
    let mut read = |before: &[usize]| -> Outcome<Vec<Answer>> {
        let mut batch = Batch::default();
        let mut block = 0;
        for &len in before.iter().chain(&[333]) {
            let table: Vec<u32> = (block..).take(len.div_ceil(32)).collect();
            block += table.len() as u32;
            batch.push((0..len as u32).map(|i| Input::Token(i * 37 % 8000)), 0, &table);
        }
        let first = batch.tokens.len() - 333;
        batch.rows.extend([0, 100, 332].map(|i| Row { token: first + i, want: Want::Logits }));
        let mut output = Output::default();
        backend.forward(&batch, &mut output)?;
        Ok(output.answers)
    };
    let alone = read(&[])?;
    let mut differing = 0;
    // On Hopper the matrices of the 1.7B, or the 4B, meet every width of `project_tiles` here; elsewhere the class ends at
    // 512 tokens.
    let mates = [&[77][..], &[100, 50, 18], &[300, 50, 18], &[564], &[800, 84], &[1200, 400]];
    for before in mates.iter().filter(|before| before.iter().sum::<usize>() + 333 <= most) {
        for (a, b) in alone.iter().zip(&read(before)?) {
            let (Answer::Logits(a), Answer::Logits(b)) = (a, b) else {
                return Err("a row without logits".into());
            };
            differing += a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        }
    }
    Ok(differing)
}

fn write(name: &str, file: &str) -> Outcome<()> {
    let (id, scheme) = name.split_once(':').unwrap_or((name, "bf16"));
    let checkpoint = Checkpoint::find(id).ok_or_else(|| format!("no checkpoint `{id}`"))?;
    let scheme = Scheme::from_name(scheme).ok_or_else(|| format!("no scheme `{scheme}`"))?;
    let schemes = (scheme, scheme.default_head());
    Ok(model::synthetic::write(file.as_ref(), checkpoint, schemes, 7, |_, _| {})?)
}

/// What passes between the start of `main` and the first token of a prompt of eight.
fn first(file: &str) -> Outcome<()> {
    let start = Instant::now();
    let model = open(file)?;
    let opened = start.elapsed().as_secs_f64();
    let loaded = load(&model, 4096)?;
    let ready = start.elapsed().as_secs_f64();
    let mut timer = Timer::new(&loaded, model.spec().vocab as u32, 1, 4096)?;
    let prepared = start.elapsed().as_secs_f64();
    timer.prefill(8)?;
    println!(
        "{{\"file\": \"{file}\", \"opened\": {opened:.3}, \"loaded\": {ready:.3}, \"backend\": {prepared:.3}, \"first_token\": {:.3}}}",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Reads `key=1,2,3` out of the settings.
fn numbers(settings: &[&str], key: &str, default: &[usize]) -> Outcome<Vec<usize>> {
    let found = settings.iter().find_map(|s| s.strip_prefix(key)?.strip_prefix('='));
    match found {
        Some(list) => Ok(list.split(',').map(str::parse).collect::<Result<_, _>>()?),
        None => Ok(default.to_vec()),
    }
}

/// What the device can do at most, then greedy decoding and prefill, each the median of three.
fn time(name: &str, settings: &[&str]) -> Outcome<()> {
    let model = open(name)?;
    let prompts = numbers(settings, "pp", &[512, 2048])?;
    let steps = numbers(settings, "tg", &[128])?[0];
    let depths = numbers(settings, "depth", &[0])?;
    let batches = numbers(settings, "batch", &[1])?;
    let (read, operations) = (cuda::peak_read(0)?, cuda::peak_operations(0)?);
    println!(
        "{{\"read_bytes_per_second\": {read:.3e}, \"operations_per_second\": {operations:.3e}}}"
    );
    let loaded = load(&model, Options::default().tokens)?;
    let vocab = model.spec().vocab as u32;
    for &tokens in &prompts {
        let mut timer = Timer::new(&loaded, vocab, 1, tokens)?;
        timer.prefill(tokens)?;
        let seconds = median(3, || timer.prefill(tokens))?;
        println!(
            "{{\"model\": \"{name}\", \"prefill\": {tokens}, \"tokens_per_second\": {:.0}}}",
            tokens as f64 / seconds
        );
    }
    for &depth in &depths {
        for &batch in &batches {
            let mut timer = Timer::new(&loaded, vocab, batch, depth + steps + 1)?;
            if depth > 0 {
                timer.prefill(depth)?;
            }
            timer.decode(depth, steps)?;
            let seconds = median(3, || timer.decode(depth, steps))?;
            println!(
                "{{\"model\": \"{name}\", \"decode_at\": {depth}, \"batch\": {batch}, \"tokens_per_second\": {:.1}, \"step_us\": {:.1}}}",
                (steps * batch) as f64 / seconds,
                seconds / steps as f64 * 1e6
            );
        }
    }
    Ok(())
}

fn median(times: usize, mut run: impl FnMut() -> Outcome<f64>) -> Outcome<f64> {
    let mut seconds: Vec<f64> = (0..times).map(|_| run()).collect::<Outcome<_>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[times / 2])
}

/// Sequences of equal length with their own blocks.
struct Timer {
    backend: CudaBackend,
    tables: Vec<Vec<u32>>,
    vocab: u32,
}

impl Timer {
    fn new(model: &Arc<CudaModel>, vocab: u32, batch: usize, positions: usize) -> Outcome<Self> {
        let each = positions.div_ceil(32);
        let kind =
            if std::env::var_os("KIPP_KV_Q8").is_some() { KvKind::Q8_0 } else { KvKind::Bf16 };
        let backend = CudaBackend::new(model, KvConfig { blocks: each * batch, kind })?;
        let tables =
            (0..batch).map(|s| (0..each).map(|b| (s * each + b) as u32).collect()).collect();
        Ok(Timer { backend, tables, vocab })
    }

    fn row(token: usize, position: usize) -> Row {
        let sample = Sample::new(SamplingParams::default(), position as u32);
        Row { token, want: Want::Sample(Box::new(sample)) }
    }

    /// Reads `tokens` tokens into every sequence, as many a call as the backend takes; the last has an answer.
    fn prefill(&mut self, tokens: usize) -> Outcome<f64> {
        let most = self.backend.limits().tokens;
        let mut output = Output::default();
        let start = Instant::now();
        for table in &self.tables {
            for first in (0..tokens).step_by(most) {
                let count = most.min(tokens - first);
                let mut batch = Batch::default();
                let input =
                    |i: usize| Input::Token((i as u32).wrapping_mul(2_654_435_761) % self.vocab);
                batch.push((first..first + count).map(input), first, table);
                if first + count == tokens {
                    batch.rows.push(Self::row(count - 1, tokens));
                }
                self.backend.forward(&batch, &mut output)?;
            }
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Decodes `steps` tokens in every sequence; a step is submitted before the one before it is read.
    fn decode(&mut self, depth: usize, steps: usize) -> Outcome<f64> {
        let mut output = Output::default();
        let mut batch = Batch::default();
        let start = Instant::now();
        for step in 0..steps {
            batch.clear();
            for (s, table) in self.tables.iter().enumerate() {
                let input = if step == 0 { Input::Token(s as u32 + 1) } else { Input::Sampled(s) };
                let token = batch.push([input], depth + step, table);
                batch.rows.push(Self::row(token, depth + step + 1));
            }
            self.backend.submit(&batch)?;
            if step > 0 {
                self.backend.collect(&mut output)?;
            }
        }
        self.backend.collect(&mut output)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// A figure as JSON, which knows no infinity.
fn number(figure: f64) -> String {
    if figure.is_finite() { format!("{figure:e}") } else { "null".into() }
}
