//! The one translation of requests of all interfaces into those of the engine.

use crate::api::native::MOST_TEXTS;
use crate::app::App;
use crate::chance;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use samite_chat::{AnswerOptions, Format, ReasoningFormat};
use samite_grammar::{Grammar, GrammarError, Lazy, Trigger};
use samite_requests::{CacheWish, Request, Shift, Wanted};
use samite_text::{Constraint, SamplerParams, Stage};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Most strings that end a text.
const MOST_STOPS: usize = 64;

/// What an answer is parsed by, where it is one of a conversation.
#[derive(Clone, Debug)]
pub struct Parsing {
    pub format: &'static Format,
    pub options: AnswerOptions,
    pub generation_prompt: String,
}

/// What is asked for, in the engine's words, and how it is told.
#[derive(Clone, Debug)]
pub struct Job {
    pub requests: Vec<Request>,
    /// By request: the text of its prompt; made when somebody wants it.
    pub parsing: Option<Parsing>,
    /// What llama-server calls the generation settings.
    pub settings: Value,
    pub is_stream: bool,
    pub include_usage: bool,
    pub timings_per_token: bool,
    pub return_tokens: bool,
    pub verbose: bool,
    /// Whether probabilities are those that tokens were drawn by.
    pub post_sampling: bool,
    pub n_probs: usize,
    pub response_fields: Vec<String>,
    pub stops: Vec<String>,
    /// What completions begin with: the texts of their prompts, if they are wanted.
    pub echo: Vec<String>,
    pub ping_seconds: u64,
    /// The model's name, as answers have it.
    pub model: String,
}

/// What a text keeps to, as requests say it.
#[derive(Clone, Debug)]
pub enum Form {
    Free,
    Schema(Value),
    Gbnf(String),
    /// Calls of tools; only them, if one is demanded.
    Calls {
        grammar: Grammar,
        triggers: Vec<Trigger>,
    },
}

/// What a conversation adds to a request.
#[derive(Default)]
pub struct ChatExtras {
    pub parsing: Option<Parsing>,
    pub shown: Vec<u32>,
    /// What the model writes before the part that a grammar is for.
    pub before_content: Option<&'static str>,
    /// A grammar that the conversation demands, such as that of calls.
    pub form: Option<Form>,
}

fn grammar_error(field: &str, error: &GrammarError) -> ApiError {
    ApiError::field(field, error)
}

/// Reads what a text is to keep to: `json_schema`, `grammar`, and OpenAI's `response_format`.
pub fn form(fields: &Fields<'_>) -> Result<(&'static str, Form)> {
    if let Some((_, schema)) = fields.get(&["json_schema"]) {
        if fields.has("grammar") {
            return Err(ApiError::field(
                "grammar",
                "a text keeps to \"json_schema\" or to \"grammar\", not to both",
            ));
        }
        return Ok(("json_schema", Form::Schema(schema.clone())));
    }
    if let Some(text) = fields.text(&["grammar"])?.filter(|text| !text.is_empty()) {
        return Ok(("grammar", Form::Gbnf(text.to_owned())));
    }
    let Some(format) = fields.fields("response_format")? else {
        return Ok(("response_format", Form::Free));
    };
    let any_object = || json!({"type": "object"});
    let form = match format.text(&["type"])?.unwrap_or("text") {
        "text" => Form::Free,
        "json_object" => match format.get(&["schema"]) {
            Some((_, schema)) => Form::Schema(schema.clone()),
            None => Form::Schema(any_object()),
        },
        "json_schema" => {
            let inner = format.fields("json_schema")?;
            let schema = inner.and_then(|inner| inner.get(&["schema"]));
            let schema = schema.or_else(|| format.get(&["schema"]));
            Form::Schema(schema.map_or_else(any_object, |(_, schema)| schema.clone()))
        }
        other => {
            return Err(ApiError::field(
                "response_format",
                format!("\"type\" must be text, json_object or json_schema, and is \"{other}\""),
            ));
        }
    };
    Ok(("response_format", form))
}

