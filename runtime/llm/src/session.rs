//! Sessions: one growing text, with its tokens in a context.

use crate::batch::Batch;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::images::{FIRST_IMAGE_ID, Images, PlacedImage};
use crate::kv::CacheKind;
use crate::saved::{SavedSequence, Stopped};
use crate::text_generator::{Finish, TextGenerator};
use samite_text::{LogProbabilities, Sampler, SamplerState, StopSequences, Tokenizer};
use std::fmt;
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Options of a generation.
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// Maximum number of tokens; `None` for as many as fit.
    pub max_tokens: Option<usize>,
    /// Strings that end the generation. They are not part of the text.
    pub stop: Vec<String>,
    /// Control tokens whose names are part of the text, for example those that an output parser
    /// needs.
    pub shown: Vec<u32>,
    /// True to continue after end-of-generation tokens.
    pub ignore_end: bool,
    /// Number of first tokens to keep when the context is full. Half of the tokens after them are
    /// removed then, and the generation continues. `None` ends the generation instead.
    pub keep_when_full: Option<usize>,
    /// Number of top tokens whose log-probabilities are returned in addition to that of each
    /// generated token.
    pub log_probabilities: Option<usize>,
}

/// Number of tokens before the end of a prompt where a model with recurrent states keeps a state to
/// go back to. A template's generation prompt is shorter.
pub const TEMPLATE_TAIL: usize = 24;

/// Numbers of tokens and durations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// Prompt tokens that were reused from the context.
    pub reused_tokens: usize,
    /// Prompt tokens that were decoded.
    pub prompt_tokens: usize,
    /// Duration of prefill.
    pub prompt: Duration,
    /// Tokens that were decoded one by one after the prompt. The first token of a generation comes
    /// from the prompt's logits.
    pub generated_tokens: usize,
    /// Duration of decoding these tokens, including sampling.
    pub generation: Duration,
}

impl Timings {
    /// Returns the prompt tokens per second.
    pub fn prompt_per_second(&self) -> f64 {
        per_second(self.prompt_tokens, self.prompt)
    }

    /// Returns the generated tokens per second.
    pub fn generation_per_second(&self) -> f64 {
        per_second(self.generated_tokens, self.generation)
    }
}

fn per_second(count: usize, time: Duration) -> f64 {
    if time.is_zero() {
        0.0
    } else {
        count as f64 / time.as_secs_f64()
    }
}

/// Result of a generation.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Tokens, including an end-of-generation token.
    pub tokens: Vec<u32>,
    /// Log-probabilities of each token, if [requested](GenerateOptions::log_probabilities).
    pub log_probabilities: Vec<LogProbabilities>,
    /// Reason for the end.
    pub finish: Finish,
    /// Numbers of tokens and durations.
    pub timings: Timings,
}

/// Callback that returns the token to use, given the sampled token.
struct TokenAgreement(Box<dyn FnMut(u32) -> Result<u32> + Send>);

impl fmt::Debug for TokenAgreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenAgreement")
    }
}

/// Callback that creates another context after a device is lost.
struct Renew(Box<MakeAnew>);

type MakeAnew = dyn FnMut(&Error) -> Result<Context> + Send;

impl fmt::Debug for Renew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Renew")
    }
}

/// Callback that gets the progress of prefill.
struct PrefillProgress(Box<dyn FnMut(usize, usize) + Send>);

impl fmt::Debug for PrefillProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrefillProgress")
    }
}

/// Maximum number of times in a row that the context is recreated before a token is decoded.
const MAX_RENEWALS: usize = 3;

