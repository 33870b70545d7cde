//! `samite embed`: embeddings of texts, or scores of pairs of texts.

use crate::args::ModelArgs;
use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::files::TextSource;
use crate::setup::ModelSetup;
use crate::{interrupt, progress, renewal};
use clap::{Args, ValueEnum};
use samite::llm::arch::spec::Pooling;
use samite::llm::{Model, Normalization, cosine, embed, fit_to};
use samite::text::Tokenizer;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

/// Maximum bytes of all texts.
const MAX_BYTES: u64 = 1 << 30;

/// Flags of `samite embed`.
#[derive(Debug, Args)]
#[command(
    after_help = "Each line of a file or of standard input is a text, unless --separator sets
another separator. With --pooling rank, a text is a query and a document with
--cls-separator between them, and their relevance score is printed.

Examples:
  samite embed -m model.gguf \"a cat\" \"a dog\" --embd-output-format json+
  samite embed -m model.gguf -f texts.txt --dimensions 256
  printf 'who?\\tnobody\\n' | samite embed -m reranker.gguf --pooling rank"
)]
pub struct EmbedArgs {
    /// Texts to embed [default: standard input]
    texts: Vec<String>,
    /// More texts, separated as in a file
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// File with texts
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["texts", "prompt"])]
    file: Option<PathBuf>,
    /// Separator of texts in a file; `\n`, `\t` and `\\` stand for a new line, a tab and a
    /// backslash [also: --embd-separator]
    #[arg(
        long,
        alias = "embd-separator",
        value_name = "TEXT",
        default_value = "\\n",
        value_parser = separator,
        allow_hyphen_values = true
    )]
    separator: String,
    /// Separator between the parts of a text to rank
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "\\t",
        value_parser = separator,
        allow_hyphen_values = true
    )]
    cls_separator: String,
    /// Pooling of embeddings [default: as the model file says, or none]
    #[arg(long, value_enum)]
    pooling: Option<PoolingArg>,
    /// Normalization of embeddings: -1 none, 0 to 16-bit integers, 1 to a sum of 1, 2 to a length
    /// of 1, other numbers to a norm of that power [default: 2, or -1 for ranks]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = normalization)]
    embd_normalize: Option<Normalization>,
    /// Keep only the first N elements of each embedding, for models trained for it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    dimensions: Option<u32>,
    /// Output format
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Format::Raw)]
    embd_output_format: Format,

    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    cpu: CpuArgs,
}

/// `--pooling`
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum PoolingArg {
    /// One embedding per token
    None,
    /// Mean over all tokens
    Mean,
    /// Embedding of the first token
    Cls,
    /// Embedding of the last token
    Last,
    /// Scores of the model's classifier
    Rank,
}

impl PoolingArg {
    pub(super) fn pooling(self) -> Pooling {
        Pooling::ALL[self as usize]
    }
}

/// `--embd-output-format`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Numbers separated by spaces, one embedding per line
    Raw,
    /// List of lists
    Array,
    /// Object as in OpenAI's API
    Json,
    /// Same as `json`, with the cosine similarities between all embeddings
    #[value(name = "json+")]
    JsonPlus,
}

fn normalization(text: &str) -> Result<Normalization, String> {
    let number = text.parse().ok().and_then(Normalization::from_number);
    number.ok_or_else(|| "must be a whole number of at least -1".to_owned())
}

fn separator(text: &str) -> Result<String, String> {
    let mut plain = String::new();
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        plain.push(match (c, c == '\\') {
            (c, false) => c,
            (_, true) => match rest.next() {
                Some('n') => '\n',
                Some('t') => '\t',
                Some('\\') => '\\',
                _ => return Err("after a backslash comes n, t or a backslash".to_owned()),
            },
        });
    }
    if plain.is_empty() {
        Err("must not be empty".to_owned())
    } else {
        Ok(plain)
    }
}

