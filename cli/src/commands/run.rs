//! `samite run`: continues a text with a language model.

use crate::args::{ModelArgs, number_or_all, token_count};
use crate::cpu_args::CpuArgs;
use crate::failure::{Failure, Outcome};
use crate::files::Source;
use crate::shown::{counted, say};
use crate::trace_file::TraceFile;
use crate::watch::{Trouble, WatchArgs};
use crate::{files, interrupt, ranks};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use samite::llm::{Finish, GenerateOptions, Session};
use samite::text::{Sampler, SamplerParams};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

/// Flags of `samite run`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite run \"Once upon a time\"
  samite run -m model.gguf -f prompt.txt -n 200 --temp 0.7 --seed 42
  samite run -m model.gguf -p \"The sky is\" --stop \".\"
  samite run -m model.gguf --device reference,cpu --place 'output:cpu' -p Hello
  mpirun -np 4 samite run -sm tensor -m model.gguf -p Hello
  samite run -n 2 --watch 'l_out-*' --watch 'result_output' Hello
  git log -1 | samite run -m model.gguf -c 8192 -q")]
pub struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    cpu: CpuArgs,

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

    /// Begin with what this file has of the text, if it is there, and save the text to it at the end: a prompt that begins with it is not computed
    /// again
    #[arg(long, visible_alias = "prompt-cache", value_name = "FILE")]
    session: Option<PathBuf>,

    /// Record what runs when, for <https://ui.perfetto.dev>
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Print only the text, no timings
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    watch: WatchArgs,

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
    /// Only the tokens that are about as surprising as is to be expected, with this probability together; 1 for all
    #[arg(long, visible_alias = "typical-p", value_name = "P", default_value_t = SamplerParams::default().typical_p, allow_negative_numbers = true)]
    typical: f32,
    /// Adds to the logit of a token: `ID+X` or `ID-X`; `ID-inf` bans it
    #[arg(short, long, value_name = "ID+X", value_parser = bias)]
    logit_bias: Vec<(u32, f32)>,
    /// Same seed, same text; -1 for a random one, which is printed at the end
    #[arg(short, long, value_name = "N", default_value = "-1", value_parser = seed, allow_negative_numbers = true)]
    seed: Seed,
}

/// A seed; `None` for a random one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seed(Option<u64>);

fn seed(text: &str) -> Result<Seed, String> {
    match text {
        "-1" => Ok(Seed(None)),
        text => text
            .parse()
            .map(|seed| Seed(Some(seed)))
            .map_err(|_| "must be a number from 0, or -1 for a random one".to_owned()),
    }
}

/// A token and what is added to its logit.
fn bias(text: &str) -> Result<(u32, f32), String> {
    let parts = || {
        let end = text.find(|c: char| !c.is_ascii_digit())?;
        let (id, bias) = text.split_at(end);
        let is_signed = bias.starts_with(['+', '-']);
        let bias = bias
            .parse::<f32>()
            .ok()
            .filter(|bias| is_signed && !bias.is_nan())?;
        Some((id.parse().ok()?, bias))
    };
    parts().ok_or_else(|| "must be a token's number and what is added, such as 15+1.5".to_owned())
}

impl SamplingArgs {
    fn params(&self) -> SamplerParams {
        // Any number that differs from run to run does.
        let random = || {
            std::time::SystemTime::UNIX_EPOCH
                .elapsed()
                .map_or(0, |time| u64::from(time.subsec_nanos()) ^ time.as_secs())
        };
        SamplerParams {
            seed: self.seed.0.unwrap_or_else(random),
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            last_n: self.repeat_last_n,
            typical_p: self.typical,
            logit_bias: self.logit_bias.clone(),
        }
    }
}

/// What is there before the first token is computed.
struct Ready {
    session: Session,
    sampler: Sampler,
    /// The text to continue.
    prompt: String,
    tokens: Vec<u32>,
    trace: Option<TraceFile>,
    trouble: Trouble,
    load_time: Duration,
}

