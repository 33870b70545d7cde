//! `samite quantize`: converts the weights of a model file to other types.

use crate::args::ThreadArgs;
use crate::failure::Outcome;
use crate::shown::{NAME_WIDTH, shortened};
use crate::{files, interrupt, progress};
use clap::Args;
use samite::DType;
use samite::gguf::{GgufFile, LoadMode};
use samite::llm::quantize::{Mixture, QuantizeOptions, plan, quantize};
use samite::sched::explain::human_bytes;
use std::io::Write;
use std::path::PathBuf;

mod bench;

/// Flags of `samite quantize`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite quantize model-f16.gguf model-q4.gguf Q4_K_M
  samite quantize model-f16.gguf model-q8.gguf Q8_0 --dry-run
  samite quantize --bench Q4_0 Q4_K")]
pub struct QuantizeArgs {
    /// Model to convert, best in F32, F16 or BF16
    #[arg(required_unless_present = "bench")]
    input: Option<PathBuf>,
    /// File to write
    #[arg(required_unless_present = "bench")]
    output: Option<PathBuf>,
    /// Types, as llama.cpp names them: Q4_0, Q4_K_M, Q8_0, F16, …
    #[arg(value_name = "TYPE", required_unless_present = "bench")]
    mixture: Option<Mixture>,
    #[command(flatten)]
    threads: ThreadArgs,
    /// Accept weights that are quantized already, at a loss of quality
    #[arg(long)]
    allow_requantize: bool,
    /// The same type for all matrices
    #[arg(long)]
    pure: bool,
    /// Only show what would be done
    #[arg(long)]
    dry_run: bool,
    /// Instead, measure how fast one thread encodes and decodes these types, or all of them
    #[arg(
        long,
        value_name = "TYPE",
        num_args = 0..,
        value_parser = bench::dtype,
        conflicts_with_all = ["input", "output", "mixture", "threads", "allow_requantize", "pure", "dry_run"]
    )]
    bench: Option<Vec<DType>>,
    /// Print what was measured as JSON
    #[arg(long, requires = "bench")]
    json: bool,
}

pub fn run(args: QuantizeArgs) -> Outcome {
    let cancel = interrupt::token();
    let (input, output, mixture) = match (args.bench, args.input, args.output, args.mixture) {
        (None, Some(input), Some(output), Some(mixture)) => (input, output, mixture),
        (types, ..) => return bench::run(&types.unwrap_or_default(), args.json, &cancel),
    };
    let source = GgufFile::open(&input, LoadMode::Read)?;
    files::refuse_same(&input, &output)?;
    let bar = progress::bytes("quantizing");
    let bytes = source.tensors().total_bytes();
    let threads = args.threads.count();
    let threads = threads.unwrap_or_else(samite::registry::allowed_threads);
    let options = QuantizeOptions {
        mixture,
        threads,
        allow_requantize: args.allow_requantize,
        pure: args.pure,
        progress: &|done, total| {
            // Of bytes, users know how many there are; elements are counted.
            bar.set_length(bytes);
            bar.set_position((done as f64 / total.max(1) as f64 * bytes as f64) as u64);
        },
        cancel: &cancel,
    };
    let conversions = if args.dry_run {
        plan(&source, &options)?
    } else {
        quantize(&source, &output, &options)?
    };
    drop(bar);

    let mut out = std::io::stdout().lock();
    let names: Vec<_> = conversions
        .iter()
        .map(|c| shortened(&c.name, NAME_WIDTH))
        .collect();
    let width = names.iter().map(|name| name.chars().count()).max();
    let width = width.unwrap_or(0);
    for (c, name) in conversions.iter().zip(&names) {
        writeln!(
            out,
            "{name:<width$}  {:<6} -> {:<6} {:>10}",
            c.from.name(),
            c.to.name(),
            human_bytes(c.bytes_after)
        )?;
    }
    let sum = |f: fn(&samite::llm::quantize::Conversion) -> usize| {
        conversions.iter().map(f).sum::<usize>()
    };
    let (before, after) = (sum(|c| c.bytes_before), sum(|c| c.bytes_after));
    let elements = source.tensors().total_elements().max(1);
    writeln!(
        out,
        "{} -> {} ({:.2} bits per weight){}",
        human_bytes(before),
        human_bytes(after),
        after as f64 * 8.0 / elements as f64,
        if args.dry_run {
            ", nothing written".to_owned()
        } else {
            format!(", written to {}", output.display())
        }
    )?;
    Ok(())
}
