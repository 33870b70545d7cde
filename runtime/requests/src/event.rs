//! What a request is told.

use std::time::Duration;

/// What happens with a request, in this order: at most one [`Started`], then progress and tokens, then one end.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It has a slot.
    Started(Started),
    /// A part of the prompt was computed.
    Progress(PromptProgress),
    /// A token was written.
    Token(Token),
    /// The text ends.
    Finished(Finished),
    /// It could not be answered, or not to the end.
    Failed(Failed),
}

impl Event {
    /// Whether nothing follows.
    pub fn is_end(&self) -> bool {
        matches!(self, Event::Finished(_) | Event::Failed(_))
    }
}

/// What was found for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// The slot.
    pub slot: usize,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Those of them that need not be computed.
    pub cached: usize,
    /// Where what was known ends, and why, unless all of it was known.
    pub miss: Option<CacheMiss>,
}

/// Why a part of a prompt is computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheMiss {
    /// The first token that nothing was found for.
    pub at_token: usize,
    /// Why.
    pub cause: MissCause,
}

/// Why nothing is known of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissCause {
    /// The request does not want what is kept.
    Off,
    /// No text that is kept begins so: another token comes here.
    Differs,
    /// The text that is kept ends here.
    Ends,
    /// It was known, and given up for others.
    Evicted,
    /// The model keeps a state of what came, and there is none of this place.
    NoState,
    /// Layers that look through a window have forgotten what comes before this place.
    Window,
}

impl MissCause {
    /// In words, as answers have it.
    pub fn name(self) -> &'static str {
        match self {
            MissCause::Off => "off",
            MissCause::Differs => "prompt differs",
            MissCause::Ends => "end of what is kept",
            MissCause::Evicted => "evicted",
            MissCause::NoState => "no state here",
            MissCause::Window => "window forgotten",
        }
    }
}

/// How far a prompt is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptProgress {
    /// Its tokens.
    pub total: usize,
    /// Those that were known.
    pub cached: usize,
    /// Those that are there now, with the ones that were known.
    pub processed: usize,
    /// Time since it has a slot.
    pub time: Duration,
}

/// A token of the text.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// The token.
    pub id: u32,
    /// What can be shown now: characters that are complete and part of no stop string.
    pub text: String,
    /// If they are wanted.
    pub probabilities: Option<Probabilities>,
}

/// Probabilities of a token and of others in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Probabilities {
    /// That of the token: a logarithm, unless they are those that it was drawn by.
    pub token: f32,
    /// The likeliest ones, the likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// How a text ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Why.
    pub reason: Reason,
    /// The rest of the text, which was held back as long as it could be part of a stop string.
    pub rest: String,
    /// Tokens and times.
    pub counts: Counts,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The model ended it with this token.
    EndToken(u32),
    /// The stop string of this number came.
    Stop(usize),
    /// Nothing can follow by what the text keeps to.
    Constraint,
    /// As many tokens as wanted.
    MaxTokens,
    /// The context of the request is full.
    ContextFull,
    /// Its time is over.
    Deadline,
}

/// Tokens and times of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Those of them that were known.
    pub cached: usize,
    /// Tokens that were written, with one that ended the text.
    pub written: usize,
    /// Tokens that were [drafted](crate::EngineOptions::draft).
    pub drafted: usize,
    /// Those of them that stood.
    pub accepted: usize,
    /// Whether a part of the text was forgotten to make room.
    pub truncated: bool,
    /// How often it made room for others.
    pub preempted: usize,
    /// Time that it waited for a slot.
    pub waiting: Duration,
    /// Time from then to the first token.
    pub reading: Duration,
    /// Time from the first token to the last one.
    pub writing: Duration,
}

/// Why a request has no answer, or only a part of one.
#[derive(Clone, Debug, PartialEq)]
pub struct Failed {
    /// What kind of failure.
    pub kind: FailureKind,
    /// What happened, in words.
    pub message: String,
    /// Tokens and times until then.
    pub counts: Counts,
}

/// Kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// Somebody cancelled it.
    Cancelled,
    /// The server ends.
    Closing,
    /// No token could be chosen.
    Sampling,
    /// A device failed.
    Device,
}
