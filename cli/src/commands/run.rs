//! `samite run`

use crate::args::{ModelArgs, ThreadArgs, number_or_all, token_count};
use crate::failure::{Failure, Outcome};
use crate::{files, interrupt};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use samite::llm::{Finish, GenerateOptions, Session};
use samite::text::{Sampler, SamplerParams};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Flags of `samite run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    threads: ThreadArgs,

    /// Text to continue; standard input if it is not given
    #[arg(short, long, value_name = "TEXT", conflicts_with_all = ["text", "file"], allow_hyphen_values = true)]
    prompt: Option<String>,

    /// Text to continue
    #[arg(value_name = "TEXT", conflicts_with = "file")]
    text: Option<String>,

    /// File with the text to continue
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// Most tokens to write; as many as the context holds by default
    #[arg(short = 'n', long, value_name = "N|all", value_parser = number_or_all, allow_negative_numbers = true)]
    n_predict: Option<usize>,

    /// Stop when the model writes this
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,

    /// Go on after tokens that end a text
    #[arg(long)]
    ignore_eos: bool,

    /// When the context is full, forget half of what comes after the first N tokens and go on
    #[arg(long, value_name = "N", value_parser = token_count)]
    keep: Option<usize>,

    /// Do not repeat the prompt in the output
    #[arg(long)]
    no_display_prompt: bool,

    /// Record what runs when, for <https://ui.perfetto.dev>
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Print only the text, no timings
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    sampling: SamplingArgs,
}

/// How tokens are picked.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
struct SamplingArgs {
    /// Randomness; 0 always takes the most likely token
    #[arg(long, value_name = "T", default_value_t = SamplerParams::default().temperature, allow_negative_numbers = true)]
    temp: f32,
    /// Only the K most likely tokens; 0 for all
    #[arg(long, value_name = "K", default_value_t = SamplerParams::default().top_k)]
    top_k: usize,
    /// Only the most likely tokens that together have this probability
    #[arg(long, value_name = "P", default_value_t = SamplerParams::default().top_p, allow_negative_numbers = true)]
    top_p: f32,
    /// Only tokens at least P times as likely as the most likely one
    #[arg(long, value_name = "P", default_value_t = SamplerParams::default().min_p, allow_negative_numbers = true)]
    min_p: f32,
    /// Divides the logits of recent tokens; 1 for no effect
    #[arg(long, value_name = "X", default_value_t = SamplerParams::default().repeat_penalty, allow_negative_numbers = true)]
    repeat_penalty: f32,
    /// Subtracted from the logits of recent tokens for each time they came
    #[arg(long, value_name = "X", default_value_t = SamplerParams::default().frequency_penalty, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Subtracted from the logits of recent tokens
    #[arg(long, value_name = "X", default_value_t = SamplerParams::default().presence_penalty, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// How many recent tokens the penalties look at
    #[arg(long, value_name = "N", default_value_t = SamplerParams::default().last_n)]
    repeat_last_n: usize,
    /// Same seed, same text; random by default
    #[arg(short, long, value_name = "N")]
    seed: Option<u64>,
}

impl SamplingArgs {
    fn params(&self) -> SamplerParams {
        // Any number that differs from run to run does.
        let random = || {
            std::time::SystemTime::UNIX_EPOCH
                .elapsed()
                .map_or(0, |time| time.as_nanos() as u64)
        };
        SamplerParams {
            seed: self.seed.unwrap_or_else(random),
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            last_n: self.repeat_last_n,
            ..SamplerParams::default()
        }
    }
}

pub fn run(args: RunArgs) -> Outcome {
    // Everything that can be wrong with the flags is found before a large file is loaded.
    let mut sampler = Sampler::new(args.sampling.params()).map_err(Failure::usage)?;
    let trace_file = files::create(&args.trace)?;
    let prompt = match (args.prompt.or(args.text), &args.file) {
        (Some(text), _) => text,
        (None, Some(path)) => files::read_text(path)?,
        (None, None) => files::read_stdin()?,
    };
    // From here on, Ctrl-C is looked at between two steps; until here, it just ends the program.
    let cancel = interrupt::token()?;
    let context_options = args.model.context_options(&cancel)?;
    let model = args.model.load(args.threads, &cancel)?;
    let load_time = model.load_time();
    let mut session = Session::new(args.model.context(model, context_options)?)?;
    let tokens = session
        .tokenizer()
        .tokenize(&prompt, true, true)
        .map_err(Failure::error)?;
    if tokens.is_empty() {
        return Err(Failure::usage(
            "the text to continue is empty: give one with -p",
        ));
    }
    let n_ctx = session.context().n_ctx();
    if tokens.len() > n_ctx {
        return Err(Failure::error(format_args!(
            "the text to continue has {} tokens, the context {n_ctx}: choose a larger --ctx-size (-c) or a shorter text",
            tokens.len()
        )));
    }
    if trace_file.is_some() {
        session.context_mut().scheduler_mut().start_trace();
    }

    let mut out = std::io::stdout().lock();
    if !args.no_display_prompt {
        write!(out, "{prompt}")?;
        out.flush()?;
    }
    let options = GenerateOptions {
        max_tokens: args.n_predict,
        stop: args.stop,
        ignore_end: args.ignore_eos,
        keep_when_full: args.keep,
    };
    let mut broken = None;
    let generation = session.generate(&tokens, &mut sampler, &options, |piece| {
        if let Err(error) = write!(out, "{piece}").and_then(|()| out.flush()) {
            broken = Some(error);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    });
    if let Some(error) = broken {
        return Err(error.into());
    }
    writeln!(out)?;
    let generation = generation?;
    let trace = session.context_mut().scheduler_mut().finish_trace();
    if let (Some(file), Some(trace)) = (trace_file, trace) {
        files::finish(file, &trace.into_json().to_string())?;
    }
    if !args.quiet {
        let t = generation.timings;
        let why = match generation.finish {
            Finish::ContextFull => "; the context is full (see -c and --keep)",
            _ => "",
        };
        eprintln!(
            "loaded in {:.2} s; prompt: {} tokens, {:.1} tokens/s; generation: {} tokens, {:.1} tokens/s{why}",
            load_time.as_secs_f64(),
            t.prompt_tokens,
            t.prompt_per_second(),
            generation.tokens.len(),
            t.generation_per_second()
        );
    }
    Ok(())
}
