//! `kipp imatrix`: how much each input of a model's matrices matters on a text.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, bail};
use engine::{Backend, Batch, KvConfig, KvKind, KvPool, Oracle, Output, Sequence};
use hub::{Importance, Squares};
use text::Special;

use crate::input;
use crate::options::{Threads, open, tokenizer_of};
use crate::output::{check_target, complain, print};

/// Measures how much each input of a model's matrices matters on a text, for `kipp quantize --imatrix`.
///
/// The scalar oracle computes it, which is the only backend that shows its inputs: seconds for the built-in model, and
/// several tokens a second at most for the smallest published ones.
#[derive(clap::Args)]
pub struct Args {
    /// Registry id with an optional :scheme, or a GGUF file; kipp-tiny, which is built in, if left out
    model: Option<String>,
    #[command(flatten)]
    threads: Threads,
    /// A UTF-8 text
    #[arg(long)]
    text: PathBuf,
    /// Tokens a chunk; each chunk is read from an empty cache
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    chunk: u32,
    /// Chunks to read at most
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    chunks: Option<u32>,
    /// The file to write
    #[arg(long)]
    out: PathBuf,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    check_target("--out", &args.out)?;
    let model = open(args.model.as_deref())?;
    let name = args.text.display().to_string();
    let text = input::read_file(&args.text)?;
    let tokenizer = tokenizer_of(model.spec())?;
    let tokens = tokenizer.encode(&text, Special::Literal);
    let chunk = (args.chunk as usize).min(model.spec().context);
    let mut chunks: Vec<&[u32]> = tokens.chunks_exact(chunk).collect();
    if chunks.is_empty() && !tokens.is_empty() {
        chunks.push(&tokens);
    }
    if chunks.is_empty() {
        bail!("{name}: expected at least one token, found none");
    }
    chunks.truncate(args.chunks.map_or(usize::MAX, |chunks| chunks as usize));

    let kv = KvConfig::for_positions(chunk, KvKind::Bf16);
    let mut oracle = Oracle::new(Arc::clone(&model), kv, args.threads.count());
    let sums = Arc::new(Mutex::new(BTreeMap::<String, Squares>::new()));
    let seen = Arc::clone(&sums);
    let add = move |layer: usize, matrices: &[&str], inputs: &[f32], tokens: usize| {
        let mut sums = seen.lock().unwrap_or_else(PoisonError::into_inner);
        for matrix in matrices {
            let squares = sums.entry(format!("blk.{layer}.{matrix}.weight")).or_default();
            squares.add(inputs, inputs.len() / tokens);
        }
    };
    oracle.observe(Box::new(add));
    let count = chunks.len();
    for (index, tokens) in (1..).zip(chunks) {
        read(&mut oracle, tokens)?;
        complain(&format!("{index}/{count} chunks of {chunk} tokens"));
    }
    let squares: Vec<(String, Squares)> =
        sums.lock().unwrap_or_else(PoisonError::into_inner).clone().into_iter().collect();
    Importance::write(&args.out, &squares, &name, chunk)?;
    print(&format!("{}: {} matrices\n", args.out.display(), squares.len()))
}

/// Evaluates tokens from an empty cache, wanting no answer.
fn read(oracle: &mut Oracle, tokens: &[u32]) -> Result<()> {
    let limits = oracle.limits();
    let mut pool = KvPool::new(limits.blocks);
    let mut sequence = Sequence::new(tokens.to_vec());
    let (mut batch, mut output) = (Batch::default(), Output::default());
    while sequence.pending() > 0 {
        batch.clear();
        let count = sequence.pending().min(limits.tokens);
        let full = |_| anyhow::anyhow!("the chunk does not fit the KV cache");
        sequence.schedule(&mut pool, &mut batch, count).map_err(full)?;
        oracle.forward(&batch, &mut output)?;
    }
    Ok(())
}
