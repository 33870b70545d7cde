//! Conversations with a language model, for programs that embed samite.

#[cfg(feature = "async")]
mod asynchronous;
mod error;
#[cfg(feature = "vision")]
mod images;
mod tools;
#[cfg(feature = "grammar")]
mod typed;

#[cfg(feature = "async")]
pub use asynchronous::{AnswerUpdate, Answering, AsyncConversation};
pub use error::ConversationError;

use crate::chat::{
    Answer, AnswerEvent, AnswerOptions, AnswerParser, ChatTemplate, Content, ContentPart, DateTime,
    Guard, Message, Prompt, PromptOptions, ReasoningFormat,
};
use crate::llm::{
    Context, Finish, GenerateOptions, Generation, PlacedImage, Session, sampler_params,
};
use crate::text::{Sampler, SamplerParams};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::hash::{BuildHasher, RandomState};
use std::ops::ControlFlow;
use std::path::Path;
use tools::Tools;

type Result<T, E = ConversationError> = std::result::Result<T, E>;

/// When the model calls tools, if the conversation has any.
#[cfg(feature = "grammar")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides. The arguments of a call conform to the tool's schema.
    #[default]
    Auto,
    /// The model must call a tool.
    Required,
}

/// Options for the answers of a conversation.
///
/// ```no_run
/// use samite::Conversation;
///
/// let mut chat = Conversation::open("model.gguf")?;
/// chat.options.max_tokens = Some(200);
/// chat.options.sampling.temperature = 0.2;
/// chat.options.sampling.seed = 7;
/// chat.options.stop.push("\n\n".to_owned());
/// println!("{}", chat.ask("Name three rivers.")?);
/// # Ok::<_, samite::ConversationError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ConversationOptions {
    /// Sampling parameters. Each answer of a conversation uses its own seed, derived from this one.
    /// [`Conversation::new`] draws a seed; set one to get the same answers again.
    pub sampling: SamplerParams,
    /// Maximum number of tokens in an answer; `None` for as many as fit.
    pub max_tokens: Option<usize>,
    /// Strings that end an answer. They are not part of it.
    pub stop: Vec<String>,
    /// Format of the reasoning in an answer.
    pub reasoning: ReasoningFormat,
    /// Enables or disables reasoning before the answer; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Reasoning effort: "low", "medium" or "high".
    pub reasoning_effort: Option<String>,
    /// Additional variables for the template.
    pub kwargs: Map<String, Value>,
    /// Time that the template sees; `None` for the system clock.
    pub now: Option<DateTime>,
    /// Maximum number of consecutive rounds of tool calls.
    pub max_rounds: usize,
    /// When the model calls tools.
    #[cfg(feature = "grammar")]
    pub tool_choice: ToolChoice,
    /// Grammar that the text of an answer must follow. Reasoning before it is unconstrained.
    #[cfg(feature = "grammar")]
    pub keeps_to: Option<crate::grammar::Grammar>,
}

impl ConversationOptions {
    /// Returns the default options with these sampling parameters.
    pub fn new(sampling: SamplerParams) -> Self {
        Self {
            sampling,
            max_tokens: None,
            stop: Vec::new(),
            reasoning: ReasoningFormat::default(),
            enable_thinking: None,
            reasoning_effort: None,
            kwargs: Map::new(),
            now: None,
            max_rounds: 8,
            #[cfg(feature = "grammar")]
            tool_choice: ToolChoice::default(),
            #[cfg(feature = "grammar")]
            keeps_to: None,
        }
    }
}

/// An answer, with statistics of its generation.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Text, reasoning and tool calls of the model.
    pub answer: Answer,
    /// Tokens and times; `None` if the answer was cancelled and is incomplete.
    pub generation: Option<Generation>,
}

