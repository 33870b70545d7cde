//! Requests to the engine, and the checks before they are accepted.

use samite_llm::{FIRST_IMAGE_ID, Images, PlacedImage, ScaledAdapter};
use samite_text::{Constraint, Sampler, SamplerParams, StopSequences, Tokenizer};
use std::sync::Arc;
use std::time::Duration;

/// A request for one text.
#[derive(Clone, Debug)]
pub struct Request {
    /// Prompt, which has at least one token.
    pub prompt: Vec<u32>,
    /// Images of the prompt, in order. The prompt has their [IDs](samite_llm::ImageTokens::ids).
    pub images: Vec<PlacedImage>,
    /// Maximum number of generated tokens; `None` for as many as fit. With 0, the prompt is
    /// computed and nothing is generated.
    pub max_tokens: Option<usize>,
    /// Sampling parameters.
    pub sampling: SamplerParams,
    /// Constraint on the text.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Strings that end the text. They are not part of it.
    pub stop: Vec<String>,
    /// Control tokens whose names are part of the text.
    pub shown: Vec<u32>,
    /// True to continue after end-of-generation tokens.
    pub ignore_end: bool,
    /// Probabilities to return with each token.
    pub probabilities: Option<ProbabilityKind>,
    /// Number of top tokens to return with the log-probability of each prompt token; `None` returns
    /// nothing. The whole prompt is then computed, because the cache has no logits.
    pub prompt_logprobs: Option<usize>,
    /// Adapters with their scales; `None` uses the engine's default adapters.
    pub adapters: Option<Vec<ScaledAdapter>>,
    /// Use of the prefix cache.
    pub cache: CacheOptions,
    /// Context shift when the text fills the context of the request. `None` ends the text instead.
    pub when_full: Option<Shift>,
    /// Maximum time from the submission to the end.
    pub deadline: Option<Duration>,
    /// Maximum time from the first token to the end.
    pub decode_time: Option<Duration>,
    /// Priority: requests with larger values come first, then those submitted earlier.
    pub priority: i32,
    /// The only slot that the request may use. It can only continue texts that were left in this
    /// slot.
    pub slot: Option<usize>,
    /// True to send progress events during prefill.
    pub reports_progress: bool,
    /// Capacity of the event queue. If the queue is full, the request is paused; other requests are
    /// not.
    pub event_queue: usize,
    /// Owner of the request. Owners get slots in turns, and each may have
    /// [`queue`](crate::EngineOptions::queue) requests waiting.
    pub owner: u64,
    /// Arbitrary tag of the caller; [`SlotView`](crate::SlotView) contains it.
    pub tag: u64,
}

/// Kind of probabilities to return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbabilityKind {
    /// Log-probabilities of the model: of the token, and of this many top tokens.
    Model(usize),
    /// Sampling probabilities after all stages of the sampler.
    Drawn(usize),
}

/// Use of the prefix cache by a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// True to reuse texts of earlier requests.
    pub reuse: bool,
    /// True to cache the text for later requests.
    pub keep: bool,
    /// True to evict the text after others, until it is
    /// [saved](crate::Engine::save_prefix) or many requests have ended.
    pub hold: bool,
    /// Salt: only requests with the same number share anything.
    pub salt: u64,
}

impl Default for CacheOptions {
    fn default() -> Self {
        CacheOptions {
            reuse: true,
            keep: true,
            hold: false,
            salt: 0,
        }
    }
}

/// Context shift: the removal of a part of a text that fills its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shift {
    /// Number of first tokens to keep.
    pub keep: usize,
    /// Number of tokens to remove after them; `None` for half of the rest.
    pub discard: Option<usize>,
}

impl Request {
    /// Creates a request with llama.cpp's defaults.
    pub fn new(prompt: Vec<u32>) -> Self {
        Request {
            prompt,
            images: Vec::new(),
            max_tokens: None,
            sampling: SamplerParams::default(),
            constraint: None,
            stop: Vec::new(),
            shown: Vec::new(),
            ignore_end: false,
            probabilities: None,
            prompt_logprobs: None,
            adapters: None,
            cache: CacheOptions::default(),
            when_full: None,
            deadline: None,
            decode_time: None,
            priority: 0,
            slot: None,
            reports_progress: false,
            event_queue: 256,
            owner: 0,
            tag: 0,
        }
    }
}

