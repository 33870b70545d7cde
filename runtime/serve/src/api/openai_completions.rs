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
/// `offsets` are the numbers of characters before the tokens.
fn listed(content: Vec<Value>, offsets: &[usize]) -> Value {
    // Sampling probabilities are reported as they are, not as logarithms.
    let of = |entry: &Value| entry.get("logprob").or(entry.get("prob")).cloned();
    let top = |entry: &Value| -> Value {
        let list = entry.get("top_logprobs").or(entry.get("top_probs"));
        let Some(list) = list.and_then(Value::as_array) else {
            return Value::Null;
        };
        // As in OpenAI's, the token itself is there even if others are more probable. Others may
        // have the same text, so it comes last.
        let all = list.iter().chain([entry]);
        let all = all.filter_map(|entry| Some((entry["token"].as_str()?.to_owned(), of(entry)?)));
        all.collect::<Map<_, _>>().into()
    };
    let tokens: Vec<&Value> = content.iter().map(|entry| &entry["token"]).collect();
    json!({
        "tokens": tokens,
        "token_logprobs": content.iter().map(of).collect::<Vec<_>>(),
        "top_logprobs": content.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
        "content": content,
    })
}

/// Returns the numbers of characters of `text` before each piece. Pieces that the tokenizer added,
/// such as the first token or a space, are not in it.
fn prompt_offsets(text: &str, pieces: impl Iterator<Item = Vec<u8>>) -> Vec<usize> {
    let mut at = 0;
    let mut characters = 0;
    let offsets = pieces.map(|piece| {
        let own = characters;
        let rest = &text.as_bytes()[at..];
        let without_space = piece.strip_prefix(b" ").unwrap_or(&piece);
        let found = [&piece[..], without_space]
            .into_iter()
            .find(|piece| rest.starts_with(piece));
        // A normalized text has other pieces: continue where one is found again.
        let near = &rest[..rest.len().min(piece.len() + 16)];
        let later = || {
            near.windows(piece.len().max(1))
                .position(|part| part == piece)
        };
        let end = match found {
            Some(piece) => at + piece.len(),
            None => at + later().map_or(0, |place| place + piece.len()),
        };
        // The first byte of a character counts for all of it.
        let starts = text.as_bytes()[at..end]
            .iter()
            .filter(|byte| **byte & 0xC0 != 0x80);
        characters += starts.count();
        at = end;
        own
    });
    offsets.collect()
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

    /// Returns the probabilities of the prompt if `has_prompt`, and of tokens. The first of these
    /// starts `offset` characters into the text.
    fn logprobs(
        &self,
        choice: &Choice,
        has_prompt: bool,
        tokens: &[TokenInfo],
        mut offset: usize,
    ) -> Value {
        let mut found = Vec::new();
        let mut offsets = Vec::new();
        if has_prompt && self.job.has_prompt_logprobs {
            let pieces = choice.prompt.iter().map(|&token| choice.piece(token).1);
            offsets = prompt_offsets(self.prompt(choice), pieces);
            found.extend((0..choice.prompt.len()).filter_map(|place| choice.prompt_logprob(place)));
        }
        for token in tokens.iter().filter(|token| !choice.is_end_token(token.id)) {
            if let Some(entry) = choice.probabilities(token, self.job.post_sampling) {
                offsets.push(offset);
                offset += entry["token"].as_str().unwrap_or_default().chars().count();
                found.push(entry);
            }
        }
        if found.is_empty() {
            Value::Null
        } else {
            listed(found, &offsets)
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
            Update::Started(_)
                if !self.job.has_prompt_logprobs && !self.prompt(choice).is_empty() =>
            {
                self.part(choice, self.prompt(choice), Value::Null, out);
            }
            Update::PromptLogprobs if self.job.has_prompt_logprobs => {
                let logprobs = self.logprobs(choice, true, &[], 0);
                self.part(choice, self.prompt(choice), logprobs, out);
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
                let logprobs = self.logprobs(choice, false, std::slice::from_ref(token), offset);
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
                "logprobs": self.logprobs(choice, true, &choice.tokens, offset),
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
