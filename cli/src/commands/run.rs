//! `samite run`: continues a text with a language model.

use super::chat::TemplateArgs;
use crate::args::{ModelArgs, SplitMode, number_or_all, token_count};
use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::files::TextSource;
use crate::model_name::{model_and_text, set_model};
use crate::renewal::{self, Renewal};
use crate::sampling::SamplingArgs;
use crate::setup::ModelSetup;
use crate::shown::{counted, on_terminal, say};
use crate::trace_file::TraceFile;
use crate::watch::{Trouble, WatchArgs};
use crate::{files, interrupt, progress, ranks};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
#[cfg(feature = "vision")]
use samite::chat::Prompt;
use samite::llm::{
    Context, Finish, GenerateOptions, Generation, PlacedImage, Session, sampler_params,
};
use samite::text::{Sampler, SamplerParams};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Flags of `samite run`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite run \"Once upon a time\"
  samite run -m model.gguf -f prompt.txt -n 200 --temp 0.7 --seed 42
  samite run model.gguf \"The sky is\" --stop \".\"
  samite run -m model.gguf -p \"A person: \" -j '{\"type\": \"object\"}'
  samite run -m model.gguf --device reference,cpu --place 'output:cpu' -p Hello
  mpirun -np 4 samite run -sm tensor -m model.gguf -p Hello
  samite run -n 2 --watch 'l_out-*' --watch 'result_output' Hello
  git log -1 | samite run -m model.gguf -c 8192 -q")]
pub struct RunArgs {
    /// Text to continue [default: standard input]
    #[arg(short, long, value_name = "TEXT", conflicts_with_all = ["text", "file"],
        allow_hyphen_values = true)]
    prompt: Option<String>,

    /// Model: a GGUF file (as -m) or OWNER/NAME of a repository (as -hf). Any other text is the
    /// text to continue
    #[arg(value_name = "MODEL|TEXT")]
    first: Option<String>,

    /// Text to continue
    #[arg(value_name = "TEXT", conflicts_with = "file")]
    text: Option<String>,

    /// File with the text to continue
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// Maximum number of tokens to generate [default: as many as the context holds]
    #[arg(short = 'n', long, value_name = "N|all", value_parser = number_or_all,
        allow_negative_numbers = true)]
    n_predict: Option<usize>,

    /// Stop when the model generates this text
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true,
        value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,

    /// Continue after end-of-text tokens
    #[arg(long)]
    ignore_eos: bool,

    /// When the context is full, discard half of the tokens after the first N and continue
    #[arg(long, value_name = "N", value_parser = token_count)]
    keep: Option<usize>,

    /// Print only the generated text, without the prompt
    #[arg(long)]
    no_display_prompt: bool,

    /// Restore the saved text and its KV cache from this file if it exists, and save them there at
    /// the end. A prompt that starts with the saved text does not compute it again; without a
    /// prompt, generation resumes exactly where it stopped
    #[arg(long, visible_alias = "prompt-cache", value_name = "FILE")]
    session: Option<PathBuf>,

    /// Answer the text as a chat message, formatted with the chat template
    #[arg(long)]
    chat: bool,

    /// Record a timeline of the run to a file, for <https://ui.perfetto.dev>
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Print only the text, without timings
    #[arg(short, long)]
    quiet: bool,

    /// Print one JSON object at the end instead: text, tokens, finish reason (end, stop, grammar,
    /// limit, full), timings and seed
    #[arg(long)]
    json: bool,

    /// With --json: add the log-probability of each token, and of the N most likely tokens
    #[arg(long, visible_alias = "n-probs", value_name = "N", requires = "json")]
    logprobs: Option<usize>,

    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    cpu: CpuArgs,

    #[command(flatten)]
    template: TemplateArgs,

    #[cfg(feature = "vision")]
    #[command(flatten)]
    images: crate::images::ImageArgs,

    #[command(flatten)]
    watch: WatchArgs,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[cfg(feature = "grammar")]
    #[command(flatten)]
    grammar: crate::grammar::GrammarArgs,
}

/// Everything that is ready before the first token is computed.
struct Ready {
    /// Name of the model, and the time to load it.
    model: (String, Duration),
    session: Session,
    sampler: Sampler,
    seed: u64,
    /// Text to continue.
    prompt: String,
    /// Its tokens. `None` continues where a saved text stopped.
    tokens: Option<Vec<u32>>,
    /// Its images.
    images: Vec<PlacedImage>,
    trace: Option<TraceFile>,
    trouble: Trouble,
}

