//! `kipp manual`: the reference of all commands, as Markdown or as man pages. Both are made from the same
//! definitions that the command line is parsed with.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Arg, Command, CommandFactory};
use engine::conformance::{AGAINST_BF16, GATES};

use crate::Cli;
use crate::output::print;

const HEAD: &str = "\
<!-- Made by `cargo run -- manual > docs/commands.md`; a test tells when it is stale. -->

# Commands

Results go to stdout, everything else to stderr. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted. The file
that a command is to write must not be there yet, and appears under its name when it is whole; until then it is `NAME.part`.
";

/// Prints the reference of all commands in Markdown.
#[derive(clap::Args)]
pub struct Args {
    /// Write man pages into this folder instead
    #[arg(long, value_name = "DIR")]
    man: Option<PathBuf>,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let mut cli = Cli::command();
    cli.build();
    let Some(folder) = args.man else { return print(&markdown(&cli)) };
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    clap_mangen::generate_to(Cli::command().disable_help_subcommand(true), &folder)
        .with_context(|| folder.display().to_string())
}

fn markdown(cli: &Command) -> String {
    let mut text = HEAD.to_owned();
    for command in cli.get_subcommands().filter(|command| command.get_name() != "help") {
        section(command, &mut text);
    }
    text += "\n## The gates\n\nWhat `kipp verify` runs, in this order.\n\n| gate | what must hold |\n|---|---|\n";
    for gate in GATES.iter().chain([&AGAINST_BF16]) {
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(text, "| `{}` | {} |", gate.name, gate.shows);
    }
    text
}

fn section(command: &Command, text: &mut String) {
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    let _ = write!(text, "\n## kipp {}\n\n", command.get_name());
    if let Some(about) = command.get_long_about().or(command.get_about()) {
        let _ = write!(text, "{}\n\n", plain(&about.to_string()));
    }
    let _ = write!(text, "```text\n{usage}\n```\n\n");
    for arg in command.get_positionals().chain(command.get_opts()).chain(flags(command)) {
        item(arg, text);
    }
}

/// What takes no value and is not known from everywhere.
fn flags(command: &Command) -> impl Iterator<Item = &Arg> {
    let is_flag = |arg: &&Arg| !arg.is_positional() && !arg.get_action().takes_values();
    command
        .get_arguments()
        .filter(is_flag)
        .filter(|arg| !matches!(arg.get_id().as_str(), "help" | "version"))
}

fn item(arg: &Arg, text: &mut String) {
    let _ = write!(text, "- `{arg}`");
    if let Some(help) = arg.get_long_help().or(arg.get_help()) {
        let _ = write!(text, ": {}", plain(&help.to_string()));
    }
    let takes_value = arg.get_action().takes_values();
    let values = arg.get_possible_values();
    if takes_value && !values.is_empty() {
        let values = values.iter().filter(|value| !value.is_hide_set());
        let value = |value: &clap::builder::PossibleValue| match value.get_help() {
            Some(help) => format!("`{}` ({})", value.get_name(), plain(&help.to_string())),
            None => format!("`{}`", value.get_name()),
        };
        let _ = write!(text, ". One of {}", values.map(value).collect::<Vec<_>>().join(", "));
    }
    let defaults = arg.get_default_values();
    if takes_value && !defaults.is_empty() && !arg.is_hide_default_value_set() {
        let defaults: Vec<_> = defaults.iter().map(|value| value.to_string_lossy()).collect();
        let _ = write!(text, ". Default `{}`", defaults.join(","));
    }
    if let Some(variable) = arg.get_env() {
        let _ = write!(text, ". Environment: `{}`", variable.to_string_lossy());
    }
    text.push('\n');
}

/// A help text as Markdown: nothing in it is markup.
fn plain(help: &str) -> String {
    help.replace('<', "\\<").replace('*', "\\*")
}
