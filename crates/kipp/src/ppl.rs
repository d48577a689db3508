//! `kipp ppl`: how well a model predicts a text, alone or against the saved distributions of a reference.

use std::fs::File;
use std::io::{self, BufReader, BufWriter};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use engine::Backend;
use engine::perplexity::divergence::{Divergence, Summary};
use engine::perplexity::saved::{Header, Reader, Writer};
use engine::perplexity::{Span, Windows, log_probabilities, log_sum_exp, logits};
use model::{Model, Part};
use serde_json::{Value, json};
use text::Special;

use crate::input;
use crate::options::{ModelOptions, tokenizer_of};
use crate::output::{check_target, complain, print, size, wrong_usage};

/// Measures the perplexity of a text, and the divergence from a reference model.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    source: Source,
    /// Tokens a window; 1024, or all positions where there are fewer, if left out
    #[arg(long, conflicts_with = "kl", value_parser = clap::value_parser!(u32).range(2..))]
    window: Option<u32>,
    /// Tokens from one window's begin to the next one's; each token is scored once, with at least
    /// window - stride before it. Windows side by side if left out
    #[arg(long, conflicts_with = "kl", value_parser = clap::value_parser!(u32).range(1..))]
    stride: Option<u32>,
    /// Read only this many windows
    #[arg(long, conflicts_with = "kl", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Save the model's distributions, for other models' --kl: 2 bytes a token of the text and of the
    /// vocabulary
    #[arg(long, value_name = "FILE", conflicts_with = "kl")]
    save_logits: Option<PathBuf>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// What to read.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Source {
    /// A UTF-8 text
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Token ids, little-endian: 16 bits each in a .u16 file, 32 bits in a .u32 file
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
    /// Distributions that a reference model saved with --save-logits; the text is in the file too
    #[arg(long, value_name = "FILE")]
    kl: Option<PathBuf>,
}

impl Source {
    /// The file's name.
    fn name(&self) -> String {
        let path = self.text.as_ref().or(self.tokens.as_ref()).or(self.kl.as_ref());
        path.map(|path| path.display().to_string()).unwrap_or_default()
    }
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    args.save_logits.iter().try_for_each(|path| check_target("--save-logits", path))?;
    let model = args.model.open()?;
    if let Some(path) = &args.source.kl {
        return compare(&args, &model, path);
    }
    let windows = windows(&args, args.model.context(&model)?)?;
    let mut tokens = read_text(&args.source, &model)?;
    let spans = windows.spans(tokens.len());
    let spans = &spans[..spans.len().min(args.limit.map_or(usize::MAX, |limit| limit as usize))];
    let Some(last) = spans.last() else {
        bail!("{}: expected at least two tokens, found {}", args.source.name(), tokens.len());
    };
    // A limit makes a shorter text, so that a saved file says all by itself.
    tokens.truncate(last.tokens.end);
    let mut backend = args.model.backend(&model, windows.window)?;
    let mut save = match &args.save_logits {
        Some(path) => Some(Saving::begin(path, &model, windows, &tokens)?),
        None => None,
    };
    let (mut nll, mut scored) = (0.0, 0);
    let perplexity = |nll: f64, scored: usize| (nll / scored as f64).exp();
    for (number, span) in (1..).zip(spans) {
        let found = match &mut save {
            Some(save) => save.window(backend.as_mut(), &tokens, span)?,
            None => log_probabilities(backend.as_mut(), &tokens, span)?,
        };
        nll -= found.iter().sum::<f64>();
        scored += found.len();
        let so_far = perplexity(nll, scored);
        complain(&format!("{number}/{} windows, perplexity {so_far:.4}", spans.len()));
    }
    if let Some(save) = save {
        save.end()?;
    }
    let perplexity = perplexity(nll, scored);
    if args.json {
        let value = json!({
            "perplexity": perplexity,
            "nll": nll,
            "tokens": scored,
            "window": windows.window,
            "stride": windows.stride,
            "windows": spans.len(),
        });
        return print(&format!("{value}\n"));
    }
    print(&format!("perplexity {perplexity:.6} over {scored} tokens\n"))
}

/// How the flags cut a text.
fn windows(args: &Args, context: usize) -> Result<Windows> {
    let window = args.window.map_or(context.min(1024), |window| window as usize);
    if !(2..=context).contains(&window) {
        return Err(wrong_usage(format!("--window: expected 2 to {context}, found {window}")));
    }
    let stride = args.stride.map_or(window, |stride| stride as usize);
    if stride > window {
        return Err(wrong_usage(format!("--stride: expected 1 to {window}, found {stride}")));
    }
    Ok(Windows { window, stride })
}

/// The text's tokens, all of them the model's.
fn read_text(source: &Source, model: &Model) -> Result<Vec<u32>> {
    let tokens = match (&source.text, &source.tokens) {
        (Some(path), _) => {
            let text = input::read_file(path)?;
            let tokenizer = tokenizer_of(model.spec())?;
            tokenizer.encode(&text, Special::Literal)
        }
        (None, Some(path)) => read_tokens(path)?,
        (None, None) => bail!("expected --text, --tokens or --kl"),
    };
    let vocab = model.spec().vocab;
    if let Some((at, id)) = tokens.iter().enumerate().find(|&(_, &id)| id as usize >= vocab) {
        bail!("{}: token {at}: expected an id below {vocab}, found {id}", source.name());
    }
    Ok(tokens)
}

