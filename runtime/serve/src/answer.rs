//! The answer to one request while it is generated: turns engine events into text, reasoning and
//! tool calls.

use crate::account::RequestAccount;
use crate::context::RequestContext;
use crate::error::ApiError;
use crate::job::{Job, Parsing};
use crate::latency::Latencies;
use samite_chat::{Answer, AnswerCall, AnswerEvent as Parsed, AnswerParser};
use samite_requests::{
    CacheMiss, Counts, Event, Finish, MissCause, Probabilities, PromptProgress, Started, Token,
};
use samite_text::Tokenizer;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A token and its probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenInfo {
    pub id: u32,
    pub probabilities: Option<Probabilities>,
}

/// An event of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    Started(Started),
    Progress(PromptProgress),
    /// All log-probabilities of the prompt have arrived.
    PromptLogprobs,
    /// A token, and the text that can be shown now.
    Token {
        token: TokenInfo,
        text: String,
    },
    /// More text without a token of its own.
    Rest(String),
    /// New content, reasoning and calls.
    Parsed(Parsed),
    Finished,
    Failed(ApiError),
}

/// An answer so far.
#[derive(Debug)]
pub struct Choice {
    pub index: usize,
    parser: Option<AnswerParser>,
    tokenizer: Arc<Tokenizer>,
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Log-probabilities of the prompt's tokens from the second one on, if requested.
    pub prompt_logprobs: Vec<Probabilities>,
    /// Raw generated text.
    pub text: String,
    /// Parsed text.
    pub answer: Answer,
    pub tokens: Vec<TokenInfo>,
    /// Number of reasoning tokens, including the marks that end reasoning.
    pub thought: usize,
    pub slot: usize,
    pub counts: Counts,
    pub miss: Option<CacheMiss>,
    pub reason: Option<Finish>,
    pub error: Option<ApiError>,
    /// Text that arrived with the end.
    rest: String,
    latencies: Arc<Latencies>,
    account: Arc<RequestAccount>,
    /// Number of copies of its probabilities as JSON that are held at the end of the answer. A
    /// stream holds none.
    kept: usize,
    asked: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

/// Returns the current time, for answers that are still running.
fn now() -> Instant {
    Instant::now()
}

impl Choice {
    pub fn new(index: usize, prompt: Vec<u32>, job: &Job, context: &RequestContext) -> Self {
        let parser = job.parsing.as_ref().map(Parsing::parser);
        Choice {
            index,
            parser,
            tokenizer: Arc::clone(&context.tokenizer),
            counts: Counts {
                prompt: prompt.len(),
                ..Counts::default()
            },
            prompt,
            prompt_logprobs: Vec::new(),
            text: String::new(),
            answer: Answer::default(),
            tokens: Vec::new(),
            thought: 0,
            slot: 0,
            miss: None,
            reason: None,
            error: None,
            rest: String::new(),
            latencies: Arc::clone(&context.latencies),
            account: Arc::clone(&context.account),
            kept: if job.keeps_probabilities {
                // The message and its part, the list of items, and the response with it.
                5
            } else {
                usize::from(!job.is_stream)
            },
            asked: now(),
            started: None,
            first_token: None,
            last_token: None,
        }
    }

    /// Processes an event and returns the resulting updates.
    pub fn take(&mut self, event: Event) -> Vec<Update> {
        let mut updates = Vec::new();
        match event {
            Event::Started(started) => {
                self.slot = started.slot;
                self.counts.cached = started.cached;
                self.miss = started.miss;
                self.started = Some(now());
                updates.push(Update::Started(started));
                if started.prompt == 1 {
                    updates.push(Update::PromptLogprobs);
                }
            }
            Event::Progress(progress) => updates.push(Update::Progress(progress)),
            Event::PromptLogprobs(more) => {
                self.prompt_logprobs.extend(more);
                if self.prompt_logprobs.len() + 1 == self.prompt.len() {
                    updates.push(Update::PromptLogprobs);
                }
            }
            Event::Token(token) => {
                let size = self.size_of(&token);
                if let Err(error) = self.account.charge("max_tokens", size) {
                    return vec![self.fail(error)];
                }
                let time = now();
                match self.last_token.replace(time) {
                    Some(last) => self.latencies.next_token.observe(time - last),
                    None => self.latencies.first_token.observe(time - self.asked),
                }
                self.first_token.get_or_insert(time);
                self.counts.generated += 1;
                let info = TokenInfo {
                    id: token.id,
                    probabilities: token.probabilities,
                };
                self.tokens.push(info.clone());
                self.text.push_str(&token.text);
                updates.push(Update::Token {
                    token: info,
                    text: token.text.clone(),
                });
                let parser = self.parser.as_ref();
                let was_reasoning = parser.is_some_and(|parser| parser.reasoning_end().is_some());
                self.parse(&token.text, &mut updates);
                let thinks = |update: &Update| {
                    matches!(update,
                    Update::Parsed(Parsed::Reasoning(text)) if !text.is_empty())
                };
                self.thought += usize::from(was_reasoning || updates.iter().any(thinks));
            }
            Event::Finished(finished) => {
                self.counts = finished.counts;
                self.latencies.whole.observe(self.asked.elapsed());
                self.reason = Some(finished.reason);
                self.text.push_str(&finished.rest);
                self.rest.clone_from(&finished.rest);
                if !finished.rest.is_empty() {
                    updates.push(Update::Rest(finished.rest.clone()));
                }
                self.parse(&finished.rest, &mut updates);
                let is_cut = self.is_cut();
                if let Some(parser) = &mut self.parser {
                    let events = if is_cut {
                        parser.cut()
                    } else {
                        parser.finish()
                    };
                    self.answer.add(events.clone());
                    updates.extend(events.into_iter().map(Update::Parsed));
                }
                updates.push(Update::Finished);
                self.log();
            }
            Event::Failed(failed) => {
                self.counts = failed.counts;
                updates.push(self.fail(failed.into()));
            }
        }
        updates
    }