/// A conversation: its messages, and the model that answers them.
///
/// Answers reuse the cached prefix that they share with the text before. On failure, the messages
/// are restored to their previous state.
///
/// ```no_run
/// use samite::Conversation;
///
/// let mut chat = Conversation::open("model.gguf")?;
/// chat.system("Answer in one sentence.");
/// println!("{}", chat.ask("Why is the sky blue?")?);
/// chat.ask_with("And at night?", |event| {
///     if let samite::chat::AnswerEvent::Content(text) = event {
///         print!("{text}");
///     }
///     std::ops::ControlFlow::Continue(())
/// })?;
/// # Ok::<_, samite::ConversationError>(())
/// ```
#[derive(Debug)]
pub struct Conversation {
    /// Options for the answers.
    pub options: ConversationOptions,
    /// All messages in order, including the system message.
    pub messages: Vec<Message>,
    session: Session,
    template: ChatTemplate,
    tools: Tools,
    #[cfg(feature = "vision")]
    images: Option<images::ConversationImages>,
    /// Cached template analysis: for a conversation without tools, and for one with tools.
    words: [Option<SpecialWords>; 2],
    #[cfg(feature = "grammar")]
    vocabulary: Option<crate::grammar::GrammarVocabulary>,
    /// Answers so far, including those that were removed again.
    answers: u64,
}

/// Part of a saved conversation that is stored beside its text.
#[derive(Serialize, Deserialize)]
struct ConversationRecord<'a> {
    messages: Cow<'a, [Message]>,
    answers: u64,
}

/// A prompt with its tokens and images.
struct PromptInput {
    prompt: Prompt,
    tokens: Vec<u32>,
    images: Vec<PlacedImage>,
}

/// A template's special words, resolved for a vocabulary.
#[derive(Debug)]
struct SpecialWords {
    guard: Guard,
    /// Control tokens that are shown as part of an answer's text.
    shown: Vec<u32>,
}

impl Conversation {
    /// Opens a conversation with the model in a file, on the best devices of this machine.
    ///
    /// # Errors
    /// If the model cannot be loaded, or its chat template cannot be used.
    pub fn open(model: impl AsRef<Path>) -> Result<Self> {
        Self::new(crate::open(model)?)
    }

    /// Creates a conversation in a context, with its model's template. Clears the context.
    ///
    /// # Errors
    /// If the model has no vocabulary, or its chat template cannot be used.
    pub fn new(context: Context) -> Result<Self> {
        let template = ChatTemplate::choose(&context.model().chat_sources(), None)?;
        Self::with_template(context, template)
    }

    /// Creates a conversation like [`new`](Self::new), with another template.
    ///
    /// # Errors
    /// If the model has no vocabulary.
    pub fn with_template(context: Context, template: ChatTemplate) -> Result<Self> {
        let mut sampling = sampler_params(context.model().metadata())?;
        sampling.seed = RandomState::new().hash_one(());
        Ok(Self {
            options: ConversationOptions::new(sampling),
            messages: Vec::new(),
            session: Session::new(context)?,
            template,
            tools: Tools::default(),
            #[cfg(feature = "vision")]
            images: None,
            words: [None, None],
            #[cfg(feature = "grammar")]
            vocabulary: None,
            answers: 0,
        })
    }

    /// Returns the context, with its model and options.
    /// [`ContextOptions::cancel`](crate::llm::ContextOptions::cancel) stops an answer.
    pub fn context(&self) -> &Context {
        self.session.context()
    }

    /// Sets `renew`, which creates a new context when a device is lost. The conversation continues
    /// there: see [`Session::on_loss`].
    pub fn on_loss(
        &mut self,
        renew: impl FnMut(&crate::llm::Error) -> crate::llm::Result<Context> + Send + 'static,
    ) {
        self.session.on_loss(renew);
    }

    /// Calls `progress` while a long message is prefilled: see [`Session::on_prefill`].
    pub fn on_prefill(&mut self, progress: impl FnMut(usize, usize) + Send + 'static) {
        self.session.on_prefill(progress);
    }

    /// Returns the template that renders the conversation as text.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Sets the system message, replacing an earlier one.
    pub fn system(&mut self, content: impl Into<Content>) {
        let message = Message::system(content);
        match self.messages.first_mut() {
            Some(first) if first.role == message.role => *first = message,
            _ => self.messages.insert(0, message),
        }
    }

    /// Asks a question and returns the model's complete answer.
    ///
    /// # Errors
    /// Fails like [`answer`](Self::answer).
    pub fn ask(&mut self, content: impl Into<Content>) -> Result<String> {
        let reply = self.ask_with(content, |_| ControlFlow::Continue(()))?;
        Ok(reply.answer.content)
    }

