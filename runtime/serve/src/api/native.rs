//! llama-server's own completions, and infill.

use crate::answer::{Choice, Update, timings};
use crate::app::App;
use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, kind};
use crate::images::{PromptImages, PromptTokens};
use crate::job::{ChatExtras, Job};
use crate::stream::{Frames, ResponseEncoder};
use samite_chat::Prompt;
use samite_requests::{Finish, ProbabilityKind, PromptProgress};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Returns the progress of a prompt.
pub fn progress(progress: &PromptProgress) -> Value {
    json!({
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": progress.time.as_millis(),
    })
}

/// Returns the timings during prefill.
pub fn progress_timings(progress: &PromptProgress) -> Value {
    let computed = progress.processed.saturating_sub(progress.cached);
    let time = if computed == 0 {
        Duration::ZERO
    } else {
        progress.time
    };
    timings(progress.cached, computed, time, 0, Duration::ZERO)
}

/// Maximum number of texts per request.
pub const MAX_TEXTS: usize = 256;

/// Returns the prompts of a request: a text, tokens, both mixed, or a list of those.
pub fn prompts(context: &RequestContext, fields: &Fields<'_>) -> Result<(Vec<PromptTokens>, bool)> {
    let Some((name, value)) = fields.get(&["prompt"]) else {
        return Err(ApiError::field("prompt", "is missing"));
    };
    let is_scalar = |value: &Value| value.is_number() || value.is_string();
    match value {
        Value::Array(list) if list.is_empty() => Err(ApiError::field(name, "is empty")),
        Value::Array(list) if list.iter().any(Value::is_number) && list.iter().all(is_scalar) => {
            Ok((vec![mixed(context, name, list)?.into()], false))
        }
        Value::Array(list) if list.len() > MAX_TEXTS => Err(ApiError::field(
            name,
            format!("{MAX_TEXTS} texts at once are allowed"),
        )),
        Value::Array(list) => {
            let each = list.iter().enumerate();
            let prompts =
                each.map(|(i, value)| prompt_with_images(context, &format!("{name}[{i}]"), value));
            let prompts: Vec<_> = prompts.collect::<Result<_>>()?;
            let is_list = prompts.len() > 1;
            Ok((prompts, is_list))
        }
        other => Ok((vec![prompt_with_images(context, name, other)?], false)),
    }
}

/// Returns the tokens of one prompt, which may have images: an object with `prompt_string` and
/// `multimodal_data`.
fn prompt_with_images(context: &RequestContext, name: &str, value: &Value) -> Result<PromptTokens> {
    const IMAGES: &str = "multimodal_data";
    let fields = match value {
        Value::Object(_) => Fields::from_value(name, value)?,
        _ => return Ok(prompt(context, name, value)?.into()),
    };
    let Some(list) = fields.list(IMAGES)? else {
        return Ok(prompt(context, name, value)?.into());
    };
    let text = fields.required_text("prompt_string")?;
    context.check_length(name, text)?;
    let mut images = PromptImages::with_public_marker();
    for (i, image) in list.iter().enumerate() {
        let place = format!("{name}.{IMAGES}[{i}]");
        let image = image.as_str();
        let image = image.ok_or_else(|| ApiError::field(&place, "must be an image in base64"))?;
        images.add(context, &place, image)?;
    }
    images.tokens(context, name, &Prompt::from_text(text.to_owned()))
}

/// Returns the tokens of one prompt without images.
pub fn prompt(context: &RequestContext, name: &str, value: &Value) -> Result<Vec<u32>> {
    match value {
        Value::String(text) => {
            context.check_length(name, text)?;
            let tokens = context.tokenize(name, text, true, true)?;
            Ok(with_begin(context, tokens))
        }
        Value::Array(list) => mixed(context, name, list),
        Value::Object(_) => {
            let fields = Fields::from_value(name, value)?;
            if fields.has("multimodal_data") {
                return Err(ApiError::field(
                    "multimodal_data",
                    "images are not supported here",
                ));
            }
            match fields.get(&["prompt_string"]) {
                Some((_, text @ Value::String(_))) => prompt(context, name, text),
                _ => Err(ApiError::field(
                    name,
                    "an object needs \"prompt_string\", a string",
                )),
            }
        }
        other => Err(ApiError::field(
            name,
            format!(
                "must be a string, a list of tokens, or a list of those, and is {}",
                kind(other)
            ),
        )),
    }
}

/// Removes the end token that the tokenizer adds, because the text continues.
fn with_begin(app: &App, mut tokens: Vec<u32>) -> Vec<u32> {
    if app.tokenizer.adds_eos() {
        tokens.pop();
    }
    tokens
}