/// What a text keeps to.
fn constraint(
    app: &App,
    field: &str,
    form: &Form,
    before: Option<&'static str>,
) -> Result<Option<Box<dyn Constraint>>> {
    let grammar = match form {
        Form::Free => return Ok(None),
        Form::Schema(schema) => match schema {
            Value::Object(_) | Value::Bool(_) => {
                let schema = match schema {
                    Value::Object(members) if members.is_empty() => json!({"type": "object"}),
                    other => other.clone(),
                };
                Grammar::json_schema(&schema.to_string())
            }
            other => {
                return Err(ApiError::field(
                    field,
                    format!(
                        "a schema is an object, and this is {}",
                        crate::fields::kind(other)
                    ),
                ));
            }
        },
        Form::Gbnf(text) => Grammar::gbnf(text),
        Form::Calls { grammar, .. } => Ok(grammar.clone()),
    };
    let grammar = grammar.map_err(|error| grammar_error(field, &error))?;
    let _turn = app.compiling.begin()?;
    // What lets no text begin is found now, and not when the answer begins.
    grammar
        .check()
        .map_err(|error| grammar_error(field, &error))?;
    let mut constraint = grammar
        .constraint(app.vocabulary()?)
        .map_err(|error| grammar_error(field, &error))?;
    // So is what is too large to be followed at once.
    constraint
        .mask()
        .map_err(|error| ApiError::field(field, error))?;
    let lazy = match form {
        Form::Calls { triggers, .. } if !triggers.is_empty() => {
            let lazy = Lazy::new(constraint, triggers);
            let lazy = lazy.map_err(|error| grammar_error(field, &error))?;
            return Ok(Some(Box::new(lazy.sleep_until(before.unwrap_or_default()))));
        }
        _ => before,
    };
    Ok(Some(match lazy {
        None => Box::new(constraint),
        Some(mark) => {
            let lazy = Lazy::new(constraint, &[Trigger::After(mark.to_owned())]);
            Box::new(lazy.map_err(|error| grammar_error(field, &error))?)
        }
    }))
}

