//! `samite probe-plugin`: loads a plugin of ggml in a process of its own, because a plugin can end the process that loads it.

use crate::failure::Outcome;
use clap::Args;
use std::io::Write;
use std::path::PathBuf;

/// Flags of `samite probe-plugin`.
#[derive(Debug, Args)]
pub struct ProbePluginArgs {
    /// The library
    path: PathBuf,
}

pub fn run(args: ProbePluginArgs) -> Outcome {
    let answer = samite::registry::probe_ggml_plugin(&args.path);
    // On a line of its own: the plugin may have printed something.
    writeln!(std::io::stdout(), "\n{answer}")?;
    Ok(())
}
