//! `samite perplexity`: measures how well a model predicts a text, or how far it is from another
//! model.

use crate::args::ModelArgs;
use crate::chunks::{ChunkRange, DEFAULT_CHUNK};
use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::files::{self, TextSource};
use crate::setup::ModelSetup;
use crate::shown::{counted, escaped, json_number, say};
use crate::{interrupt, progress, renewal};
use clap::Args;
use samite::llm::log_probs::LogProbsReader;
use samite::llm::{
    Distribution, Estimate, KlDivergence, Perplexity, kl_divergence, perplexity, record_log_probs,
};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};

/// Minimum tokens of a chunk: half of it is predicted from the other half.
const MIN_CHUNK: usize = 4;

/// Flags of `samite perplexity`.
#[derive(Debug, Args)]
#[command(
    after_help = "To measure the loss of quantization, write the log-probabilities of the original
model to a file, and compare the quantized model with that file.

Examples:
  samite perplexity -m model.gguf -f wiki.test.raw
  samite perplexity -m model.gguf -f wiki.test.raw -c 2048 --chunks 20
  samite perplexity -m f16.gguf -f wiki.test.raw --kl-divergence-base f16.kld
  samite perplexity -m q4.gguf --kl-divergence --kl-divergence-base f16.kld"
)]
pub struct PerplexityArgs {
    /// Text to evaluate; at most 67 million tokens without --chunks
    #[arg(
        short,
        long,
        value_name = "FILE",
        required_unless_present = "kl_divergence"
    )]
    file: Option<PathBuf>,
    /// Evaluate only the first N chunks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    chunks: Option<u32>,
    /// Write the log-probabilities of all predicted tokens to this file, in llama-perplexity's
    /// format; an existing file is replaced [also: --save-all-logits]
    #[arg(long, alias = "save-all-logits", value_name = "FILE")]
    kl_divergence_base: Option<PathBuf>,
    /// Compare the model with the log-probabilities in --kl-divergence-base, on that file's text
    #[arg(long, requires = "kl_divergence_base")]
    kl_divergence: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    cpu: CpuArgs,
}

pub fn run(args: PerplexityArgs) -> CommandResult {
    match (&args.kl_divergence_base, &args.file) {
        (Some(base), file) if args.kl_divergence => {
            if let Some(file) = file {
                say(format_args!(
                    "warning: --file {}: is not read, the text is in {}",
                    escaped(&file.display().to_string()),
                    escaped(&base.display().to_string())
                ));
            }
            compare(&args, base)
        }
        (base, Some(file)) => predict(&args, file, base.as_deref()),
        (_, None) => Err(CommandError::usage("there is no text: name it with --file")),
    }
}

/// Measures the perplexity of a text, and writes log-probabilities if `output` is set.
fn predict(args: &PerplexityArgs, file: &Path, output: Option<&Path>) -> CommandResult {
    let source = TextSource::file(file)?;
    let setup = ModelSetup::new(&args.model)?;
    if let Some(output) = output {
        for input in [Some(file), setup.path()?].into_iter().flatten() {
            files::refuse_same(input, output)?;
        }
    }
    let mut base = files::create(&output)?;
    let cancel = interrupt::token();
    let mut options = setup.context_options(&cancel);
    args.cpu.apply(&mut options);
    let model = renewal::load(&setup, &args.cpu, &cancel)?;
    let n_ctx_train = model.spec().n_ctx_train;
    let chunk = options.n_ctx.unwrap_or(n_ctx_train.min(DEFAULT_CHUNK));
    if chunk < MIN_CHUNK {
        return Err(CommandError::usage(format_args!(
            "--ctx-size {chunk}: chunks need at least {MIN_CHUNK} tokens"
        )));
    }
    let part = ChunkRange {
        chunk,
        from_chunk: 0,
        chunks: args.chunks,
        parse_special: false,
    };
    let tokens = part.tokens(source, model.tokenizer()?)?;
    options.n_ctx = Some(chunk);
    options.n_logits = Some(options.n_ubatch);
    let mut context = renewal::context(&setup, &args.cpu, model, options)?;
    let bar = progress::count("predicting", "chunks");
    bar.set_length((tokens.len() / chunk) as u64);
    let on_chunk = |so_far: &Perplexity| {
        bar.inc(1);
        bar.set_message(format!("perplexity {:.4}", so_far.value));
    };
    let result = match &mut base {
        Some(base) => record_log_probs(&mut context, &tokens, chunk, base, on_chunk),
        None => perplexity(&mut context, &tokens, chunk, on_chunk),
    };
    let result = result.map_err(|error| in_file(error, output))?;
    if let Some(base) = base {
        base.commit()?;
    }
    drop(bar);
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut value = json_of(&result, chunk);
        if let Some(output) = output {
            value["log_probs_file"] = json!(output);
        }
        writeln!(out, "{value:#}")?;
        return Ok(());
    }
    writeln!(
        out,
        "perplexity {:.4} ± {:.4} over {}",
        result.value,
        result.error,
        extent_of(&result, chunk)
    )?;
    if let Some(output) = output {
        let name = output.display().to_string();
        writeln!(out, "log-probabilities written to {}", escaped(&name))?;
    }
    Ok(())
}