/// One text in sequence 0 of a context. A common prefix of two prompts is decoded only once.
///
/// ```no_run
/// use samite_llm::{GenerateOptions, Session};
/// use samite_text::{Sampler, SamplerParams};
/// use std::ops::ControlFlow;
/// # fn write(context: samite_llm::Context) -> samite_llm::Result<()> {
///
/// let mut session = Session::new(context)?;
/// let prompt = session.tokenizer().tokenize("Once upon a time", true, false)?;
/// let mut sampler = Sampler::new(SamplerParams { seed: 7, ..SamplerParams::default() })?;
/// let options = GenerateOptions { max_tokens: Some(100), ..GenerateOptions::default() };
/// let generation = session.generate(&prompt, &mut sampler, &options, |text| {
///     print!("{text}");
///     ControlFlow::Continue(())
/// })?;
/// println!("{:?}", generation.finish);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Session {
    context: Context,
    tokenizer: Arc<Tokenizer>,
    /// Tokens in the cache, in order.
    tokens: Vec<u32>,
    /// Images of the text, and of the prompt that is decoded.
    images: Images,
    /// Number of tokens in each batch, so that they can be decoded again with the same rounding.
    batches: Vec<usize>,
    /// [`Cells::changes`](crate::Cells::changes) after the session's own last change of its
    /// sequence.
    own_changes: u64,
    /// True if other code changed the sequence through the context.
    is_foreign: bool,
    /// State of the last generation, if it can be resumed.
    stopped: Option<Stopped>,
    batch: Batch,
    agreement: Option<TokenAgreement>,
    renew: Option<Renew>,
    progress: Option<PrefillProgress>,
}

impl Session {
    /// Creates a session in `context`, and removes all its sequences.
    ///
    /// # Errors
    /// Returns an error if the model has no vocabulary, or if a device fails.
    pub fn new(mut context: Context) -> Result<Self> {
        if context.model().spec().is_bidirectional() {
            return Err(Error::invalid(
                "this model's tokens look at later ones: it cannot write text token by token; see `samite embed` and `samite logits`",
            ));
        }
        let tokenizer = Arc::clone(context.model().tokenizer()?);
        context.clear()?;
        Ok(Session {
            own_changes: context.kv_cache().cells().changes(0),
            is_foreign: false,
            context,
            tokenizer,
            tokens: Vec::new(),
            images: Images::default(),
            batches: Vec::new(),
            stopped: None,
            batch: Batch::new(),
            agreement: None,
            renew: None,
            progress: None,
        })
    }

    /// Sets a callback that returns the token to use, given the sampled token. If several processes
    /// generate the same text, it returns the token of the first process.
    pub fn agree_on_token(&mut self, agree: impl FnMut(u32) -> Result<u32> + Send + 'static) {
        self.agreement = Some(TokenAgreement(Box::new(agree)));
    }

    /// Sets a callback that creates another context of the same model after a device is
    /// [lost](Error::is_lost). It gets the error.
    ///
    /// The session decodes the tokens of the text again in the new context, in the same batches,
    /// and continues the generation. Before the call, the session releases the resources of the
    /// lost context; other owners of the model should have released it as well. Watchers and traces
    /// of the lost context do not apply to the new one. A text whose start was removed is decoded
    /// as if it had started after that.
    ///
    /// If `renew` fails, the session's current operation fails. The next decode tries again.
    pub fn on_loss(&mut self, renew: impl FnMut(&Error) -> Result<Context> + Send + 'static) {
        self.renew = Some(Renew(Box::new(renew)));
    }

    /// Sets a callback for progress during prefill. It gets the number of prompt tokens that are
    /// decoded, and of all that have to be. They are equal in the last call, even if prefill fails.
    /// Prompts of one micro-batch have no progress.
    pub fn on_prefill(&mut self, progress: impl FnMut(usize, usize) + Send + 'static) {
        self.progress = Some(PrefillProgress(Box::new(progress)));
    }

    /// Returns the context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the context, to trace it. Sequence 0 belongs to the session: if the caller changes
    /// it, the session reuses nothing of it.
    pub fn context_mut(&mut self) -> &mut Context {
        &mut self.context
    }

