//! Translates requests of all APIs into requests of the engine.

use crate::api::native::MAX_TEXTS;
use crate::app::App;
use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::form::{Form, calls_or_schema, constraint, form};
use crate::images::PromptTokens;
use crate::kv_transfer::TransferRole;
use crate::min_tokens::MinTokens;
use crate::reasoning_budget::{ReasoningBudget, ReasoningLimit};
use crate::sampling::{probabilities, sampling};
use crate::settings::settings;
use samite_chat::{AnswerOptions, AnswerParser, Format, ReasoningFormat};
use samite_core::CancelToken;
use samite_llm::ScaledAdapter;
use samite_requests::{CacheOptions, ProbabilityKind, Refusal, Request, Shift};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Maximum number of stop strings.
const MAX_STOPS: usize = 64;

/// Maximum total bytes of the stop strings. The engine's thread compares each token with them.
const MAX_STOP_BYTES: usize = 64 << 10;

/// Parser settings for the answer of a conversation.
#[derive(Clone, Debug)]
pub struct Parsing {
    pub format: &'static Format,
    pub options: AnswerOptions,
    pub generation_prompt: String,
}

impl Parsing {
    /// Returns a parser for the answer.
    pub fn parser(&self) -> AnswerParser {
        AnswerParser::new(self.format, &self.options, &self.generation_prompt)
    }
}

/// Requests for the engine, and how to send the answers.
#[derive(Clone, Debug)]
pub struct Job {
    pub requests: Vec<Request>,
    /// Stop the encoding of images.
    pub encodings: Vec<CancelToken>,
    /// Parser settings for the answers of a conversation.
    pub parsing: Option<Parsing>,
    /// Generation settings, in llama-server's terms.
    pub settings: Arc<Value>,
    pub is_stream: bool,
    pub include_usage: bool,
    pub timings_per_token: bool,
    pub return_tokens: bool,
    pub verbose: bool,
    /// True if the probabilities are those after sampling filters.
    pub post_sampling: bool,
    pub n_probs: usize,
    pub response_fields: Vec<String>,
    pub stops: Vec<String>,
    /// Texts of the prompts, if completions must echo them.
    pub echo: Vec<String>,
    /// True if the probabilities of a stream are kept to its end.
    pub keeps_probabilities: bool,
    /// True if the echoed prompts have log-probabilities.
    pub has_prompt_logprobs: bool,
    pub ping_seconds: u64,
    /// Set when the client ends the reasoning of the answer.
    pub reasoning_stop: Option<Arc<AtomicBool>>,
    /// Part of the job in a transfer of a KV cache.
    pub transfer: Option<TransferRole>,
    /// Name of the model in responses.
    pub model: String,
}

/// Additions of a conversation to a request.
#[derive(Clone, Default)]
pub struct ChatExtras {
    pub parsing: Option<Parsing>,
    pub shown: Vec<u32>,
    /// Text that the model writes before the part that a grammar covers.
    pub before_content: Option<&'static str>,
    /// Constraint of the conversation, such as the grammar of tool calls.
    pub form: Option<Form>,
    pub reasoning_limit: ReasoningLimit,
}

/// Reads the adapter scales that a request sets: `[{id, scale}]`, or one adapter by its name in the
/// field of the model. Adapters that are not listed are off.
pub fn lora(app: &App, fields: &Fields<'_>) -> Result<Option<Vec<f32>>> {
    match fields.get(&["lora"]) {
        None => Ok(adapter_as_model(app, fields).map(|number| {
            let own = app.options.adapters[number].1;
            let mut shares = vec![0.0; app.options.adapters.len()];
            // The request names this adapter, so it applies even if the server's default scale is
            // 0.
            shares[number] = if own == 0.0 { 1.0 } else { own };
            shares
        })),
        Some((name, value)) => shares(app, name, value).map(Some),
    }
}

/// Returns the index of the adapter that a request names in the field of the model.
fn adapter_as_model(app: &App, fields: &Fields<'_>) -> Option<usize> {
    let (_, name) = fields.get(&["model"])?;
    app.adapter_named(name.as_str()?)
}

/// Returns the name by which a request asks for the model, if it is one of its aliases.
fn asked_name(app: &App, fields: &Fields<'_>) -> Option<String> {
    let (_, name) = fields.get(&["model"])?;
    let mut aliases = app.options.aliases.iter();
    aliases.find(|alias| name.as_str() == Some(alias)).cloned()
}

