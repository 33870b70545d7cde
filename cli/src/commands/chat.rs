//! `samite chat`: a conversation in the terminal.

#[cfg(feature = "vision")]
mod images;
mod input;
#[cfg(not(feature = "vision"))]
mod no_images;
mod printer;

use crate::args::{ModelArgs, number_or_all};
use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::files::{self, TextSource};
use crate::interrupt;
use crate::model_name::ModelName;
use crate::progress;
use crate::renewal::{self, Renewal};
use crate::sampling::SamplingArgs;
use crate::setup::ModelSetup;
use crate::shown::{counted, escaped, one_line, say};
use clap::Args;
#[cfg(feature = "vision")]
use images::image_path;
use input::MessageInput;
#[cfg(not(feature = "vision"))]
use no_images::image_path;
use printer::Printer;
use samite::chat::{
    ChatTemplate, Guard, Message, MessageRole, Prompt, PromptOptions, ReasoningFormat,
};
use samite::gguf::AtomicFile;
use samite::llm::{Error, Finish, Generation, Model, sampler_params};
use samite::text::{Sampler, SamplerParams};
use samite::{CancelToken, Conversation, ConversationError};
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Flags of `samite chat`.
#[derive(Debug, Args)]
#[command(
    after_help = "A line that ends with \\ continues on the next line; \"\"\" starts and ends a \
message of several lines. Type /help for commands. Ctrl-C stops the answer, Ctrl-D ends the \
conversation. The text of -p and input from a pipe form one message.

Examples:
  samite chat model.gguf
  samite chat -m model.gguf --system \"Answer in one sentence.\" --temp 0.3
  echo \"What is a llama?\" | samite chat -m model.gguf -q
  samite chat model.gguf -p \"Summarize this text:\" < README.md"
)]
pub struct ChatArgs {
    #[command(flatten)]
    name: ModelName,

    /// First message; input from a pipe is appended to it
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,

    /// Maximum number of tokens per answer [default: as many as the context holds]
    #[arg(short = 'n', long, value_name = "N|all", value_parser = number_or_all,
        allow_negative_numbers = true)]
    n_predict: Option<usize>,

    /// Format in which reasoning is separated from the answer
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = reasoning_format)]
    reasoning_format: ReasoningFormat,

    /// Enable reasoning before the answer [default: the model decides]
    #[arg(long, value_name = "on|off", value_parser = on_or_off)]
    thinking: Option<bool>,

    /// Resume the conversation in this file if it exists, and save it there at the end; nothing is
    /// computed again
    #[arg(long, value_name = "FILE")]
    session: Option<PathBuf>,

    /// Print only answers
    #[arg(short, long)]
    quiet: bool,

    /// Treat each line of a pipe as a message or command, instead of the whole input as one message
    #[arg(long)]
    lines: bool,

    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    cpu: CpuArgs,

    #[command(flatten)]
    template: TemplateArgs,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[cfg(feature = "vision")]
    #[command(flatten)]
    encoder: crate::images::EncoderArgs,

    #[cfg(feature = "grammar")]
    #[command(flatten)]
    grammar: crate::grammar::GrammarArgs,
}

/// Flags for the chat template.
#[derive(Debug, Args)]
#[command(next_help_heading = "Conversation")]
pub(super) struct TemplateArgs {
    /// System prompt [also: -sys]
    #[arg(
        long,
        visible_alias = "system-prompt",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    system: Option<String>,

    /// Chat template: a name (docs/chat-templates.md has the list) or the text of a template
    /// [default: the model's own]
    #[arg(long, value_name = "NAME|TEXT")]
    chat_template: Option<String>,

    /// File with the chat template
    #[arg(long, value_name = "FILE", conflicts_with = "chat_template")]
    chat_template_file: Option<PathBuf>,
}

impl TemplateArgs {
    /// Returns whether any of these flags was given.
    pub(super) fn is_given(&self) -> bool {
        self.system.is_some() || self.chat_template.is_some() || self.chat_template_file.is_some()
    }

    /// Returns the text or name of the template, if one was given. The file may be a pipe, which
    /// can be read only once.
    fn read(&self) -> CommandResult<Option<String>> {
        match &self.chat_template_file {
            Some(path) => files::read_flag(path, "--chat-template-file").map(Some),
            None => Ok(self.chat_template.clone()),
        }
    }

