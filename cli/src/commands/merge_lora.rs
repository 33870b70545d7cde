//! `samite merge-lora`: writes a model with adapters merged into its weights.

use crate::args::{AdapterArgs, ThreadArgs};
use crate::failure::{CommandError, CommandResult};
use crate::setup::scaled_files;
use crate::{files, interrupt, progress};
use clap::Args;
use samite::DType;
use samite::gguf::{GgufFile, LoadMode};
use samite::llm::merge::{MergeOptions, merge};
use std::io::Write;
use std::path::PathBuf;

/// Flags of `samite merge-lora`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite merge-lora model.gguf merged.gguf --lora adapter.gguf
  samite merge-lora in.gguf out.gguf --lora-scaled lora.gguf:0.5 --dtype q8_0")]
pub struct MergeLoraArgs {
    /// Model to merge the adapters into
    input: PathBuf,
    /// File to write
    output: PathBuf,
    #[command(flatten)]
    adapters: AdapterArgs,
    /// Type of the changed matrices [default: the type that they have]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<String>,
    #[command(flatten)]
    threads: ThreadArgs,
}

pub fn run(args: MergeLoraArgs) -> CommandResult {
    let named = |name: &String| {
        DType::from_name(name).ok_or_else(|| {
            CommandError::usage(format_args!(
                "--dtype: '{name}' is not a type; try f32, f16 or q8_0"
            ))
        })
    };
    let dtype = args.dtype.as_ref().map(named).transpose()?;
    let adapters = scaled_files(&args.adapters);
    if adapters.is_empty() {
        return Err(CommandError::usage(
            "there is no adapter to merge: name one with --lora or --lora-scaled",
        ));
    }
    let cancel = interrupt::token();
    let source = GgufFile::open(&args.input, LoadMode::Read)?;
    files::refuse_same(&args.input, &args.output)?;
    let bar = progress::bytes("merging");
    let bytes = source.tensors().total_bytes();
    let threads = args.threads.threads;
    let options = MergeOptions {
        adapters: &adapters,
        dtype,
        threads: threads.unwrap_or_else(samite::registry::allowed_threads),
        progress: &|done, total| {
            // Work is counted in elements, but users expect bytes.
            bar.set_length(bytes);
            bar.set_position((done as f64 / total.max(1) as f64 * bytes as f64) as u64);
        },
        cancel: &cancel,
    };
    let changed = merge(&source, &args.output, &options)?;
    drop(bar);
    writeln!(
        std::io::stdout().lock(),
        "{changed} of {} tensors changed, written to {}",
        source.tensors().len(),
        args.output.display()
    )?;
    Ok(())
}
