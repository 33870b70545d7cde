//! The events of a request.

use samite_llm::{CacheKind, Finish};
use samite_text::LogProbabilities;
use std::time::Duration;

/// Event of a request, in this order: at most one [`Started`], then progress, the prompt and
/// tokens, then one end.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request got a slot.
    Started(Started),
    /// A part of the prompt was computed.
    Progress(PromptProgress),
    /// [Log-probabilities](crate::Request::prompt_logprobs) of the next prompt tokens. The
    /// first ones are those of the second token, as nothing predicts the first.
    PromptLogprobs(Vec<Probabilities>),
    /// A token was generated.
    Token(Token),
    /// The text ended.
    Finished(Finished),
    /// The request could not be answered, or not completely.
    Failed(Failed),
}

impl Event {
    /// Returns whether this is the last event.
    pub fn is_end(&self) -> bool {
        matches!(self, Event::Finished(_) | Event::Failed(_))
    }
}

/// Start of a request, with the result of the search in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// Slot of the request.
    pub slot: usize,
    /// Number of prompt tokens.
    pub prompt: usize,
    /// Number of prompt tokens that are cached.
    pub cached: usize,
    /// End of the cached prefix and its cause, unless all of the prompt was cached.
    pub miss: Option<CacheMiss>,
}

/// Cache miss: the position from which a prompt is computed again, and its cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheMiss {
    /// First token that was not found.
    pub at_token: usize,
    /// Cause of the miss.
    pub cause: MissCause,
}

/// Cause of a cache miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissCause {
    /// The request does not use the cache.
    Off,
    /// No cached text has this prefix: another token follows here.
    Differs,
    /// The cached text ends here.
    Ends,
    /// The prefix was cached, but evicted.
    Evicted,
    /// The model has a recurrent state, and none is cached for this position.
    NoState,
    /// Layers with a window no longer have the tokens before this position.
    Window,
}

impl MissCause {
    /// Returns the cause if the prefix cannot be cut to this position in a cache of `kind`.
    pub(crate) fn uncuttable(kind: CacheKind) -> Self {
        match kind {
            CacheKind::States => MissCause::NoState,
            _ => MissCause::Window,
        }
    }

    /// Returns the text that answers contain.
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

/// Progress of prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptProgress {
    /// Number of prompt tokens.
    pub total: usize,
    /// Number of cached tokens.
    pub cached: usize,
    /// Number of tokens that are computed or cached.
    pub processed: usize,
    /// Time since the request got a slot.
    pub time: Duration,
}

/// A generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// The token.
    pub id: u32,
    /// Text that can be shown now: complete characters that are not part of a stop string.
    pub text: String,
    /// Probabilities, if they were requested.
    pub probabilities: Option<Probabilities>,
}

/// Probabilities of a token and its alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct Probabilities {
    /// Log-probability of the token, or its probability if sampling probabilities were requested.
    pub token: f32,
    /// Top tokens, the most probable first.
    pub top: Vec<(u32, f32)>,
}

impl From<LogProbabilities> for Probabilities {
    fn from(LogProbabilities { token, top }: LogProbabilities) -> Self {
        Probabilities { token, top }
    }
}

/// End of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Reason for the end.
    pub reason: Finish,
    /// Rest of the text, which was held back while it could be part of a stop string.
    pub rest: String,
    /// Token counts and times.
    pub counts: Counts,
}

/// Token counts and times of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Prompt tokens.
    pub prompt: usize,
    /// Prompt tokens from the cache.
    pub cached: usize,
    /// Generated tokens, including an end-of-generation token.
    pub generated: usize,
    /// [Drafted](crate::EngineOptions::draft) tokens.
    pub drafted: usize,
    /// Accepted tokens.
    pub accepted: usize,
    /// True if a part of the text was removed to make room.
    pub truncated: bool,
    /// Number of preemptions.
    pub preempted: usize,
    /// Time of waiting for a slot.
    pub waiting: Duration,
    /// Time from then to the first token (prefill).
    pub prefill: Duration,
    /// Time from the first token to the last one (decode).
    pub decoding: Duration,
}

/// Failure of a request, which has no answer or a partial one.
#[derive(Clone, Debug, PartialEq)]
pub struct Failed {
    /// Kind of failure.
    pub kind: FailureKind,
    /// Description of the failure.
    pub message: String,
    /// Token counts and times until then.
    pub counts: Counts,
}

/// Kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The request was cancelled.
    Cancelled,
    /// The server is shutting down.
    Closing,
    /// No token could be sampled.
    Sampling,
    /// A device failed.
    Device,
}