impl RunArgs {
    /// Splits the positional arguments into model and text.
    fn settle_names(&mut self) -> CommandResult {
        let (model, text) = model_and_text(self.first.take(), self.text.take())?;
        if let Some(model) = model {
            set_model(&mut self.model, &model)?;
        }
        if text.is_some() && (self.prompt.is_some() || self.file.is_some()) {
            return Err(CommandError::usage(
                "the text to continue is given twice: leave out --prompt, --file or the positional text",
            ));
        }
        self.text = text;
        Ok(())
    }

    fn has_images(&self) -> bool {
        #[cfg(feature = "vision")]
        let has_images = self.images.are_given();
        #[cfg(not(feature = "vision"))]
        let has_images = false;
        has_images
    }

    /// Returns the file of a saved text, if it exists.
    fn saved(&self) -> Option<&Path> {
        self.session.as_deref().filter(|path| path.exists())
    }

    /// Returns the text to continue, unless a saved text is continued.
    fn source(&self) -> CommandResult<Option<TextSource>> {
        Ok(
            match (self.prompt.as_ref().or(self.text.as_ref()), &self.file) {
                // Of several processes, only the first one reads the text.
                _ if !ranks::is_first() => Some(TextSource::text(String::new())),
                (Some(text), _) => Some(TextSource::text(text.clone())),
                (None, Some(path)) => Some(TextSource::file(path)?),
                (None, None) if self.saved().is_some() => None,
                (None, None) => Some(TextSource::stdin()),
            },
        )
    }