/// How tokens are chosen.
fn sampling(app: &App, fields: &Fields<'_>) -> Result<SamplerParams> {
    const ANY: f64 = f32::MAX as f64;
    let defaults = &app.options.sampling;
    let float = |names: &[&str], least: f64, most: f64, default: f32| {
        let value = fields.number(names, least, most)?;
        Ok::<f32, ApiError>(value.map_or(default, |value| value as f32))
    };
    // -1, and for some 0, means all there are.
    let count = |names: &[&str], default: usize, all: usize| {
        let value = fields.integer(names, -1, i64::from(i32::MAX))?;
        Ok::<usize, ApiError>(match value {
            None => default,
            Some(value) => usize::try_from(value).unwrap_or(all),
        })
    };
    let mut params = SamplerParams {
        temperature: float(&["temperature"], 0.0, ANY, defaults.temperature)?,
        dynatemp_range: float(&["dynatemp_range"], 0.0, ANY, defaults.dynatemp_range)?,
        dynatemp_exponent: float(&["dynatemp_exponent"], 0.0, ANY, defaults.dynatemp_exponent)?,
        top_k: count(&["top_k"], defaults.top_k, 0)?,
        top_p: float(&["top_p"], 0.0, 1.0, defaults.top_p)?,
        min_p: float(&["min_p"], 0.0, 1.0, defaults.min_p)?,
        typical_p: float(&["typical_p", "typ_p"], 0.0, 1.0, defaults.typical_p)?,
        top_n_sigma: float(&["top_n_sigma"], -ANY, ANY, defaults.top_n_sigma)?,
        xtc_probability: float(&["xtc_probability"], 0.0, 1.0, defaults.xtc_probability)?,
        xtc_threshold: float(&["xtc_threshold"], 0.0, 1.0, defaults.xtc_threshold)?,
        repeat_penalty: float(
            &["repeat_penalty", "repetition_penalty"],
            f64::from(f32::MIN_POSITIVE),
            ANY,
            defaults.repeat_penalty,
        )?,
        frequency_penalty: float(
            &["frequency_penalty"],
            -ANY,
            ANY,
            defaults.frequency_penalty,
        )?,
        presence_penalty: float(&["presence_penalty"], -ANY, ANY, defaults.presence_penalty)?,
        last_n: count(&["repeat_last_n"], defaults.last_n, usize::MAX)?,
        dry_multiplier: float(&["dry_multiplier"], 0.0, ANY, defaults.dry_multiplier)?,
        dry_base: float(&["dry_base"], 0.0, ANY, defaults.dry_base)?,
        dry_allowed_length: count(&["dry_allowed_length"], defaults.dry_allowed_length, 0)?,
        min_keep: count(&["min_keep"], defaults.min_keep, 0)?,
        dry_last_n: count(&["dry_penalty_last_n"], defaults.dry_last_n, usize::MAX)?,
        mirostat: fields
            .count(&["mirostat"], 2)?
            .map_or(defaults.mirostat, |version| version as u8),
        mirostat_tau: float(&["mirostat_tau"], 0.0, ANY, defaults.mirostat_tau)?,
        mirostat_eta: float(&["mirostat_eta"], 0.0, ANY, defaults.mirostat_eta)?,
        adaptive_target: float(&["adaptive_target"], -ANY, 1.0, defaults.adaptive_target)?,
        adaptive_decay: float(&["adaptive_decay"], 0.0, 0.99, defaults.adaptive_decay)?,
        seed: match fields.seed("seed")? {
            None => app.options.seed.unwrap_or_else(chance::seed),
            // -1 is any seed, also as 32 bits.
            Some(u64::MAX | 0xffff_ffff) => chance::seed(),
            Some(seed) => seed,
        },
        ..defaults.clone()
    };
    // A base below 1 would reward repetition: it counts as none given.
    if params.dry_base < 1.0 {
        params.dry_base = defaults.dry_base;
    }
    if fields.has("dry_sequence_breakers") {
        params.dry_breakers = fields.texts("dry_sequence_breakers", 64)?;
        if params.dry_breakers.iter().any(|text| text.len() > 1024) {
            let message = "a text has more than 1024 bytes";
            return Err(ApiError::field("dry_sequence_breakers", message));
        }
        if params.dry_breakers.is_empty() {
            return Err(ApiError::field("dry_sequence_breakers", "it is empty"));
        }
    }
    match fields.get(&["samplers"]) {
        None => {}
        Some((_, Value::String(letters))) => {
            params.stages = Stage::parse_letters(letters)
                .map_err(|error| ApiError::field("samplers", error))?;
        }
        Some(_) => {
            let names = fields.texts("samplers", 32)?;
            params.stages = Stage::parse_list(&names.join(";"))
                .map_err(|error| ApiError::field("samplers", error))?;
        }
    }
    bias(app, fields, &mut params)?;
    if fields.boolean(&["ignore_eos"], false)? {
        let ends = app.tokenizer.eog_tokens().iter();
        let ends = ends.map(|&token| (token, f32::NEG_INFINITY));
        params.logit_bias.extend(ends);
    }
    Ok(params)
}

/// What is added to logits: `[[token or text, number or false]]`, or `{token or text: number}`.
fn bias(app: &App, fields: &Fields<'_>, params: &mut SamplerParams) -> Result<()> {
    let Some((name, value)) = fields.get(&["logit_bias"]) else {
        return Ok(());
    };
    let wrong = |what: &str| ApiError::field(name, what);
    let mut pairs: Vec<(Value, &Value)> = Vec::new();
    match value {
        Value::Object(map) => {
            for (token, bias) in map {
                let id = token.parse::<u32>().map(Value::from);
                pairs.push((id.unwrap_or_else(|_| token.clone().into()), bias));
            }
        }
        Value::Array(list) => {
            for pair in list {
                match pair.as_array().map(Vec::as_slice) {
                    Some([token, bias]) => pairs.push((token.clone(), bias)),
                    _ => return Err(wrong("each entry must be a token and a number")),
                }
            }
        }
        _ => return Err(wrong("must be a list of pairs, or an object")),
    }
    if pairs.len() > 4096 {
        return Err(wrong("4096 entries are allowed"));
    }
    for (token, bias) in pairs {
        let bias = match bias {
            Value::Bool(false) => f32::NEG_INFINITY,
            other => match other.as_f64() {
                Some(number) if number.is_finite() => number as f32,
                _ => return Err(wrong("what is added must be a number, or false for never")),
            },
        };
        match token {
            Value::String(text) => {
                app.check_length(name, &text)?;
                let tokens = app.tokenizer.tokenize(&text, false, false)?;
                params
                    .logit_bias
                    .extend(tokens.into_iter().map(|token| (token, bias)));
            }
            other => {
                let id = other.as_u64().and_then(|id| u32::try_from(id).ok());
                let id = id.filter(|&id| (id as usize) < app.tokenizer.vocab_size());
                let id = id.ok_or_else(|| wrong(&format!("there is no token {other}")))?;
                params.logit_bias.push((id, bias));
            }
        }
    }
    Ok(())
}