    /// Returns the maximum number of bytes that a token takes in an answer.
    fn size_of(&self, token: &Token) -> usize {
        /// Bytes of a token with its ID and its text, twice.
        const TOKEN: usize = 64;
        let top = token.probabilities.as_ref().map(|all| all.top.len() + 1);
        let each = Self::PROBABILITY + self.kept * Self::PROBABILITY_OBJECT;
        TOKEN + 4 * token.text.len() + top.unwrap_or(0) * each
    }

    /// Bytes of a probability.
    const PROBABILITY: usize = 16;

    /// Bytes of a probability as a JSON object with a text, its bytes and a number.
    const PROBABILITY_OBJECT: usize = 1200;

    /// Returns the maximum number of bytes that the probabilities of `tokens` prompt tokens take in
    /// an answer, with `top` tokens each.
    pub fn size_of_prompt(tokens: usize, top: usize) -> usize {
        let each = Self::PROBABILITY + Self::PROBABILITY_OBJECT;
        tokens.saturating_mul((top + 1) * each)
    }

    /// Ends the answer with an error.
    pub fn fail(&mut self, error: ApiError) -> Update {
        self.error = Some(error.clone());
        Update::Failed(error)
    }

    fn parse(&mut self, text: &str, updates: &mut Vec<Update>) {
        if let Some(parser) = self.parser.as_mut().filter(|_| !text.is_empty()) {
            let events = parser.push(text);
            self.answer.add(events.clone());
            updates.extend(events.into_iter().map(Update::Parsed));
        }
    }

    /// Returns the text that arrived with the end.
    pub fn rest(&self) -> &str {
        &self.rest
    }

    /// Returns whether `token` ended the text.
    pub fn is_end_token(&self, token: u32) -> bool {
        self.tokenizer.is_eog(token)
    }

    /// Returns the text of the prompt, including the names of control tokens.
    pub fn prompt_text(&self) -> String {
        let mut bytes = Vec::new();
        for &token in &self.prompt {
            let piece = self.tokenizer.token_to_piece(token, true);
            bytes.extend_from_slice(piece.unwrap_or_default());
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns whether the answer is parsed into content, reasoning and calls.
    pub fn is_parsed(&self) -> bool {
        self.parser.is_some()
    }

    /// Returns whether the answer is complete.
    pub fn is_over(&self) -> bool {
        self.reason.is_some() || self.error.is_some()
    }

    /// Returns whether a limit ended the answer, so that its last call may be incomplete.
    pub fn is_cut(&self) -> bool {
        matches!(
            self.reason,
            Some(Finish::MaxTokens | Finish::ContextFull | Finish::Deadline)
        )
    }

    /// Returns the calls, without one that a limit cut off: a client must not run it.
    pub fn calls(&self) -> impl Iterator<Item = &AnswerCall> {
        let calls = self.answer.calls.iter();
        calls.filter(|call| call.is_complete || !self.is_cut())
    }

    /// Returns the finish reason in OpenAI's terms.
    pub fn finish_reason(&self) -> &'static str {
        if self.is_cut() {
            "length"
        } else if self.answer.calls.is_empty() {
            "stop"
        } else {
            "tool_calls"
        }
    }

    fn log(&self) {
        let counts = &self.counts;
        let per_second = |tokens: usize, time: Duration| match time.as_secs_f64() {
            0.0 => 0.0,
            seconds => tokens as f64 / seconds,
        };
        tracing::info!(
            "slot {}: {} prompt tokens ({} cached, {:.0}/s), {} generated ({:.1}/s), {}",
            self.slot,
            counts.prompt,
            counts.cached,
            per_second(counts.prompt.saturating_sub(counts.cached), counts.prefill),
            counts.generated,
            per_second(counts.generated.saturating_sub(1), counts.decoding),
            self.finish_reason(),
        );
    }

    /// Logs that the client left before the end.
    pub fn log_cancelled(&self) {
        let (slot, count) = (self.slot, self.tokens.len());
        tracing::info!("slot {slot}: cancelled after {count} tokens");
    }

    /// Returns the stop type in llama-server's terms.
    pub fn stop_type(&self) -> &'static str {
        match self.reason {
            _ if self.is_cut() => "limit",
            Some(Finish::StopString(_)) => "word",
            Some(_) => "eos",
            None => "none",
        }
    }

