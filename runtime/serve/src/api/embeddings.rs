//! Embeddings and reranking.

use crate::api::native;
use crate::app::App;
use crate::context::RequestContext;
use crate::embedder::Embedder;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use base64::Engine as _;
use samite_llm::Normalization;
use serde_json::{Map, Value, json};

fn embedder(app: &App) -> Result<&Embedder> {
    app.embedder.as_ref().ok_or_else(|| {
        ApiError::not_supported(
            "this server does not compute embeddings: start it with --embeddings",
        )
    })
}

/// Maximum number of texts per request. OpenAI has the same limit.
const MAX_INPUTS: usize = 2048;

/// Returns the tokens of each text of a request.
fn inputs(context: &RequestContext, fields: &Fields<'_>) -> Result<Vec<Vec<u32>>> {
    let Some((name, value)) = fields.get(&["input", "content", "prompt"]) else {
        return Err(ApiError::field("input", "is missing"));
    };
    let of = |place: &str, value: &Value| {
        let tokens = match value {
            Value::String(text) => {
                context.check_length(place, text)?;
                context.tokenize(place, text, true, true)?
            }
            other => native::prompt(context, place, other)?,
        };
        if tokens.is_empty() {
            Err(ApiError::field(
                place,
                "has no tokens: the input must not be empty",
            ))
        } else {
            Ok(tokens)
        }
    };
    match value {
        Value::Array(list) if list.is_empty() => Err(ApiError::field(name, "is empty")),
        Value::Array(list) if list.iter().all(Value::is_number) => Ok(vec![of(name, value)?]),
        Value::Array(list) if list.len() > MAX_INPUTS => Err(ApiError::field(
            name,
            format!("{MAX_INPUTS} texts at once are allowed"),
        )),
        Value::Array(list) => {
            let list = list.iter().enumerate();
            list.map(|(i, value)| of(&format!("{name}[{i}]"), value))
                .collect()
        }
        other => Ok(vec![of(name, other)?]),
    }
}

fn check_lengths(embedder: &Embedder, texts: &[Vec<u32>]) -> Result<()> {
    let long = texts
        .iter()
        .map(Vec::len)
        .find(|&count| count > embedder.longest);
    match long {
        None => Ok(()),
        Some(count) => {
            let most = embedder.longest;
            let mut error = ApiError::new(
                400,
                format!(
                    "input ({count} tokens) is too large to process: it exceeds the available context size ({most} tokens); take a shorter one, or start the server with a larger --ctx-size, --batch-size and --ubatch-size"
                ),
            );
            error.kind = "exceed_context_size_error";
            error
                .more
                .insert("n_prompt_tokens".to_owned(), count.into());
            error.more.insert("n_ctx".to_owned(), most.into());
            Err(error)
        }
    }
}

fn compute(
    context: &RequestContext,
    embedder: &Embedder,
    texts: &[Vec<u32>],
) -> Result<Vec<Vec<Vec<f32>>>> {
    /// Bytes of a number: as a float, and as JSON with its text.
    const NUMBER: usize = 4 + 32 + 2 * 16;
    check_lengths(embedder, texts)?;
    let count = if embedder.is_of_tokens {
        texts.iter().map(Vec::len).sum()
    } else {
        texts.len()
    };
    let numbers = count.saturating_mul(embedder.width);
    context
        .account
        .charge("input", numbers.saturating_mul(NUMBER))?;
    let mut found = Vec::with_capacity(texts.len());
    // Other requests may run between the batches.
    for batch in batches(texts, embedder.longest) {
        let _turn = context
            .embedding_batch
            .begin_blocking(context.caller.owner)?;
        if context.cancel.is_cancelled() {
            return Err(ApiError::new(503, "the client left"));
        }
        let batch = embedder.embed(batch);
        found.extend(batch.map_err(|error| ApiError::new(500, error.to_string()))?);
    }
    Ok(found)
}

/// Splits texts into batches of at most `most` tokens, or of one text.
fn batches(texts: &[Vec<u32>], most: usize) -> impl Iterator<Item = &[Vec<u32>]> {
    let mut rest = texts;
    std::iter::from_fn(move || {
        let mut sum = 0;
        let fitting = rest.iter().take_while(|text| {
            sum += text.len();
            sum <= most
        });
        let count = fitting.count().max(1).min(rest.len());
        let (batch, after) = rest.split_at(count);
        rest = after;
        (count > 0).then_some(batch)
    })
}