    /// Returns the tokenizer of the model.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Returns the tokens in the cache.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the text so far: the tokens in the cache, and the last sampled token if it is not in
    /// the cache yet.
    pub fn text(&self) -> Vec<u32> {
        let last = self.stopped.as_ref().and_then(|stopped| stopped.last);
        self.tokens.iter().copied().chain(last).collect()
    }

    /// Removes the text.
    ///
    /// # Errors
    /// Returns an error if a device fails.
    pub fn clear(&mut self) -> Result<()> {
        self.tokens.clear();
        self.batches.clear();
        self.stopped = None;
        self.images = Images::default();
        self.change(Context::clear)
    }

    /// Returns the sampler's state after the last generation, if [`resume`](Self::resume) can
    /// continue from there.
    pub fn sampler_state(&self) -> Option<&SamplerState> {
        self.stopped.as_ref().map(|stopped| &stopped.sampler)
    }

    /// Saves the text with its cache, the state of its generation, and a text of the application to
    /// a file, which appears complete or not at all.
    ///
    /// # Errors
    /// Returns an error if other code changed the sequence, if the file cannot be written, or if a
    /// device fails.
    pub fn save(&mut self, path: impl AsRef<Path>, application: &str) -> Result<()> {
        if !self.is_whole() {
            return Err(Error::invalid(
                "the session's sequence was changed through its context: its text is not known",
            ));
        }
        let mut saved = self.change(|context| context.save(0))?;
        saved.tokens.clone_from(&self.tokens);
        saved.stopped.clone_from(&self.stopped);
        application.clone_into(&mut saved.application);
        saved.write(path)
    }

    /// Restores the text from a file, and returns the text of the application. Checks everything
    /// before it changes anything.
    ///
    /// # Errors
    /// Fails like [`restore_if`](Self::restore_if).
    pub fn restore(&mut self, path: impl AsRef<Path>) -> Result<String> {
        self.restore_if(path, |application| Ok(application.to_owned()))
    }

    /// Restores the text like [`restore`](Self::restore), but only if `read` can parse the text of
    /// the application.
    ///
    /// # Errors
    /// Fails like [`SavedSequence::read`] and [`Context::restore`], or if `read` fails. The error
    /// names the file.
    pub fn restore_if<T>(
        &mut self,
        path: impl AsRef<Path>,
        read: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<T> {
        let path = path.as_ref();
        let saved = SavedSequence::read(path)?;
        let in_file = |error: Error| match error {
            Error::InvalidArgument(what) => Error::invalid(format!("{}: {what}", path.display())),
            Error::ContextFull { tokens, size, .. } => Error::invalid(format!(
                "{}: the saved text has {tokens} tokens, more than the context of {size}: use a larger one",
                path.display()
            )),
            other => other,
        };
        let n_vocab = self.context.model().spec().n_vocab;
        let is_text = saved.tokens.len() == saved.len() && saved.has_no_gaps();
        let last = saved.stopped.as_ref().and_then(|stopped| stopped.last);
        let is_text_token = |id: &u32| *id < FIRST_IMAGE_ID;
        let tokens = saved.tokens.iter().copied().filter(is_text_token);
        let mut tokens = tokens.chain(last);
        if !is_text {
            return Err(in_file(Error::invalid("it is no text: tokens are missing")));
        }
        if let Some(token) = tokens.find(|token| *token as usize >= n_vocab) {
            return Err(in_file(Error::invalid(format!(
                "it is of another model: token {token} is outside the vocabulary of {n_vocab}"
            ))));
        }
        let application =
            read(&saved.application).map_err(|error| in_file(Error::invalid(error)))?;
        self.change(|context| context.restore(0, &saved))
            .map_err(in_file)?;
        self.is_foreign = false;
        self.images = Images::default();
        self.batches = vec![saved.tokens.len()];
        self.tokens = saved.tokens;
        self.stopped = saved.stopped;
        Ok(application)
    }

    /// Returns whether only the session changed the sequence.
    fn is_whole(&self) -> bool {
        let cells = self.context.kv_cache().cells();
        !self.is_foreign
            && cells.changes(0) == self.own_changes
            && cells.sequence_len(0) == self.tokens.len()
    }

    /// Changes the sequence, and records changes that are not the session's own.
    fn change<T>(&mut self, act: impl FnOnce(&mut Context) -> Result<T>) -> Result<T> {
        self.is_foreign |= self.context.kv_cache().cells().changes(0) != self.own_changes;
        let result = act(&mut self.context);
        self.own_changes = self.context.kv_cache().cells().changes(0);
        result
    }

    fn decode_batch(&mut self) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        let mut result = self.change(|context| context.decode(&batch));
        for _ in 0..MAX_RENEWALS {
            match result {
                Err(lost) if lost.is_lost() && self.renew.is_some() => {
                    if let Err(error) = self.renew(&lost) {
                        result = Err(error);
                        break;
                    }
                    result = self
                        .decode_again()
                        .and_then(|()| self.change(|context| context.decode(&batch)));
                }
                _ => break,
            }
        }
        self.batch = batch;
        result
    }

