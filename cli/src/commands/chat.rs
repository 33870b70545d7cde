//! `samite chat`: a conversation in the terminal.

use crate::args::{ModelArgs, number_or_all};
use crate::cpu_args::CpuArgs;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::sampling::SamplingArgs;
use crate::shown::{counted, escaped, say};
use clap::Args;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use samite::CancelToken;
use samite::chat::{
    Answer, AnswerOptions, AnswerParser, ChatTemplate, DateTime, Event, Guard, Message,
    PromptOptions, ReasoningFormat, Role,
};
use samite::llm::{Error, Finish, GenerateOptions, Generation, Model, Session, sampler_params};
use samite::text::{Sampler, SamplerParams};
use std::io::{BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Flags of `samite chat`.
#[derive(Debug, Args)]
#[command(
    after_help = "A line that ends with \\ goes on in the next one; \"\"\" begins and ends a text of several lines. Type /help for commands. \
Ctrl-C stops an answer, Ctrl-D ends the conversation.

Examples:
  samite chat -m model.gguf
  samite chat -m model.gguf --system \"Answer in one sentence.\" --temp 0.3
  echo \"What is a llama?\" | samite chat -m model.gguf -q"
)]
pub struct ChatArgs {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    cpu: CpuArgs,

    /// The first message
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,

    /// Most tokens of an answer; as many as the context holds by default
    #[arg(short = 'n', long, value_name = "N|all", value_parser = number_or_all, allow_negative_numbers = true)]
    n_predict: Option<usize>,

    #[command(flatten)]
    template: TemplateArgs,

    /// Whether thoughts are told apart from what the model says
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = reasoning_format)]
    reasoning_format: ReasoningFormat,

    /// Whether the model thinks before it answers; it decides itself by default
    #[arg(long, value_name = "on|off", value_parser = on_or_off)]
    thinking: Option<bool>,

    /// Print only answers
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    sampling: SamplingArgs,
}

/// How a conversation becomes a text.
#[derive(Debug, Args)]
#[command(next_help_heading = "Conversation")]
pub(super) struct TemplateArgs {
    /// How the model is to behave [also: -sys]
    #[arg(
        long,
        visible_alias = "system-prompt",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    system: Option<String>,

    /// How a conversation becomes a text: a name (docs/chat-templates.md has the list), or a template's text; the model's own by default
    #[arg(long, value_name = "NAME|TEXT")]
    chat_template: Option<String>,

    /// The same, from a file
    #[arg(long, value_name = "FILE", conflicts_with = "chat_template")]
    chat_template_file: Option<PathBuf>,
}

impl TemplateArgs {
    /// Whether any of it was given.
    pub(super) fn is_given(&self) -> bool {
        self.system.is_some() || self.chat_template.is_some() || self.chat_template_file.is_some()
    }

    /// The text or the name of the template, if one was given.
    fn wanted(&self) -> Outcome<Option<String>> {
        match &self.chat_template_file {
            Some(path) => {
                let text = std::fs::read_to_string(path);
                let text = text.map_err(|error| {
                    Failure::usage(format_args!(
                        "--chat-template-file: {}: {error}",
                        path.display()
                    ))
                });
                text.map(Some)
            }
            None => Ok(self.chat_template.clone()),
        }
    }

    /// The template for a model.
    fn choose(&self, model: &Model) -> Outcome<ChatTemplate> {
        let wanted = self.wanted()?;
        let sources = model.chat_sources();
        let template = ChatTemplate::choose(&sources, wanted.as_deref()).map_err(Failure::usage)?;
        for warning in template.warnings() {
            say(format_args!("warning: {}", escaped(warning)));
        }
        Ok(template)
    }

    /// The tokens of a conversation of one message.
    pub(super) fn tokens(&self, model: &Model, message: &str) -> Outcome<Vec<u32>> {
        let template = self.choose(model)?;
        let tokenizer = model.tokenizer()?;
        let guard = Guard::for_template(tokenizer, template.source(false));
        let system = self.system.as_deref().map(Message::system);
        let messages: Vec<Message> = system.into_iter().chain([Message::user(message)]).collect();
        let prompt = template.prompt(&messages, &PromptOptions::new(now()), &guard);
        prompt
            .map_err(Failure::error)?
            .tokens(tokenizer)
            .map_err(Failure::error)
    }
}