pub fn run(args: EmbedArgs) -> CommandResult {
    let texts = texts(&args)?;
    let cancel = interrupt::token();
    let setup = ModelSetup::new(&args.model)?;
    let mut options = setup.context_options(&cancel);
    args.cpu.apply(&mut options);
    let model = renewal::load(&setup, &args.cpu, &cancel)?;
    let spec = model.spec();
    let pooling = match args.pooling {
        Some(pooling) => pooling.pooling(),
        None => spec.pooling.unwrap_or(Pooling::None),
    };
    let width = spec.embedding_width(pooling);
    let kept = match args.dimensions {
        Some(_) if pooling == Pooling::Rank => {
            return Err(CommandError::usage("--dimensions: scores have none"));
        }
        Some(count) if count as usize > width => {
            return Err(CommandError::usage(format_args!(
                "--dimensions {count}: the model's embeddings have {width} elements"
            )));
        }
        Some(count) => count as usize,
        None => width,
    };
    let texts = tokens(&model, pooling, &args.cls_separator, &texts)?;
    let lengths: Vec<usize> = texts.iter().map(Vec::len).collect();
    if let (Some(most), Some(&longest)) = (setup.context.n_ctx, lengths.iter().max())
        && longest > most
    {
        return Err(CommandError::error(format_args!(
            "a text has {longest} tokens, more than --ctx-size {most}: take a larger one, or a shorter text"
        )));
    }
    fit_to(&mut options, spec, pooling, &lengths);
    let mut context = renewal::context(&setup, &args.cpu, model, options)?;
    let normalization = match (args.embd_normalize, pooling) {
        (Some(normalization), _) => normalization,
        (None, Pooling::Rank) => Normalization::None,
        (None, _) => Normalization::Norm(2),
    };
    let mut output = EmbeddingWriter {
        out: BufWriter::new(std::io::stdout().lock()),
        format: args.embd_output_format,
        decimals: match normalization {
            Normalization::Largest => 0,
            _ => 7,
        },
        count: 0,
        all: Vec::new(),
    };
    let bar = progress::count("embedding", "texts");
    bar.set_length(texts.len() as u64);
    embed(&mut context, &texts, |text, embedding| -> CommandResult {
        bar.set_position(text as u64);
        let mut embedding = embedding[..kept].to_vec();
        if !embedding.iter().all(|x| x.is_finite()) {
            return Err(CommandError::error(format_args!(
                "the embedding of text {text} has elements that are no finite numbers: the model's file may be damaged"
            )));
        }
        normalization.apply(&mut embedding);
        output.put(embedding)
    })?;
    drop(bar);
    output.finish()
}

/// Returns the texts that the flags specify.
fn texts(args: &EmbedArgs) -> CommandResult<Vec<String>> {
    let mut texts = args.texts.clone();
    let prompt = args.prompt.as_deref().unwrap_or_default();
    texts.extend(separated(prompt, &args.separator));
    if !texts.is_empty() {
        return Ok(texts);
    }
    let source = match &args.file {
        Some(path) => TextSource::file(path)?,
        None => TextSource::stdin(),
    };
    let name = source.name().to_owned();
    let all = source.read_all(MAX_BYTES)?;
    let texts = separated(&all, &args.separator);
    if texts.is_empty() {
        Err(CommandError::usage(format_args!("{name}: has no text")))
    } else {
        Ok(texts)
    }
}

fn separated(all: &str, separator: &str) -> Vec<String> {
    let mut texts: Vec<String> = all.split(separator).map(str::to_owned).collect();
    // A trailing separator does not start another text.
    texts.pop_if(|last| last.is_empty());
    texts
}

/// Returns the tokens of each text.
fn tokens(
    model: &Model,
    pooling: Pooling,
    separator: &str,
    texts: &[String],
) -> CommandResult<Vec<Vec<u32>>> {
    let tokenizer = model.tokenizer()?;
    let template = model
        .metadata()
        .get::<&str>("tokenizer.chat_template.rerank")
        .map_err(samite::llm::Error::from)?;
    let of_text = |(number, text): (usize, &String)| {
        let ranked = match pooling {
            Pooling::Rank => pair(tokenizer, template, separator, text),
            _ => None,
        };
        let tokens = match &ranked {
            Some(ranked) => tokenizer.tokenize(ranked, true, true),
            None => tokenizer.tokenize(text, true, false),
        };
        let tokens =
            tokens.map_err(|error| CommandError::error(format_args!("text {number}: {error}")))?;
        if tokens.is_empty() {
            Err(CommandError::error(format_args!(
                "text {number} is empty: it has no tokens"
            )))
        } else {
            Ok(tokens)
        }
    };
    texts.iter().enumerate().map(of_text).collect()
}