fn normalization(embedder: &Embedder, fields: &Fields<'_>) -> Result<Normalization> {
    let number = fields.integer(&["embd_normalize"], -1, i64::from(i32::MAX))?;
    let Some(number) = number else {
        return Ok(embedder.normalization);
    };
    let known = i32::try_from(number)
        .ok()
        .and_then(Normalization::from_number);
    known.ok_or_else(|| ApiError::field("embd_normalize", "must be -1, 0, or the power of a norm"))
}

/// Truncates texts that are too long, but keeps the tokens that the vocabulary adds at the end.
fn cut(app: &App, embedder: &Embedder, texts: &mut [Vec<u32>]) {
    let ends = [app.tokenizer.eos(), app.tokenizer.sep()];
    for tokens in texts {
        let last = tokens.last().copied();
        if tokens.len() > embedder.longest {
            tokens.truncate(embedder.longest);
            if let (true, Some(end), Some(place)) = (ends.contains(&last), last, tokens.last_mut())
            {
                *place = end;
            }
        }
    }
}

/// Computes embeddings for OpenAI's API.
pub fn openai(context: &RequestContext, body: &Value) -> Result<Value> {
    openai_or_cut(context, body, false)
}

/// Computes [`openai`] embeddings. Truncates texts that are too long if `cuts` is set.
pub fn openai_or_cut(context: &RequestContext, body: &Value, cuts: bool) -> Result<Value> {
    let fields = Fields::new(body)?;
    let embedder = embedder(context)?;
    if embedder.is_of_tokens {
        return Err(ApiError::invalid(
            "pooling type \"none\" gives an embedding of each token, which this interface cannot tell: start the server with another --pooling, or use /embeddings",
        ));
    }
    let format = fields.text(&["encoding_format"])?.unwrap_or("float");
    if !["float", "base64"].contains(&format) {
        return Err(ApiError::field(
            "encoding_format",
            format!("must be float or base64, and is \"{format}\""),
        ));
    }
    let dimensions = fields.integer(&["dimensions"], 1, i64::from(i32::MAX))?;
    let normalization = normalization(embedder, &fields)?;
    let mut texts = inputs(context, &fields)?;
    if cuts {
        cut(context, embedder, &mut texts);
    }
    let found = compute(context, embedder, &texts)?;
    let width = found.iter().filter_map(|list| list.last()).map(Vec::len);
    if let (Some(count), Some(width)) = (dimensions, width.min())
        && usize::try_from(count).is_ok_and(|count| count > width)
    {
        let message = format!("must be at most {width}, which embeddings of this model have");
        return Err(ApiError::field("dimensions", message));
    }
    let data = found.into_iter().enumerate().map(|(index, mut list)| {
        let mut embedding = list.pop().unwrap_or_default();
        if let Some(count) = dimensions {
            embedding.truncate(usize::try_from(count).unwrap_or(usize::MAX));
        }
        normalization.apply(&mut embedding);
        let mut entry = Map::new();
        let value = match format {
            "base64" => {
                let bytes: Vec<u8> = embedding.iter().flat_map(|x| x.to_le_bytes()).collect();
                entry.insert("encoding_format".to_owned(), "base64".into());
                base64::engine::general_purpose::STANDARD
                    .encode(bytes)
                    .into()
            }
            _ => json!(embedding),
        };
        entry.insert("embedding".to_owned(), value);
        entry.insert("index".to_owned(), index.into());
        entry.insert("object".to_owned(), "embedding".into());
        Value::Object(entry)
    });
    let data: Vec<Value> = data.collect();
    let tokens: usize = texts.iter().map(Vec::len).sum();
    Ok(json!({
        "model": context.model_id(),
        "object": "list",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "data": data,
    }))
}

/// Computes embeddings for llama-server's API.
pub fn native(context: &RequestContext, body: &Value) -> Result<Value> {
    let fields = Fields::new(body)?;
    let embedder = embedder(context)?;
    let normalization = normalization(embedder, &fields)?;
    let texts = inputs(context, &fields)?;
    let found = compute(context, embedder, &texts)?;
    let entries = found.into_iter().enumerate().map(|(index, mut list)| {
        // Embeddings per token are not normalized.
        if !embedder.is_of_tokens {
            list.iter_mut()
                .for_each(|embedding| normalization.apply(embedding));
        }
        json!({"index": index, "embedding": list})
    });
    Ok(entries.collect())
}

