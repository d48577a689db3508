//! `kipp completions`: what shells complete commands with.

use anyhow::Result;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::Cli;
use crate::output::print;

/// Prints a script with which a shell completes kipp's commands and flags.
#[derive(clap::Args)]
pub struct Args {
    /// The shell that is to run the script
    shell: Shell,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "kipp", &mut script);
    print(&String::from_utf8(script)?)
}