    /// Returns the chat settings. Needs no model yet.
    pub(super) fn prepare(&self, is_embedded: bool) -> CommandResult<ChatForm> {
        let stories = is_embedded.then(|| STORIES.to_owned());
        Ok(ChatForm {
            template: self.read()?.or(stories),
            system: self.system.clone(),
        })
    }
}

/// Chat settings.
pub(super) struct ChatForm {
    /// Text or name of the template; `None` for the model's own.
    template: Option<String>,
    system: Option<String>,
}

impl ChatForm {
    /// Selects the template for a model.
    fn choose(&self, model: &Model) -> CommandResult<ChatTemplate> {
        let sources = model.chat_sources();
        let template = ChatTemplate::choose(&sources, self.template.as_deref());
        let template = template.map_err(CommandError::usage)?;
        for warning in template.warnings() {
            say(format_args!("warning: {}", escaped(warning)));
        }
        Ok(template)
    }

    /// Returns the tokens of a conversation of one message.
    pub(super) fn tokens(&self, model: &Model, message: &str) -> CommandResult<Vec<u32>> {
        let tokens = self.prompt(model, message)?.tokens(model.tokenizer()?);
        tokens.map_err(CommandError::error)
    }

    /// Returns the prompt of a conversation of one message.
    pub(super) fn prompt(&self, model: &Model, message: &str) -> CommandResult<Prompt> {
        let template = self.choose(model)?;
        let tokenizer = model.tokenizer()?;
        let guard = Guard::for_template(tokenizer, template.source(false));
        let system = self.system.as_deref().map(Message::system);
        let messages: Vec<Message> = system.into_iter().chain([Message::user(message)]).collect();
        let prompt = template.prompt(&messages, &PromptOptions::new(samite::now()), &guard);
        prompt.map_err(CommandError::error)
    }
}

pub(super) fn reasoning_format(name: &str) -> Result<ReasoningFormat, String> {
    ReasoningFormat::named(name)
        .ok_or_else(|| format!("must be one of {}", ReasoningFormat::NAMES.join(", ")))
}

fn on_or_off(word: &str) -> Result<bool, String> {
    match word {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("must be on or off".to_owned()),
    }
}

/// Maximum bytes of a message from a pipe, and of a saved conversation.
const MAX_BYTES: u64 = 64 << 20;

/// Template of the built-in model, which continues text and has no roles.
pub(super) const STORIES: &str = "{{ messages[-1].content }}";

pub fn run(mut args: ChatArgs) -> CommandResult {
    args.name.apply(&mut args.model)?;
    Sampler::new(args.sampling.params(SamplerParams::default())?).map_err(CommandError::usage)?;
    #[cfg(feature = "grammar")]
    let grammar = args.grammar.read()?;
    let setup = ModelSetup::new(&args.model)?;
    let form = args.template.prepare(setup.file.is_embedded())?;
    // Find out early if the file cannot be written.
    files::create(&args.session)?;
    let cancel = interrupt::token();
    let mut context_options = setup.context_options(&cancel);
    args.cpu.apply(&mut context_options);
    #[cfg(feature = "vision")]
    let beside = &args.encoder.beside(&setup, &args.cpu)?;
    #[cfg(not(feature = "vision"))]
    let beside = &setup;
    let model = renewal::load(beside, &args.cpu, &cancel)?;
    #[cfg(feature = "vision")]
    let encoder = {
        let encoder = args.encoder.load(&model, context_options.threads_batch);
        let encoder = encoder.map_err(CommandError::error)?;
        if let Some(encoder) = &encoder {
            crate::images::fit(encoder.spec(), &mut context_options);
        }
        encoder
    };
    let template = form.choose(&model)?;
    let sampling = args.sampling.params(sampler_params(model.metadata())?)?;
    Sampler::new(sampling.clone()).map_err(CommandError::usage)?;
    let name = escaped(model.name()).into_owned();
    let context = renewal::context(&setup, &args.cpu, model, context_options.clone())?;
    let renewal = Renewal::new(&setup, &args.cpu, context_options, context.n_ctx());
    let mut talk = Conversation::with_template(context, template).map_err(failure)?;
    #[cfg(feature = "vision")]
    let sees = match encoder {
        Some(encoder) => talk
            .set_image_encoder(encoder)
            .map(|()| true)
            .map_err(failure)?,
        None => false,
    };
    talk.on_prefill(progress::prefill());
    if let Some(renewal) = renewal {
        talk.on_loss(move |lost| renewal.renew(lost));
    }
    talk.options.sampling = sampling;
    talk.options.max_tokens = args.n_predict;
    talk.options.reasoning = args.reasoning_format;
    talk.options.enable_thinking = args.thinking;
    #[cfg(feature = "grammar")]
    if let Some(grammar) = grammar {
        talk.options.keeps_to = Some(grammar.into_grammar());
    }
    if let Some(path) = args.session.as_deref().filter(|path| path.exists()) {
        talk.restore(path).map_err(failure)?;
    }
    if let Some(system) = form.system {
        talk.system(system);
    }
    let is_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let mut chat = Chat {
        talk,
        cancel,
        is_terminal,
        is_quiet: args.quiet,
        #[cfg(feature = "vision")]
        images: sees.then(Vec::new),
        left_out: 0,
    };
    if is_terminal && !args.quiet {
        say(format_args!("{name}; /help lists commands"));
        if setup.file.is_embedded() {
            say(
                "This small model only tells stories: begin one with \"Once upon a time\".\nFor a \
                 conversation, give a model with -m.",
            );
        }
    }
    if args.lines || std::io::stdin().is_terminal() {
        chat.talk_by_lines(args.prompt, MessageInput::new(is_terminal)?)?;
    } else {
        let piped = TextSource::stdin().read_all(MAX_BYTES)?;
        let parts = args.prompt.into_iter().chain([piped.trim_end().to_owned()]);
        let parts: Vec<_> = parts.filter(|part| !part.is_empty()).collect();
        if !parts.is_empty() {
            chat.ask(&parts.join("\n\n"))?;
        }
    }
    if let Some(path) = args.session {
        chat.talk.save(path).map_err(failure)?;
    }
    Ok(())
}

