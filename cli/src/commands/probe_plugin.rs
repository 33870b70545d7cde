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
    /// Release of ggml of a plugin that comes without libggml-base
    #[arg(long, value_name = "RELEASE")]
    release: Option<String>,
    /// Plugin library
    path: PathBuf,
}

pub fn run(args: ProbePluginArgs) -> CommandResult {
    let mut out = std::io::stdout();
    let mut result = Ok(());
    let mut options = samite::registry::ProbeOptions::default();
    (options.load_only, options.release) = (args.load_only, args.release);
    samite::registry::probe_ggml_plugin(&args.path, &options, &mut |line| {
        // Start a new line: the plugin may have printed something.
        let written = writeln!(out, "\n{line}").and_then(|()| out.flush());
        if result.is_ok() {
            result = written;
        }
    });
    Ok(result?)
}