/// Returns a query and a document in the model's format, or `None` if the text is not a pair.
fn pair(
    tokenizer: &Tokenizer,
    template: Option<&str>,
    separator: &str,
    text: &str,
) -> Option<String> {
    let parts: Vec<&str> = text.split(separator).collect();
    let (&query, &document) = (parts.first()?, parts.get(1)?);
    if let Some(template) = template {
        // Replace both in one pass, so that a query that contains `{document}` stays unchanged.
        let pieces = template.split("{query}");
        let pieces = pieces.map(|piece| piece.replace("{document}", document));
        return Some(pieces.collect::<Vec<_>>().join(query));
    }
    let added = [
        tokenizer.eos().filter(|_| tokenizer.adds_eos()),
        tokenizer.sep().filter(|_| tokenizer.adds_sep()),
    ];
    let mut between = String::new();
    for id in added.into_iter().flatten() {
        let piece = tokenizer.token_to_piece(id, true).ok()?;
        between.push_str(&String::from_utf8_lossy(piece));
    }
    Some(parts.join(&between))
}

/// Writes embeddings to standard output.
struct EmbeddingWriter<W: Write> {
    out: W,
    format: Format,
    decimals: usize,
    count: usize,
    /// Embeddings for the cosines.
    all: Vec<Vec<f32>>,
}

impl<W: Write> EmbeddingWriter<W> {
    fn begin(&mut self) -> CommandResult {
        match self.format {
            Format::Raw => {}
            Format::Array => write!(self.out, "[")?,
            Format::Json | Format::JsonPlus => {
                write!(self.out, "{{\n  \"object\": \"list\",\n  \"data\": [\n")?;
            }
        }
        Ok(())
    }

    fn put(&mut self, embedding: Vec<f32>) -> CommandResult {
        // Write nothing before the first embedding, so that an early failure prints nothing.
        if self.count == 0 {
            self.begin()?;
        }
        let (out, decimals) = (&mut self.out, self.decimals);
        let separator = match self.format {
            Format::Raw => " ",
            _ => ",",
        };
        match (self.format, self.count) {
            (Format::Raw, _) => {}
            (Format::Array, 0) => write!(out, "[")?,
            (Format::Array, _) => write!(out, ",[")?,
            (Format::Json | Format::JsonPlus, count) => {
                let before = if count == 0 { "" } else { ",\n" };
                write!(
                    out,
                    "{before}    {{\n      \"object\": \"embedding\",\n      \"index\": \
                     {count},\n      \"embedding\": ["
                )?;
            }
        }
        for (i, x) in embedding.iter().enumerate() {
            let before = if i == 0 { "" } else { separator };
            write!(out, "{before}{x:.decimals$}")?;
        }
        match self.format {
            Format::Raw => writeln!(out)?,
            Format::Array => write!(out, "]")?,
            Format::Json | Format::JsonPlus => write!(out, "]\n    }}")?,
        }
        self.count += 1;
        if self.format == Format::JsonPlus {
            self.all.push(embedding);
        }
        Ok(())
    }

    fn finish(mut self) -> CommandResult {
        let out = &mut self.out;
        match self.format {
            Format::Raw => {}
            Format::Array => writeln!(out, "]")?,
            Format::Json | Format::JsonPlus => {
                write!(out, "\n  ]")?;
                if self.all.len() > 1 {
                    write!(out, ",\n  \"cosineSimilarity\": [")?;
                    for (i, a) in self.all.iter().enumerate() {
                        let before = if i == 0 { "\n    [" } else { ",\n    [" };
                        let cosines = self.all.iter().map(|b| format!("{:6.2}", cosine(a, b)));
                        write!(out, "{before}{} ]", cosines.collect::<Vec<_>>().join(", "))?;
                    }
                    write!(out, "\n  ]")?;
                }
                writeln!(out, "\n}}")?;
            }
        }
        Ok(out.flush()?)
    }
}
