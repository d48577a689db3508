//! The `kipp` command line: one module a verb, each reading its flags, calling the libraries and printing.
//!
//! Results go to stdout, everything else to stderr. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.

#![forbid(unsafe_code)]

mod backends;
mod bench;
mod chat;
mod completions;
mod convert;
mod doctor;
mod gates;
mod generate;
mod imatrix;
mod input;
mod inspect;
mod interrupt;
mod ls;
mod machine;
mod manual;
mod options;
mod output;
mod ppl;
mod progress;
mod pull;
mod quantize;
mod render;
mod rm;
mod serve;
mod speculation;
mod store;
mod tokenize;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::output::WrongUsage;

/// Runs the dense Qwen3 models on local hardware.
#[derive(Parser)]
#[command(name = "kipp", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Continues a text.
    Generate(generate::Args),
    /// Talks with the model on the terminal.
    Chat(chat::Args),
    /// Answers OpenAI's and Anthropic's APIs over HTTP, with a chat page.
    Serve(serve::Args),
    /// Prints the token ids of a text.
    Tokenize(tokenize::Args),
    /// Prints the prompt text of a chat request.
    Render(render::Args),
    /// Downloads a checkpoint's pinned revision, checks it and converts it.
    Pull(pull::Args),
    /// Converts a published folder of safetensors to GGUF.
    Convert(convert::Args),
    /// Stores the weights of a 16-bit GGUF in fewer bits.
    Quantize(quantize::Args),
    /// Measures how much each input of a model's matrices matters on a text.
    Imatrix(imatrix::Args),
    /// Removes a checkpoint's files from the models' folder.
    Rm(rm::Args),
    /// Says what is in a model file.
    Inspect(inspect::Args),
    /// Lists the checkpoints that kipp runs and which of them are here.
    Ls(ls::Args),
    /// Says what this machine has and what fits on it.
    Doctor(doctor::Args),
    /// Measures the perplexity of a text.
    Ppl(ppl::Args),
    /// Measures how fast a backend reads prompts and generates.
    Bench(bench::Args),
    /// Checks backends against the scalar oracle on this machine.
    Verify(verify::Args),
    /// Prints a script with which a shell completes kipp's commands and flags.
    Completions(completions::Args),
    /// Prints the reference of all commands, or writes man pages.
    Manual(manual::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().verb {
        Verb::Generate(args) => generate::run(args),
        Verb::Chat(args) => chat::run(args),
        Verb::Serve(args) => serve::run(args),
        Verb::Tokenize(args) => tokenize::run(args),
        Verb::Render(args) => render::run(args),
        Verb::Pull(args) => pull::run(args),
        Verb::Convert(args) => convert::run(args),
        Verb::Quantize(args) => quantize::run(args),
        Verb::Imatrix(args) => imatrix::run(args),
        Verb::Rm(args) => rm::run(args),
        Verb::Inspect(args) => inspect::run(args),
        Verb::Ls(args) => ls::run(args),
        Verb::Doctor(args) => doctor::run(args),
        Verb::Ppl(args) => ppl::run(args),
        Verb::Bench(args) => bench::run(args),
        Verb::Verify(args) => verify::run(args),
        Verb::Completions(args) => completions::run(args),
        Verb::Manual(args) => manual::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read our output has seen enough.
        Err(error) if output::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) if error.is::<interrupt::Interrupted>() => ExitCode::from(interrupt::STATUS),
        Err(error) => {
            output::complain(&format!("kipp: {error:#}"));
            if error.is::<WrongUsage>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}
