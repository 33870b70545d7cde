//! `samite logits`: writes a model's logits after each token, for comparison with other
//! implementations.

use crate::args::ModelArgs;
use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::files::{self, TextSource};
use crate::setup::ModelSetup;
use crate::watch::npy;
use crate::{interrupt, progress, renewal};
use clap::Args;
use samite::DType;
use samite::gguf::AtomicFile;
use samite::llm::arch::Output;
use samite::llm::arch::spec::Pooling;
use samite::llm::{Batch, Context};
use samite::text::Tokenizer;
use serde_json::json;
use std::io::{BufWriter, StdoutLock, Write};
use std::path::PathBuf;

/// Default number of values to print for each position.
const DEFAULT_TOP: usize = 5;

/// Flags of `samite logits`.
#[derive(Debug, Args)]
#[command(
    after_help = "The file is in NumPy's format: F32, an array [tokens, vocabulary] whose row i has
the logits after token i, or with --embeddings, an array [tokens, width].

Examples:
  samite logits -p \"Once upon a time\" --top 3
  samite logits -m model.gguf --ids 1,17,93 -o logits.npy"
)]
pub struct LogitsArgs {
    /// Input text; the BOS token is added if the model uses one
    #[arg(short, long, value_name = "TEXT", conflicts_with_all = ["ids", "file"],
        allow_hyphen_values = true)]
    prompt: Option<String>,
    /// File with the input text
    #[arg(short, long, value_name = "FILE", conflicts_with = "ids")]
    file: Option<PathBuf>,
    /// Input as token IDs; no other tokens are added
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    ids: Option<Vec<u32>>,
    /// Write all values to this file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print the N most likely tokens after each position [default: 5 without --output]
    #[arg(long, value_name = "N")]
    top: Option<usize>,
    /// Write the output of the final norm for each token instead, an array [tokens, width]
    #[arg(long, requires = "output", conflicts_with_all = ["top", "json"])]
    embeddings: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    cpu: CpuArgs,
}

pub fn run(args: LogitsArgs) -> CommandResult {
    let source = match (&args.ids, args.prompt, &args.file) {
        (Some(_), ..) => None,
        (None, Some(text), _) => Some(TextSource::text(text)),
        (None, None, Some(path)) => Some(TextSource::file(path)?),
        (None, None, None) => {
            return Err(CommandError::usage(
                "there are no tokens: say them with --ids, --prompt or --file",
            ));
        }
    };
    // Find out before the work if the file cannot be written.
    let file = files::create(&args.output)?;
    let cancel = interrupt::token();
    let setup = ModelSetup::new(&args.model)?;
    let mut options = setup.context_options(&cancel);
    args.cpu.apply(&mut options);
    let model = renewal::load(&setup, &args.cpu, &cancel)?;
    let n_ctx_train = model.spec().n_ctx_train;
    let most = options.n_ctx.unwrap_or(n_ctx_train);
    let tokens = match (args.ids, source) {
        (Some(ids), _) => ids,
        (None, Some(source)) => source.tokens(model.tokenizer()?, false, most, |_| {})?,
        (None, None) => Vec::new(),
    };
    if tokens.is_empty() {
        return Err(CommandError::usage(
            "there are no tokens: the text is empty",
        ));
    }
    if tokens.len() > most {
        return Err(CommandError::error(format_args!(
            "more than {most} tokens, the length of the context: take fewer, or a larger --ctx-size"
        )));
    }
    let n_vocab = model.spec().n_vocab;
    let tokenizer = model.tokenizer().ok().cloned();
    options.n_ctx = Some(tokens.len());
    if model.spec().is_bidirectional() {
        // Compute all tokens in one batch.
        options.n_batch = tokens.len();
        options.n_ubatch = tokens.len();
    }
    options.n_logits = Some(options.n_ubatch);
    let width = match args.embeddings {
        true => {
            options.output = Output::Embeddings(Pooling::None);
            model.spec().embedding_width(Pooling::None)
        }
        false if model.spec().head.output.is_none() => {
            return Err(CommandError::usage(
                "this model gives embeddings and no logits: --embeddings -o FILE writes those of its tokens",
            ));
        }
        false => n_vocab,
    };
    let mut context = renewal::context(&setup, &args.cpu, model, options)?;
    let top = match (args.top, &file) {
        (Some(top), _) => top.min(n_vocab),
        (None, Some(_)) => 0,
        (None, None) => DEFAULT_TOP.min(n_vocab),
    };
    let mut output = LogitsWriter {
        file: file.map(BufWriter::new),
        out: std::io::stdout().lock(),
        tokenizer: tokenizer.as_deref(),
        top,
        json: args.json,
        positions: Vec::new(),
    };
    output.begin(tokens.len(), width)?;
    decode(&mut context, &tokens, &mut output)?;
    output.finish()
}

