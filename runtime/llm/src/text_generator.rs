//! One step of a generation: from logits to a token, its text and the reason for the end. Sessions
//! and the batching engine share it.

use crate::context::Context;
use crate::error::Result;
use samite_text::{Sampler, StopSequences, Tokenizer, Utf8Stream};

/// Reason why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended the text with this token.
    EndToken(u32),
    /// The stop string with this index occurred.
    StopString(usize),
    /// The sampler's [`Constraint`](samite_text::Constraint) allows no continuation.
    Constraint,
    /// The maximum number of tokens was reached.
    MaxTokens,
    /// The context is full.
    ContextFull,
    /// The deadline of a request passed.
    Deadline,
    /// The callback of a session stopped the generation.
    Callback,
}

/// Converts generated tokens to text, and detects the end.
#[derive(Debug)]
pub struct TextGenerator {
    stop: StopSequences,
    text: Utf8Stream,
    /// Control tokens whose names are part of the text.
    shown: Vec<u32>,
    ignore_end: bool,
    max_tokens: Option<usize>,
    n_tokens: usize,
}

/// Result of [`TextGenerator::accept`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratedText {
    /// Text that can be shown now: complete characters that are not part of a stop string.
    pub text: String,
    /// Reason for the end, if this token is the last one.
    pub finish: Option<Finish>,
}

impl TextGenerator {
    /// Creates a generator of one text. The names of the control tokens in `shown` are part of the
    /// text. With `ignore_end`, end-of-generation tokens do not end it.
    pub fn new(
        stop: StopSequences,
        shown: Vec<u32>,
        ignore_end: bool,
        max_tokens: Option<usize>,
    ) -> Self {
        TextGenerator {
            stop,
            text: Utf8Stream::new(),
            shown,
            ignore_end,
            max_tokens,
            n_tokens: 0,
        }
    }

    /// Samples the token after the one at `row` of the context's last batch.
    ///
    /// # Errors
    /// Returns an error if the sampler allows no token, or if a device fails.
    pub fn sample(context: &mut Context, sampler: &mut Sampler, row: usize) -> Result<u32> {
        let n_vocab = context.model().spec().n_vocab;
        if let Some(top_k) = context.device_top_k(row)
            && let Some(token) = sampler.sample_top_k(top_k, n_vocab)?
        {
            return Ok(token);
        }
        Ok(sampler.sample(context.read_logits(row)?)?)
    }

    /// Appends a sampled token to the text. A token without text, such as padding of the
    /// vocabulary, adds nothing.
    ///
    /// # Errors
    /// Returns an error if the sampler's constraint does not allow the token.
    pub fn accept(
        &mut self,
        sampler: &mut Sampler,
        tokenizer: &Tokenizer,
        token: u32,
    ) -> Result<GeneratedText> {
        sampler.accept(token)?;
        self.n_tokens += 1;
        if tokenizer.is_eog(token) && !self.ignore_end {
            return Ok(GeneratedText {
                text: String::new(),
                finish: Some(Finish::EndToken(token)),
            });
        }
        let is_shown = self.shown.contains(&token);
        let piece = tokenizer.token_to_piece(token, is_shown);
        let step = self.stop.push(piece.unwrap_or_default());
        let text = self.text.push(step.emit).into_owned();
        let is_last = self.max_tokens.is_some_and(|max| self.n_tokens >= max);
        let finish = match step.stopped {
            Some(index) => Some(Finish::StopString(index)),
            None if sampler.is_finished() => Some(Finish::Constraint),
            None if is_last => Some(Finish::MaxTokens),
            None => None,
        };
        Ok(GeneratedText { text, finish })
    }

    /// Returns the rest of the text after its end: characters that were held back because they
    /// could have been part of a stop string, and an incomplete character.
    pub fn finish(&mut self) -> String {
        self.text.push(self.stop.finish()).into_owned() + self.text.flush()
    }
}