    /// Loads the model and reads the text.
    fn prepare(&self) -> CommandResult<Ready> {
        // Report all problems with the flags before loading a large file.
        if self.template.is_given() && !self.chat {
            return Err(CommandError::usage(
                "--system and --chat-template are for conversations: add --chat, or see `samite chat`",
            ));
        }
        for (flag, is_given) in [
            ("--session", self.session.is_some()),
            ("--keep", self.keep.is_some()),
        ] {
            if is_given && self.has_images() {
                return Err(CommandError::usage(format_args!(
                    "{flag} is for texts without images: leave it out, or --image"
                )));
            }
        }
        Sampler::new(self.sampling.params(SamplerParams::default())?)
            .map_err(CommandError::usage)?;
        #[cfg(feature = "grammar")]
        let grammar = self.grammar.read()?;
        self.check_ranks()?;
        let trace_file = files::create(&self.trace)?;
        let watching = self.watch.prepare()?;
        let setup = ModelSetup::new(&self.model)?;
        let form = self.template.prepare(setup.file.is_embedded())?;
        // Find out early if the file cannot be written.
        files::create(&self.session)?;
        let source = self.source()?;
        let cancel = interrupt::token();
        let mut context_options = setup.context_options(&cancel);
        self.cpu.apply(&mut context_options);
        #[cfg(feature = "vision")]
        let beside = &self.images.beside(&setup, &self.cpu)?;
        #[cfg(not(feature = "vision"))]
        let beside = &setup;
        let model = renewal::load(beside, &self.cpu, &cancel);
        // Some processes load faster than others.
        let model = ranks::together(ranks::LOADING, model)?;
        let params = self.sampling.params(sampler_params(model.metadata())?)?;
        let mut seed = params.seed;
        let sampler = Sampler::new(params).map_err(CommandError::usage)?;
        #[cfg(feature = "vision")]
        let loaded_images = self
            .images
            .load(&model, context_options.threads_batch, &cancel)?;
        #[cfg(feature = "vision")]
        if let Some(images) = &loaded_images {
            images.fit(&mut context_options);
        }
        let (options, shared) = (context_options.clone(), Arc::clone(&model));
        let context = renewal::context(&setup, &self.cpu, shared, options)?;
        // The context size now limits how much of an endless text to read.
        let n_ctx = context.n_ctx();
        let renewal = Renewal::new(&setup, &self.cpu, context_options, n_ctx);
        let mut session = Session::new(context)?;
        session.on_prefill(progress::prefill());
        let mut prompt = String::new();
        let tokenizer = Arc::clone(session.tokenizer());
        #[cfg(feature = "grammar")]
        let sampler = match grammar {
            Some(grammar) => {
                let mut sampler = sampler;
                sampler.set_constraint(Some(grammar.constraint(&tokenizer)?));
                sampler
            }
            None => sampler,
        };
        let mut tokens = None;
        #[cfg_attr(
            not(feature = "vision"),
            expect(unused_mut, reason = "no images are loaded")
        )]
        let mut images = Vec::new();
        if let Some(source) = source {
            let mut text =
                source.tokens(&tokenizer, true, n_ctx, |piece| prompt.push_str(piece))?;
            #[cfg(feature = "vision")]
            if let Some(loaded) = &loaded_images {
                let marked = loaded.text(&prompt)?;
                let prompt = if self.chat {
                    form.prompt(&model, &marked)?
                } else {
                    Prompt::from_text(marked)
                };
                (text, images) = loaded.tokens(&model, &prompt)?;
            }
            if self.chat && images.is_empty() && ranks::is_first() {
                text = form.tokens(&model, &prompt)?;
            }
            let text = ranks::of_first(text)?;
            if text.is_empty() {
                return Err(CommandError::usage(
                    "the text to continue is empty: give one with -p",
                ));
            }
            tokens = Some(text);
        }
        if let Some(path) = self.saved() {
            session.restore_if(path, |application| match application {
                "" => Ok(()),
                _ => {
                    Err("it is a conversation: go on with it by `samite chat --session`".to_owned())
                }
            })?;
        }
        if tokens.is_none() {
            let text = session.text();
            let bytes = tokenizer.detokenize(&text).map_err(CommandError::error)?;
            prompt = String::from_utf8_lossy(&bytes).into_owned();
            match session.sampler_state() {
                Some(state) if !self.sampling.has_seed() => seed = state.seed,
                _ => tokens = Some(text),
            }
        }
        let count = tokens.as_ref().map_or(session.tokens().len(), Vec::len);
        if count > n_ctx {
            return Err(CommandError::error(format_args!(
                "the text to continue has more tokens than the context of {n_ctx}: choose a larger --ctx-size (-c) or a shorter text",
            )));
        }
        let trace = match trace_file {
            Some(file) => Some(TraceFile::start(file, session.context_mut())?),
            None => None,
        };
        let trouble = match watching {
            Some(watching) => watching.start(session.context_mut(), count)?,
            None => Default::default(),
        };
        // A recording covers a single context.
        let is_recorded = trace.is_some() || self.watch.is_given();
        if let (Some(renewal), false) = (renewal, is_recorded || ranks::group().is_some()) {
            session.on_loss(move |lost| renewal.renew(lost));
        }
        if let Some(group) = ranks::group() {
            session.agree_on_token(|token| Ok(group.of_first(token.into())? as u32));
        }
        Ok(Ready {
            model: (model.name().to_owned(), model.load_time()),
            session,
            sampler,
            seed,
            prompt,
            tokens,
            images,
            trace,
            trouble,
        })
    }

    /// Checks what several processes cannot do, or must do in the same way.
    fn check_ranks(&self) -> CommandResult {
        let Some(group) = ranks::group() else {
            return Ok(());
        };
        for (flag, is_given) in [
            ("--image", self.has_images()),
            ("--session", self.session.is_some()),
            ("--trace", self.trace.is_some()),
            ("--watch", self.watch.is_given()),
        ] {
            if is_given {
                return Err(CommandError::usage(format_args!(
                    "{flag} is for one process: leave it out where several share a model"
                )));
            }
        }
        let flags = (self.n_predict, &self.stop, self.ignore_eos, self.keep);
        Ok(group.agree("set of flags", ranks::hash(flags))?)
    }
}

/// Returns a text as it is printed.
fn shown(text: &str, is_terminal: bool) -> Cow<'_, str> {
    if is_terminal {
        on_terminal(text).into()
    } else {
        text.into()
    }
}