    /// Replaces a lost context by another one.
    fn renew(&mut self, lost: &Error) -> Result<()> {
        let Some(Renew(renew)) = &mut self.renew else {
            return Err(lost.clone());
        };
        self.context.give_up(lost.clone())?;
        let mut context = renew(lost)?;
        if context.model().spec() != self.context.model().spec() {
            return Err(Error::invalid(format!(
                "{}: the text cannot go on: this is another model by now",
                context.model().path().display()
            )));
        }
        context.clear()?;
        self.own_changes = context.kv_cache().cells().changes(0);
        self.is_foreign = false;
        let device_top_k = self.context.requested_top_k();
        self.context = context;
        self.set_device_top_k(device_top_k)
    }

    /// Decodes the text so far in an empty context.
    fn decode_again(&mut self) -> Result<()> {
        let images = self.images.clone();
        let mut batch = Batch::new();
        let n_batch = self.context.options().n_batch;
        let mut end = 0;
        for count in self.batches.clone() {
            let mut first = end;
            end += count;
            while first < end {
                let next = images.end_of_batch(first, end.min(first + n_batch));
                batch.clear();
                for (at, &token) in (first..next).zip(&self.tokens[first..next]) {
                    images.add_to(&mut batch, at, token, 0, false)?;
                }
                self.change(|context| context.decode(&batch))?;
                first = next;
            }
        }
        Ok(())
    }

