//! `samite pull`: downloads a model by its name.

use crate::args::AccessArgs;
use crate::failure::CommandResult;
use crate::hub;
use crate::shown::escaped;
use clap::Args;
use samite::hub::Reference;
use samite::sched::explain::human_bytes;
use serde_json::json;
use std::io::Write;

/// Flags of `samite pull`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite pull ggml-org/gemma-3-1b-it-GGUF
  samite pull unsloth/Qwen3-0.6B-GGUF:Q8_0
  samite pull unsloth/Qwen3-0.6B-GGUF --list
  samite run -hf unsloth/Qwen3-0.6B-GGUF:Q8_0 Hello")]
pub struct PullArgs {
    /// OWNER/NAME of the repository, optionally with a quantization type or a file; Q4_K_M by
    /// default, if the repository has it. An interrupted download resumes where it stopped. Models
    /// are stored in the folder that HF_HUB_CACHE names, or that other programs for the hub use
    #[arg(value_name = "OWNER/NAME[:TYPE|:FILE]")]
    model: Reference,

    /// Branch, tag or commit
    #[arg(long, value_name = "NAME", default_value = "main")]
    revision: String,

    #[command(flatten)]
    access: AccessArgs,

    /// List the models of the repository without downloading any
    #[arg(long)]
    list: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: PullArgs) -> CommandResult {
    let hub = hub::hub(&args.access);
    let listing = hub::list(&hub, &args.model, &args.revision)?;
    let mut out = std::io::stdout().lock();
    if args.list {
        if args.json {
            writeln!(out, "{:#}", json!(listing))?;
            return Ok(());
        }
        for file in &listing.files {
            writeln!(
                out,
                "{:>12}  {}",
                human_bytes(usize::try_from(file.size).unwrap_or(usize::MAX)),
                escaped(&file.path)
            )?;
        }
        return Ok(());
    }
    let files = listing.choose(&args.model)?;
    let paths = hub::fetch(&hub, &hub::cache()?, &listing, &files)?;
    if args.json {
        let files = files.iter().zip(&paths).map(|(file, path)| {
            json!({"file": file.path, "size": file.size, "sha256": file.sha256, "path": path})
        });
        let files: Vec<_> = files.collect();
        writeln!(
            out,
            "{:#}",
            json!({"repository": listing.repository, "commit": listing.commit, "files": files})
        )?;
        return Ok(());
    }
    for path in paths {
        writeln!(out, "{}", path.display())?;
    }
    Ok(())
}