    /// Asks a question. `on_event` receives the answer as it is generated and may end it.
    ///
    /// # Errors
    /// Fails like [`answer`](Self::answer).
    pub fn ask_with(
        &mut self,
        content: impl Into<Content>,
        on_event: impl FnMut(&AnswerEvent) -> ControlFlow<()>,
    ) -> Result<Reply> {
        self.messages.push(Message::user(content));
        let reply = self.answer(on_event);
        if reply.is_err() {
            self.messages.pop();
        }
        reply
    }

    /// Generates an answer to the messages and appends it to them. Calls the tools that the model
    /// requests and continues with their results. A call of a tool that has no function here
    /// becomes part of the reply. The tool calls of an answer that `on_event` ended early are not
    /// executed.
    ///
    /// # Errors
    /// If the template rejects the messages; if the text does not fit into the context; if a device
    /// fails; if cancelled before the answer begins.
    pub fn answer(
        &mut self,
        mut on_event: impl FnMut(&AnswerEvent) -> ControlFlow<()>,
    ) -> Result<Reply> {
        let before = self.messages.len();
        let reply = self.rounds(&mut on_event);
        if reply.is_err() {
            self.messages.truncate(before);
        }
        reply
    }

    fn rounds(
        &mut self,
        on_event: &mut dyn FnMut(&AnswerEvent) -> ControlFlow<()>,
    ) -> Result<Reply> {
        let mut rounds = 0;
        loop {
            let (reply, is_ended) = self.round(on_event)?;
            self.messages.push(reply.answer.clone().into_message());
            if is_ended || !self.tools.answer_all(&reply.answer.calls) {
                return Ok(reply);
            }
            if rounds == self.options.max_rounds {
                return Err(ConversationError::TooManyRounds(rounds));
            }
            rounds += 1;
            for call in &reply.answer.calls {
                self.messages.push(self.tools.call(call));
            }
        }
    }

    /// Generates one answer. The flag is true if it was ended early.
    fn round(
        &mut self,
        on_event: &mut dyn FnMut(&AnswerEvent) -> ControlFlow<()>,
    ) -> Result<(Reply, bool)> {
        let PromptInput {
            prompt,
            tokens,
            images,
        } = self.input()?;
        let has_tools = !self.tools.is_empty();
        let answer_options = AnswerOptions {
            tools: self.tools.list(),
            reasoning: self.options.reasoning,
            seed: self.answers,
        };
        let format = self.template.format(has_tools);
        let mut parser = AnswerParser::new(format, &answer_options, &prompt.generation_prompt);
        let mut sampler = Sampler::new(SamplerParams {
            seed: self.options.sampling.seed.wrapping_add(self.answers),
            ..self.options.sampling.clone()
        })
        .map_err(crate::llm::Error::from)?;
        #[cfg(feature = "grammar")]
        sampler.set_constraint(self.constraint(parser.before_content())?);
        self.answers = self.answers.wrapping_add(1);
        let shown = self.words[usize::from(has_tools)]
            .as_ref()
            .map(|words| words.shown.clone());
        let generate_options = GenerateOptions {
            max_tokens: self.options.max_tokens,
            stop: self.options.stop.clone(),
            shown: shown.unwrap_or_default(),
            ..GenerateOptions::default()
        };
        let mut answer = Answer::default();
        let mut flow = ControlFlow::Continue(());
        let mut take = |events: Vec<AnswerEvent>| {
            for event in &events {
                if flow.is_continue() {
                    flow = on_event(event);
                }
            }
            answer.add(events);
            flow
        };
        let generation = self.session.generate_with_images(
            &tokens,
            images,
            &mut sampler,
            &generate_options,
            |_, piece| take(parser.push(piece)),
        );
        let is_cut = generation.as_ref().is_ok_and(|generation| {
            matches!(generation.finish, Finish::MaxTokens | Finish::ContextFull)
        });
        let _ = take(if is_cut {
            parser.cut()
        } else {
            parser.finish()
        });
        let generation = match generation {
            Ok(generation) => Some(generation),
            Err(error) if error.is_cancelled() && answer != Answer::default() => None,
            Err(error) => return Err(error.into()),
        };
        let is_ended = flow.is_break() || generation.is_none();
        Ok((Reply { answer, generation }, is_ended))
    }