/// Token ids of a binary file whose name tells their width.
fn read_tokens(path: &Path) -> Result<Vec<u32>> {
    let name = path.display();
    let bytes = std::fs::read(path).with_context(|| name.to_string())?;
    let width = match path.extension().and_then(|e| e.to_str()) {
        Some("u16") => 2,
        Some("u32") => 4,
        _ => bail!("{name}: expected a name that ends in .u16 or .u32"),
    };
    if !bytes.len().is_multiple_of(width) {
        bail!("{name}: expected a multiple of {width} bytes, found {}", bytes.len());
    }
    let id = |b: &[u8]| b.iter().rev().fold(0, |id, &byte| id << 8 | u32::from(byte));
    Ok(bytes.chunks_exact(width).map(id).collect())
}

/// A file of distributions that is being written.
struct Saving<'a> {
    path: &'a Path,
    writer: Writer<BufWriter<Part>>,
}

impl<'a> Saving<'a> {
    fn begin(path: &'a Path, model: &Model, windows: Windows, tokens: &[u32]) -> Result<Self> {
        let header = Header { vocab: model.spec().vocab, windows, tokens: tokens.to_vec() };
        complain(&format!("{}: {}", path.display(), size(header.file_bytes())));
        let part = Part::create(path);
        let writer = part.and_then(|part| Writer::new(BufWriter::new(part), &header));
        Ok(Saving { path, writer: writer.with_context(|| path.display().to_string())? })
    }

    /// Saves a window's distributions and returns its scores.
    fn window(
        &mut self,
        backend: &mut dyn Backend,
        tokens: &[u32],
        span: &Span,
    ) -> Result<Vec<f64>> {
        let mut found = Vec::new();
        logits(backend, tokens, span, |target, row| -> Result<()> {
            found.push(f64::from(row[target as usize]) - log_sum_exp(row));
            self.writer.row(row).with_context(|| self.path.display().to_string())
        })?;
        Ok(found)
    }

    fn end(self) -> Result<()> {
        let Saving { path, writer } = self;
        let end = || -> io::Result<()> { writer.finish()?.into_inner()?.complete() };
        end().with_context(|| path.display().to_string())
    }
}

/// Compares the model with what a reference has saved.
fn compare(args: &Args, model: &Arc<Model>, path: &Path) -> Result<()> {
    let name = || path.display().to_string();
    let file = File::open(path).with_context(name)?;
    let length = file.metadata().with_context(name)?.len();
    let (header, mut reader) = Reader::open(BufReader::new(file), length).with_context(name)?;
    let vocab = model.spec().vocab;
    if header.vocab != vocab {
        bail!("{}: vocabulary: expected {vocab}, the model's, found {}", name(), header.vocab);
    }
    let context = args.model.context(model)?;
    let Windows { window, stride } = header.windows;
    if window > context {
        bail!("{}: window: expected at most {context}, the model's, found {window}", name());
    }
    let mut backend = args.model.backend(model, window)?;
    let mut divergence = Divergence::default();
    let spans = header.windows.spans(header.tokens.len());
    for (number, span) in (1..).zip(&spans) {
        logits(backend.as_mut(), &header.tokens, span, |target, row| -> Result<()> {
            let reference = reader.row().with_context(name)?;
            let reference = reference.with_context(|| format!("{}: no more rows", name()))?;
            divergence.add(target, &reference, row);
            Ok(())
        })?;
        complain(&format!("{number}/{} windows", spans.len()));
    }
    let summary = divergence.summary();
    let summary = summary.with_context(|| format!("{}: expected two tokens or more", name()))?;
    if args.json {
        let mut value = record(&summary);
        value["window"] = window.into();
        value["stride"] = stride.into();
        return print(&format!("{value}\n"));
    }
    print(&describe(&summary))
}

fn record(summary: &Summary) -> Value {
    json!({
        "tokens": summary.tokens,
        "perplexity": summary.perplexity,
        "reference_perplexity": summary.reference,
        "kl_mean": summary.mean,
        "kl_standard_error": summary.error,
        "kl_median": summary.median,
        "kl_99_percent": summary.percentile_99,
        "kl_largest": summary.largest,
        "same_top_token": summary.same_top,
        "probability_change_mean": summary.mean_change,
        "probability_change_rms": summary.rms_change,
    })
}

fn describe(summary: &Summary) -> String {
    let ratio = 100.0 * (summary.perplexity / summary.reference - 1.0);
    format!(
        "perplexity         {:.6} over {} tokens, reference {:.6} ({ratio:+.3} %)\n\
         KL divergence      {:.6} +- {:.6} nats; median {:.6}, 99 % below {:.6}, largest {:.6}\n\
         same top token     {:.3} %\n\
         p of the text      {:+.4} % on average, {:.4} % root mean square\n",
        summary.perplexity,
        summary.tokens,
        summary.reference,
        summary.mean,
        summary.error,
        summary.median,
        summary.percentile_99,
        summary.largest,
        100.0 * summary.same_top,
        100.0 * summary.mean_change,
        100.0 * summary.rms_change,
    )
}
