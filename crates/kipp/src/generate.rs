//! `kipp generate`: continues a text, printing it as it grows.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Instant;

use anyhow::{Result, bail};
use engine::request::{Event, FinishReason, Finished};
use engine::{Engine, Request, Settings};
use serde_json::json;
use text::{Special, StopStrings};

use crate::input;
use crate::interrupt;
use crate::options::{ModelOptions, SamplingOptions, SyntheticOptions, tokenizer_of};
use crate::output::{complain, print, wrong_usage};
use crate::speculation::SpeculationOptions;

/// Continues a text.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    synthetic: SyntheticOptions,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    speculation: SpeculationOptions,
    /// The text to continue; stdin if neither this nor --prompt-file is given
    #[arg(long)]
    prompt: Option<String>,
    /// A file that holds the text to continue
    #[arg(long, conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Tokens to generate at most
    #[arg(long, default_value_t = 256, allow_negative_numbers = true)]
    max_tokens: usize,
    /// A text that ends the answer; may be given several times
    #[arg(long)]
    stop: Vec<String>,
    /// Go on past the tokens that end an answer
    #[arg(long)]
    ignore_eos: bool,
    /// Print counts and rates to stderr
    #[arg(long)]
    stats: bool,
    /// Print one JSON object at the end instead of the text as it grows
    #[arg(long)]
    json: bool,
    /// Print token ids instead of text
    #[arg(long, conflicts_with = "json")]
    ids: bool,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let started = Instant::now();
    let params = args.sampling.params()?;
    if args.stop.iter().any(String::is_empty) {
        return Err(wrong_usage("--stop: expected a text, found an empty one"));
    }
    let prompt = read_prompt(&args)?;
    let model = args.synthetic.open_or(&args.model)?;
    let tokenizer = tokenizer_of(model.spec())?;
    let prompt = tokenizer.encode(&prompt, Special::Recognise);
    let context = args.model.context(&model)?;
    let settings = Settings { max_running: 1, token_budget: 512, context };
    let positions = context.min(prompt.len().saturating_add(args.max_tokens.max(1)));
    let backend = args.model.backend(&model, positions)?;
    let mut engine = Engine::new(backend, tokenizer.vocabulary(), settings);
    if let Some(speculation) = args.speculation.speculation(&args.model, &model, positions)? {
        engine.speculate(speculation);
    }

    let (sink, events) = sync_channel(64);
    let stops = model.checkpoint().map(|c| c.stops()).unwrap_or_default();
    let id = engine.submit(Request {
        max_tokens: args.max_tokens,
        sampling: params,
        stop_tokens: if args.ignore_eos { Vec::new() } else { stops },
        stops: StopStrings::new(args.stop.iter().cloned()),
        ..Request::new(prompt, Box::new(sink))
    })?;
    let interrupted = interrupt::flag()?;
    let mut answer = Answer::new(&args);
    let finished = loop {
        if interrupted.load(Ordering::Relaxed) {
            engine.cancel(id);
        }
        engine.step()?;
        if let Some(finished) = answer.take(&events)? {
            break finished;
        }
    };
    answer.end(&finished, engine.load().steps, started)?;
    match finished.reason {
        FinishReason::Error(why) | FinishReason::Constraint(why) => bail!(why),
        FinishReason::NoToken => bail!("no token is left to go on with"),
        FinishReason::Cancelled => Err(interrupt::Interrupted.into()),
        _ => Ok(()),
    }
}

/// The prompt from the flag, the file or stdin.
fn read_prompt(args: &Args) -> Result<String> {
    if let Some(prompt) = &args.prompt {
        return Ok(prompt.clone());
    }
    match &args.prompt_file {
        Some(path) => input::read_file(path),
        None => input::read_stdin("the text to continue"),
    }
}

/// Prints an answer as it grows, and keeps what the end needs.
struct Answer<'a> {
    args: &'a Args,
    text: String,
    ids: Vec<u32>,
}

impl<'a> Answer<'a> {
    fn new(args: &'a Args) -> Self {
        Answer { args, text: String::new(), ids: Vec::new() }
    }

    /// Takes the events that are there; returns the last one if the answer has ended.
    fn take(&mut self, events: &Receiver<Event>) -> Result<Option<Finished>> {
        for event in events.try_iter() {
            match event {
                Event::Prompt(_) => {}
                Event::Token(token) => {
                    if self.args.ids {
                        let space = if self.ids.is_empty() { "" } else { " " };
                        print(&format!("{space}{}", token.choice.token))?;
                    }
                    self.ids.push(token.choice.token);
                    self.grow(&token.text)?;
                }
                Event::Finished(finished) => {
                    self.grow(&finished.text)?;
                    return Ok(Some(finished));
                }
            }
        }
        Ok(None)
    }

    fn grow(&mut self, text: &str) -> Result<()> {
        if self.args.json {
            self.text.push_str(text);
        } else if !self.args.ids && !text.is_empty() {
            print(text)?;
        }
        Ok(())
    }

    /// Prints what is printed once: a last line end, the JSON, the statistics.
    fn end(self, finished: &Finished, steps: u64, started: Instant) -> Result<()> {
        let usage = finished.usage;
        let seconds = |d: std::time::Duration| d.as_secs_f64();
        let rate = |tokens: usize, s: f64| if s > 0.0 { tokens as f64 / s } else { 0.0 };
        let timings = finished.timings;
        let (prefill, decode) = (seconds(timings.prefill), seconds(timings.decode));
        let read = usage.prompt - usage.cached;
        // The first token comes with the prompt; the others are what decoding took its time for.
        let decoded = usage.generated.saturating_sub(1);
        if self.args.json {
            let value = json!({
                "text": self.text,
                "ids": self.ids,
                "finish_reason": reason(&finished.reason),
                "prompt_tokens": usage.prompt,
                "cached_tokens": usage.cached,
                "generated_tokens": usage.generated,
                "drafted_tokens": usage.drafted,
                "accepted_tokens": usage.accepted,
                "forward_passes": steps,
                "timings": {
                    "total_s": seconds(started.elapsed()),
                    "prefill_s": prefill,
                    "decode_s": decode,
                    "prefill_tokens_per_s": rate(read, prefill),
                    "decode_tokens_per_s": rate(decoded, decode),
                },
            });
            print(&format!("{value}\n"))?;
        } else {
            print("\n")?;
        }
        if self.args.stats {
            let drafts = match usage.drafted {
                0 => String::new(),
                drafted => format!("; of {drafted} drafted tokens {} were right", usage.accepted),
            };
            complain(&format!(
                "prompt {} tokens in {prefill:.3} s ({:.1} tokens/s); generated {} tokens in {steps} forward \
                 passes, {:.1} tokens/s{drafts}; {}",
                usage.prompt,
                rate(read, prefill),
                usage.generated,
                rate(decoded, decode),
                reason(&finished.reason),
            ));
        }
        Ok(())
    }
}

/// The word for the end of an answer: OpenAI's, and three more for what it has none for.
fn reason(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Deadline => "deadline",
        FinishReason::Cancelled => "cancelled",
        FinishReason::NoToken | FinishReason::Constraint(_) | FinishReason::Error(_) => "error",
    }
}