/// Compares a model with the log-probabilities in a file.
fn compare(args: &PerplexityArgs, path: &Path) -> CommandResult {
    let (file, length) = files::open_regular(path)?;
    let base = LogProbsReader::new(BufReader::new(file), length);
    let base = base.map_err(|error| in_file(error, Some(path)))?;
    let chunk = base.n_ctx();
    let cancel = interrupt::token();
    let setup = ModelSetup::new(&args.model)?;
    let mut options = setup.context_options(&cancel);
    args.cpu.apply(&mut options);
    if let Some(n_ctx) = options.n_ctx.filter(|&n_ctx| n_ctx < chunk) {
        return Err(CommandError::usage(format_args!(
            "--ctx-size {n_ctx}: {} has chunks of {chunk} tokens; leave out --ctx-size",
            path.display()
        )));
    }
    let model = renewal::load(&setup, &args.cpu, &cancel)?;
    let n_vocab = model.spec().n_vocab;
    base.check_vocab(n_vocab)
        .map_err(|error| in_file(error, Some(path)))?;
    options.n_ctx = Some(chunk);
    options.n_logits = Some(options.n_ubatch);
    let context = renewal::context(&setup, &args.cpu, model, options);
    let mut context = context.map_err(|failure| match failure {
        CommandError::Error(message) => CommandError::error(format_args!(
            "{}: n_ctx is {chunk}, which makes a context that is refused: {message}",
            path.display()
        )),
        other => other,
    })?;
    let chunks = args.chunks.map(|chunks| chunks as usize);
    let bar = progress::count("comparing", "chunks");
    bar.set_length(chunks.unwrap_or(usize::MAX).min(base.n_chunk()) as u64);
    let result = kl_divergence(&mut context, base, chunks, |so_far, divergence| {
        bar.inc(1);
        bar.set_message(format!(
            "perplexity {:.4}, KLD {:.5}",
            so_far.value, divergence.value
        ));
    });
    let result = result.map_err(|error| in_file(error, Some(path)))?;
    drop(bar);
    let mut out = std::io::stdout().lock();
    if args.json {
        let value = json_of_divergence(&result, chunk);
        writeln!(out, "{value:#}")?;
    } else {
        write!(out, "{}", table_of(&result, chunk))?;
    }
    Ok(())
}

/// Adds the name of the file to an error about log-probabilities.
fn in_file(error: samite::llm::Error, path: Option<&Path>) -> CommandError {
    match (error, path) {
        (samite::llm::Error::Gguf(error), Some(path)) => error.in_file(path).into(),
        (error, _) => error.into(),
    }
}

fn extent_of(result: &Perplexity, chunk: usize) -> String {
    let tokens = counted(result.tokens, "token");
    let chunks = counted(result.chunks.len(), "chunk");
    format!("{tokens} in {chunks} of {chunk}")
}

fn json_of(result: &Perplexity, chunk: usize) -> Value {
    json!({
        "perplexity": json_number(result.value),
        "error": json_number(result.error),
        "tokens": result.tokens,
        "chunk_size": chunk,
        "chunks": result.chunks,
    })
}

