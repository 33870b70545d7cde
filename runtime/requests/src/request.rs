//! What is asked of the engine, and what is checked before it is taken.

use samite_llm::ScaledAdapter;
use samite_text::{Constraint, Sampler, SamplerParams, StopSequences, Tokenizer};
use std::sync::Arc;
use std::time::Duration;

/// A request for one text.
#[derive(Clone, Debug)]
pub struct Request {
    /// The tokens that the text goes on from; at least one.
    pub prompt: Vec<u32>,
    /// Most tokens that are written; `None` for as many as fit. With 0, the prompt is computed and nothing is written.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampling: SamplerParams,
    /// What the text keeps to.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Strings that end the text. They are not part of it.
    pub stop: Vec<String>,
    /// Control tokens whose names are part of the text.
    pub shown: Vec<u32>,
    /// Goes on after tokens that end a text.
    pub ignore_end: bool,
    /// Which probabilities are told of with each token.
    pub probabilities: Option<Wanted>,
    /// Adapters of the model, each with the share in which it counts; `None` for those that the engine began with.
    pub adapters: Option<Vec<ScaledAdapter>>,
    /// What is reused and kept of its tokens.
    pub cache: CacheWish,
    /// What happens when the text is as long as the context of a request. `None` ends it.
    pub when_full: Option<Shift>,
    /// Time from the submission to the end.
    pub deadline: Option<Duration>,
    /// Time from the first token to the end.
    pub writing_time: Option<Duration>,
    /// Greater ones come first; equal ones in the order in which they came.
    pub priority: i32,
    /// The only slot that it may take. It goes on from what this slot has left, and from nothing else.
    pub slot: Option<usize>,
    /// Whether it is told how far the prompt is.
    pub tells_progress: bool,
    /// Events that may wait for their reader. A request whose reader is so far behind is paused; no other is.
    pub outbox: usize,
    /// Owner of the request. Owners get slots in turns, and each may have
    /// [`queue`](crate::EngineOptions::queue) requests waiting.
    pub owner: u64,
    /// Whatever the caller knows it by; [`SlotView`](crate::SlotView) has it.
    pub tag: u64,
}

/// Which probabilities are told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Logarithms of those that the model gives: of the token, and of so many of the likeliest.
    Model(usize),
    /// Those that the token was drawn by, after all stages of the sampler.
    Drawn(usize),
}

/// What is reused and kept of a request's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheWish {
    /// Whether what earlier requests have left is used.
    pub reuse: bool,
    /// Whether later requests may use what this one leaves.
    pub keep: bool,
    /// Only requests with the same number share anything.
    pub salt: u64,
}

impl Default for CacheWish {
    fn default() -> Self {
        CacheWish {
            reuse: true,
            keep: true,
            salt: 0,
        }
    }
}

/// How a text that is as long as its context goes on: a part is forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shift {
    /// So many first tokens stay.
    pub keep: usize,
    /// So many behind them are forgotten; `None` for half of what follows.
    pub discard: Option<usize>,
}

impl Request {
    /// A request with llama.cpp's defaults.
    pub fn new(prompt: Vec<u32>) -> Self {
        Request {
            prompt,
            max_tokens: None,
            sampling: SamplerParams::default(),
            constraint: None,
            stop: Vec::new(),
            shown: Vec::new(),
            ignore_end: false,
            probabilities: None,
            adapters: None,
            cache: CacheWish::default(),
            when_full: None,
            deadline: None,
            writing_time: None,
            priority: 0,
            slot: None,
            tells_progress: false,
            outbox: 256,
            owner: 0,
            tag: 0,
        }
    }
}

/// Numbers that no request may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of one text, with its prompt.
    pub context: usize,
    /// Slots: requests that are computed at the same time.
    pub slots: usize,
    /// Requests of one owner that wait for a slot.
    pub queue: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Whether what is kept of tokens can be moved, so that a text can [shift](Shift).
    pub can_shift: bool,
}

/// Why a request is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It cannot be: a field and what is wrong with it.
    #[error("{field}: {message}")]
    Invalid {
        /// The field of [`Request`].
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {prompt} tokens, and a request has a context of {context}: take a shorter one, or a larger context (--ctx-size)"
    )]
    TooLong {
        /// Its tokens.
        prompt: usize,
        /// Tokens that there is room for.
        context: usize,
    },
    /// Too many of this owner wait already.
    #[error("{0} requests wait already: try again later")]
    QueueFull(usize),
    /// No further requests are taken.
    #[error("the server is about to end")]
    Closing,
}

impl Refusal {
    fn invalid(field: &'static str, message: impl ToString) -> Self {
        Refusal::Invalid {
            field,
            message: message.to_string(),
        }
    }
}

/// A request that was found sound, with what is needed to answer it.
#[derive(Debug)]
pub struct Prepared {
    pub(crate) request: Request,
    pub(crate) sampler: Sampler,
    pub(crate) stop: StopSequences,
}

impl Prepared {
    /// Checks a request. It can take a while, and the engine has no part in it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(
        mut request: Request,
        limits: &Limits,
        tokenizer: &Arc<Tokenizer>,
    ) -> Result<Self, Refusal> {
        if request.prompt.is_empty() {
            return Err(Refusal::invalid("prompt", "it has no tokens"));
        }
        let unknown = |&&token: &&u32| token as usize >= limits.vocabulary;
        if let Some(token) = request.prompt.iter().find(unknown) {
            let count = limits.vocabulary;
            return Err(Refusal::invalid(
                "prompt",
                format!("there is no token {token}: the vocabulary has {count}"),
            ));
        }
        // The last token of the context can be written, but none can follow it.
        if request.prompt.len() >= limits.context {
            return Err(Refusal::TooLong {
                prompt: request.prompt.len(),
                context: limits.context,
            });
        }
        if let Some(slot) = request.slot.filter(|&slot| slot >= limits.slots) {
            let count = limits.slots;
            return Err(Refusal::invalid(
                "slot",
                format!("there is no slot {slot}: there are {count}"),
            ));
        }
        if !limits.can_shift {
            request.when_full = None;
        }
        let known = |token: u32| (token as usize) < limits.vocabulary;
        if let Some((token, _)) = request
            .sampling
            .logit_bias
            .iter()
            .find(|(token, _)| !known(*token))
        {
            return Err(Refusal::invalid(
                "logit_bias",
                format!("there is no token {token}"),
            ));
        }
        let wrong = |error| Refusal::invalid("sampling", error);
        let mut sampler = Sampler::new(request.sampling.clone()).map_err(wrong)?;
        sampler.set_vocabulary(tokenizer);
        sampler.set_constraint(request.constraint.take());
        sampler.accept_prompt(&request.prompt);
        let stop = StopSequences::new(&request.stop);
        Ok(Prepared {
            stop: stop.map_err(|error| Refusal::invalid("stop", error))?,
            sampler,
            request,
        })
    }
}