fn failure(error: ConversationError) -> CommandError {
    match error {
        ConversationError::Model(error) => error.into(),
        ConversationError::NoEncoder => CommandError::usage(
            "the conversation has an image: --mmproj names the model's image encoder",
        ),
        error => CommandError::error(error),
    }
}

const HELP: &str = "\
/help           this list
/clear          forget the conversation
/regen          answer the last message anew
/undo           take the last message and its answer back
/image FILE     show an image with the next message; a file dragged into
                the terminal also counts
/system [TEXT]  how the model is to behave; without a text, show it
/set [NAME X]   temp, top-k, top-p, min-p, repeat-penalty, seed, n or
                thinking; without a name, show them
/save FILE      write the conversation to a file
/load FILE      go on with the conversation in a file
/quit           end";

struct Chat {
    talk: Conversation,
    cancel: CancelToken,
    is_terminal: bool,
    is_quiet: bool,
    /// URLs of images that go with the next message; `None` if the model does not see.
    #[cfg(feature = "vision")]
    images: Option<Vec<String>>,
    /// Number of questions that the model no longer sees.
    left_out: usize,
}

impl Chat {
    /// Answers the first message, if there is one, then each line, until the input or a command
    /// ends the conversation.
    fn talk_by_lines(&mut self, first: Option<String>, mut input: MessageInput) -> CommandResult {
        if let Some(first) = first {
            self.ask(&first)?;
        }
        while let Some(line) = input.next()? {
            match line.strip_prefix('/') {
                Some(_) if let Some(path) = self.dragged_image(&line) => self.add_image(&path),
                Some(command) => {
                    if !self.command(command)? {
                        break;
                    }
                }
                None if line.trim().is_empty() => {}
                None => match self.dragged_image(&line) {
                    Some(path) => self.add_image(&path),
                    None => self.ask(&line)?,
                },
            }
        }
        Ok(())
    }

