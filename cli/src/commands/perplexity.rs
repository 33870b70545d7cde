//! `samite perplexity`

use crate::args::ModelArgs;
use crate::failure::{Failure, Outcome};
use crate::{interrupt, progress};
use clap::Args;
use samite::llm::{Context, perplexity};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Flags of `samite perplexity`.
#[derive(Debug, Args)]
pub struct PerplexityArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to predict
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Only the first N chunks
    #[arg(long, value_name = "N")]
    chunks: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: PerplexityArgs) -> Outcome {
    let cancel = interrupt::token()?;
    let text = std::fs::read_to_string(&args.file)
        .map_err(|error| Failure::error(format_args!("{}: {error}", args.file.display())))?;
    let model = args.model.load(&cancel)?;
    let mut tokens = model
        .tokenizer()?
        .tokenize(&text, true, false)
        .map_err(Failure::error)?;
    let mut options = args.model.context_options(&cancel)?;
    options.n_ctx = Some(
        args.model
            .ctx_size
            .unwrap_or(512)
            .min(model.hparams().n_ctx_train.max(4)),
    );
    options.n_logits = Some(options.n_ubatch);
    let mut context = Context::new(model, options)?;
    let chunk = context.n_ctx();
    if let Some(chunks) = args.chunks {
        tokens.truncate(chunks.saturating_mul(chunk));
    }
    let bar = progress::count("chunks");
    bar.set_length((tokens.len() / chunk) as u64);
    let result = perplexity(&mut context, &tokens, chunk, |so_far| {
        bar.inc(1);
        bar.set_message(format!("perplexity {:.4}", so_far.value));
    })?;
    bar.finish_and_clear();
    let mut out = std::io::stdout().lock();
    if args.json {
        let value = json!({
            "perplexity": result.value, "error": result.error, "tokens": result.tokens, "chunk_size": chunk, "chunks": result.chunks,
        });
        writeln!(out, "{value:#}")?;
    } else {
        writeln!(
            out,
            "perplexity {:.4} ± {:.4} over {} tokens in {} chunks of {chunk}",
            result.value,
            result.error,
            result.tokens,
            result.chunks.len()
        )?;
    }
    Ok(())
}