/// Limits of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of tokens in one text, including its prompt.
    pub context: usize,
    /// Number of slots: requests that are computed at the same time.
    pub slots: usize,
    /// Maximum number of waiting requests per owner.
    pub queue: usize,
    /// Size of the vocabulary.
    pub vocabulary: usize,
    /// True if cached tokens can be shifted, so that a text without images can use a [`Shift`].
    pub can_shift: bool,
    /// Maximum number of tokens of an image, if they attend to each other and are therefore
    /// computed at once. 0 if the context has no [room for images](samite_llm::ContextOptions).
    pub image: usize,
}

/// Reason why a request is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The request is invalid: a field and the problem.
    #[error("{field}: {message}")]
    Invalid {
        /// Field of [`Request`].
        field: &'static str,
        /// Description of the problem.
        message: String,
    },
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {prompt} tokens, and a request has a context of {context}: take a shorter one, or a larger context (--ctx-size)"
    )]
    TooLong {
        /// Number of tokens in the prompt.
        prompt: usize,
        /// Number of tokens that fit.
        context: usize,
    },
    /// Too many requests of this owner are already waiting.
    #[error("{0} requests wait already: try again later")]
    QueueFull(usize),
    /// No more requests are accepted.
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

/// A valid request, with the state that is needed to answer it.
#[derive(Debug)]
pub struct Prepared {
    pub(crate) request: Request,
    pub(crate) images: Images,
    pub(crate) sampler: Sampler,
    pub(crate) stop: StopSequences,
}

impl Prepared {
    /// Checks a request. This can take a while, and does not involve the engine.
    ///
    /// # Errors
    /// Returns the problem of the request.
    pub fn new(
        mut request: Request,
        limits: &Limits,
        tokenizer: &Arc<Tokenizer>,
    ) -> Result<Self, Refusal> {
        if request.prompt.is_empty() {
            return Err(Refusal::invalid("prompt", "it has no tokens"));
        }
        let is_text = |token: u32| token < FIRST_IMAGE_ID;
        let unknown = |&&token: &&u32| is_text(token) && token as usize >= limits.vocabulary;
        if let Some(token) = request.prompt.iter().find(unknown) {
            let count = limits.vocabulary;
            return Err(Refusal::invalid(
                "prompt",
                format!("there is no token {token}: the vocabulary has {count}"),
            ));
        }
        // The last token of the context can be generated, but no token can follow it.
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
        let images = checked_images(&mut request, limits)?;
        // What is left of a text with images would not have the positions of its images.
        if !limits.can_shift || !images.is_empty() {
            request.when_full = None;
        }
        if request.prompt_logprobs.is_some() {
            request.cache.reuse = false;
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
        let text = request.prompt.iter().copied();
        let text: Vec<u32> = text.filter(|&token| is_text(token)).collect();
        sampler.accept_prompt(&text);
        let stop = StopSequences::new(&request.stop);
        Ok(Prepared {
            stop: stop.map_err(|error| Refusal::invalid("stop", error))?,
            sampler,
            images,
            request,
        })
    }
}

/// Takes the images out of a request, and checks them.
fn checked_images(request: &mut Request, limits: &Limits) -> Result<Images, Refusal> {
    let placed = std::mem::take(&mut request.images);
    if placed.is_empty() && request.prompt.iter().all(|&token| token < FIRST_IMAGE_ID) {
        return Ok(Images::default());
    }
    if limits.image == 0 {
        let message = "this context has no room for images";
        return Err(Refusal::invalid("images", message));
    }
    let whole = placed.iter().map(|one| &one.image);
    let whole = whole.filter(|image| image.is_bidirectional());
    if let Some(most) = whole
        .map(|image| image.len())
        .max()
        .filter(|&most| most > limits.image)
    {
        let limit = limits.image;
        return Err(Refusal::invalid(
            "images",
            format!(
                "an image has {most} tokens, and {limit} are computed at once: raise --ubatch-size and --batch-size"
            ),
        ));
    }
    if request.prompt_logprobs.is_some() {
        let message = "the tokens of images have no probabilities";
        return Err(Refusal::invalid("prompt_logprobs", message));
    }
    Images::new(placed, &request.prompt).map_err(|error| Refusal::invalid("images", error))
}