    fn command(&mut self, line: &str) -> CommandResult<bool> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        match word {
            "help" | "?" => say(HELP),
            "quit" | "exit" | "bye" => return Ok(false),
            "clear" => {
                self.talk
                    .messages
                    .retain(|message| message.role == MessageRole::System);
                self.forget_images();
                say("forgotten");
            }
            "regen" => match self.last_question() {
                Some(last) => {
                    let earlier = self.talk.messages.split_off(last + 1);
                    if !self.answer()? {
                        self.talk.messages.extend(earlier);
                    }
                }
                None => say("there is nothing to answer yet"),
            },
            "undo" => match self.last_question() {
                Some(last) => {
                    self.talk.messages.truncate(last);
                    say(counted(self.talk.messages.len(), "message"));
                }
                None => say("there is nothing to take back"),
            },
            "system" if rest.is_empty() => {
                let first = self.talk.messages.first();
                let system = first.filter(|message| message.role == MessageRole::System);
                let text = system.and_then(|message| message.content.text());
                say(text.as_deref().map_or("there is none".into(), escaped));
            }
            "system" => self.talk.system(rest),
            "set" => match rest.split_once(char::is_whitespace) {
                None if rest.is_empty() => self.show_settings(),
                None => say("give a name and a value, such as /set temp 0.7"),
                Some((name, value)) => {
                    if let Err(message) = self.set(name, value.trim()) {
                        say(format_args!("/set {}: {message}", escaped(name)));
                    }
                }
            },
            "save" | "load" if rest.is_empty() => {
                say(format_args!("/{word} needs the name of a file"))
            }
            "save" => match self.save(Path::new(rest)) {
                Ok(()) => say(format_args!(
                    "{} in {}",
                    counted(self.talk.messages.len(), "message"),
                    escaped(rest)
                )),
                Err(failure) => say(format_args!("/save {}", one_line(&failure.text()))),
            },
            "load" => match load(Path::new(rest)) {
                Ok(messages) => {
                    self.forget_images();
                    say(counted(messages.len(), "message"));
                    self.talk.messages = messages;
                }
                Err(failure) => say(format_args!("/load {}", one_line(&failure.text()))),
            },
            "image" if rest.is_empty() => say("/image needs the name of a file"),
            "image" => self.add_image(&image_path(rest)),
            _ => say(format_args!(
                "there is no command /{}; /help lists those that there are",
                escaped(word)
            )),
        }
        Ok(true)
    }

    fn show_settings(&self) {
        let options = &self.talk.options;
        let p = &options.sampling;
        let n = options
            .max_tokens
            .map_or("all".to_owned(), |n| n.to_string());
        let thinking = match options.enable_thinking {
            None => "auto",
            Some(true) => "on",
            Some(false) => "off",
        };
        say(format_args!(
            "temp {}, top-k {}, top-p {}, min-p {}, repeat-penalty {}, seed {}, n {n}, thinking {thinking}",
            p.temperature, p.top_k, p.top_p, p.min_p, p.repeat_penalty, p.seed
        ));
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        fn read<T: std::str::FromStr>(value: &str) -> Result<T, String> {
            value
                .parse()
                .map_err(|_| format!("'{}' is no value for it", escaped(value)))
        }
        let options = &mut self.talk.options;
        let mut params = options.sampling.clone();
        match name {
            "temp" => params.temperature = read(value)?,
            "top-k" => params.top_k = read(value)?,
            "top-p" => params.top_p = read(value)?,
            "min-p" => params.min_p = read(value)?,
            "repeat-penalty" => params.repeat_penalty = read(value)?,
            "seed" => params.seed = read(value)?,
            "n" if value == "all" => options.max_tokens = None,
            "n" => options.max_tokens = Some(read(value)?),
            "thinking" if value == "auto" => options.enable_thinking = None,
            "thinking" => {
                let is_on = on_or_off(value).map_err(|message| message + ", or auto");
                options.enable_thinking = Some(is_on?);
            }
            _ => return Err("there is no such setting".to_owned()),
        }
        Sampler::new(params.clone()).map_err(|error| error.to_string())?;
        options.sampling = params;
        Ok(())
    }

    fn last_question(&self) -> Option<usize> {
        let mut messages = self.talk.messages.iter();
        messages.rposition(|message| message.role == MessageRole::User)
    }

    fn save(&self, path: &Path) -> CommandResult {
        let value = serde_json::json!({"messages": self.talk.messages});
        let text = serde_json::to_string_pretty(&value).map_err(CommandError::error)? + "\n";
        files::finish(AtomicFile::private(path)?, &text)
    }

    /// Asks a question with the images that were added. Removes it if the model cannot answer.
    fn ask(&mut self, text: &str) -> CommandResult {
        self.talk.messages.push(Message::user(self.content(text)));
        // An image that the model cannot take does not spoil further messages.
        self.forget_images();
        if !self.answer()? {
            self.talk.messages.pop();
        }
        Ok(())
    }

    /// Removes the oldest questions and answers if there is no room for an answer, until a quarter
    /// of the context is free or only one question is left. Returns the removed messages and their
    /// position.
    fn make_room(&mut self) -> (usize, Vec<Message>) {
        let n_ctx = self.talk.context().n_ctx();
        let mut length = self.length();
        if length <= n_ctx / 8 * 7 {
            return (0, Vec::new());
        }
        let (mut place, mut left_out) = (0, Vec::new());
        let mut count = 0;
        while length > n_ctx / 4 * 3 {
            let messages = self.talk.messages.iter().enumerate();
            let questions = messages.filter(|(_, message)| message.role == MessageRole::User);
            let places: Vec<_> = questions.map(|(place, _)| place).take(2).collect();
            let &[first, second] = &*places else {
                break;
            };
            place = first;
            left_out.extend(self.talk.messages.drain(first..second));
            count += 1;
            length = self.length();
        }
        if length > n_ctx {
            // The last question alone is too long.
            self.talk.messages.splice(place..place, left_out);
            return (0, Vec::new());
        }
        if count > self.left_out && !self.is_quiet {
            say(format_args!(
                "(the context is full: the model does not see the oldest {} any more; --ctx-size \
                 (-c) makes room for more)",
                counted(count, "question")
            ));
        }
        self.left_out = count;
        (place, left_out)
    }

    /// Returns the number of tokens of the conversation, or 0 if the template rejects it; the
    /// answer reports that error.
    fn length(&mut self) -> usize {
        self.talk.prompt_len().unwrap_or(0)
    }

    /// Answers the messages. Returns whether that was possible. Keeps all messages, including those
    /// for which the context has no room.
    fn answer(&mut self) -> CommandResult<bool> {
        let (place, left_out) = self.make_room();
        let answered = self.answer_shown();
        self.talk.messages.splice(place..place, left_out);
        answered
    }

    fn answer_shown(&mut self) -> CommandResult<bool> {
        let mut printer = Printer::new(std::io::stdout().is_terminal().then(terminal_width));
        let mut broken = None;
        let mut out = std::io::stdout().lock();
        let reply = self
            .talk
            .answer(|event| match printer.print(event, &mut out) {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    broken = Some(error);
                    ControlFlow::Break(())
                }
            });
        if let Some(error) = broken {
            return Err(error.into());
        }
        printer.end(&mut out, reply.is_ok())?;
        if self.cancel.is_cancelled() {
            // Only Ctrl-C stops just the answer.
            if interrupt::exit_code() != interrupt::INTERRUPTED {
                return Err(CommandError::Interrupted);
            }
            self.cancel.reset();
            say("(stopped)");
        }
        match reply {
            Ok(reply) => {
                if let Some(generation) = reply.generation {
                    self.tell(&generation);
                }
                Ok(true)
            }
            Err(error) if error.is_cancelled() => Ok(false),
            // There is no user who could react.
            Err(error) if !self.is_terminal => Err(failure(error)),
            Err(ConversationError::Model(Error::ContextFull { tokens, size, .. })) => {
                say(format_args!(
                    "error: the conversation has {tokens} tokens, more than the context of {size}: /clear forgets it, --ctx-size (-c) makes room for a longer one"
                ));
                Ok(false)
            }
            Err(error) => {
                say(format_args!("error: {}", one_line(&error.to_string())));
                Ok(false)
            }
        }
    }

    fn tell(&self, generation: &Generation) {
        if self.is_quiet {
            return;
        }
        let t = generation.timings;
        let why = match generation.finish {
            Finish::ContextFull => {
                "; the context is full and cut the answer; the next question drops the oldest"
            }
            Finish::MaxTokens => "; cut off at the limit (-n)",
            _ => "",
        };
        say(format_args!(
            "({}, {:.1} tokens/s; {} of the prompt, {} of them known{why})",
            counted(generation.tokens.len(), "token"),
            t.generation_per_second(),
            t.prompt_tokens + t.reused_tokens,
            t.reused_tokens
        ));
    }
}

/// Returns the current width of the terminal in columns.
fn terminal_width() -> usize {
    console::Term::stdout().size().1.into()
}

fn load(path: &Path) -> CommandResult<Vec<Message>> {
    #[derive(serde::Deserialize)]
    struct Saved {
        messages: Vec<Message>,
    }
    let text = TextSource::file(path)?.read_all(MAX_BYTES)?;
    serde_json::from_str::<Saved>(&text)
        .map(|saved| saved.messages)
        .map_err(|error| CommandError::error(format_args!("{}: {error}", path.display())))
}