fn reasoning_format(name: &str) -> Result<ReasoningFormat, String> {
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

/// The model of the program writes on; it knows no roles.
const STORIES: &str = "{{ messages[-1].content }}";

pub fn run(args: ChatArgs) -> Outcome {
    Sampler::new(args.sampling.params(SamplerParams::default())?).map_err(Failure::usage)?;
    let cancel = interrupt::token();
    let mut context_options = args.model.context_options(&cancel)?;
    args.cpu.apply(&mut context_options);
    let model = args.model.load(&args.cpu, &cancel)?;
    let template = if args.model.is_embedded() && args.template.wanted()?.is_none() {
        ChatTemplate::choose(&Default::default(), Some(STORIES)).map_err(Failure::error)?
    } else {
        args.template.choose(&model)?
    };
    let params = args.sampling.params(sampler_params(model.metadata())?)?;
    Sampler::new(params.clone()).map_err(Failure::usage)?;
    let session = Session::new(args.model.context(Arc::clone(&model), context_options)?)?;
    let tokenizer = Arc::clone(session.tokenizer());
    let is_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let format = template.format(false);
    let mut options = PromptOptions::new(now());
    options.enable_thinking = args.thinking;
    let mut chat = Chat {
        guard: Guard::for_template(&tokenizer, template.source(false)),
        shown: format.shown_tokens(&tokenizer),
        template,
        session,
        params,
        options,
        system: args.template.system,
        messages: Vec::new(),
        n_predict: args.n_predict,
        reasoning: args.reasoning_format,
        cancel,
        is_terminal,
        is_quiet: args.quiet,
    };
    if is_terminal && !args.quiet {
        say(format_args!(
            "{}; /help lists commands",
            escaped(model.name())
        ));
        if args.model.is_embedded() {
            say(
                "This small model only tells stories: begin one with \"Once upon a time\".\nFor a conversation, give a model with -m.",
            );
        }
    }
    let mut input = Input::new(is_terminal)?;
    if let Some(prompt) = args.prompt {
        chat.ask(&prompt)?;
    }
    while let Some(line) = input.next()? {
        match line.strip_prefix('/') {
            Some(command) => {
                if !chat.command(command)? {
                    break;
                }
            }
            None if line.trim().is_empty() => {}
            None => chat.ask(&line)?,
        }
    }
    Ok(())
}

/// What time it is, in universal time.
fn now() -> DateTime {
    let seconds = std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .map_or(0, |time| time.as_secs());
    DateTime::new(seconds.cast_signed(), 0)
}

/// Where messages come from.
enum Input {
    Terminal {
        editor: Box<DefaultEditor>,
        history: Option<PathBuf>,
    },
    Pipe(std::io::Lines<std::io::StdinLock<'static>>),
}

impl Input {
    fn new(is_terminal: bool) -> Outcome<Self> {
        if !is_terminal {
            return Ok(Self::Pipe(std::io::stdin().lock().lines()));
        }
        let mut editor = DefaultEditor::new().map_err(Failure::error)?;
        let history = samite::cache_folder().map(|folder| folder.join("chat-history.txt"));
        if let Some(history) = &history {
            // There may be none yet.
            let _ = editor.load_history(history);
        }
        Ok(Self::Terminal {
            editor: Box::new(editor),
            history,
        })
    }

    /// The next message, of several lines if they say so; `None` at the end.
    fn next(&mut self) -> Outcome<Option<String>> {
        let text = loop {
            match self.message()? {
                Line::Text(text) => break text,
                Line::Cancelled => {}
                Line::End => return Ok(None),
            }
        };
        if let Self::Terminal { editor, history } = self {
            let _ = editor.add_history_entry(&text);
            if let Some(history) = history {
                // A history that cannot be kept is no reason to stop.
                let _ = history.parent().map(std::fs::create_dir_all);
                let _ = editor.save_history(history);
            }
        }
        Ok(Some(text))
    }

    fn message(&mut self) -> Outcome<Line> {
        let mut text = match self.line("> ")? {
            Line::Text(text) => text,
            other => return Ok(other),
        };
        let is_quoted = text.starts_with("\"\"\"");
        if is_quoted {
            text.drain(..3);
        }
        // What ends without its mark is taken as it is.
        while if is_quoted {
            !text.ends_with("\"\"\"")
        } else {
            text.ends_with('\\')
        } {
            match self.line("… ")? {
                Line::Text(line) => {
                    if !is_quoted {
                        text.pop();
                    }
                    text = text + "\n" + &line;
                }
                Line::Cancelled => return Ok(Line::Cancelled),
                Line::End => break,
            }
        }
        if is_quoted {
            text = text
                .trim_end_matches("\"\"\"")
                .trim_matches('\n')
                .to_owned();
        }
        Ok(Line::Text(text))
    }

    fn line(&mut self, prompt: &str) -> Outcome<Line> {
        interrupt::at_once(|| match self {
            Self::Pipe(lines) => Ok(lines.next().transpose()?.map_or(Line::End, Line::Text)),
            Self::Terminal { editor, .. } => match editor.readline(prompt) {
                Ok(line) => Ok(Line::Text(line)),
                Err(ReadlineError::Interrupted) => Ok(Line::Cancelled),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(error) => Err(Failure::error(error)),
            },
        })
    }
}

/// What was typed.
enum Line {
    Text(String),
    /// Ctrl-C: what was typed so far does not count.
    Cancelled,
    End,
}

const HELP: &str = "\
/help           this list
/clear          forget the conversation
/regen          answer the last message anew
/undo           take the last message and its answer back
/system [TEXT]  how the model is to behave; without a text, show it
/set [NAME X]   temp, top-k, top-p, min-p, repeat-penalty, seed, n or thinking; without a name, show them
/save FILE      write the conversation to a file
/load FILE      go on with the conversation in a file
/quit           end";

struct Chat {
    template: ChatTemplate,
    guard: Guard,
    session: Session,
    params: SamplerParams,
    options: PromptOptions,
    system: Option<String>,
    messages: Vec<Message>,
    n_predict: Option<usize>,
    reasoning: ReasoningFormat,
    /// Control tokens that marks consist of.
    shown: Vec<u32>,
    cancel: CancelToken,
    is_terminal: bool,
    is_quiet: bool,
}

impl Chat {
    /// Says something about the conversation, not in it.
    fn note(&self, text: impl std::fmt::Display) {
        say(text);
    }

    fn command(&mut self, line: &str) -> Outcome<bool> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        match word {
            "help" | "?" => self.note(HELP),
            "quit" | "exit" | "bye" => return Ok(false),
            "clear" => {
                self.messages.clear();
                self.note("forgotten");
            }
            "regen" => {
                let end = self
                    .messages
                    .iter()
                    .rposition(|message| message.role == Role::User);
                match end {
                    Some(end) => {
                        self.messages.truncate(end + 1);
                        self.answer()?;
                    }
                    None => self.note("there is nothing to answer yet"),
                }
            }
            "undo" => match self
                .messages
                .iter()
                .rposition(|message| message.role == Role::User)
            {
                Some(last) => {
                    self.messages.truncate(last);
                    self.note(counted(self.messages.len(), "message"));
                }
                None => self.note("there is nothing to take back"),
            },
            "system" if rest.is_empty() => {
                self.note(
                    self.system
                        .as_deref()
                        .map_or("there is none".into(), escaped),
                );
            }
            "system" => self.system = Some(rest.to_owned()),
            "set" => match rest.split_once(char::is_whitespace) {
                None if rest.is_empty() => self.show_settings(),
                None => self.note("give a name and a value, such as /set temp 0.7"),
                Some((name, value)) => {
                    if let Err(message) = self.set(name, value.trim()) {
                        self.note(format_args!("/set {}: {message}", escaped(name)));
                    }
                }
            },
            "save" | "load" if rest.is_empty() => {
                self.note(format_args!("/{word} needs the name of a file"))
            }
            "save" => match self.save(Path::new(rest)) {
                Ok(()) => self.note(format_args!(
                    "{} in {}",
                    counted(self.messages.len(), "message"),
                    escaped(rest)
                )),
                Err(error) => self.note(format_args!("/save {}: {error}", escaped(rest))),
            },
            "load" => match load(Path::new(rest)) {
                Ok(messages) => {
                    self.system = None;
                    self.messages = messages;
                    self.note(counted(self.messages.len(), "message"));
                }
                Err(error) => {
                    self.note(format_args!("/load {}: {}", escaped(rest), escaped(&error)))
                }
            },
            "image" => self.note("this model sees no pictures yet"),
            _ => self.note(format_args!(
                "there is no command /{}; /help lists those that there are",
                escaped(word)
            )),
        }
        Ok(true)
    }

    fn show_settings(&self) {
        let p = &self.params;
        let n = self.n_predict.map_or("all".to_owned(), |n| n.to_string());
        let thinking = match self.options.enable_thinking {
            None => "auto",
            Some(true) => "on",
            Some(false) => "off",
        };
        self.note(format_args!(
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
        let mut params = self.params.clone();
        match name {
            "temp" => params.temperature = read(value)?,
            "top-k" => params.top_k = read(value)?,
            "top-p" => params.top_p = read(value)?,
            "min-p" => params.min_p = read(value)?,
            "repeat-penalty" => params.repeat_penalty = read(value)?,
            "seed" => params.seed = read(value)?,
            "n" if value == "all" => self.n_predict = None,
            "n" => self.n_predict = Some(read(value)?),
            "thinking" if value == "auto" => self.options.enable_thinking = None,
            "thinking" => self.options.enable_thinking = Some(on_or_off(value)?),
            _ => return Err("there is no such setting".to_owned()),
        }
        Sampler::new(params.clone()).map_err(|error| error.to_string())?;
        self.params = params;
        Ok(())
    }

    /// All messages, with that of the system.
    fn conversation(&self) -> Vec<Message> {
        let system = self.system.as_deref().map(Message::system);
        system
            .into_iter()
            .chain(self.messages.iter().cloned())
            .collect()
    }

    fn save(&self, path: &Path) -> std::io::Result<()> {
        let text =
            serde_json::to_string_pretty(&serde_json::json!({"messages": self.conversation()}))?;
        std::fs::write(path, text + "\n")
    }

    fn ask(&mut self, text: &str) -> Outcome {
        self.messages.push(Message::user(text));
        self.answer()
    }

    /// Answers the last message. What cannot be answered is taken back.
    fn answer(&mut self) -> Outcome {
        self.options.now = now();
        let prompt = match self
            .template
            .prompt(&self.conversation(), &self.options, &self.guard)
        {
            Ok(prompt) => prompt,
            Err(error) => {
                self.messages.pop();
                self.note(format_args!("error: {}", escaped(&error.to_string())));
                return Ok(());
            }
        };
        let tokens = prompt
            .tokens(self.session.tokenizer())
            .map_err(Failure::error)?;
        let mut sampler = Sampler::new(self.params.clone()).map_err(Failure::error)?;
        let answer_options = AnswerOptions {
            reasoning: self.reasoning,
            ..AnswerOptions::default()
        };
        let format = self.template.format(false);
        let mut parser = AnswerParser::new(format, &answer_options, &prompt.generation_prompt);
        let mut answer = Answer::default();
        let mut printer = Printer {
            is_terminal: self.is_terminal,
            is_dim: false,
        };
        let mut broken = None;
        let mut out = std::io::stdout().lock();
        let options = GenerateOptions {
            max_tokens: self.n_predict,
            shown: self.shown.clone(),
            ..GenerateOptions::default()
        };
        let result = self
            .session
            .generate(&tokens, &mut sampler, &options, |piece| {
                let events = parser.push(piece);
                let printed = printer.print(&events, &mut out);
                answer.add(events);
                match printed {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(error) => {
                        broken = Some(error);
                        ControlFlow::Break(())
                    }
                }
            });
        if let Some(error) = broken {
            return Err(error.into());
        }
        let events = parser.finish();
        printer.print(&events, &mut out)?;
        answer.add(events);
        printer.end(&mut out)?;
        let is_interrupted = self.cancel.is_cancelled();
        if is_interrupted {
            // Only Ctrl-C is about the answer alone.
            if interrupt::exit_code() != INTERRUPTED {
                return Err(Failure::Interrupted);
            }
            self.cancel.reset();
            self.note("(stopped)");
        }
        match result {
            Ok(generation) => self.tell(&generation),
            Err(_) if is_interrupted => {}
            Err(error @ Error::ContextFull { .. }) => {
                self.messages.pop();
                self.note(format_args!("error: {error}; /clear forgets the conversation, --ctx-size (-c) makes room for a longer one"));
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        self.messages.push(answer.into_message());
        Ok(())
    }

    fn tell(&self, generation: &Generation) {
        if self.is_quiet {
            return;
        }
        let t = generation.timings;
        let why = match generation.finish {
            Finish::ContextFull => "; the context is full: /clear, or a larger --ctx-size (-c)",
            Finish::MaxTokens => "; cut off at the limit (-n)",
            _ => "",
        };
        self.note(format_args!(
            "({}, {:.1} tokens/s; {} of the prompt, {} of them known{why})",
            counted(generation.tokens.len(), "token"),
            t.generation_per_second(),
            t.prompt_tokens + t.reused_tokens,
            t.reused_tokens
        ));
    }
}

/// What the program would exit with after Ctrl-C.
const INTERRUPTED: i32 = 130;

fn load(path: &Path) -> Result<Vec<Message>, String> {
    #[derive(serde::Deserialize)]
    struct Saved {
        messages: Vec<Message>,
    }
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    serde_json::from_str::<Saved>(&text)
        .map(|saved| saved.messages)
        .map_err(|error| error.to_string())
}

/// Writes an answer as it comes: thoughts dimmed on a terminal, and nowhere else.
struct Printer {
    is_terminal: bool,
    is_dim: bool,
}

impl Printer {
    fn print(&mut self, events: &[Event], out: &mut impl Write) -> std::io::Result<()> {
        for event in events {
            match event {
                Event::Reasoning(text) if self.is_terminal => {
                    if !std::mem::replace(&mut self.is_dim, true) {
                        write!(out, "\x1b[2m")?;
                    }
                    write!(out, "{}", on_terminal(text))?;
                }
                Event::Content(text) => {
                    if std::mem::take(&mut self.is_dim) {
                        write!(out, "\x1b[0m\n\n")?;
                    }
                    if self.is_terminal {
                        write!(out, "{}", on_terminal(text))?;
                    } else {
                        write!(out, "{text}")?;
                    }
                }
                _ => {}
            }
        }
        out.flush()
    }

    fn end(&mut self, out: &mut impl Write) -> std::io::Result<()> {
        if std::mem::take(&mut self.is_dim) {
            write!(out, "\x1b[0m")?;
        }
        writeln!(out)?;
        out.flush()
    }
}

/// A text that does nothing to the terminal but move on in it.
fn on_terminal(text: &str) -> String {
    let parts =
        text.split_inclusive(['\n', '\t'])
            .map(|part| match part.strip_suffix(['\n', '\t']) {
                Some(begin) => format!("{}{}", escaped(begin), &part[begin.len()..]),
                None => escaped(part).into_owned(),
            });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thoughts_are_dimmed_on_a_terminal_and_nowhere_else() {
        let shown = |is_terminal| {
            let mut printer = Printer {
                is_terminal,
                is_dim: false,
            };
            let mut out = Vec::new();
            for events in [
                vec![Event::Reasoning("a".into())],
                vec![Event::Reasoning("b".into()), Event::Content("c".into())],
            ] {
                printer.print(&events, &mut out).unwrap();
            }
            printer.end(&mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(shown(true), "\x1b[2mab\x1b[0m\n\nc\n");
        assert_eq!(shown(false), "c\n");
    }

    #[test]
    fn answers_do_nothing_to_the_terminal() {
        assert_eq!(on_terminal("a\tb\n\nc"), "a\tb\n\nc");
        assert_eq!(on_terminal("\x1b[2Ja\n\r"), "\\u{1b}[2Ja\n\\r");
    }
}
