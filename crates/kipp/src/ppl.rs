//! `kipp ppl`: perplexity of a text under a model.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use engine::{Answer, Backend, Batch, KvPool, Output, Row, Sequence, Want};
use serde_json::json;
use text::{Special, Tokenizer};

use crate::options::ModelOptions;
use crate::output::{complain, print};

/// Measures the perplexity of a text.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelOptions,
    /// A UTF-8 text
    #[arg(long, required_unless_present = "tokens", conflicts_with = "tokens")]
    text: Option<PathBuf>,
    /// Token ids, little-endian: 16 bits each in a .u16 file, 32 bits in a .u32 file
    #[arg(long)]
    tokens: Option<PathBuf>,
    /// Tokens a window; each window is scored from its second token on
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..))]
    window: u32,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// Negative log-likelihood of some tokens.
#[derive(Default)]
struct Score {
    nll: f64,
    tokens: usize,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let model = args.model.open()?;
    let vocab = model.spec().vocab;
    let tokens = match (&args.text, &args.tokens) {
        (Some(path), _) => {
            let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
            let tokenizer = Tokenizer::of(model.spec()).context("the model has no tokenizer")?;
            tokenizer.encode(&text, Special::Literal)
        }
        (None, Some(path)) => read_tokens(path)?,
        (None, None) => bail!("expected --text or --tokens"),
    };
    if let Some((at, id)) = tokens.iter().enumerate().find(|&(_, &id)| id as usize >= vocab) {
        bail!("token {at}: expected an id below {vocab}, found {id}");
    }
    let window = (args.window as usize).min(args.model.context(&model)?);
    let mut backend = args.model.backend(&model, window)?;
    let mut total = Score::default();
    let windows = tokens.chunks(window).filter(|w| w.len() >= 2);
    let count = windows.clone().count();
    for (index, window) in (1..).zip(windows) {
        let score = score(backend.as_mut(), window)?;
        total.nll += score.nll;
        total.tokens += score.tokens;
        complain(&format!("{index}/{count} windows, perplexity {:.4}", total.perplexity()));
    }
    if total.tokens == 0 {
        bail!("expected at least two tokens, found {}", tokens.len());
    }
    if args.json {
        let value = json!({
            "perplexity": total.perplexity(),
            "nll": total.nll,
            "tokens": total.tokens,
            "window": window,
            "windows": count,
        });
        return print(&format!("{value}\n"));
    }
    print(&format!("perplexity {:.6} over {} tokens\n", total.perplexity(), total.tokens))
}

impl Score {
    fn perplexity(&self) -> f64 {
        (self.nll / self.tokens as f64).exp()
    }
}

/// Scores one window from its second token on.
fn score(backend: &mut dyn Backend, window: &[u32]) -> Result<Score> {
    let limits = backend.limits();
    let mut pool = KvPool::new(limits.blocks);
    let mut sequence = Sequence::new(window.to_vec());
    let mut batch = Batch::default();
    let mut output = Output::default();
    let mut score = Score::default();
    while sequence.pending() > 1 {
        batch.clear();
        let start = sequence.evaluated();
        let count = (sequence.pending() - 1).min(limits.tokens).min(limits.rows);
        let full = |_| anyhow::anyhow!("the window does not fit the KV cache");
        sequence.schedule(&mut pool, &mut batch, count).map_err(full)?;
        batch.rows.extend((0..count).map(|token| Row {
            token,
            want: Want::Score { target: window[start + token + 1], top: 0 },
        }));
        backend.forward(&batch, &mut output)?;
        for answer in &output.answers {
            let Answer::Choice(choice) = answer else { bail!("the model's output is not finite") };
            score.nll -= f64::from(choice.logprob);
            score.tokens += 1;
        }
    }
    Ok(score)
}

/// Token ids of a binary file whose name tells their width.
fn read_tokens(path: &PathBuf) -> Result<Vec<u32>> {
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
