//! `samite tokenize`

use crate::failure::{Failure, Outcome};
use crate::files::read_stdin;
use clap::Args;
use samite::gguf::{GgufFile, LoadMode};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Flags of `samite tokenize`.
#[derive(Debug, Args)]
pub struct TokenizeArgs {
    /// GGUF file with the vocabulary
    #[arg(short, long, value_name = "FILE")]
    model: PathBuf,
    /// Text; standard input if it is not given
    #[arg(
        short,
        long,
        value_name = "TEXT",
        conflicts_with = "text",
        allow_hyphen_values = true
    )]
    prompt: Option<String>,
    /// Text
    text: Option<String>,
    /// Do not add the beginning-of-text token
    #[arg(long)]
    no_bos: bool,
    /// Treat the text of special tokens as plain text
    #[arg(long)]
    no_parse_special: bool,
    /// Print only ids, as a list
    #[arg(long)]
    ids: bool,
    /// Print the number of tokens
    #[arg(long)]
    show_count: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: TokenizeArgs) -> Outcome {
    let file = GgufFile::open(&args.model, LoadMode::Read)?;
    let vocabulary = samite::llm::vocab_data(file.metadata())?.ok_or_else(|| {
        Failure::error(format_args!("{}: has no vocabulary", args.model.display()))
    })?;
    let tokenizer = samite::text::Tokenizer::new(vocabulary).map_err(Failure::error)?;
    let text = match args.prompt.or(args.text) {
        Some(text) => text,
        None => read_stdin()?,
    };
    let ids = tokenizer
        .tokenize(&text, !args.no_bos, !args.no_parse_special)
        .map_err(Failure::error)?;
    let piece = |id: u32| {
        String::from_utf8_lossy(tokenizer.token_to_piece(id, true).unwrap_or_default()).into_owned()
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        let tokens: Vec<_> = ids
            .iter()
            .map(|&id| json!({ "id": id, "piece": piece(id) }))
            .collect();
        writeln!(out, "{:#}", json!({ "count": ids.len(), "tokens": tokens }))?;
    } else if args.ids {
        writeln!(out, "{ids:?}")?;
    } else {
        for &id in &ids {
            writeln!(out, "{id:>7} -> {:?}", piece(id))?;
        }
    }
    if args.show_count && !args.json {
        writeln!(out, "{} tokens", ids.len())?;
    }
    Ok(())
}
