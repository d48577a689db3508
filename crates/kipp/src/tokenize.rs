//! `kipp tokenize`: token ids of a text.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;
use text::Special;

use crate::input;
use crate::options::tokenizer_of;
use crate::output::print;
use crate::store::Reference;

/// Prints the token ids of a text.
#[derive(clap::Args)]
pub struct Args {
    /// Registry id or GGUF file; kipp-tiny if left out
    model: Option<String>,
    /// A file of {"text": ...} lines; prints a JSON array of ids for each. Otherwise stdin is one text
    #[arg(long)]
    jsonl: Option<PathBuf>,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let checkpoint = Reference::parse(args.model.as_deref())?.checkpoint()?;
    let tokenizer = tokenizer_of(&checkpoint.spec)?;
    if let Some(path) = &args.jsonl {
        return each_line(path, |line| {
            let line: Value = serde_json::from_str(line)?;
            let text = line.get("text").and_then(Value::as_str);
            let text = text.context("text: expected a string, found none")?;
            Ok(serde_json::to_string(&tokenizer.encode(text, Special::Recognise))?)
        });
    }
    let text = input::read_stdin("a text")?;
    let ids = tokenizer.encode(&text, Special::Recognise);
    let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
    print(&format!("{}\n", ids.join(" ")))
}

/// Prints one line for each line of a file; an error names the line.
pub fn each_line(path: &Path, convert: impl Fn(&str) -> Result<String>) -> Result<()> {
    let name = path.display();
    let file = File::open(path).with_context(|| name.to_string())?;
    let mut converted = String::new();
    for (number, line) in (1..).zip(BufReader::new(file).lines()) {
        let line = line.with_context(|| format!("{name}, line {number}"))?;
        if line.trim().is_empty() {
            continue;
        }
        let out = convert(&line).with_context(|| format!("{name}, line {number}"))?;
        converted.push_str(&out);
        converted.push('\n');
        if converted.len() > 1 << 16 {
            print(&converted)?;
            converted.clear();
        }
    }
    print(&converted)
}