pub fn run(mut args: RunArgs) -> CommandResult {
    args.settle_names()?;
    // Other processes that share the model connect before anything else.
    let placement = &args.model.placement;
    placement
        .ranks
        .start(placement.split_mode == SplitMode::Tensor)?;
    let Ready {
        model,
        mut session,
        mut sampler,
        seed,
        prompt,
        tokens,
        images,
        mut trace,
        trouble,
    } = ranks::together(ranks::LOADING, args.prepare())?;
    // Of several processes, only the first one prints.
    let mut out: Box<dyn Write> = if ranks::is_first() {
        Box::new(std::io::stdout().lock())
    } else {
        Box::new(std::io::sink())
    };
    let is_terminal = std::io::stdout().is_terminal();
    let mut has_started = !args.no_display_prompt && !args.chat && !args.json;
    if has_started {
        write!(out, "{}", shown(&prompt, is_terminal))?;
        out.flush()?;
    }
    let options = GenerateOptions {
        max_tokens: args.n_predict,
        stop: args.stop,
        shown: Vec::new(),
        ignore_end: args.ignore_eos,
        keep_when_full: args.keep,
        log_probabilities: args.logprobs,
    };
    let mut broken = None;
    let mut text = String::new();
    let on_text = |context: &mut Context, piece: &str| {
        let written = if args.json {
            text += piece;
            Ok(())
        } else {
            has_started = true;
            write!(out, "{}", shown(piece, is_terminal)).and_then(|()| out.flush())
        };
        let written = written.map_err(CommandError::from).and_then(|()| {
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
    };
    let generation = match &tokens {
        Some(tokens) if !images.is_empty() => {
            session.generate_with_images(tokens, images, &mut sampler, &options, on_text)
        }
        Some(tokens) => session.generate_with(tokens, &mut sampler, &options, on_text),
        None => session.resume(&mut sampler, &options, on_text),
    };
    if let Some(failure) = broken {
        return Err(failure);
    }
    if has_started || (generation.is_ok() && !args.json) {
        writeln!(out)?;
    }
    trouble.check()?;
    let generation = generation?;
    if let Some(path) = &args.session {
        session.save(path, "")?;
    }
    if let Some(trace) = trace {
        trace.finish(session.context_mut())?;
    }
    if args.json {
        let value = as_json(&model, &prompt, text, &generation, seed);
        writeln!(out, "{value}")?;
    } else if !args.quiet && ranks::is_first() {
        let t = generation.timings;
        let why = match generation.finish {
            Finish::ContextFull => "; the context is full (see -c and --keep)",
            _ => "",
        };
        say(format_args!(
            "loaded in {:.2} s; prompt: {}, {:.1} tokens/s; generation: {}, {:.1} tokens/s; seed {seed}{why}",
            model.1.as_secs_f64(),
            counted(t.prompt_tokens, "token"),
            t.prompt_per_second(),
            counted(generation.tokens.len(), "token"),
            t.generation_per_second()
        ));
    }
    Ok(())
}

/// Returns the output of `--json`.
fn as_json(
    (model, load_time): &(String, Duration),
    prompt: &str,
    text: String,
    generation: &Generation,
    seed: u64,
) -> Value {
    let finish = match generation.finish {
        Finish::EndToken(_) => "end",
        Finish::StopString(_) => "stop",
        Finish::Constraint => "grammar",
        Finish::MaxTokens | Finish::Deadline | Finish::Callback => "limit",
        Finish::ContextFull => "full",
    };
    let t = generation.timings;
    let mut value = json!({
        "model": model,
        "prompt": prompt,
        "text": text,
        "tokens": generation.tokens,
        "finish": finish,
        "seed": seed,
        "timings": {
            "load_seconds": load_time.as_secs_f64(),
            "reused_tokens": t.reused_tokens,
            "prompt_tokens": t.prompt_tokens,
            "prompt_seconds": t.prompt.as_secs_f64(),
            "prompt_tokens_per_second": t.prompt_per_second(),
            "generated_tokens": generation.tokens.len(),
            "generation_seconds": t.generation.as_secs_f64(),
            "generation_tokens_per_second": t.generation_per_second(),
        },
    });
    if !generation.log_probabilities.is_empty() {
        // A token with probability 0 has no finite logarithm: null in JSON.
        let each = generation.log_probabilities.iter().map(|found| {
            let top = found.top.iter();
            let top = top.map(|(id, logprob)| json!({"id": id, "logprob": logprob}));
            json!({"logprob": found.token, "top": top.collect::<Vec<_>>()})
        });
        value["logprobs"] = each.collect();
    }
    value
}
