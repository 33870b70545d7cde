//! The generation settings of a request, in llama-server's terms.

use crate::app::App;
use crate::error::Result;
use crate::fields::Fields;
use crate::form::Form;
use crate::job::lora;
use samite_requests::Request;
use samite_text::SamplerParams;
use serde_json::{Map, Value, json};

/// Returns llama-server's generation settings.
pub fn settings(
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

/// Returns the settings of a request without any fields.
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