fn json_of_divergence(result: &KlDivergence, chunk: usize) -> Value {
    let estimate = |name: &str, Estimate { value, error }: Estimate| {
        let (value, error) = (json_number(value), json_number(error));
        json!({ name: value, "error": error })
    };
    let of_percent = |percent: f64| json_number(result.divergence.percentile(percent));
    let mut divergence = estimate("mean", result.divergence.mean);
    divergence["min"] = of_percent(0.0);
    divergence["median"] = of_percent(50.0);
    divergence["max"] = of_percent(100.0);
    for percent in PERCENTS {
        divergence["percentiles"][percent.to_string()] = of_percent(percent);
    }
    let mut delta_p = estimate("mean", result.delta_p);
    delta_p["rms"] = json_number(result.delta_p_rms.value);
    delta_p["rms_error"] = json_number(result.delta_p_rms.error);
    delta_p["min"] = json_number(result.min_delta_p);
    delta_p["max"] = json_number(result.max_delta_p);
    let mut value = json_of(&result.perplexity, chunk);
    value["base"] = estimate("perplexity", result.base_perplexity);
    value["base"]["clipped_tokens"] = json!(result.clipped_tokens);
    value["log_ratio"] = estimate("mean", result.log_ratio);
    value["kl_divergence"] = divergence;
    value["delta_p"] = delta_p;
    value["same_top"] = estimate("share", result.same_top);
    value
}

/// Percentiles to report, besides median, minimum and maximum.
const PERCENTS: [f64; 7] = [99.9, 99.0, 95.0, 90.0, 10.0, 5.0, 1.0];

/// Returns a line per figure, and the distribution of divergences in two columns.
fn table_of(result: &KlDivergence, chunk: usize) -> String {
    let KlDivergence {
        perplexity,
        base_perplexity,
        clipped_tokens,
        log_ratio,
        divergence,
        delta_p,
        delta_p_rms,
        same_top,
        ..
    } = result;
    let mut table = String::new();
    let mut line = |label: &str, Estimate { value, error }: Estimate, unit: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(table, "{label:<24}{value:>12.6} ± {error:.6}{unit}");
    };
    let percent = |share: Estimate| Estimate {
        value: 100.0 * share.value,
        error: 100.0 * share.error,
    };
    let perplexity_estimate = Estimate {
        value: perplexity.value,
        error: perplexity.error,
    };
    line("perplexity of the model", perplexity_estimate, "");
    line("perplexity of the base", *base_perplexity, "");
    line("ln(PPL(Q)/PPL(base))", *log_ratio, "");
    line("mean KL divergence", divergence.mean, "");
    line("same top token", percent(*same_top), " %");
    line("mean Δp", percent(*delta_p), " %");
    line("RMS Δp", percent(*delta_p_rms), " %");
    let _ = writeln!(
        table,
        "{:<24}{:>12.6} to {:.6} %",
        "range of Δp",
        100.0 * result.min_delta_p,
        100.0 * result.max_delta_p
    );
    table += &quantiles_of(divergence);
    table += &format!("over {}\n", extent_of(perplexity, chunk));
    if *clipped_tokens > 0 {
        table += &format!(
            "{} too unlikely for the file's range: the base's true perplexity is higher\n",
            counted(*clipped_tokens, "token")
        );
    }
    table
}

fn quantiles_of(divergence: &Distribution) -> String {
    let [p999, p99, p95, p90, p10, p5, p1] =
        PERCENTS.map(|percent| (format!("{percent} %"), percent));
    let named = |name: &str, percent| (name.to_owned(), percent);
    let rows = [
        [named("maximum", 100.0), named("median", 50.0)],
        [p999, p10],
        [p99, p5],
        [p95, p1],
        [p90, named("minimum", 0.0)],
    ];
    let mut table = String::from("KL divergence of tokens:\n");
    for row in rows {
        let cells = row
            .map(|(name, percent)| format!("  {name:<10}{:>12.6}", divergence.percentile(percent)));
        table += &format!("{}\n", cells.concat());
    }
    table
}
