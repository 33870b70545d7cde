//! OpenAI's chat completions.

use crate::answer::{Choice, TokenInfo, Update};
use crate::api::native;
use crate::chat::member;
use crate::ids;
use crate::job::Job;
use crate::stream::{Frames, ResponseEncoder};
use samite_chat::AnswerEvent as Parsed;
use serde_json::{Map, Value, json};

/// Sends an answer in the format of chat completions.
pub struct ChatEncoder {
    pub id: String,
    created: u64,
    pub job: Job,
    /// Tokens of each choice whose probabilities have not been sent yet.
    waiting: Vec<Vec<TokenInfo>>,
    /// True for each choice whose first chunk, with the role, was sent.
    has_begun: Vec<bool>,
}

/// Version string where llama-server reports its build.
pub const FINGERPRINT: &str = concat!("b1-samite-", env!("CARGO_PKG_VERSION"));

impl ChatEncoder {
    pub fn new(job: &Job) -> Self {
        ChatEncoder {
            id: ids::id("chatcmpl-"),
            created: ids::seconds(),
            job: Job {
                requests: Vec::new(),
                ..job.clone()
            },
            waiting: vec![Vec::new(); job.requests.len()],
            has_begun: vec![false; job.requests.len()],
        }
    }

    fn chunk(&self, choices: Value) -> Value {
        json!({
            "choices": choices,
            "created": self.created,
            "id": self.id,
            "model": self.job.model,
            "system_fingerprint": FINGERPRINT,
            "object": "chat.completion.chunk",
        })
    }

    fn logprobs(&self, choice: &Choice, tokens: &[TokenInfo]) -> Option<Value> {
        let found = tokens.iter();
        let found = found.filter_map(|token| choice.probabilities(token, self.job.post_sampling));
        let found: Vec<Value> = found.collect();
        (!found.is_empty()).then(|| json!({"content": found}))
    }

    fn delta(&mut self, choice: &Choice, delta: Value, out: &mut Frames) {
        let mut entry = Map::new();
        entry.insert("finish_reason".to_owned(), Value::Null);
        entry.insert("index".to_owned(), choice.index.into());
        entry.insert("delta".to_owned(), delta);
        let tokens = std::mem::take(&mut self.waiting[choice.index]);
        member(&mut entry, "logprobs", self.logprobs(choice, &tokens));
        let mut chunk = self.chunk(json!([entry]));
        if self.job.timings_per_token {
            chunk["timings"] = choice.timings();
        }
        out.data(&chunk);
    }

    fn begin(&mut self, choice: &Choice, out: &mut Frames) {
        if !std::mem::replace(&mut self.has_begun[choice.index], true) {
            let delta = json!({"role": "assistant", "content": null});
            let entry = json!({"finish_reason": null, "index": choice.index, "delta": delta});
            let chunk = self.chunk(json!([entry]));
            out.data(&chunk);
        }
    }
}

impl ResponseEncoder for ChatEncoder {
    fn update(&mut self, choice: &Choice, update: &Update, out: &mut Frames) {
        match update {
            Update::Started(_) => self.begin(choice, out),
            Update::Progress(progress) => {
                let entry = json!({"finish_reason": null, "index": choice.index, "delta": {}});
                let mut chunk = self.chunk(json!([entry]));
                chunk["prompt_progress"] = native::progress(progress);
                if self.job.timings_per_token {
                    chunk["timings"] = native::progress_timings(progress);
                }
                out.data(&chunk);
            }
            Update::Token { token, .. } => {
                self.begin(choice, out);
                if token.probabilities.is_some() && !choice.is_end_token(token.id) {
                    self.waiting[choice.index].push(token.clone());
                }
            }
            Update::Parsed(parsed) => match parsed {
                Parsed::Content(text) => self.delta(choice, json!({"content": text}), out),
                Parsed::Reasoning(text) => {
                    self.delta(choice, json!({"reasoning_content": text}), out);
                }
                Parsed::ToolCallStart { index, id, name } => {
                    let function = json!({"name": name, "arguments": ""});
                    let call =
                        json!({"index": index, "id": id, "type": "function", "function": function});
                    self.delta(choice, json!({"tool_calls": [call]}), out);
                }
                Parsed::ToolArguments { index, text } => {
                    let call = json!({"index": index, "function": {"arguments": text}});
                    self.delta(choice, json!({"tool_calls": [call]}), out);
                }
                Parsed::ToolCallEnd { .. } => {}
            },
            Update::Finished => {
                self.begin(choice, out);
                let entry = json!({
                    "finish_reason": choice.finish_reason(),
                    "index": choice.index,
                    "delta": {},
                });
                let mut chunk = self.chunk(json!([entry]));
                if !self.job.include_usage {
                    chunk["timings"] = choice.timings();
                    chunk["cache_miss"] = choice.cache_miss();
                }
                out.data(&chunk);
            }
            Update::PromptLogprobs | Update::Rest(_) | Update::Failed(_) => {}
        }
    }

    fn end(&mut self, choices: &[Choice], out: &mut Frames) {
        if self.job.include_usage {
            let mut chunk = self.chunk(json!([]));
            chunk["usage"] = Choice::usage(choices);
            if let Some(first) = choices.first() {
                chunk["timings"] = first.timings();
                chunk["cache_miss"] = first.cache_miss();
            }
            out.data(&chunk);
        }
        out.done();
    }

    fn whole(&mut self, choices: &[Choice]) -> Value {
        let list = choices.iter().map(|choice| {
            let mut entry = Map::new();
            entry.insert("finish_reason".to_owned(), choice.finish_reason().into());
            entry.insert("index".to_owned(), choice.index.into());
            entry.insert("message".to_owned(), message(choice));
            let tokens = choice.tokens.iter();
            let tokens = tokens
                .filter(|token| !choice.is_end_token(token.id))
                .cloned();
            let tokens: Vec<TokenInfo> = tokens.collect();
            member(&mut entry, "logprobs", self.logprobs(choice, &tokens));
            Value::Object(entry)
        });
        let mut whole = json!({
            "choices": list.collect::<Vec<_>>(),
            "created": self.created,
            "model": self.job.model,
            "system_fingerprint": FINGERPRINT,
            "object": "chat.completion",
            "usage": Choice::usage(choices),
            "id": self.id,
        });
        if let Some(first) = choices.first() {
            whole["timings"] = first.timings();
            whole["cache_miss"] = first.cache_miss();
            if self.job.verbose {
                whole["__verbose"] = native::whole(first, &self.job);
            }
        }
        whole
    }
}

/// Returns the message of an answer.
pub fn message(choice: &Choice) -> Value {
    let answer = &choice.answer;
    let mut message = Map::new();
    message.insert("role".to_owned(), "assistant".into());
    let content = if answer.content.is_empty() && !answer.calls.is_empty() {
        Value::Null
    } else {
        answer.content.clone().into()
    };
    message.insert("content".to_owned(), content);
    if !answer.reasoning.is_empty() {
        message.insert(
            "reasoning_content".to_owned(),
            answer.reasoning.clone().into(),
        );
    }
    if !answer.calls.is_empty() {
        let calls = answer.calls.iter().map(|call| {
            let function = json!({"name": call.name, "arguments": call.arguments});
            json!({"type": "function", "function": function, "id": call.id})
        });
        message.insert("tool_calls".to_owned(), calls.collect());
    }
    message.into()
}
