//! `samite quantize`: converts the weights of a model file to other types.

use crate::args::ThreadArgs;
use crate::commands::imatrix;
use crate::failure::{CommandError, CommandResult};
use crate::shown::{NAME_WIDTH, counted, escaped, say, shortened};
use crate::{files, interrupt, progress};
use clap::Args;
use samite::DType;
use samite::gguf::{GgufFile, LoadMode};
use samite::llm::importance::ImportanceMatrix;
use samite::llm::quantize::{Mixture, QuantizeOptions, TensorPattern, TypeChoices, plan, quantize};
use samite::quant::can_quantize;
use samite::sched::explain::human_bytes;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

mod bench;

/// Flags of `samite quantize`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite quantize model-f16.gguf model-q4.gguf Q4_K_M
  samite quantize model-f16.gguf model-q8.gguf Q8_0 --dry-run
  samite quantize --imatrix imatrix.gguf model-f16.gguf iq2.gguf IQ2_M
  samite quantize --tensor-type attn_v=Q8_0 model-f16.gguf q4.gguf Q4_K_M
  samite quantize --bench Q4_0 Q4_K")]
pub struct QuantizeArgs {
    /// Model to convert, preferably in F32, F16 or BF16
    #[arg(required_unless_present = "bench")]
    input: Option<PathBuf>,
    /// File to write
    #[arg(required_unless_present = "bench")]
    output: Option<PathBuf>,
    /// Quantization type, as named by llama.cpp: Q4_0, Q4_K_M, Q8_0, F16, … or COPY for none
    #[arg(value_name = "TYPE", required_unless_present = "bench")]
    mixture: Option<Mixture>,
    #[command(flatten)]
    threads: ThreadArgs,
    /// Accept weights that are already quantized, at a loss of quality
    #[arg(long)]
    allow_requantize: bool,
    /// Use the same type for all matrices
    #[arg(long)]
    pure: bool,
    /// Importance matrix from `samite imatrix` or llama.cpp; the most important weights lose the
    /// least precision
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Use the importance matrix only for weights with this in their names; may be repeated
    #[arg(
        long,
        value_name = "NAME",
        requires = "imatrix",
        conflicts_with = "exclude_weights"
    )]
    include_weights: Vec<String>,
    /// Do not use the importance matrix for weights with this in their names; may be repeated
    #[arg(long, value_name = "NAME", requires = "imatrix")]
    exclude_weights: Vec<String>,
    /// Keep the type of the output matrix
    #[arg(long)]
    leave_output_tensor: bool,
    /// Type of the output matrix
    #[arg(long, value_name = "TYPE", value_parser = tensor_type,
        conflicts_with = "leave_output_tensor")]
    output_tensor_type: Option<DType>,
    /// Type of the token embeddings
    #[arg(long, value_name = "TYPE", value_parser = tensor_type)]
    token_embedding_type: Option<DType>,
    /// Type of the tensors whose names match a regular expression: `attn_v=Q8_0`; may be repeated,
    /// and the first match is used
    #[arg(long, value_name = "NAME=TYPE", value_parser = named_type)]
    tensor_type: Vec<(TensorPattern, DType)>,
    /// Also write the result to the empty file that it replaces, which another program has open
    #[arg(long, hide = true)]
    fill_output: bool,
    /// Print the planned conversion without writing a file
    #[arg(long)]
    dry_run: bool,
    /// Measure how fast one thread encodes and decodes these types, or all types, instead of
    /// converting a model
    #[arg(
        long,
        value_name = "TYPE",
        num_args = 0..,
        value_parser = bench::dtype,
        conflicts_with_all = [
            "input", "output", "mixture", "threads", "allow_requantize", "pure", "dry_run",
            "imatrix", "leave_output_tensor", "output_tensor_type",
            "token_embedding_type", "tensor_type", "include_weights", "exclude_weights"
        ]
    )]
    bench: Option<Vec<DType>>,
    /// Print the measurements as JSON
    #[arg(long, requires = "bench")]
    json: bool,
}

/// Parses a type that tensors of files can have.
fn tensor_type(name: &str) -> Result<DType, String> {
    // Only activations have these types.
    let is_of_files = |dtype: &DType| !matches!(dtype, DType::Q8_1 | DType::Q8_K);
    let known = || {
        DType::all()
            .filter(|&dtype| can_quantize(dtype))
            .filter(is_of_files)
    };
    known()
        .find(|dtype| dtype.name().eq_ignore_ascii_case(name))
        .ok_or_else(|| {
            let names: Vec<_> = known().map(DType::name).collect();
            format!("must be a type, not a mixture: one of {}", names.join(", "))
        })
}