/// Scores how well documents match a query.
pub fn rerank(context: &RequestContext, body: &Value) -> Result<Value> {
    let fields = Fields::new(body)?;
    let embedder = context
        .embedder
        .as_ref()
        .filter(|embedder| embedder.is_rank);
    let embedder = embedder.ok_or_else(|| {
        ApiError::not_supported("this server does not rank: start it with --reranking")
    })?;
    let query = fields.text(&["query"])?;
    let query = query.ok_or_else(|| ApiError::field("query", "is missing: it must be a string"))?;
    let is_tei = fields.has("texts");
    let name = if is_tei { "texts" } else { "documents" };
    let documents = match fields.list(name)? {
        Some(_) => fields.texts(name, 4096)?,
        None => Vec::new(),
    };
    if documents.is_empty() {
        return Err(ApiError::field(
            "documents",
            "must be a list of strings, and not empty",
        ));
    }
    let top = fields
        .count(&["top_n"], usize::MAX)?
        .unwrap_or(documents.len());
    let returns_text = fields.boolean(&["return_text"], false)?;
    let texts = documents
        .iter()
        .map(|document| pair(context, query, document));
    let texts: Vec<Vec<u32>> = texts.collect::<Result<_>>()?;
    let found = compute(context, embedder, &texts)?;
    let score = |list: &Vec<Vec<f32>>| list.last().and_then(|scores| scores.first()).copied();
    let mut scores: Vec<(usize, f32)> = found
        .iter()
        .map(|list| score(list).unwrap_or(0.0))
        .enumerate()
        .collect();
    scores.sort_by(|a, b| b.1.total_cmp(&a.1));
    scores.truncate(top);
    let tokens: usize = texts.iter().map(Vec::len).sum();
    if is_tei {
        let list = scores.iter().map(|&(index, score)| {
            let mut entry = json!({"index": index, "score": score});
            if returns_text {
                entry["text"] = documents[index].clone().into();
            }
            entry
        });
        return Ok(list.collect());
    }
    let results = scores
        .iter()
        .map(|&(index, score)| json!({"index": index, "relevance_score": score}));
    Ok(json!({
        "model": context.model_id(),
        "object": "list",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": results.collect::<Vec<_>>(),
    }))
}

/// Returns the tokens of a query and a document: by the template in the model's file, or with the
/// vocabulary's separator between them.
fn pair(context: &RequestContext, query: &str, document: &str) -> Result<Vec<u32>> {
    let tokenizer = &context.tokenizer;
    let key = "tokenizer.chat_template.rerank";
    let template = context.model.metadata().get::<&str>(key).ok().flatten();
    let added = [
        tokenizer.eos().filter(|_| tokenizer.adds_eos()),
        tokenizer.sep().filter(|_| tokenizer.adds_sep()),
    ];
    let between: Vec<u32> = added.into_iter().flatten().collect();
    let template = match template {
        Some(template) => template.to_owned(),
        None => format!("{{query}}{}{{document}}", context.text_of(&between)),
    };
    let length = query.len() + document.len() + template.len();
    let tokens = context.tokens("documents", length, || {
        Ok(tokenizer.tokenize_parts(filled(&template, query, document), true)?)
    })?;
    if tokens.is_empty() {
        Err(ApiError::field(
            "documents",
            "a pair of texts has no tokens",
        ))
    } else {
        Ok(tokens)
    }
}

/// Fills a query and a document into a template and returns the parts. Special tokens are
/// recognized only in parts of the template.
fn filled<'a>(template: &'a str, query: &'a str, document: &'a str) -> Vec<(&'a str, bool)> {
    let mut parts = Vec::new();
    for (i, piece) in template.split("{query}").enumerate() {
        if i > 0 {
            parts.push((query, false));
        }
        for (i, piece) in piece.split("{document}").enumerate() {
            if i > 0 {
                parts.push((document, false));
            }
            parts.push((piece, true));
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_rerank_template_yields_special_tokens() {
        let parts = filled(
            "<s>{query}</s>{document}</s>",
            "a</s>{document}",
            "b{query}",
        );
        let expected = [
            ("<s>", true),
            ("a</s>{document}", false),
            ("</s>", true),
            ("b{query}", false),
            ("</s>", true),
        ];
        assert_eq!(parts, expected);
    }
}