/// Returns the tokens of a prompt that mixes tokens and texts.
fn mixed(context: &RequestContext, name: &str, list: &[Value]) -> Result<Vec<u32>> {
    let mut tokens = Vec::new();
    for (i, value) in list.iter().enumerate() {
        match value {
            Value::String(text) => {
                context.check_length(name, text)?;
                let more = context.tokenize(name, text, i == 0, true)?;
                tokens.extend(if i == 0 {
                    with_begin(context, more)
                } else {
                    more
                });
            }
            other => tokens.push(token(context, &format!("{name}[{i}]"), other)?),
        }
    }
    Ok(tokens)
}

/// Parses the ID of a token.
pub fn token(app: &App, name: &str, value: &Value) -> Result<u32> {
    let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
    let count = app.tokenizer.vocab_size();
    id.filter(|&id| (id as usize) < count).ok_or_else(|| {
        ApiError::field(
            name,
            format!("{value} is no token: they are 0 to {}", count - 1),
        )
    })
}

/// Creates the job of a completion.
pub fn job(context: &RequestContext, body: &Value) -> Result<(Job, bool)> {
    let fields = Fields::new(body)?;
    let (prompts, is_list) = prompts(context, &fields)?;
    let job = Job::new(context, &fields, prompts, ChatExtras::default())?;
    let is_list = is_list || job.requests.len() > 1;
    Ok((job, is_list))
}

/// Creates the job of an OpenAI completion, which may echo its prompt.
pub fn openai_job(context: &RequestContext, body: &Value) -> Result<Job> {
    let (mut job, _) = job(context, body)?;
    let fields = Fields::new(body)?;
    if !fields.boolean(&["echo"], false)? {
        return Ok(job);
    }
    if let Some(kind) = job.requests.first().and_then(|one| one.probabilities) {
        let ProbabilityKind::Model(count) = kind else {
            let message = "a prompt was not drawn: it has no probabilities after sampling";
            return Err(ApiError::field("post_sampling_probs", message));
        };
        job.has_prompt_logprobs = true;
        for request in &mut job.requests {
            request.prompt_logprobs = Some(count);
            let size = Choice::size_of_prompt(request.prompt.len(), count);
            context.account.charge("logprobs", size)?;
        }
    }
    let texts: Vec<String> = match fields.get(&["prompt"]) {
        Some((_, Value::String(text))) => vec![text.clone()],
        Some((_, Value::Array(list))) if list.iter().all(Value::is_string) => {
            let texts = list.iter().filter_map(Value::as_str);
            texts.map(str::to_owned).collect()
        }
        _ => Vec::new(),
    };
    // The choices of a prompt are adjacent.
    let count = texts.len().max(1);
    let each = (job.requests.len() / count).max(1);
    job.echo = if texts.is_empty() {
        let prompts = job.requests.iter();
        prompts
            .map(|request| context.text_of(&request.prompt))
            .collect()
    } else {
        texts
            .iter()
            .flat_map(|text| std::iter::repeat_n(text.clone(), each))
            .collect()
    };
    Ok(job)
}

/// Creates the job of an infill.
pub fn infill(context: &RequestContext, body: &Value) -> Result<(Job, bool)> {
    let fields = Fields::new(body)?;
    let [Some(prefix), Some(suffix), Some(middle)] = context.tokenizer.fill_in() else {
        return Err(ApiError::not_supported(
            "infill is not supported by this model: its vocabulary has no tokens for prefix, suffix and middle",
        ));
    };
    let needed = |name: &'static str| {
        let text = fields.text(&[name])?;
        text.ok_or_else(|| ApiError::field(name, "is missing: it must be a string"))
    };
    let (before, after) = (needed("input_prefix")?, needed("input_suffix")?);
    let own = fields.text(&["prompt"])?.unwrap_or_default();
    let tokenize = |field: &str, text: &str| context.tokenize(field, text, false, false);
    let mut extra = Vec::new();
    for (i, entry) in fields
        .list("input_extra")?
        .unwrap_or_default()
        .iter()
        .enumerate()
    {
        let place = format!("input_extra[{i}]");
        let entry = Fields::from_value(&place, entry)?;
        let text = entry.required_text("text")?;
        let name = entry.text(&["filename"])?.unwrap_or("tmp");
        context.check_length(&place, text)?;
        let snippet = format!("\n\n--- snippet ---\n\n{name}\n{text}");
        extra.extend(tokenize(&place, &snippet)?);
    }
    context.check_length("input_prefix", before)?;
    context.check_length("input_suffix", after)?;
    let mut tokens: Vec<u32> = context
        .tokenizer
        .bos()
        .filter(|_| context.tokenizer.adds_bos())
        .into_iter()
        .collect();
    tokens.extend(extra);
    tokens.push(prefix);
    tokens.extend(tokenize("input_prefix", before)?);
    tokens.push(suffix);
    tokens.extend(tokenize("input_suffix", after)?);
    tokens.push(middle);
    tokens.extend(tokenize("prompt", own)?);
    let job = Job::new(context, &fields, vec![tokens.into()], ChatExtras::default())?;
    let is_list = job.requests.len() > 1;
    Ok((job, is_list))
}

