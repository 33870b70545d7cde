//! `samite tokenize`: turns text into tokens.

use crate::failure::{CommandError, CommandResult};
use crate::files::TextSource;
use crate::setup::ModelFile;
use crate::shown::counted;
use clap::Args;
use samite::gguf::LoadMode;
use samite::text::Tokenizer;
use serde_json::json;
use std::io::{BufWriter, StdoutLock, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Flags of `samite tokenize`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite tokenize \"Once upon a time\"
  samite tokenize -m model.gguf --ids -f book.txt")]
pub struct TokenizeArgs {
    /// GGUF file with the vocabulary [default: that of the built-in model]
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    #[cfg(feature = "hub")]
    #[command(flatten)]
    hub: crate::args::HubArgs,
    /// Text to tokenize [default: standard input]
    #[arg(
        short,
        long,
        value_name = "TEXT",
        conflicts_with_all = ["text", "file"],
        allow_hyphen_values = true
    )]
    prompt: Option<String>,
    /// Text to tokenize
    #[arg(conflicts_with = "file")]
    text: Option<String>,
    /// File with the text to tokenize
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Do not add the BOS token
    #[arg(long)]
    no_bos: bool,
    /// Treat the names of special tokens as plain text
    #[arg(long)]
    no_parse_special: bool,
    /// Print only token IDs, as a list
    #[arg(long)]
    ids: bool,
    /// Print the number of tokens
    #[arg(long)]
    show_count: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: TokenizeArgs) -> CommandResult {
    let file = ModelFile::new(args.model);
    #[cfg(feature = "hub")]
    let file = file.or_named(&args.hub)?;
    let file = file.open(LoadMode::Read)?;
    let vocabulary = samite::llm::vocab_data(file.metadata())?.ok_or_else(|| {
        CommandError::error(format_args!("{}: has no vocabulary", file.path().display()))
    })?;
    let tokenizer = Tokenizer::new(vocabulary).map_err(CommandError::error)?;
    let source = match (args.prompt.or(args.text), &args.file) {
        (Some(text), _) => TextSource::text(text),
        (None, Some(path)) => TextSource::file(path)?,
        (None, None) => TextSource::stdin(),
    };
    let mut output = TokenWriter {
        out: BufWriter::with_capacity(1 << 16, std::io::stdout().lock()),
        tokenizer: &tokenizer,
        count: 0,
        form: match (args.json, args.ids) {
            (true, _) => Form::Json,
            (false, true) => Form::Ids,
            (false, false) => Form::Lines,
        },
    };
    let name = source.name().to_owned();
    let wrong = |error| CommandError::error(format_args!("{name}: {error}"));
    let mut stream = tokenizer.stream(!args.no_bos, !args.no_parse_special);
    let mut ids = Vec::new();
    source.read(|piece| {
        stream.push(piece, &mut ids).map_err(wrong)?;
        output.put(&ids)?;
        ids.clear();
        Ok(ControlFlow::Continue(()))
    })?;
    stream.finish(&mut ids).map_err(wrong)?;
    output.put(&ids)?;
    output.finish(args.show_count)
}

/// Output format of tokens.
#[derive(Clone, Copy)]
enum Form {
    Json,
    Ids,
    Lines,
}

/// Writes tokens to standard output as they arrive.
struct TokenWriter<'a> {
    out: BufWriter<StdoutLock<'static>>,
    tokenizer: &'a Tokenizer,
    count: usize,
    form: Form,
}

impl TokenWriter<'_> {
    fn put(&mut self, ids: &[u32]) -> CommandResult {
        let piece = |id| {
            let piece = self.tokenizer.token_to_piece(id, true);
            String::from_utf8_lossy(piece.unwrap_or_default())
        };
        let out = &mut self.out;
        for &id in ids {
            let first = self.count == 0;
            self.count += 1;
            match self.form {
                Form::Json => {
                    let start = if first { "{\"tokens\":[\n" } else { ",\n" };
                    write!(out, "{start}{}", json!({ "id": id, "piece": piece(id) }))?;
                }
                Form::Ids => write!(out, "{}{id}", if first { "[" } else { ", " })?,
                Form::Lines => writeln!(out, "{id:>7} -> {:?}", piece(id))?,
            }
        }
        Ok(())
    }

    fn finish(mut self, show_count: bool) -> CommandResult {
        let (form, count) = (self.form, self.count);
        let out = &mut self.out;
        let empty = count == 0;
        match form {
            Form::Json => {
                let start = if empty { "{\"tokens\":[" } else { "" };
                writeln!(out, "{start}\n],\"count\":{count}}}")?;
            }
            Form::Ids => writeln!(out, "{}]", if empty { "[" } else { "" })?,
            Form::Lines => {}
        }
        if show_count && !matches!(form, Form::Json) {
            writeln!(out, "{}", counted(count, "token"))?;
        }
        Ok(out.flush()?)
    }
}