/// Reads adapter scales from a list of `{id, scale}`.
pub fn shares(app: &App, name: &str, value: &Value) -> Result<Vec<f32>> {
    let Value::Array(list) = value else {
        return Err(ApiError::field(
            name,
            "must be a list of objects with id and scale",
        ));
    };
    let count = app.options.adapters.len();
    let mut shares = vec![0.0; count];
    for entry in list {
        let entry = Fields::from_value(name, entry)?;
        let id = entry.count(&["id"], usize::MAX)?;
        let most = f64::from(ScaledAdapter::MAX_SHARE);
        let scale = entry.number(&["scale"], -most, most)?;
        match (id.and_then(|id| shares.get_mut(id)), scale) {
            (Some(share), Some(scale)) => *share = scale as f32,
            (None, _) => {
                return Err(ApiError::field(
                    name,
                    format!("there is no adapter of this id; there are {count}"),
                ));
            }
            (_, None) => return Err(ApiError::field(name, "an entry has no \"scale\"")),
        }
    }
    Ok(shares)
}

/// Returns the bytes that each text of a job takes besides its tokens.
fn size_of_request(request: &Request, form: &Form) -> usize {
    /// Bytes of the request, its event queue, its sampler, and its HTTP state.
    const CONSTANT: usize = 16 << 10;
    let sampling = &request.sampling;
    let texts = request.stop.iter().chain(&sampling.dry_breakers);
    let texts = texts.map(|text| text.len() + size_of::<String>());
    let form = match form {
        Form::Gbnf(text) => text.len(),
        _ => 0,
    };
    // Stop strings and biases are in the request, the sampler, and the settings that slots show.
    CONSTANT + form + 8 * texts.sum::<usize>() + 64 * sampling.logit_bias.len()
}

