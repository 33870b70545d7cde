//! `samite run`

use super::tokenize::read_stdin;
use crate::args::ModelArgs;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use clap::Args;
use samite::llm::{Context, Finish, GenerateOptions, Session};
use samite::text::{Sampler, SamplerParams};
use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Flags of `samite run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Text to continue; standard input if it is not given
    #[arg(short, long, value_name = "TEXT", conflicts_with_all = ["text", "file"])]
    prompt: Option<String>,

    /// Text to continue
    #[arg(value_name = "TEXT", conflicts_with = "file")]
    text: Option<String>,

    /// File with the text to continue
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// Most tokens to write; as many as the context holds by default
    #[arg(short = 'n', long, value_name = "N")]
    n_predict: Option<usize>,

    /// Stop when the model writes this
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,

    /// Go on after tokens that end a text
    #[arg(long)]
    ignore_eos: bool,

    /// When the context is full, forget half of what comes after the first N tokens and go on
    #[arg(long, value_name = "N")]
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
    #[arg(long, value_name = "T", default_value_t = SamplerParams::default().temperature)]
    temp: f32,
    /// Only the K most likely tokens; 0 for all
    #[arg(long, value_name = "K", default_value_t = SamplerParams::default().top_k)]
    top_k: usize,
    /// Only the most likely tokens that together have this probability
    #[arg(long, value_name = "P", default_value_t = SamplerParams::default().top_p)]
    top_p: f32,
    /// Only tokens at least P times as likely as the most likely one
    #[arg(long, value_name = "P", default_value_t = SamplerParams::default().min_p)]
    min_p: f32,
    /// Divides the logits of recent tokens; 1 for no effect
    #[arg(long, value_name = "X", default_value_t = SamplerParams::default().repeat_penalty)]
    repeat_penalty: f32,
    /// Subtracted from the logits of recent tokens for each time they came
    #[arg(long, value_name = "X", default_value_t = SamplerParams::default().frequency_penalty)]
    frequency_penalty: f32,
    /// Subtracted from the logits of recent tokens
    #[arg(long, value_name = "X", default_value_t = SamplerParams::default().presence_penalty)]
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
    let cancel = interrupt::token()?;
    // Everything that can be wrong with the flags is found before a large file is loaded.
    let mut sampler = Sampler::new(args.sampling.params()).map_err(Failure::usage)?;
    let context_options = args.model.context_options(&cancel)?;
    let prompt = match (args.prompt, args.text, &args.file) {
        (Some(text), ..) | (None, Some(text), _) => text,
        (None, None, Some(path)) => std::fs::read_to_string(path)
            .map_err(|error| Failure::error(format_args!("{}: {error}", path.display())))?,
        (None, None, None) => {
            if std::io::stdin().is_terminal() {
                eprintln!("reading the text to continue from the terminal; end it with Ctrl-D");
            }
            read_stdin()?
        }
    };
    let model = args.model.load(&cancel)?;
    let load_time = model.load_time();
    let mut session = Session::new(Context::new(model, context_options)?)?;
    let tokens = session
        .tokenizer()
        .tokenize(&prompt, true, true)
        .map_err(Failure::error)?;
    if tokens.is_empty() {
        return Err(Failure::usage(
            "the text to continue is empty: give one with -p",
        ));
    }
    if args.trace.is_some() {
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
    if let (Some(path), Some(trace)) = (
        &args.trace,
        session.context_mut().scheduler_mut().finish_trace(),
    ) {
        std::fs::write(path, trace.to_json().to_string())
            .map_err(|error| Failure::error(format_args!("{}: {error}", path.display())))?;
    }
    let generation = generation?;
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