/// Decodes the tokens in batches and passes the values of each to `output`.
fn decode(context: &mut Context, tokens: &[u32], output: &mut LogitsWriter<'_>) -> CommandResult {
    let bar = progress::count("decoding", "tokens");
    bar.set_length(tokens.len() as u64);
    let size = context.options().n_batch.min(context.options().n_ubatch);
    let mut batch = Batch::new();
    let mut position = 0;
    for part in tokens.chunks(size.max(1)) {
        batch.clear();
        for &id in part {
            batch.add(id, position, &[0], true);
            position += 1;
        }
        context.decode(&batch)?;
        for (index, &id) in part.iter().enumerate() {
            let row = context.logits(index).or_else(|| context.embedding(index));
            output.put(
                id,
                row.ok_or_else(|| CommandError::error("a row is missing"))?,
            )?;
        }
        bar.inc(part.len() as u64);
    }
    Ok(())
}

/// Writes values to a file, a table or JSON.
struct LogitsWriter<'a> {
    file: Option<BufWriter<AtomicFile>>,
    out: StdoutLock<'static>,
    tokenizer: Option<&'a Tokenizer>,
    top: usize,
    json: bool,
    /// JSON of the positions so far.
    positions: Vec<serde_json::Value>,
}

impl LogitsWriter<'_> {
    fn begin(&mut self, n_tokens: usize, width: usize) -> CommandResult {
        self.write(&npy::header_of(&[n_tokens, width], DType::F32))
    }

    /// Writes to the file, if there is one.
    fn write(&mut self, bytes: &[u8]) -> CommandResult {
        if let Some(file) = &mut self.file {
            file.write_all(bytes)
                .map_err(|error| files::cannot_write(file.get_ref(), &error))?;
        }
        Ok(())
    }

    fn piece(&self, id: u32) -> String {
        let piece = self
            .tokenizer
            .and_then(|tokenizer| tokenizer.token_to_piece(id, true).ok());
        String::from_utf8_lossy(piece.unwrap_or_default()).into_owned()
    }

    fn put(&mut self, id: u32, logits: &[f32]) -> CommandResult {
        for logit in logits {
            self.write(&logit.to_le_bytes())?;
        }
        if self.top == 0 {
            return Ok(());
        }
        let mut best: Vec<u32> = (0..logits.len() as u32).collect();
        let by_logit = |a: &u32, b: &u32| {
            let [a, b] = [a, b].map(|&id| logits[id as usize]);
            b.total_cmp(&a)
        };
        if self.top < best.len() {
            best.select_nth_unstable_by(self.top, by_logit);
            best.truncate(self.top);
        }
        // Of equal logits, the smaller ID comes first.
        best.sort_unstable_by(|a, b| by_logit(a, b).then(a.cmp(b)));
        let max = logits[best[0] as usize];
        let sum: f64 = logits
            .iter()
            .map(|&logit| f64::from(logit - max).exp())
            .sum();
        let best = best.into_iter().map(|next| {
            let logit = logits[next as usize];
            (next, logit, f64::from(logit - max) - sum.ln())
        });
        if self.json {
            let best = best.map(|(next, logit, log_probability)| {
                json!({ "id": next, "piece": self.piece(next), "logit": logit,
                    "log_probability": log_probability })
            });
            let value =
                json!({ "id": id, "piece": self.piece(id), "top": best.collect::<Vec<_>>() });
            self.positions.push(value);
            return Ok(());
        }
        let best: Vec<_> = best.collect();
        writeln!(self.out, "{id:>7} {:?}", self.piece(id))?;
        for (next, logit, log_probability) in best {
            let piece = self.piece(next);
            writeln!(
                self.out,
                "        {:>5.1} %  {logit:>10.4}  {next:>7} {piece:?}",
                100.0 * log_probability.exp()
            )?;
        }
        Ok(())
    }

    fn finish(mut self) -> CommandResult {
        if let Some(file) = self.file {
            let file = file
                .into_inner()
                .map_err(|error| CommandError::error(error.error()))?;
            file.commit()?;
        }
        if self.json {
            let value = json!({ "positions": self.positions });
            writeln!(self.out, "{value:#}")?;
        }
        Ok(())
    }
}