impl Job {
    /// Creates a job with these prompts.
    pub fn new(
        context: &RequestContext,
        fields: &Fields<'_>,
        prompts: Vec<PromptTokens>,
        extras: ChatExtras,
    ) -> Result<Self> {
        let limits = context.handle()?.limits();
        // Fail before a grammar is compiled for the request.
        if let Some(prompt) = prompts
            .iter()
            .map(|prompt| prompt.tokens.len())
            .find(|&len| len >= limits.context)
        {
            let context = limits.context;
            return Err(Refusal::TooLong { prompt, context }.into());
        }
        let most = i64::from(i32::MAX);
        let wanted = fields.integer(
            &["n_predict", "max_completion_tokens", "max_tokens"],
            -1,
            most,
        )?;
        let max_tokens = match wanted {
            None => context.options.max_tokens,
            Some(count) => usize::try_from(count).ok(),
        };
        refuse_unknown_shapes(fields)?;
        let choices = fields.integer(&["n_cmpl", "n"], 1, limits.slots as i64)?;
        let choices = choices.map_or(1, |count| count as usize);
        // More candidates than choices would have to be ranked, which is unsupported.
        if let Some(best) = fields.integer(&["best_of"], 1, most)?
            && best as usize != choices
        {
            let message = format!("must be \"n\", here {choices}: all texts are told");
            return Err(ApiError::field("best_of", message));
        }
        let keep = fields.integer(&["n_keep"], -1, most)?;
        let discard = fields.count(&["n_discard"], most as usize)?;
        let shift = context.options.shift.map(|keep| Shift {
            keep,
            discard: discard.filter(|&count| count > 0),
        });
        let (n_probs, post_sampling) = probabilities(fields)?;
        let stops = fields.texts("stop", MAX_STOPS)?;
        if stops.iter().map(String::len).sum::<usize>() > MAX_STOP_BYTES {
            let message = format!("{MAX_STOP_BYTES} bytes are allowed in all strings");
            return Err(ApiError::field("stop", message));
        }
        let (mut name, own_form) = form(fields)?;
        let form = match (&own_form, extras.form) {
            (Form::Free, Some(form)) => {
                name = "tools";
                form
            }
            (Form::Schema(schema), Some(Form::Calls { grammar, triggers })) => {
                let form = calls_or_schema(context, name, schema, grammar, triggers)?;
                name = "tools";
                form
            }
            (_, Some(_)) => {
                return Err(ApiError::field(
                    name,
                    "a text that keeps to a grammar cannot call tools at the same time",
                ));
            }
            (_, None) => own_form,
        };
        let mut constraint = constraint(context, name, &form, extras.before_content)?;
        let reasoning_stop = extras.reasoning_limit.stop.clone();
        if let Some(parsing) = extras.parsing.as_ref()
            && !extras.reasoning_limit.is_none()
        {
            let shown = extras.shown.clone();
            let limit = ReasoningBudget::new(
                constraint.take(),
                &context.tokenizer,
                shown,
                parsing.parser(),
                extras.reasoning_limit,
            )?;
            constraint = Some(Box::new(limit));
        }
        if let Some(least) = fields
            .count(&["min_tokens"], most as usize)?
            .filter(|&n| n > 0)
        {
            if max_tokens.is_some_and(|most| least > most) {
                return Err(ApiError::field(
                    "min_tokens",
                    "must not exceed \"max_tokens\"",
                ));
            }
            let limit = MinTokens::new(constraint.take(), &context.tokenizer, least);
            constraint = Some(Box::new(limit));
        }
        let params = sampling(context, fields)?;
        let shares = lora(context, fields)?;
        let slot = fields.integer(&["id_slot"], -1, most)?;
        let slot = slot.and_then(|slot| usize::try_from(slot).ok());
        let deadline = |name: &str| -> Result<Option<Duration>> {
            let time = fields.integer(&[name], -1, i64::MAX)?;
            let time = time.filter(|&time| time > 0);
            Ok(time.map(|time| Duration::from_millis(time.cast_unsigned())))
        };
        let ping = fields.integer(&["sse_ping_interval"], -1, most)?;
        let is_stream = fields.boolean(&["stream"], false)?;
        let return_progress = fields.boolean(&["return_progress"], false)?;
        let stream_options = fields.fields("stream_options")?;
        let include_usage = match stream_options {
            Some(options) => options.boolean(&["include_usage"], false)?,
            None => false,
        };
        let mut request = Request {
            max_tokens,
            stop: stops.clone(),
            shown: extras.shown,
            constraint,
            probabilities: match (n_probs, post_sampling) {
                (None, _) => None,
                (Some(count), false) => Some(ProbabilityKind::Model(count)),
                (Some(count), true) => Some(ProbabilityKind::Drawn(count)),
            },
            adapters: Some(context.adapters(&shares.unwrap_or_else(|| context.shares()))),
            cache: CacheOptions {
                reuse: fields.boolean(&["cache_prompt"], context.options.cache_prompt)?,
                hold: context.transfers.is_some()
                    && TransferRole::read(fields)? == Some(TransferRole::Offers),
                salt: salt(context, fields)?,
                ..CacheOptions::default()
            },
            deadline: deadline("t_max_total_ms")?,
            decode_time: deadline("t_max_predict_ms")?,
            // Several choices cannot use one slot at the same time; they take turns.
            slot,
            reports_progress: is_stream && return_progress,
            sampling: params,
            ..Request::new(Vec::new())
        };
        let settings = settings(
            context,
            fields,
            &request,
            &form,
            is_stream,
            n_probs,
            post_sampling,
        )?;
        let settings = Arc::new(settings);
        request.tag = context.tag(&settings);
        request.owner = context.caller.owner;
        let count = prompts.len().saturating_mul(choices);
        if count > MAX_TEXTS {
            let message = format!("{MAX_TEXTS} texts at once are allowed");
            return Err(ApiError::field("prompt", message));
        }
        let each = size_of_request(&request, &form);
        context
            .account
            .charge("prompt", each.saturating_mul(count))?;
        for prompt in &prompts {
            // Three copies: the engine's, the prefix cache's, and the one in the answer.
            let bytes = size_of_val(prompt.tokens.as_slice()).saturating_mul(3 * choices);
            context.account.charge("prompt", bytes)?;
        }
        let encodings = prompts.iter().map(|prompt| prompt.encoding.clone());
        let encodings = encodings.collect();
        let mut requests = Vec::with_capacity(count);
        for prompt in prompts {
            for choice in 0..choices {
                let mut one = request.clone();
                one.sampling.seed = one.sampling.seed.wrapping_add(choice as u64);
                one.when_full = shift.map(|shift| Shift {
                    keep: match keep {
                        Some(-1) => prompt.tokens.len(),
                        Some(count) => usize::try_from(count).unwrap_or(0),
                        None => shift.keep,
                    },
                    ..shift
                });
                one.prompt.clone_from(&prompt.tokens);
                one.images.clone_from(&prompt.images);
                requests.push(one);
            }
        }
        Ok(Job {
            requests,
            encodings,
            parsing: extras.parsing,
            settings,
            is_stream,
            include_usage,
            timings_per_token: fields.boolean(&["timings_per_token"], false)?,
            return_tokens: fields.boolean(&["return_tokens"], false)?,
            verbose: fields.boolean(&["verbose"], context.options.verbose)?,
            post_sampling,
            n_probs: n_probs.unwrap_or(0),
            response_fields: fields.texts("response_fields", 256)?,
            stops,
            echo: Vec::new(),
            keeps_probabilities: false,
            has_prompt_logprobs: false,
            ping_seconds: match ping {
                None => context.options.ping_seconds,
                Some(seconds) => u64::try_from(seconds).unwrap_or(0),
            },
            reasoning_stop,
            transfer: TransferRole::read(fields)?,
            model: match adapter_as_model(context, fields)
                .and_then(|number| context.adapter_name(number))
            {
                Some(name) => name.to_owned(),
                None => asked_name(context, fields).unwrap_or_else(|| context.model_id()),
            },
        })
    }
}