fn named_type(argument: &str) -> Result<(TensorPattern, DType), String> {
    let (pattern, dtype) = argument
        .rsplit_once('=')
        .filter(|(pattern, _)| !pattern.is_empty())
        .ok_or("must be NAME=TYPE, such as attn_v=Q8_0")?;
    Ok((pattern.parse()?, tensor_type(dtype)?))
}

/// Reads the part of the importance matrix to use.
fn importance(args: &QuantizeArgs) -> CommandResult<Option<ImportanceMatrix>> {
    let Some(path) = &args.imatrix else {
        return Ok(None);
    };
    let mut matrix = ImportanceMatrix::read(path)?;
    let has = |names: &[String], weight: &str| names.iter().any(|name| weight.contains(&**name));
    matrix.retain(|weight| {
        let included = args.include_weights.is_empty() || has(&args.include_weights, weight);
        included && !has(&args.exclude_weights, weight)
    });
    if matrix.weights().len() == 0 {
        return Err(CommandError::usage(format_args!(
            "--include-weights or --exclude-weights leave nothing of {}",
            escaped(&path.display().to_string())
        )));
    }
    if matrix.unseen_experts().next().is_some() {
        say(imatrix::unseen_note(&matrix));
    }
    Ok(Some(matrix))
}

/// An empty file with the name of the result. The program that made it may have it open and expect
/// the result there, as ollama does, but the result replaces the file.
struct EmptyFile(File);

impl EmptyFile {
    fn open(path: &Path) -> Option<Self> {
        let file = File::options().write(true).open(path).ok()?;
        let about = file.metadata().ok()?;
        (about.is_file() && about.len() == 0).then_some(EmptyFile(file))
    }

    /// Copies the result to the file.
    fn fill(mut self, result: &Path) -> CommandResult {
        let copied = File::open(result).and_then(|mut from| io::copy(&mut from, &mut self.0));
        copied.map(drop).map_err(|error| {
            let result = result.display().to_string();
            CommandError::error(format_args!(
                "{}: cannot copy it to the file that it replaces: {error}",
                escaped(&result)
            ))
        })
    }
}

pub fn run(args: QuantizeArgs) -> CommandResult {
    if args.json && args.bench.is_none() {
        return Err(CommandError::usage("--json goes with --bench"));
    }
    let cancel = interrupt::token();
    let importance = importance(&args)?;
    let (input, output, mixture) = match (args.bench, args.input, args.output, args.mixture) {
        (None, Some(input), Some(output), Some(mixture)) => (input, output, mixture),
        (types, ..) => return bench::run(&types.unwrap_or_default(), args.json, &cancel),
    };
    let source = GgufFile::open(&input, LoadMode::Read)?;
    for read in [Some(&input), args.imatrix.as_ref()].into_iter().flatten() {
        files::refuse_same(read, &output)?;
    }
    let bar = progress::bytes("quantizing");
    let bytes = source.tensors().total_bytes();
    let threads = args.threads.threads;
    let threads = threads.unwrap_or_else(samite::registry::allowed_threads);
    let options = QuantizeOptions {
        mixture,
        types: TypeChoices {
            output: args.output_tensor_type,
            keep_output: args.leave_output_tensor,
            embedding: args.token_embedding_type,
            of_tensors: args.tensor_type,
        },
        importance: importance.as_ref(),
        threads,
        allow_requantize: args.allow_requantize,
        pure: args.pure,
        progress: &|done, total| {
            // Work is counted in elements, but users expect bytes.
            bar.set_length(bytes);
            bar.set_position((done as f64 / total.max(1) as f64 * bytes as f64) as u64);
        },
        cancel: &cancel,
    };
    let conversions = if args.dry_run {
        plan(&source, &options)?
    } else {
        let empty = args.fill_output.then(|| EmptyFile::open(&output)).flatten();
        let conversions = quantize(&source, &output, &options)?;
        if let Some(file) = empty {
            file.fill(&output)?;
        }
        conversions
    };
    let unused = options.types.unused(&conversions).map(str::to_owned);
    let unused: Vec<_> = unused.collect();
    drop(bar);
    for pattern in unused {
        say(format_args!(
            "--tensor-type {}: no tensor that gets a type has such a name",
            escaped(&pattern)
        ));
    }

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
    if let Some(matrix) = &importance {
        let weighed = conversions.iter().filter(|c| c.is_weighed).count();
        writeln!(
            out,
            "{weighed} of {} are weighed by the importance matrix, which knows {}",
            counted(
                conversions.iter().filter(|c| c.from != c.to).count(),
                "converted tensor"
            ),
            counted(matrix.weights().len(), "weight")
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
            format!(", written to {}", escaped(&output.display().to_string()))
        }
    )?;
    Ok(())
}
