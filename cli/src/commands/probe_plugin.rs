//! `samite probe-plugin`: loads a ggml plugin in a separate process, because a plugin can end the
//! process that loads it.

use crate::failure::CommandResult;
use clap::Args;
use std::io::Write;
use std::path::PathBuf;

/// Flags of `samite probe-plugin`.
#[derive(Debug, Args)]
pub struct ProbePluginArgs {
    /// Load the plugin without computing a graph
    #[arg(long)]
    load_only: bool,
    /// Plugin library
    path: PathBuf,
}

pub fn run(args: ProbePluginArgs) -> CommandResult {
    let mut out = std::io::stdout();
    let mut result = Ok(());
    samite::registry::probe_ggml_plugin(&args.path, !args.load_only, &mut |line| {
        // Start a new line: the plugin may have printed something.
        let written = writeln!(out, "\n{line}").and_then(|()| out.flush());
        if result.is_ok() {
            result = written;
        }
    });
    Ok(result?)
}
