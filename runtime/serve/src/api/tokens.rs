//! Tokenization, detokenization, and chat templates.

use crate::api::native::token;
use crate::app::App;
use crate::chat::Conversation;
use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::images::MARKER;
use serde_json::{Value, json};

/// Maximum bytes that a token and its piece take as JSON, besides the piece.
const PIECE: usize = 800;

/// Returns vLLM's description of the tokenizer, from which evaluators learn that this server can
/// tokenize for them.
pub fn info(app: &App) -> Value {
    let tokenizer = &app.tokenizer;
    let text = |token: Option<u32>| token.map(|token| app.text_of(&[token]));
    json!({
        "bos_token": text(tokenizer.bos()),
        "eos_token": text(tokenizer.eos()),
        "add_bos_token": tokenizer.adds_bos(),
        "chat_template": app.template.source(false),
        "model_max_length": max_model_len(app),
    })
}

/// Returns the context of a request; null without an engine.
fn max_model_len(app: &App) -> Value {
    let limits = app.handle.as_ref().map(|handle| handle.limits());
    limits.map(|limits| limits.context).into()
}

/// Tokenizes `content`, as llama-server does, or `prompt` or `messages`, as vLLM does.
pub fn tokenize(context: &RequestContext, body: &Value) -> Result<Value> {
    let fields = Fields::new(body)?;
    let is_vllm = !fields.has("content") && (fields.has("prompt") || fields.has("messages"));
    if !is_vllm {
        let tokens = tokens_of_text(context, &fields, false)?;
        if !fields.boolean(&["with_pieces"], false)? {
            return Ok(json!({"tokens": tokens}));
        }
        context
            .account
            .charge("with_pieces", tokens.len().saturating_mul(PIECE))?;
        let pieces = tokens
            .iter()
            .map(|&id| json!({"id": id, "piece": piece(context, id)}));
        return Ok(json!({"tokens": pieces.collect::<Value>()}));
    }
    let tokens = if fields.has("prompt") {
        tokens_of_text(context, &fields, true)?
    } else {
        of_conversation(context, body)?
    };
    let mut strings = Value::Null;
    if fields.boolean(&["return_token_strs"], false)? {
        context
            .account
            .charge("return_token_strs", tokens.len().saturating_mul(PIECE))?;
        let texts = tokens.iter().map(|&id| context.text_of(&[id]));
        strings = texts.collect();
    }
    Ok(json!({
        "count": tokens.len(),
        "max_model_len": max_model_len(context),
        "tokens": tokens,
        "token_strs": strings,
    }))
}

/// Returns the text of a token, or its bytes if they are no UTF-8.
fn piece(app: &App, token: u32) -> Value {
    let bytes = app.tokenizer.token_to_piece(token, true);
    let bytes = bytes.unwrap_or_default();
    match std::str::from_utf8(bytes) {
        Ok(text) => json!(text),
        Err(_) => json!(bytes),
    }
}

/// Returns the tokens of `content` or `prompt`.
fn tokens_of_text(context: &RequestContext, fields: &Fields, is_vllm: bool) -> Result<Vec<u32>> {
    let of_prompt = fields.boolean(&["add_special_tokens"], true)?;
    let of_content = fields.boolean(&["add_special"], false)?;
    let add_special = if is_vllm { of_prompt } else { of_content };
    let parse_special = fields.boolean(&["parse_special"], true)?;
    match fields.get(&["content", "prompt"]) {
        None => Ok(Vec::new()),
        Some((name, Value::String(text))) => {
            if text.len() > context.options.body_limit {
                return Err(ApiError::field(name, "is too long"));
            }
            context.tokenize(name, text, add_special, parse_special)
        }
        Some((name, Value::Array(list))) => {
            let mut tokens = Vec::new();
            for (i, part) in list.iter().enumerate() {
                match part {
                    Value::String(text) => {
                        let special = add_special && i == 0;
                        tokens.extend(context.tokenize(name, text, special, parse_special)?);
                    }
                    other => tokens.push(token(context, &format!("{name}[{i}]"), other)?),
                }
            }
            Ok(tokens)
        }
        Some((name, _)) => Err(ApiError::field(
            name,
            "must be a string, or a list of strings and tokens",
        )),
    }
}

pub fn detokenize(context: &RequestContext, body: &Value) -> Result<Value> {
    let fields = Fields::new(body)?;
    let list = fields
        .list("tokens")?
        .unwrap_or_default()
        .iter()
        .enumerate();
    let tokens = list.map(|(i, value)| token(context, &format!("tokens[{i}]"), value));
    let tokens: Vec<u32> = tokens.collect::<Result<_>>()?;
    let pieces = tokens
        .iter()
        .map(|&token| context.tokenizer.token_to_piece(token, true));
    let bytes = pieces.flatten().map(<[u8]>::len).sum::<usize>();
    // The text, its copies in the answer, and the answer as JSON with escapes.
    context.account.charge("tokens", bytes.saturating_mul(16))?;
    let text = context.text_of(&tokens);
    // llama-server's name of the text, and vLLM's.
    Ok(json!({"content": text, "prompt": text}))
}

pub fn apply_template(context: &RequestContext, body: &Value) -> Result<Value> {
    let fields = Fields::new(body)?;
    let conversation = Conversation::read(context, &fields)?;
    let text = conversation.prompt(context)?.text();
    // The text is for requests that send the images with it.
    let text = text.replace(conversation.images.marker(), MARKER);
    // Tokenizing the prompt adds the BOS token.
    let bos = context
        .tokenizer
        .bos()
        .filter(|_| context.tokenizer.adds_bos());
    let bos = bos
        .map(|token| context.text_of(&[token]))
        .filter(|bos| !bos.is_empty());
    let rest = bos.and_then(|bos| text.strip_prefix(bos.as_str()));
    Ok(json!({"prompt": rest.unwrap_or(&text)}))
}

/// Returns the tokens of a conversation.
pub fn of_conversation(context: &RequestContext, body: &Value) -> Result<Vec<u32>> {
    let conversation = Conversation::read(context, &Fields::new(body)?)?;
    Ok(conversation.tokens(context)?.1.tokens)
}

/// Counts the tokens of a conversation.
pub fn count(context: &RequestContext, body: &Value) -> Result<Value> {
    Ok(json!({"input_tokens": of_conversation(context, body)?.len()}))
}