/// Sends an answer in llama-server's format.
pub struct NativeEncoder {
    pub job: Job,
    pub is_list: bool,
}

/// Returns llama-server's final object.
pub fn whole(choice: &Choice, job: &Job) -> Value {
    let mut whole = ended(choice, job, &choice.text);
    if job.return_tokens {
        whole["tokens"] = choice.tokens.iter().map(|token| token.id).collect();
    }
    if job.n_probs > 0 {
        let tokens = choice.tokens.iter();
        let tokens = tokens.filter_map(|token| choice.probabilities(token, job.post_sampling));
        whole["completion_probabilities"] = tokens.collect();
    }
    whole
}

fn ended(choice: &Choice, job: &Job, content: &str) -> Value {
    let word = match choice.reason {
        Some(Finish::StopString(number)) => job.stops.get(number).map_or("", String::as_str),
        _ => "",
    };
    json!({
        "index": choice.index,
        "content": content,
        "tokens": [],
        "id_slot": choice.slot,
        "stop": true,
        "model": job.model,
        "tokens_predicted": choice.counts.generated,
        "tokens_evaluated": choice.counts.prompt,
        "generation_settings": *job.settings,
        "prompt": choice.prompt_text(),
        "has_new_line": choice.text.contains('\n'),
        "truncated": choice.is_truncated(),
        "stop_type": choice.stop_type(),
        "stopping_word": word,
        "tokens_cached": choice.counts.prompt + choice.counts.generated.saturating_sub(1),
        "timings": choice.timings(),
        "cache_miss": choice.cache_miss(),
    })
}

/// Keeps only the members `names`. A name with a slash refers to a member of a nested object.
fn only(value: &Value, names: &[String]) -> Value {
    if names.is_empty() {
        return value.clone();
    }
    let mut chosen = Map::new();
    for name in names {
        let mut parts = name.split('/');
        let found = parts.try_fold(value, |value, part| value.get(part));
        if let Some(found) = found {
            chosen.insert(name.clone(), found.clone());
        }
    }
    chosen.into()
}

impl ResponseEncoder for NativeEncoder {
    fn update(&mut self, choice: &Choice, update: &Update, out: &mut Frames) {
        let part = |content: &str, tokens: Value| {
            json!({
                "index": choice.index,
                "content": content,
                "tokens": tokens,
                "stop": false,
                "id_slot": choice.slot,
                "tokens_predicted": choice.counts.generated,
                "tokens_evaluated": choice.counts.prompt,
            })
        };
        match update {
            Update::Progress(found) => {
                let mut chunk = part("", json!([]));
                chunk["prompt_progress"] = progress(found);
                if self.job.timings_per_token {
                    chunk["timings"] = progress_timings(found);
                }
                out.data(&chunk);
            }
            Update::Token { token, text } if !choice.is_end_token(token.id) => {
                let mut chunk = part(text, json!([token.id]));
                if self.job.n_probs > 0 {
                    let found = choice.probabilities(token, self.job.post_sampling);
                    chunk["completion_probabilities"] = found.into_iter().collect();
                }
                if self.job.timings_per_token {
                    chunk["timings"] = choice.timings();
                }
                out.data(&only(&chunk, &self.job.response_fields));
            }
            Update::Finished => {
                let rest = choice.rest();
                out.data(&only(
                    &ended(choice, &self.job, rest),
                    &self.job.response_fields,
                ));
            }
            _ => {}
        }
    }

    fn end(&mut self, _choices: &[Choice], _out: &mut Frames) {}

    fn whole(&mut self, choices: &[Choice]) -> Value {
        let each = choices.iter();
        let mut each =
            each.map(|choice| only(&whole(choice, &self.job), &self.job.response_fields));
        if self.is_list {
            each.collect()
        } else {
            each.next().unwrap_or_default()
        }
    }
}
