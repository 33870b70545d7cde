//! `samite perplexity`: measures how well a model predicts a text.

use crate::args::ModelArgs;
use crate::chunks::{DEFAULT_CHUNK, Part};
use crate::cpu_args::CpuArgs;
use crate::failure::{Failure, Outcome};
use crate::files::Source;
use crate::shown::counted;
use crate::{interrupt, progress, renewal};
use clap::Args;
use samite::llm::perplexity;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Half of a chunk is predicted from the other half.
const SMALLEST_CHUNK: usize = 4;

/// Flags of `samite perplexity`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite perplexity -m model.gguf -f wiki.test.raw
  samite perplexity -m model.gguf -f wiki.test.raw -c 2048 --chunks 20")]
pub struct PerplexityArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cpu: CpuArgs,
    /// Text to predict; without --chunks, of at most 67 million tokens
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Only the first N chunks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    chunks: Option<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: PerplexityArgs) -> Outcome {
    let source = Source::file(&args.file)?;
    let cancel = interrupt::token();
    let mut options = args.model.context_options(&cancel)?;
    args.cpu.apply(&mut options);
    let model = renewal::load(&args.model, &args.cpu, &cancel)?;
    let n_ctx_train = model.spec().n_ctx_train;
    let chunk = options.n_ctx.unwrap_or(n_ctx_train.min(DEFAULT_CHUNK));
    if chunk < SMALLEST_CHUNK {
        return Err(Failure::usage(format_args!(
            "--ctx-size {chunk}: chunks need at least {SMALLEST_CHUNK} tokens"
        )));
    }
    let part = Part {
        chunk,
        from_chunk: 0,
        chunks: args.chunks,
        parse_special: false,
    };
    let tokens = part.tokens(source, model.tokenizer()?)?;
    options.n_ctx = Some(chunk);
    options.n_logits = Some(options.n_ubatch);
    let mut context = renewal::context(&args.model, &args.cpu, model, options)?;
    let bar = progress::count("predicting", "chunks");
    bar.set_length((tokens.len() / chunk) as u64);
    let result = perplexity(&mut context, &tokens, chunk, |so_far| {
        bar.inc(1);
        bar.set_message(format!("perplexity {:.4}", so_far.value));
    })?;
    drop(bar);
    let mut out = std::io::stdout().lock();
    if args.json {
        let value = json!({
            "perplexity": result.value, "error": result.error, "tokens": result.tokens, "chunk_size": chunk, "chunks": result.chunks,
        });
        writeln!(out, "{value:#}")?;
    } else {
        writeln!(
            out,
            "perplexity {:.4} ± {:.4} over {} in {} of {chunk}",
            result.value,
            result.error,
            counted(result.tokens, "token"),
            counted(result.chunks.len(), "chunk")
        )?;
    }
    Ok(())
}
