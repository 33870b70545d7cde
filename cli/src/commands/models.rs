//! `samite models`: lists and deletes downloaded models.

use crate::failure::CommandResult;
use crate::hub;
use crate::shown::{escaped, say};
use clap::{Args, Subcommand};
use samite::hub::{Cached, Reference};
use samite::sched::explain::human_bytes;
use serde_json::json;
use std::io::Write;

/// Flags of `samite models`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite models
  samite models remove unsloth/Qwen3-0.6B-GGUF:Q8_0
  samite models remove unsloth/Qwen3-0.6B-GGUF")]
pub struct ModelsArgs {
    #[command(subcommand)]
    action: Option<Action>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Delete a model, or all models of a repository
    #[command(alias = "rm")]
    Remove {
        /// OWNER/NAME of the repository, optionally with a quantization type or a file
        #[arg(value_name = "OWNER/NAME[:TYPE|:FILE]")]
        model: Reference,
    },
}

fn human(bytes: u64) -> String {
    human_bytes(usize::try_from(bytes).unwrap_or(usize::MAX))
}

pub fn run(args: ModelsArgs) -> CommandResult {
    let cache = hub::cache()?;
    if let Some(Action::Remove { model }) = args.action {
        let freed = cache.remove(&model)?;
        say(format_args!("{} freed", human(freed)));
        return Ok(());
    }
    let models = cache.models()?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", json!(models))?;
        return Ok(());
    }
    if models.is_empty() {
        say(format_args!(
            "there are no models in {}: samite pull downloads one",
            cache.folder().display()
        ));
    }
    for Cached {
        repository,
        file,
        size,
        ..
    } in &models
    {
        writeln!(out, "{:>12}  {repository}:{}", human(*size), escaped(file))?;
    }
    Ok(())
}