    /// Saves the messages and the contents of the context to a file, atomically.
    ///
    /// # Errors
    /// If the file cannot be written, or a device fails.
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let kept = ConversationRecord {
            messages: Cow::Borrowed(&self.messages),
            answers: self.answers,
        };
        let text = serde_json::to_string(&kept).unwrap_or_default();
        Ok(self.session.save(path, &text)?)
    }

    /// Restores a conversation from a file and continues as if it had not been interrupted.
    /// Everything is validated before any state changes.
    ///
    /// # Errors
    /// If the file belongs to another model, other adapters or another cache type; if it is damaged
    /// or not a conversation; if it does not fit into the context.
    pub fn restore(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let kept: ConversationRecord = self.session.restore_if(path, |text| {
            serde_json::from_str(text).map_err(|error| format!("it is no conversation: {error}"))
        })?;
        self.messages = kept.messages.into_owned();
        self.answers = kept.answers;
        Ok(())
    }

    /// Returns the prompt that the model would receive now. A text stands for each image.
    ///
    /// # Errors
    /// If the template rejects the messages, or an image cannot be read.
    pub fn prompt(&mut self) -> Result<Prompt> {
        Ok(self.input()?.prompt)
    }

    /// Returns the number of tokens that the model would receive now.
    ///
    /// # Errors
    /// Fails like [`prompt`](Self::prompt).
    pub fn prompt_len(&mut self) -> Result<usize> {
        Ok(self.input()?.tokens.len())
    }

    fn input(&mut self) -> Result<PromptInput> {
        let parts = self
            .messages
            .iter()
            .filter_map(|message| match &message.content {
                Content::Parts(parts) => Some(parts),
                _ => None,
            });
        let is_image = |part: &ContentPart| matches!(part, ContentPart::ImageUrl { .. });
        if parts.flatten().any(is_image) {
            return self.input_with_images();
        }
        let messages = std::mem::take(&mut self.messages);
        let prompt = self.rendered(&messages);
        self.messages = messages;
        let prompt = prompt?;
        let tokens = prompt.tokens(self.session.tokenizer());
        Ok(PromptInput {
            tokens: tokens.map_err(crate::llm::Error::from)?,
            prompt,
            images: Vec::new(),
        })
    }

    #[cfg(feature = "vision")]
    fn input_with_images(&mut self) -> Result<PromptInput> {
        let cancel = self.session.context().options().cancel.clone();
        let images = self.images.as_mut().ok_or(ConversationError::NoEncoder)?;
        let (messages, marked) = images.marked(&self.messages, &cancel)?;
        let prompt = self.rendered(&messages)?;
        let (tokens, images) = marked.tokens(&prompt, self.session.tokenizer())?;
        Ok(PromptInput {
            prompt,
            tokens,
            images,
        })
    }

    #[cfg(not(feature = "vision"))]
    fn input_with_images(&mut self) -> Result<PromptInput> {
        Err(ConversationError::NoEncoder)
    }

    fn rendered(&mut self, messages: &[Message]) -> Result<Prompt> {
        let has_tools = !self.tools.is_empty();
        let options = PromptOptions {
            tools: self.tools.list(),
            enable_thinking: self.options.enable_thinking,
            reasoning_effort: self.options.reasoning_effort.clone(),
            kwargs: self.options.kwargs.clone(),
            ..PromptOptions::new(self.options.now.unwrap_or_else(now))
        };
        let words = self.words[usize::from(has_tools)].get_or_insert_with(|| {
            let tokenizer = self.session.tokenizer();
            SpecialWords {
                guard: Guard::for_template(tokenizer, self.template.source(has_tools)),
                shown: self.template.format(has_tools).shown_tokens(tokenizer),
            }
        });
        Ok(self.template.prompt(messages, &options, &words.guard)?)
    }
}

/// Returns the current time in UTC, the default of [`ConversationOptions::now`].
pub fn now() -> DateTime {
    let seconds = std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .map_or(0, |time| time.as_secs());
    DateTime::new(seconds.cast_signed(), 0)
}