/// Returns the salt of the prefix cache: of the caller, and of vLLM's `cache_salt`, if the request
/// has one.
fn salt(context: &RequestContext, fields: &Fields<'_>) -> Result<u64> {
    let own = context.salt();
    let Some(text) = fields.text(&["cache_salt"])? else {
        return Ok(own);
    };
    if text.is_empty() {
        return Err(ApiError::field("cache_salt", "must not be empty"));
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(&own.to_le_bytes());
    hasher.update(text.as_bytes());
    let hash = hasher.finalize();
    let first = std::array::from_fn(|at| hash.as_bytes()[at]);
    // 0 is the salt of requests without any.
    Ok(u64::from_le_bytes(first).max(1))
}

/// Rejects the fields that other servers use to constrain a text. Ignoring them would produce a
/// text of the wrong form.
fn refuse_unknown_shapes(fields: &Fields<'_>) -> Result<()> {
    const KNOWN: [(&str, &str); 11] = [
        ("functions", "use \"tools\""),
        ("function_call", "use \"tool_choice\""),
        ("guided_json", "use \"json_schema\""),
        ("guided_grammar", "use \"grammar\""),
        ("guided_regex", "use \"grammar\""),
        ("guided_choice", "use \"grammar\""),
        ("structured_outputs", "use \"json_schema\" or \"grammar\""),
        ("suffix", "use POST /infill"),
        ("use_beam_search", "texts are drawn"),
        ("audio", "texts are written only"),
        ("web_search_options", "nothing is fetched"),
    ];
    for (name, instead) in KNOWN {
        match fields.get(&[name]) {
            None | Some((_, Value::Bool(false))) => {}
            Some((_, Value::String(text))) if text.is_empty() => {}
            Some((_, Value::Array(list))) if list.is_empty() => {}
            Some((_, Value::Number(number))) if number.as_f64() == Some(0.0) => {}
            Some(_) => {
                return Err(ApiError::field(
                    name,
                    format!("is not supported here: {instead}"),
                ));
            }
        }
    }
    if let Some(kinds) = fields.list("modalities")?
        && kinds.iter().any(|kind| kind != "text")
    {
        return Err(ApiError::field(
            "modalities",
            "only \"text\" is supported here",
        ));
    }
    Ok(())
}

/// Reads the reasoning format of a request.
pub fn reasoning_format(app: &App, fields: &Fields<'_>) -> Result<ReasoningFormat> {
    match fields.text(&["reasoning_format"])? {
        None => Ok(app.options.reasoning),
        Some(name) => ReasoningFormat::named(name).ok_or_else(|| {
            ApiError::field(
                "reasoning_format",
                format!("must be one of {}", ReasoningFormat::NAMES.join(", ")),
            )
        }),
    }
}
