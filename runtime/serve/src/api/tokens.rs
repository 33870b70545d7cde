//! Text to tokens and back, and conversations to prompts.

use crate::api::native::token;
use crate::app::App;
use crate::chat::Conversation;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use serde_json::{Value, json};

pub fn tokenize(app: &App, body: &Value) -> Result<Value> {
    let fields = Fields::new(body)?;
    let add_special = fields.boolean(&["add_special"], false)?;
    let parse_special = fields.boolean(&["parse_special"], true)?;
    let with_pieces = fields.boolean(&["with_pieces"], false)?;
    let tokens = match fields.get(&["content"]) {
        None => Vec::new(),
        Some((name, Value::String(text))) => {
            if text.len() > app.options.body_limit {
                return Err(ApiError::field(name, "is too long"));
            }
            app.tokenizer.tokenize(text, add_special, parse_special)?
        }
        Some((name, Value::Array(list))) => {
            let mut tokens = Vec::new();
            for (i, part) in list.iter().enumerate() {
                match part {
                    Value::String(text) => {
                        let special = add_special && i == 0;
                        tokens.extend(app.tokenizer.tokenize(text, special, parse_special)?);
                    }
                    other => tokens.push(token(app, &format!("{name}[{i}]"), other)?),
                }
            }
            tokens
        }
        Some((name, _)) => {
            return Err(ApiError::field(
                name,
                "must be a string, or a list of strings and tokens",
            ));
        }
    };
    if !with_pieces {
        return Ok(json!({"tokens": tokens}));
    }
    let pieces = tokens.iter().map(|&id| {
        let bytes = app.tokenizer.token_to_piece(id, true).unwrap_or_default();
        let piece = match std::str::from_utf8(bytes) {
            Ok(text) => json!(text),
            Err(_) => json!(bytes),
        };
        json!({"id": id, "piece": piece})
    });
    Ok(json!({"tokens": pieces.collect::<Vec<_>>()}))
}

pub fn detokenize(app: &App, body: &Value) -> Result<Value> {
    let fields = Fields::new(body)?;
    let list = fields
        .list("tokens")?
        .unwrap_or_default()
        .iter()
        .enumerate();
    let tokens = list.map(|(i, value)| token(app, &format!("tokens[{i}]"), value));
    let tokens: Vec<u32> = tokens.collect::<Result<_>>()?;
    Ok(json!({"content": app.text_of(&tokens)}))
}

pub fn apply_template(app: &App, body: &Value) -> Result<Value> {
    let fields = Fields::new(body)?;
    let conversation = Conversation::read(app, &fields)?;
    let text = conversation.prompt(app)?.text();
    // Whoever turns it into tokens gets the first one by that.
    let bos = app.tokenizer.bos().filter(|_| app.tokenizer.adds_bos());
    let bos = bos
        .map(|token| app.text_of(&[token]))
        .filter(|bos| !bos.is_empty());
    let rest = bos.and_then(|bos| text.strip_prefix(bos.as_str()));
    Ok(json!({"prompt": rest.unwrap_or(&text)}))
}

/// How many tokens a conversation is.
pub fn count(app: &App, body: &Value) -> Result<Value> {
    let fields = Fields::new(body)?;
    let conversation = Conversation::read(app, &fields)?;
    let (_, tokens) = conversation.tokens(app)?;
    Ok(json!({"input_tokens": tokens.len()}))
}
