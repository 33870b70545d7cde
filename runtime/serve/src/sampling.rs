//! Sampling parameters of requests.

use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::ids;
use samite_text::{SamplerParams, Stage};
use serde_json::Value;

/// Maximum number of samplers in a chain. Each processes the whole vocabulary for every token.
const MAX_SAMPLERS: usize = 32;

/// Maximum number of entries of `logit_bias`, and of tokens in their texts.
const MAX_BIASES: usize = 4096;

/// Maximum number of probabilities per token. Each takes some kilobytes of a response.
pub const MAX_PROBABILITIES: usize = 100;

/// Reads the sampling parameters.
pub fn sampling(context: &RequestContext, fields: &Fields<'_>) -> Result<SamplerParams> {
    const ANY: f64 = f32::MAX as f64;
    let defaults = &context.options.sampling;
    let float = |names: &[&str], least: f64, most: f64, default: f32| {
        let value = fields.number(names, least, most)?;
        Ok::<f32, ApiError>(value.map_or(default, |value| value as f32))
    };
    // -1, and 0 for some fields, means all.
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
            None => context.options.seed.unwrap_or_else(ids::seed),
            // -1 means any seed, also as an unsigned 32-bit number.
            Some(u64::MAX | 0xffff_ffff) => ids::seed(),
            Some(seed) => seed,
        },
        ..defaults.clone()
    };
    // A base below 1 would reward repetition, so it counts as unset.
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
            if letters.len() > MAX_SAMPLERS {
                let message = format!("{MAX_SAMPLERS} samplers are allowed");
                return Err(ApiError::field("samplers", message));
            }
            params.stages = Stage::parse_letters(letters)
                .map_err(|error| ApiError::field("samplers", error))?;
        }
        Some(_) => {
            let names = fields.texts("samplers", MAX_SAMPLERS)?;
            params.stages = Stage::parse_list(&names.join(";"))
                .map_err(|error| ApiError::field("samplers", error))?;
        }
    }
    bias(context, fields, &mut params)?;
    if fields.boolean(&["ignore_eos"], false)? {
        let ends = context.tokenizer.eog_tokens().iter();
        let ends = ends.map(|&token| (token, f32::NEG_INFINITY));
        params.logit_bias.extend(ends);
    }
    Ok(params)
}

/// Reads logit biases: `[[token or text, number or false]]`, or `{token or text: number}`.
fn bias(context: &RequestContext, fields: &Fields<'_>, params: &mut SamplerParams) -> Result<()> {
    let Some((name, value)) = fields.get(&["logit_bias"]) else {
        return Ok(());
    };
    let wrong = |what: &str| ApiError::field(name, what);
    let mut pairs: Vec<(Value, &Value)> = Vec::new();
    match value {
        Value::Object(map) => {
            for (token, bias) in map {
                // A negative number is not a text: it names a token that does not exist.
                let id = token.parse::<i64>().map(Value::from);
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
    let too_many = || wrong(&format!("{MAX_BIASES} entries and tokens are allowed"));
    if pairs.len() > MAX_BIASES {
        return Err(too_many());
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
                let tokens = context.tokenize(name, &text, false, false)?;
                if params.logit_bias.len() + tokens.len() > MAX_BIASES {
                    return Err(too_many());
                }
                let biases = tokens.into_iter().map(|token| (token, bias));
                params.logit_bias.extend(biases);
            }
            other => {
                let id = other.as_u64().and_then(|id| u32::try_from(id).ok());
                let id = id.filter(|&id| (id as usize) < context.tokenizer.vocab_size());
                let id = id.ok_or_else(|| wrong(&format!("there is no token {other}")))?;
                params.logit_bias.push((id, bias));
            }
        }
    }
    Ok(())
}

/// Returns the number of probabilities per token, and whether they are those after sampling
/// filters.
pub fn probabilities(fields: &Fields<'_>) -> Result<(Option<usize>, bool)> {
    let post = fields.boolean(&["post_sampling_probs"], false)?;
    let top = fields.count(&["top_logprobs"], MAX_PROBABILITIES)?;
    let logprobs = match fields.get(&["logprobs"]) {
        // OpenAI's chat API has a switch and a separate number.
        Some((_, Value::Bool(is_on))) => is_on.then(|| top.unwrap_or(0)),
        // In OpenAI's completions, 0 asks for a token's own probability. In llama-server's field, it
        // asks for none.
        _ => fields.count(&["logprobs"], MAX_PROBABILITIES)?,
    };
    let count = match fields.count(&["n_probs"], MAX_PROBABILITIES)? {
        Some(count) => Some(count).filter(|&count| count > 0),
        None => logprobs,
    };
    if count.is_none() && top.is_some_and(|top| top > 0) {
        return Err(ApiError::field(
            "top_logprobs",
            "it needs \"logprobs\" to be true",
        ));
    }
    Ok((count, post))
}
