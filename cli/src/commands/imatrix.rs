//! `samite imatrix`: measures on a text the importance of each column of a model's matrices, for
//! quantization.

use crate::args::ModelArgs;
use crate::chunks::{ChunkRange, DEFAULT_CHUNK};
use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::files::{self, TextSource};
use crate::setup::ModelSetup;
use crate::shown::{counted, escaped, say};
use crate::{interrupt, progress, renewal};
use clap::Args;
use samite::gguf::AtomicFile;
use samite::llm::importance::{ImportanceMatrix, collect};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Minimum tokens of a chunk. Fewer are not representative.
const MIN_CHUNK: usize = 16;

/// Flags of `samite imatrix`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite imatrix -m f16.gguf -f texts.txt
  samite imatrix -m f16.gguf -f more.txt --in-file imatrix.gguf -o both.gguf
  samite quantize --imatrix imatrix.gguf f16.gguf iq2.gguf IQ2_M")]
pub struct ImatrixArgs {
    /// Calibration text, similar to the text that the model will be used for; at most 67 million
    /// tokens without --chunks
    #[arg(short, long, value_name = "FILE", required_unless_present = "in_file")]
    file: Option<PathBuf>,
    /// File to write; an existing file is replaced
    #[arg(short, long, value_name = "FILE", default_value = "imatrix.gguf")]
    output: PathBuf,
    /// Add the data of this importance matrix of the same model; may be repeated. Without --file,
    /// such files are only merged
    #[arg(long, value_name = "FILE")]
    in_file: Vec<PathBuf>,
    /// Process only N chunks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    chunks: Option<u32>,
    /// Skip the first N chunks [also: --chunk]
    #[arg(long, alias = "chunk", value_name = "N", default_value = "0")]
    from_chunk: u32,
    /// Include the output matrix
    #[arg(long)]
    process_output: bool,
    /// Parse the names of special tokens in the text as these tokens
    #[arg(long)]
    parse_special: bool,
    /// Write the intermediate result to the file every N chunks
    #[arg(long, value_name = "N", default_value = "10",
        value_parser = clap::value_parser!(u32).range(1..))]
    output_frequency: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cpu: CpuArgs,
}

pub fn run(args: ImatrixArgs) -> CommandResult {
    let source = args.file.as_deref().map(TextSource::file).transpose()?;
    let setup = ModelSetup::new(&args.model)?;
    let model_file = setup.path()?;
    let inputs = args.in_file.iter().map(PathBuf::as_path);
    for input in inputs.chain(args.file.as_deref()).chain(model_file) {
        files::refuse_same(input, &args.output)?;
    }
    let earlier = args.in_file.iter().map(|path| ImportanceMatrix::read(path));
    let earlier = earlier.collect::<Result<Vec<_>, _>>()?;
    // Find out before the work if the file cannot be written.
    drop(AtomicFile::create(&args.output)?);
    let cancel = interrupt::token();
    let Some(source) = source else {
        let known = earlier.iter().find_map(ImportanceMatrix::chunk_size);
        let mut matrix = ImportanceMatrix::new(known.unwrap_or(DEFAULT_CHUNK as u32));
        merge(&mut matrix, &earlier)?;
        matrix.write(&args.output)?;
        return report(&args, &matrix, None);
    };
    let mut options = setup.context_options(&cancel);
    args.cpu.apply(&mut options);
    let model = renewal::load(&setup, &args.cpu, &cancel)?;
    if model.spec().is_bidirectional() {
        return Err(CommandError::error(
            "this model's tokens look at later ones: what it reads is not measured in this way; llama.cpp's llama-imatrix can, and 'samite quantize' takes its files",
        ));
    }
    let chunk = options
        .n_ctx
        .unwrap_or(model.spec().n_ctx_train.min(DEFAULT_CHUNK));
    let chunk_size = u32::try_from(chunk).ok();
    let Some(chunk_size) = chunk_size.filter(|_| chunk >= MIN_CHUNK) else {
        return Err(CommandError::usage(format_args!(
            "--ctx-size {chunk}: chunks need at least {MIN_CHUNK} tokens"
        )));
    };
    let part = ChunkRange {
        chunk,
        from_chunk: args.from_chunk,
        chunks: args.chunks,
        parse_special: args.parse_special,
    };
    let tokens = part.tokens(source, model.tokenizer()?)?;
    let mut matrix = ImportanceMatrix::new(chunk_size);
    merge(&mut matrix, &earlier)?;
    if let Some(file) = &args.file {
        matrix.add_dataset(file.display().to_string());
    }

    options.n_ctx = Some(chunk);
    options.n_logits = Some(options.n_ubatch);
    let mut context = renewal::context(&setup, &args.cpu, model, options)?;
    let bar = progress::count("reading", "chunks");
    bar.set_length((tokens.len() / chunk) as u64);
    let mut unsaved = 0;
    let mut perplexity = 0.0;
    let matrix = collect(
        &mut context,
        &tokens,
        chunk,
        matrix,
        args.process_output,
        |so_far, matrix| {
            bar.inc(1);
            perplexity = so_far.value;
            bar.set_message(format!("perplexity {perplexity:.4}"));
            unsaved += 1;
            if unsaved == args.output_frequency {
                matrix.write(&args.output)?;
                unsaved = 0;
            }
            Ok(())
        },
    )?;
    drop(bar);
    matrix.write(&args.output)?;
    report(&args, &matrix, Some(perplexity))
}

fn merge(matrix: &mut ImportanceMatrix, earlier: &[ImportanceMatrix]) -> CommandResult {
    for other in earlier {
        matrix.merge(other)?;
    }
    Ok(())
}

fn report(args: &ImatrixArgs, matrix: &ImportanceMatrix, perplexity: Option<f64>) -> CommandResult {
    let weights = matrix.weights().len();
    if matrix.unseen_experts().next().is_some() && !args.json {
        say(format_args!("{}", unseen_note(matrix)));
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        let unseen: Vec<_> = matrix
            .unseen_experts()
            .map(|(name, none, all)| json!({"weight": name, "unseen": none, "experts": all}))
            .collect();
        let value = json!({
            "file": args.output, "weights": weights, "chunks": matrix.chunks(),
            "perplexity": perplexity, "unseen_experts": unseen,
        });
        writeln!(out, "{value:#}")?;
        return Ok(());
    }
    let predicted = perplexity.map(|value| format!(", perplexity {value:.4}"));
    writeln!(
        out,
        "{} over {}{}, written to {}",
        counted(weights, "weight"),
        counted(matrix.chunks() as usize, "chunk"),
        predicted.unwrap_or_default(),
        shown(&args.output)
    )?;
    Ok(())
}

/// Returns a note that some experts were never used, so their importance is unknown.
pub fn unseen_note(matrix: &ImportanceMatrix) -> String {
    let (name, none, all) = matrix.unseen_experts().next().unwrap_or_default();
    format!(
        "{} had no token for some experts, or for all, such as '{}' for {none} of {all}: their columns count the same; take more text",
        counted(matrix.unseen_experts().count(), "weight"),
        escaped(name)
    )
}

fn shown(path: &Path) -> String {
    escaped(&path.display().to_string()).into_owned()
}