    /// Continues `prompt`, which is the whole text so far. Tokens that are already in the cache are
    /// not decoded again. `on_text` gets pieces of the text as they are generated, without the
    /// prompt.
    ///
    /// # Errors
    /// Returns [`Error::ContextFull`] if the prompt does not fit. Returns [`Error::Sampler`] if
    /// sampling fails, or if the model ends a text that the sampler's constraint does not let end.
    /// Also fails like [`Context::decode`]. The session remains usable.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        sampler: &mut Sampler,
        options: &GenerateOptions,
        mut on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        self.generate_with(prompt, sampler, options, |_, piece| on_text(piece))
    }

    /// Generates like [`generate`](Self::generate), but `on_text` also gets the context, for
    /// example to read traces.
    ///
    /// # Errors
    /// Fails like [`generate`](Self::generate).
    pub fn generate_with(
        &mut self,
        prompt: &[u32],
        sampler: &mut Sampler,
        options: &GenerateOptions,
        on_text: impl FnMut(&mut Context, &str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let images = Images::new(Vec::new(), prompt)?;
        self.generate_from((prompt, images), None, sampler, options, on_text)
    }

    /// Generates like [`generate_with`](Self::generate_with), after a prompt with images. The
    /// tokens of an image have its [IDs](crate::ImageTokens::ids). A full context ends the
    /// generation. After the text was [restored](Self::restore), a prompt must have the same images
    /// again.
    ///
    /// # Errors
    /// Returns the errors of [`Images::new`], of the encoder, and of
    /// [`generate`](Self::generate).
    pub fn generate_with_images(
        &mut self,
        prompt: &[u32],
        images: Vec<PlacedImage>,
        sampler: &mut Sampler,
        options: &GenerateOptions,
        on_text: impl FnMut(&mut Context, &str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let images = Images::new(images, prompt)?;
        self.generate_from((prompt, images), None, sampler, options, on_text)
    }

    /// Resumes the last generation, possibly from a saved text, as if it had not stopped. It
    /// continues with the next random numbers and the state of the sampler's constraint. The
    /// sampler should have the same parameters as before. A text that the model ended stays ended,
    /// unless [`GenerateOptions::ignore_end`] is set.
    ///
    /// # Errors
    /// Returns an error if there is nothing to resume: no generation ran since the text was
    /// cleared, it failed or removed older tokens, or other code changed the sequence. Also fails
    /// if the sampler's constraint does not allow the generated text, and like
    /// [`generate`](Self::generate).
    pub fn resume(
        &mut self,
        sampler: &mut Sampler,
        options: &GenerateOptions,
        on_text: impl FnMut(&mut Context, &str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let Some(stopped) = self.stopped.clone().filter(|_| self.is_whole()) else {
            return Err(Error::invalid(
                "there is no generation that could go on where it stopped",
            ));
        };
        let text = self.text();
        let prompt = (&*text, self.images.clone());
        self.generate_from(prompt, Some(stopped), sampler, options, on_text)
    }

    fn generate_from(
        &mut self,
        prompt: (&[u32], Images),
        stopped: Option<Stopped>,
        sampler: &mut Sampler,
        options: &GenerateOptions,
        on_text: impl FnMut(&mut Context, &str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        sampler.set_vocabulary(&self.tokenizer);
        let required_top_k = sampler.required_top_k();
        let required_top_k = required_top_k.filter(|_| options.log_probabilities.is_none());
        self.set_device_top_k(required_top_k)?;
        let result = self.write_text(prompt, stopped, sampler, options, on_text);
        // Other users of the context read logits.
        self.set_device_top_k(None)?;
        result
    }

    fn set_device_top_k(&mut self, count: Option<usize>) -> Result<()> {
        let set = self.context.set_device_top_k(count);
        self.unless_lost(set)
    }

    /// Ignores the loss of a device if another context can be created: the next decode detects the
    /// loss as well and handles it.
    fn unless_lost(&self, result: Result<()>) -> Result<()> {
        match result {
            Err(error) if error.is_lost() && self.renew.is_some() => Ok(()),
            result => result,
        }
    }

    fn write_text(
        &mut self,
        (prompt, images): (&[u32], Images),
        stopped: Option<Stopped>,
        sampler: &mut Sampler,
        options: &GenerateOptions,
        mut on_text: impl FnMut(&mut Context, &str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        self.stopped = None;
        let stop = StopSequences::new(&options.stop);
        let stop = stop.map_err(|error| Error::invalid(error.to_string()))?;
        let mut timings = Timings::default();
        let clock = Arc::clone(&self.context.options().environment.clock);
        let start = clock.now();
        self.decode_prompt(prompt, images, &mut timings)?;
        timings.prompt = clock.now().saturating_duration_since(start);
        let is_text = |id: &u32| *id < FIRST_IMAGE_ID;
        let text: Vec<u32> = prompt.iter().copied().filter(is_text).collect();
        let ended = match &stopped {
            Some(stopped) => {
                sampler.resume(&stopped.sampler, &text, stopped.generated)?;
                let is_end = |token: &u32| self.tokenizer.is_eog(*token) && !options.ignore_end;
                prompt.last().copied().filter(is_end)
            }
            None => {
                sampler.reset()?;
                sampler.accept_prompt(&text);
                None
            }
        };
        let before = stopped.map_or(0, |stopped| stopped.generated);
        let mut has_forgotten = false;

        let start = clock.now();
        let mut generator = TextGenerator::new(
            stop,
            options.shown.clone(),
            options.ignore_end,
            options.max_tokens,
        );
        let mut tokens = Vec::new();
        let mut log_probabilities = Vec::new();
        let mut row = self.batch.len() - 1;
        let finish = loop {
            if let Some(token) = ended {
                break Finish::EndToken(token);
            }
            if options.max_tokens.is_some_and(|most| tokens.len() >= most) {
                break Finish::MaxTokens;
            }
            let sampled = TextGenerator::sample(&mut self.context, sampler, row)?;
            let token = match &mut self.agreement {
                Some(TokenAgreement(agree)) => agree(sampled)?,
                None => sampled,
            };
            if let Some(count) = options.log_probabilities {
                let logits = self.context.read_logits(row)?;
                log_probabilities.extend(LogProbabilities::new(logits, token, count));
            }
            let step = generator.accept(sampler, &self.tokenizer, token)?;
            tokens.push(token);
            if !step.text.is_empty() && on_text(&mut self.context, &step.text).is_break() {
                break Finish::Callback;
            }
            if let Some(finish) = step.finish {
                break finish;
            }
            if self.tokens.len() >= self.context.n_ctx() {
                // What is left would not have the positions of its images.
                let keep = options.keep_when_full.filter(|_| self.images.is_empty());
                match keep {
                    Some(keep) if self.shift_context(keep)? => has_forgotten = true,
                    _ => break Finish::ContextFull,
                }
            }
            if sampler.needs_preparation() {
                std::thread::scope(|scope| {
                    // Without another thread, the sampler prepares later.
                    let _ = samite_core::thread_builder()
                        .and_then(|thread| thread.spawn_scoped(scope, || sampler.prepare()));
                    self.decode_one(token)
                })?;
            } else {
                self.decode_one(token)?;
            }
            row = 0;
            timings.generated_tokens += 1;
        };
        if !matches!(finish, Finish::Callback) {
            let rest = generator.finish();
            if !rest.is_empty() {
                // The generation has already ended, so there is nothing to stop.
                let _ = on_text(&mut self.context, &rest);
            }
        }
        timings.generation = clock.now().saturating_duration_since(start);
        if !has_forgotten {
            // The token that was sampled last is not decoded yet. Without one, all tokens are
            // decoded.
            self.stopped = Some(Stopped {
                sampler: sampler.state(),
                last: tokens.last().copied(),
                generated: before + tokens.len(),
            });
        }
        Ok(Generation {
            tokens,
            log_probabilities,
            finish,
            timings,
        })
    }

    fn decode_one(&mut self, token: u32) -> Result<()> {
        let position = self.context.kv_cache().cells().next_position(0);
        self.batch.clear();
        let at = usize::try_from(position).unwrap_or_default();
        self.images.add_to(&mut self.batch, at, token, 0, true)?;
        self.decode_batch()?;
        self.tokens.push(token);
        self.batches.push(1);
        Ok(())
    }

    /// Decodes the tokens of `prompt` that are not in the cache. Afterwards, the last batch has the
    /// logits of its last token.
    fn decode_prompt(
        &mut self,
        prompt: &[u32],
        images: Images,
        timings: &mut Timings,
    ) -> Result<()> {
        if prompt.is_empty() {
            return Err(Error::invalid(
                "the prompt is empty: there is nothing to continue",
            ));
        }
        if prompt.len() > self.context.n_ctx() {
            return Err(Error::ContextFull {
                tokens: prompt.len(),
                size: self.context.n_ctx(),
                free: self.context.n_ctx(),
            });
        }
        self.images = images;
        let common = self
            .tokens
            .iter()
            .zip(prompt)
            .take_while(|(a, b)| a == b)
            .count();
        // The last token is decoded again, because its logits are needed.
        let common = self.images.reusable(common.min(prompt.len() - 1));
        // Nothing is reused if other code changed the sequence, or if it was lost when a device
        // failed. Some caches can be rolled back only in part: recurrent states to their mark, and
        // windows by a limited number of tokens.
        let places = [
            Some(common),
            self.context.kv_cache().marked(0).map(|mark| mark as usize),
        ];
        let reusable = places.into_iter().flatten().find(|&place| {
            place <= common && self.is_whole() && self.context.kv_cache().can_cut(0, place as i32)
        });
        let common = reusable.unwrap_or(0);
        self.tokens.truncate(common);
        let mut left = common;
        for count in &mut self.batches {
            *count = left.min(*count);
            left -= *count;
        }
        self.batches.retain(|&count| count > 0);
        self.change(|context| context.kv_cache_mut().remove(0, common as i32..))?;
        // The remaining prefix was changed only by the session.
        self.is_foreign = false;
        timings.reused_tokens = common;
        timings.prompt_tokens = prompt.len() - common;
        // The next prompt may differ from here on: templates can format an answer differently once
        // it is part of the conversation.
        let marked = prompt.len().saturating_sub(TEMPLATE_TAIL);
        let wanted = common..prompt.len();
        if self.context.kv_cache().kind() == CacheKind::States && marked >= common + TEMPLATE_TAIL {
            self.decode_part(prompt, marked, &wanted)?;
            let marked = self.context.kv_cache_mut().mark(0);
            self.unless_lost(marked)?;
        }
        self.decode_part(prompt, prompt.len(), &wanted)
    }

    /// Decodes `prompt` up to `end`, starting at the end of the text so far. `wanted` is the range
    /// of prompt tokens that were not cached.
    fn decode_part(&mut self, prompt: &[u32], end: usize, wanted: &Range<usize>) -> Result<()> {
        let options = self.context.options();
        let mut size = options.n_batch;
        let is_long = wanted.len() > options.n_ubatch;
        // Pipeline copies overlap only the micro-batches of one decode.
        if self.progress.is_some() && is_long && options.copies == 1 {
            size = size.min(options.n_ubatch);
        }
        while self.tokens.len() < end {
            self.report_prefill(is_long, self.tokens.len(), wanted);
            let first = self.tokens.len();
            let last = self.images.end_of_batch(first, end.min(first + size));
            let part = &prompt[first..last];
            self.batch.clear();
            for (at, &token) in (first..last).zip(part) {
                let is_last = at + 1 == prompt.len();
                self.images.add_to(&mut self.batch, at, token, 0, is_last)?;
            }
            if let Err(error) = self.decode_batch() {
                self.report_prefill(is_long, wanted.end, wanted);
                return Err(error);
            }
            self.tokens.extend_from_slice(part);
            self.batches.push(part.len());
        }
        if end == wanted.end {
            self.report_prefill(is_long, end, wanted);
        }
        Ok(())
    }

    fn report_prefill(&mut self, is_long: bool, at: usize, wanted: &Range<usize>) {
        if let Some(PrefillProgress(progress)) = self.progress.as_mut().filter(|_| is_long) {
            progress(at - wanted.start, wanted.len());
        }
    }

    /// Removes the older half of the tokens after the first `keep` tokens, and shifts the rest
    /// there. Returns whether that made room.
    fn shift_context(&mut self, keep: usize) -> Result<bool> {
        let length = self.tokens.len();
        let forget = length.saturating_sub(keep) / 2;
        if forget == 0 || !self.context.kv_cache().can_shift() {
            return Ok(false);
        }
        let range = keep as i32..(keep + forget) as i32;
        if let Err(error) = self.change(|context| context.kv_cache_mut().cut_out(0, range)) {
            tracing::warn!(%error, "nothing can be forgotten of the full context");
            return Ok(false);
        }
        self.tokens.drain(keep..keep + forget);
        self.batches = vec![self.tokens.len()];
        Ok(true)
    }
}
