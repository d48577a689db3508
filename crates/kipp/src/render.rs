//! `kipp render`: the prompt text of a chat request, as the model reads it.

use std::path::PathBuf;

use anyhow::{Context, Result};
use model::Variant;
use text::Conversation;

use crate::input;
use crate::output::print;
use crate::store::Reference;
use crate::tokenize::each_line;

/// Prints the prompt text of a chat request.
#[derive(clap::Args)]
pub struct Args {
    /// Registry id or GGUF file, whose template counts; kipp-tiny if left out
    model: Option<String>,
    /// A file of requests, one a line: {"messages", "tools", "add_generation_prompt", "enable_thinking"};
    /// prints a JSON string for each. Otherwise stdin is one request and its prompt is printed as it is
    #[arg(long)]
    jsonl: Option<PathBuf>,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let variant = Reference::parse(args.model.as_deref())?.checkpoint()?.variant;
    if let Some(path) = &args.jsonl {
        return each_line(path, |line| Ok(serde_json::to_string(&render(line, variant)?)?));
    }
    let request = input::read_stdin("a request in JSON")?;
    print(&render(&request, variant).context("stdin")?)
}

/// The prompt of one request.
fn render(request: &str, variant: Variant) -> Result<String> {
    Ok(Conversation::parse(request)?.render(variant)?.text().to_string())
}
