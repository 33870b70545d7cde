//! OpenAI's completions.

use crate::answer::{Choice, TokenInfo, Update};
use crate::api::native;
use crate::api::openai_chat::FINGERPRINT;
use crate::ids;
use crate::job::Job;
use crate::stream::{Frames, ResponseEncoder};
use serde_json::{Map, Value, json};

/// Sends an answer in the format of completions.
pub struct CompletionEncoder {
    id: String,
    created: u64,
    job: Job,
    /// Number of characters of each choice before the next token.
    told: Vec<usize>,
}

/// Returns probabilities in the format of OpenAI's completions, and in llama-server's (`content`).
fn listed(content: Vec<Value>, mut offset: usize) -> Value {
    // Sampling probabilities are reported as they are, not as logarithms.
    let of = |entry: &Value| entry.get("logprob").or(entry.get("prob")).cloned();
    let top = |entry: &Value| -> Map<String, Value> {
        let list = entry.get("top_logprobs").or(entry.get("top_probs"));
        let list = list.and_then(Value::as_array).into_iter().flatten();
        list.filter_map(|entry| Some((entry["token"].as_str()?.to_owned(), of(entry)?)))
            .collect()
    };
    let tokens: Vec<&Value> = content.iter().map(|entry| &entry["token"]).collect();
    let offsets = tokens.iter().map(|token| {
        let own = offset;
        offset += token.as_str().unwrap_or_default().chars().count();
        own
    });
    let offsets: Vec<usize> = offsets.collect();
    json!({
        "tokens": tokens,
        "token_logprobs": content.iter().map(of).collect::<Vec<_>>(),
        "top_logprobs": content.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
        "content": content,
    })
}

impl CompletionEncoder {
    pub fn new(job: &Job) -> Self {
        CompletionEncoder {
            id: ids::id("cmpl-"),
            created: ids::seconds(),
            told: (0..job.requests.len())
                .map(|choice| job.echo.get(choice).map_or(0, |echo| echo.chars().count()))
                .collect(),
            job: Job {
                requests: Vec::new(),
                ..job.clone()
            },
        }
    }

    /// Returns the prompt to echo before a text.
    fn prompt(&self, choice: &Choice) -> &str {
        self.job.echo.get(choice.index).map_or("", String::as_str)
    }

    /// Returns the probabilities of tokens. The first one starts `offset` characters into the text.
    fn logprobs(&self, choice: &Choice, tokens: &[TokenInfo], offset: usize) -> Value {
        let tokens = tokens.iter().filter(|token| !choice.is_end_token(token.id));
        let found: Vec<Value> = tokens
            .filter_map(|token| choice.probabilities(token, self.job.post_sampling))
            .collect();
        if found.is_empty() {
            Value::Null
        } else {
            listed(found, offset)
        }
    }

    fn body(&self, choices: Value) -> Value {
        json!({
            "choices": choices,
            "created": self.created,
            "model": self.job.model,
            "system_fingerprint": FINGERPRINT,
            "object": "text_completion",
            "id": self.id,
        })
    }

    fn part(&self, choice: &Choice, text: &str, logprobs: Value, out: &mut Frames) {
        let entry = json!({
            "text": text,
            "index": choice.index,
            "logprobs": logprobs,
            "finish_reason": null,
        });
        let mut chunk = self.body(json!([entry]));
        if self.job.timings_per_token {
            chunk["timings"] = choice.timings();
        }
        out.data(&chunk);
    }
}

impl ResponseEncoder for CompletionEncoder {
    fn update(&mut self, choice: &Choice, update: &Update, out: &mut Frames) {
        match update {
            Update::Started(_) if !self.prompt(choice).is_empty() => {
                self.part(choice, self.prompt(choice), Value::Null, out);
            }
            Update::Progress(progress) => {
                let entry = json!({"text": "", "index": choice.index, "logprobs": null,
                    "finish_reason": null});
                let mut chunk = self.body(json!([entry]));
                chunk["prompt_progress"] = native::progress(progress);
                if self.job.timings_per_token {
                    chunk["timings"] = native::progress_timings(progress);
                }
                out.data(&chunk);
            }
            Update::Token { token, text } if !choice.is_end_token(token.id) => {
                let offset = self.told[choice.index];
                let logprobs = self.logprobs(choice, std::slice::from_ref(token), offset);
                self.told[choice.index] += choice.piece(token.id).0.chars().count();
                self.part(choice, text, logprobs, out);
            }
            Update::Rest(text) => self.part(choice, text, Value::Null, out),
            Update::Finished => {
                let entry = json!({
                    "text": "",
                    "index": choice.index,
                    "logprobs": null,
                    "finish_reason": choice.finish_reason(),
                });
                let mut chunk = self.body(json!([entry]));
                // As in llama-server, unless the last chunk has the usage of all choices.
                if !self.job.include_usage {
                    chunk["usage"] = Choice::usage(std::slice::from_ref(choice));
                }
                chunk["timings"] = choice.timings();
                chunk["cache_miss"] = choice.cache_miss();
                out.data(&chunk);
            }
            _ => {}
        }
    }

    fn end(&mut self, choices: &[Choice], out: &mut Frames) {
        if self.job.include_usage {
            let mut chunk = self.body(json!([]));
            chunk["usage"] = Choice::usage(choices);
            out.data(&chunk);
        }
        out.done();
    }

    fn whole(&mut self, choices: &[Choice]) -> Value {
        let list = choices.iter().map(|choice| {
            let text = [self.prompt(choice), &choice.text].concat();
            let offset = self.prompt(choice).chars().count();
            json!({
                "text": text,
                "index": choice.index,
                "logprobs": self.logprobs(choice, &choice.tokens, offset),
                "finish_reason": choice.finish_reason(),
            })
        });
        let mut whole = self.body(list.collect());
        whole["usage"] = Choice::usage(choices);
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