/// The shares of adapters that a request asks for: `[{id, scale}]`; those not named have none.
fn lora(app: &App, fields: &Fields<'_>) -> Result<Option<Vec<f32>>> {
    match fields.get(&["lora"]) {
        None => Ok(None),
        Some((name, value)) => shares(app, name, value).map(Some),
    }
}

/// Shares of adapters from a list of `{id, scale}`.
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
        let entry = Fields::of(name, entry)?;
        let id = entry.count(&["id"], usize::MAX)?;
        let scale = entry.number(&["scale"], f64::from(f32::MIN), f64::from(f32::MAX))?;
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

impl Job {
    /// A job with these prompts.
    pub fn new(
        app: &App,
        fields: &Fields<'_>,
        prompts: Vec<Vec<u32>>,
        extras: ChatExtras,
    ) -> Result<Self> {
        let limits = app.handle()?.limits();
        let most = i64::from(i32::MAX);
        let wanted = fields.integer(
            &["n_predict", "max_completion_tokens", "max_tokens"],
            -1,
            most,
        )?;
        let max_tokens = match wanted {
            None => app.options.max_tokens,
            Some(count) => usize::try_from(count).ok(),
        };
        refuse_unknown_shapes(fields)?;
        let choices = match fields.get(&["n_cmpl", "n"]) {
            None => 1,
            Some((name, _)) => fields
                .integer(&[name], 1, limits.slots as i64)?
                .map_or(1, |count| count as usize),
        };
        // Candidates that are not told would have to be compared: there are none.
        if let Some(best) = fields.integer(&["best_of"], 1, most)?
            && best as usize != choices
        {
            let message = format!("must be \"n\", here {choices}: all texts are told");
            return Err(ApiError::field("best_of", message));
        }
        let keep = fields.integer(&["n_keep"], -1, most)?;
        let discard = fields.count(&["n_discard"], most as usize)?;
        let shift = app.options.shift.map(|keep| Shift {
            keep,
            discard: discard.filter(|&count| count > 0),
        });
        let is_chat = extras.parsing.is_some();
        let (n_probs, post_sampling) = probabilities(fields)?;
        let stops = fields.texts("stop", MOST_STOPS)?;
        let (mut name, own_form) = form(fields)?;
        let form = match (&own_form, extras.form) {
            (Form::Free, Some(form)) => {
                name = "tools";
                form
            }
            (_, Some(_)) => {
                return Err(ApiError::field(
                    name,
                    "a text that keeps to a format cannot call tools at the same time",
                ));
            }
            (_, None) => own_form,
        };
        let constraint = constraint(app, name, &form, extras.before_content)?;
        let params = sampling(app, fields)?;
        let shares = lora(app, fields)?;
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
            Some(options) => options.boolean(&["include_usage"], is_chat)?,
            None => is_chat,
        };
        let mut request = Request {
            max_tokens,
            stop: stops.clone(),
            shown: extras.shown,
            constraint,
            probabilities: match (n_probs, post_sampling) {
                (None, _) => None,
                (Some(count), false) => Some(Wanted::Model(count)),
                (Some(count), true) => Some(Wanted::Drawn(count)),
            },
            adapters: Some(app.adapters(&shares.unwrap_or_else(|| app.shares()))),
            cache: CacheWish {
                reuse: fields.boolean(&["cache_prompt"], app.options.cache_prompt)?,
                ..CacheWish::default()
            },
            deadline: deadline("t_max_total_ms")?,
            writing_time: deadline("t_max_predict_ms")?,
            // Several choices cannot all have one slot at the same time; they take turns.
            slot,
            tells_progress: is_stream && return_progress,
            sampling: params,
            ..Request::new(Vec::new())
        };
        let settings = settings(
            app,
            fields,
            &request,
            &form,
            is_stream,
            n_probs,
            post_sampling,
        )?;
        request.tag = app.tag(settings.clone());
        let count = prompts.len().saturating_mul(choices);
        if count > MOST_TEXTS {
            let message = format!("{MOST_TEXTS} texts at once are allowed");
            return Err(ApiError::field("prompt", message));
        }
        let mut requests = Vec::with_capacity(count);
        for prompt in prompts {
            for choice in 0..choices {
                let mut one = request.clone();
                one.sampling.seed = one.sampling.seed.wrapping_add(choice as u64);
                one.when_full = shift.map(|shift| Shift {
                    keep: match keep {
                        Some(-1) => prompt.len(),
                        Some(count) => usize::try_from(count).unwrap_or(0),
                        None => shift.keep,
                    },
                    ..shift
                });
                one.prompt.clone_from(&prompt);
                requests.push(one);
            }
        }
        Ok(Job {
            requests,
            parsing: extras.parsing,
            settings,
            is_stream,
            include_usage,
            timings_per_token: fields.boolean(&["timings_per_token"], false)?,
            return_tokens: fields.boolean(&["return_tokens"], false)?,
            verbose: fields.boolean(&["verbose"], app.options.verbose)?,
            post_sampling,
            n_probs: n_probs.unwrap_or(0),
            response_fields: fields.texts("response_fields", 256)?,
            stops,
            echo: Vec::new(),
            ping_seconds: match ping {
                None => app.options.ping_seconds,
                Some(seconds) => u64::try_from(seconds).unwrap_or(0),
            },
            model: app.model_id(),
        })
    }
}