impl RunArgs {
    /// Loads the model and reads the text.
    fn prepare(&self) -> Outcome<Ready> {
        // Everything that can be wrong with the flags is found before a large file is loaded.
        let params = self.sampling.params();
        let sampler = Sampler::new(params).map_err(Failure::usage)?;
        self.check_ranks()?;
        let trace_file = files::create(&self.trace)?;
        let watching = self.watch.prepare()?;
        let source = match (self.prompt.as_ref().or(self.text.as_ref()), &self.file) {
            // Of several processes, the first one reads.
            _ if !ranks::is_first() => Source::text(String::new()),
            (Some(text), _) => Source::text(text.clone()),
            (None, Some(path)) => Source::file(path)?,
            (None, None) => Source::stdin(),
        };
        let cancel = interrupt::token();
        let mut context_options = self.model.context_options(&cancel)?;
        self.cpu.apply(&mut context_options);
        let model = self.model.load(&self.cpu, &cancel);
        // Some are faster.
        let model = ranks::together(ranks::LOADING, model)?;
        let load_time = model.load_time();
        let mut session = Session::new(self.model.context(model, context_options)?)?;
        // Only now it is known how much of an endless text is enough.
        let n_ctx = session.context().n_ctx();
        let mut prompt = String::new();
        let tokenizer = session.tokenizer();
        let tokens = source.tokens(tokenizer, true, n_ctx, |piece| prompt.push_str(piece))?;
        let tokens = ranks::of_first(tokens)?;
        if tokens.is_empty() {
            return Err(Failure::usage(
                "the text to continue is empty: give one with -p",
            ));
        }
        if tokens.len() > n_ctx {
            return Err(Failure::error(format_args!(
                "the text to continue has more tokens than the context of {n_ctx}: choose a larger --ctx-size (-c) or a shorter text",
            )));
        }
        if let Some(path) = self.session.as_deref().filter(|path| path.exists()) {
            session.restore(path)?;
        }
        let trace = match trace_file {
            Some(file) => Some(TraceFile::start(file, session.context_mut())?),
            None => None,
        };
        let trouble = match watching {
            Some(watching) => watching.start(session.context_mut(), tokens.len())?,
            None => Default::default(),
        };
        if let Some(group) = ranks::group() {
            session.settle_choices(|token| Ok(group.of_first(token.into())? as u32));
        }
        Ok(Ready {
            session,
            sampler,
            prompt,
            tokens,
            trace,
            trouble,
            load_time,
        })
    }

    /// What several processes cannot do, or must do alike.
    fn check_ranks(&self) -> Outcome {
        let Some(group) = ranks::group() else {
            return Ok(());
        };
        for (flag, is_given) in [
            ("--session", self.session.is_some()),
            ("--trace", self.trace.is_some()),
            ("--watch", self.watch.is_given()),
        ] {
            if is_given {
                return Err(Failure::usage(format_args!(
                    "{flag} is for one process: leave it out where several share a model"
                )));
            }
        }
        let flags = (self.n_predict, &self.stop, self.ignore_eos, self.keep);
        Ok(group.agree("set of flags", ranks::hash(flags))?)
    }
}

pub fn run(args: RunArgs) -> Outcome {
    args.model.ranks()?;
    let Ready {
        mut session,
        mut sampler,
        prompt,
        tokens,
        mut trace,
        trouble,
        load_time,
    } = ranks::together(ranks::LOADING, args.prepare())?;
    let seed = sampler.params().seed;
    // Of several processes, the first one prints.
    let mut out: Box<dyn Write> = match ranks::is_first() {
        true => Box::new(std::io::stdout().lock()),
        false => Box::new(std::io::sink()),
    };
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
    let generation = session.generate_with(&tokens, &mut sampler, &options, |context, piece| {
        let written = write!(out, "{piece}").and_then(|()| out.flush());
        let written = written.map_err(Failure::from).and_then(|()| {
            trace
                .as_mut()
                .map_or(Ok(()), |trace| trace.advance(context))
        });
        match written {
            Ok(()) => ControlFlow::Continue(()),
            Err(failure) => {
                broken = Some(failure);
                ControlFlow::Break(())
            }
        }
    });
    if let Some(failure) = broken {
        return Err(failure);
    }
    writeln!(out)?;
    trouble.check()?;
    let generation = generation?;
    if let Some(path) = &args.session {
        session.save(path)?;
    }
    if let Some(trace) = trace {
        trace.finish(session.context_mut())?;
    }
    if !args.quiet && ranks::is_first() {
        let t = generation.timings;
        let why = match generation.finish {
            Finish::ContextFull => "; the context is full (see -c and --keep)",
            _ => "",
        };
        say(format_args!(
            "loaded in {:.2} s; prompt: {}, {:.1} tokens/s; generation: {}, {:.1} tokens/s; seed {seed}{why}",
            load_time.as_secs_f64(),
            counted(t.prompt_tokens, "token"),
            t.prompt_per_second(),
            counted(generation.tokens.len(), "token"),
            t.generation_per_second()
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_and_biases_are_read() {
        assert_eq!(seed("7"), Ok(Seed(Some(7))));
        assert_eq!(seed("-1"), Ok(Seed(None)));
        assert!(seed("-2").is_err() && seed("x").is_err());
        assert_eq!(bias("15+1.5"), Ok((15, 1.5)));
        assert_eq!(bias("15-inf"), Ok((15, f32::NEG_INFINITY)));
        for wrong in ["15", "+1", "15+", "15+nan", "15*2", "-1+2"] {
            assert!(bias(wrong).is_err(), "{wrong}");
        }
    }
}