    /// Returns whether part of the answer is missing.
    pub fn is_truncated(&self) -> bool {
        self.counts.truncated || self.reason == Some(Finish::ContextFull)
    }

    /// Returns llama-server's timings.
    pub fn timings(&self) -> Value {
        let (mut prefill, mut decoding) = (self.counts.prefill, self.counts.decoding);
        if !self.is_over() {
            let at = now();
            let since = |from: Option<Instant>, to: Instant| {
                from.map_or(Duration::ZERO, |from| to.saturating_duration_since(from))
            };
            prefill = since(self.started, self.first_token.unwrap_or(at));
            decoding = since(self.first_token, at);
        }
        let prompt = self.counts.prompt.saturating_sub(self.counts.cached);
        let mut timings = timings(
            self.counts.cached,
            prompt,
            prefill,
            self.counts.generated,
            decoding,
        );
        if self.counts.drafted > 0 {
            timings["draft_n"] = self.counts.drafted.into();
            timings["draft_n_accepted"] = self.counts.accepted.into();
        }
        timings
    }

    /// Returns OpenAI's usage.
    pub fn usage(choices: &[Choice]) -> Value {
        // Choices of one prompt are adjacent, and the prompt counts once.
        let is_new =
            |number: usize| number == 0 || choices[number].prompt != choices[number - 1].prompt;
        let each = choices
            .iter()
            .enumerate()
            .filter(|(number, _)| is_new(*number));
        let (prompt, cached) = each.fold((0, 0), |(prompt, cached), (_, choice)| {
            (prompt + choice.counts.prompt, cached + choice.counts.cached)
        });
        let generated: usize = choices.iter().map(|choice| choice.counts.generated).sum();
        let thought: usize = choices.iter().map(|choice| choice.thought).sum();
        json!({
            "completion_tokens": generated,
            "completion_tokens_details": {"reasoning_tokens": thought},
            "prompt_tokens": prompt,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }

    /// Returns the position and the cause of the prefix cache miss.
    pub fn cache_miss(&self) -> Value {
        match self.miss {
            None => Value::Null,
            Some(CacheMiss { at_token, cause }) => json!({
                "at_token": at_token,
                "cause": MissCause::name(cause),
            }),
        }
    }

    /// Returns the text of a token, and its bytes.
    pub fn piece(&self, token: u32) -> (String, Vec<u8>) {
        let bytes = self.tokenizer.token_to_piece(token, true);
        let bytes = bytes.unwrap_or_default().to_vec();
        (String::from_utf8_lossy(&bytes).into_owned(), bytes)
    }

    /// Returns the probabilities of a token in the format of llama-server and OpenAI's chat
    /// completions.
    pub fn probabilities(&self, token: &TokenInfo, is_drawn: bool) -> Option<Value> {
        Some(self.listed(token.id, token.probabilities.as_ref()?, is_drawn))
    }

    /// Returns the log-probabilities of a prompt token like those of other tokens. The first one
    /// has none.
    pub fn prompt_logprob(&self, place: usize) -> Option<Value> {
        let token = *self.prompt.get(place)?;
        let Some(before) = place.checked_sub(1) else {
            let (text, bytes) = self.piece(token);
            return Some(
                json!({"id": token, "token": text, "bytes": bytes, "logprob": null,
                "top_logprobs": null}),
            );
        };
        Some(self.listed(token, self.prompt_logprobs.get(before)?, false))
    }

    fn listed(&self, token: u32, probabilities: &Probabilities, is_drawn: bool) -> Value {
        let (one, many) = if is_drawn {
            ("prob", "top_probs")
        } else {
            ("logprob", "top_logprobs")
        };
        let finite = |value: f32| if value.is_finite() { value } else { f32::MIN };
        let entry = |id: u32, value: f32| {
            let (text, bytes) = self.piece(id);
            json!({"id": id, "token": text, "bytes": bytes, one: finite(value)})
        };
        let mut own = entry(token, probabilities.token);
        let top = probabilities
            .top
            .iter()
            .map(|&(id, value)| entry(id, value));
        own[many] = top.collect();
        own
    }
}

/// Returns llama-server's timings. The first token comes from the logits of the prompt, so no
/// decode step produced it.
pub fn timings(
    cached: usize,
    prompt: usize,
    prefill: Duration,
    generated: usize,
    decoding: Duration,
) -> Value {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let per_token = |time: Duration, count: usize| match count {
        0 => 0.0,
        count => ms(time) / count as f64,
    };
    let per_second = |time: Duration, count: usize| {
        if time.is_zero() || count == 0 {
            0.0
        } else {
            count as f64 * 1e3 / ms(time)
        }
    };
    let steps = generated.saturating_sub(1);
    json!({
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": ms(prefill),
        "prompt_per_token_ms": per_token(prefill, prompt),
        "prompt_per_second": per_second(prefill, prompt),
        "predicted_n": generated,
        "predicted_ms": ms(decoding),
        "predicted_per_token_ms": per_token(decoding, steps),
        "predicted_per_second": per_second(decoding, steps),
    })
}