/// Fields by which other servers give a text its form. Left unread, the text would have another one than was asked for.
fn refuse_unknown_shapes(fields: &Fields<'_>) -> Result<()> {
    const KNOWN: [(&str, &str); 12] = [
        ("functions", "use \"tools\""),
        ("function_call", "use \"tool_choice\""),
        ("guided_json", "use \"json_schema\""),
        ("guided_grammar", "use \"grammar\""),
        ("guided_regex", "use \"grammar\""),
        ("guided_choice", "use \"grammar\""),
        ("structured_outputs", "use \"json_schema\" or \"grammar\""),
        ("suffix", "use POST /infill"),
        ("min_tokens", "use \"ignore_eos\" or \"grammar\""),
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

/// How many probabilities are wanted, and whether those that tokens are drawn by.
fn probabilities(fields: &Fields<'_>) -> Result<(Option<usize>, bool)> {
    // Each takes some kilobytes of an answer.
    const MOST: usize = 100;
    let post = fields.boolean(&["post_sampling_probs"], false)?;
    let count = match fields.get(&["n_probs", "logprobs"]) {
        None => None,
        // OpenAI's conversations have a switch, and the number apart.
        Some(("logprobs", Value::Bool(is_on))) => {
            let top = fields.count(&["top_logprobs"], MOST)?;
            is_on.then(|| top.unwrap_or(0))
        }
        Some((name, _)) => fields.count(&[name], MOST)?.filter(|&count| count > 0),
    };
    if count.is_none()
        && fields
            .count(&["top_logprobs"], MOST)?
            .is_some_and(|top| top > 0)
    {
        return Err(ApiError::field(
            "top_logprobs",
            "it needs \"logprobs\" to be true",
        ));
    }
    Ok((count, post))
}

/// llama-server's generation settings.
fn settings(
    app: &App,
    fields: &Fields<'_>,
    request: &Request,
    form: &Form,
    is_stream: bool,
    n_probs: Option<usize>,
    post_sampling: bool,
) -> Result<Value> {
    let sampling = &request.sampling;
    let limit = request.max_tokens.map_or(json!(-1), |count| json!(count));
    let many =
        |count: usize| i64::try_from(count).map_or(-1, |count| count.min(i64::from(i32::MAX)));
    let bias = sampling.logit_bias.iter();
    let bias: Vec<Value> = bias
        .map(|(token, bias)| json!({"token": token, "bias": bias.is_finite().then_some(*bias)}))
        .collect();
    let grammar = match form {
        Form::Gbnf(text) => text.clone(),
        _ => String::new(),
    };
    let samplers: Vec<&str> = sampling.stages.iter().map(|stage| stage.name()).collect();
    let shares = lora(app, fields)?.unwrap_or_else(|| app.shares());
    let shares = shares.iter().enumerate();
    let lora: Vec<Value> = shares
        .map(|(id, scale)| json!({"id": id, "scale": scale}))
        .collect();
    let mut settings = Map::new();
    let mut set = |name: &str, value: Value| settings.insert(name.to_owned(), value);
    set("seed", sampling.seed.into());
    set("temperature", sampling.temperature.into());
    set("dynatemp_range", sampling.dynatemp_range.into());
    set("dynatemp_exponent", sampling.dynatemp_exponent.into());
    set("top_k", many(sampling.top_k).into());
    set("top_p", sampling.top_p.into());
    set("min_p", sampling.min_p.into());
    set("top_n_sigma", sampling.top_n_sigma.into());
    set("xtc_probability", sampling.xtc_probability.into());
    set("xtc_threshold", sampling.xtc_threshold.into());
    set("typical_p", sampling.typical_p.into());
    set("repeat_last_n", many(sampling.last_n).into());
    set("repeat_penalty", sampling.repeat_penalty.into());
    set("presence_penalty", sampling.presence_penalty.into());
    set("frequency_penalty", sampling.frequency_penalty.into());
    set("dry_multiplier", sampling.dry_multiplier.into());
    set("dry_base", sampling.dry_base.into());
    set(
        "dry_allowed_length",
        many(sampling.dry_allowed_length).into(),
    );
    set("dry_penalty_last_n", many(sampling.dry_last_n).into());
    set("dry_sequence_breakers", json!(sampling.dry_breakers));
    set("mirostat", sampling.mirostat.into());
    set("mirostat_tau", sampling.mirostat_tau.into());
    set("mirostat_eta", sampling.mirostat_eta.into());
    set("adaptive_target", sampling.adaptive_target.into());
    set("adaptive_decay", sampling.adaptive_decay.into());
    set("stop", json!(request.stop));
    set("max_tokens", limit.clone());
    set("n_predict", limit);
    set(
        "n_keep",
        fields
            .integer(&["n_keep"], -1, i64::MAX)?
            .unwrap_or(0)
            .into(),
    );
    set(
        "n_discard",
        fields
            .integer(&["n_discard"], 0, i64::MAX)?
            .unwrap_or(0)
            .into(),
    );
    set("ignore_eos", fields.boolean(&["ignore_eos"], false)?.into());
    set("stream", is_stream.into());
    set("logit_bias", bias.into());
    set("n_probs", n_probs.unwrap_or(0).into());
    set("min_keep", many(sampling.min_keep).into());
    set("grammar", grammar.into());
    set("samplers", json!(samplers));
    set(
        "timings_per_token",
        fields.boolean(&["timings_per_token"], false)?.into(),
    );
    set("post_sampling_probs", post_sampling.into());
    set("lora", lora.into());
    Ok(settings.into())
}

/// The settings of a request that says nothing.
pub fn default_settings(app: &App) -> Result<Value> {
    let nothing = Map::new();
    let nothing = Value::Object(nothing);
    let fields = Fields::new(&nothing)?;
    let request = Request {
        sampling: SamplerParams {
            seed: app.options.seed.unwrap_or(0xffff_ffff),
            ..app.options.sampling.clone()
        },
        max_tokens: app.options.max_tokens,
        ..Request::new(Vec::new())
    };
    settings(app, &fields, &request, &Form::Free, false, None, false)
}

/// How thoughts are told of, as a request says it.
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
