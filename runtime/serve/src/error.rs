//! Errors of requests, with their HTTP status and JSON object.

use samite_requests::{Failed, FailureKind, Refusal};
use serde_json::{Map, Value, json};

/// The reason why a request failed.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// Type of the error.
    pub kind: &'static str,
    /// Problem and remedy.
    pub message: String,
    /// Further members of the object.
    pub more: Map<String, Value>,
}

/// llama-server's type of the error for a prompt that does not fit.
const TOO_LONG: &str = "exceed_context_size_error";

pub type Result<T, E = ApiError> = std::result::Result<T, E>;

impl ApiError {
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        let kind = match status {
            400 | 405 | 408 | 413 | 415 | 431 => "invalid_request_error",
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            501 => "not_supported_error",
            429 | 503 => "unavailable_error",
            _ => "server_error",
        };
        ApiError {
            status,
            kind,
            message: message.into(),
            more: Map::new(),
        }
    }

    /// Creates the error for a path that does not support a method.
    pub fn method(method: &str, path: &str, allowed: &str) -> Self {
        let message = format!("{path} answers to {allowed}, and not to {method}");
        let mut error = ApiError::new(405, message);
        error.more.insert("allow".to_owned(), allowed.into());
        error
    }

    /// Creates the error for a server that is shutting down.
    pub fn ending() -> Self {
        ApiError::new(503, "the server is about to end")
    }

    /// Creates the error for an invalid field.
    pub fn field(field: impl Into<String>, what: impl std::fmt::Display) -> Self {
        let field = field.into();
        let mut error = ApiError::new(400, format!("\"{field}\": {what}"));
        error.more.insert("param".to_owned(), field.into());
        error
    }

    /// Returns whether the error is about this field.
    pub fn is_about(&self, field: &str) -> bool {
        self.more.get("param").and_then(Value::as_str) == Some(field)
    }

    /// Renames the field of the error, for requests that were translated from another format.
    pub fn renamed(mut self, from: &str, to: &str) -> Self {
        if self.is_about(from) {
            self.message = self.message.replacen(from, to, 1);
            self.more.insert("param".to_owned(), to.into());
        }
        self
    }

    /// Creates the error for an image that the model cannot process.
    pub fn image(field: impl Into<String>) -> Self {
        ApiError::field(
            field,
            "image input is not supported by this model: it needs an image encoder (--mmproj)",
        )
    }

    /// Creates the error for an invalid request.
    pub fn invalid(message: impl Into<String>) -> Self {
        ApiError::new(400, message)
    }

    pub fn not_supported(message: impl Into<String>) -> Self {
        ApiError::new(501, message)
    }

    /// Returns the error object of OpenAI and llama-server.
    pub fn object(&self) -> Value {
        let mut error = Map::new();
        error.insert("code".to_owned(), self.status.into());
        error.insert("message".to_owned(), self.message.clone().into());
        error.insert("type".to_owned(), self.kind.into());
        error.extend(self.more.clone());
        json!({"error": error})
    }

    /// Returns OpenAI's code of the error, from which clients of the Responses API learn that a
    /// conversation is too long.
    pub fn openai_code(&self) -> &'static str {
        match self.kind {
            TOO_LONG => "context_length_exceeded",
            other => other,
        }
    }

    /// Returns the error object of the Responses API.
    pub fn responses(&self) -> Value {
        let mut object = self.object();
        object["error"]["code"] = self.openai_code().into();
        object
    }

    /// Returns Anthropic's error object.
    pub fn anthropic(&self) -> Value {
        let kind = match self.kind {
            TOO_LONG => "invalid_request_error",
            "server_error" => "api_error",
            "unavailable_error" => "overloaded_error",
            other => other,
        };
        let number = |name: &str| self.more.get(name).and_then(Value::as_u64);
        let message = match (number("n_prompt_tokens"), number("n_ctx")) {
            // Clients read the numbers from Anthropic's words.
            (Some(prompt), Some(context)) if self.kind == TOO_LONG => format!(
                "prompt is too long: {prompt} tokens > {context} maximum: start the server with a larger --ctx-size"
            ),
            _ => self.message.clone(),
        };
        json!({"type": "error", "error": {"type": kind, "message": message}})
    }

    /// Returns Ollama's error object.
    pub fn ollama(&self) -> Value {
        json!({"error": self.message})
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Invalid { field, message } => {
                let field = match field {
                    "slot" => "id_slot",
                    other => other,
                };
                ApiError::field(field, message)
            }
            Refusal::TooLong { prompt, context } => {
                let mut error = ApiError::new(
                    400,
                    format!(
                        "the prompt ({prompt} tokens) exceeds the available context size ({context} tokens): take a shorter one, or start the server with a larger --ctx-size"
                    ),
                );
                error.kind = TOO_LONG;
                error
                    .more
                    .insert("n_prompt_tokens".to_owned(), prompt.into());
                error.more.insert("n_ctx".to_owned(), context.into());
                error
            }
            Refusal::QueueFull(_) | Refusal::Closing => ApiError::new(503, refusal.to_string()),
        }
    }
}

impl From<Failed> for ApiError {
    fn from(failed: Failed) -> Self {
        // The request's grammar became too large during generation.
        const GRAMMAR: &str = "the grammar ";
        if failed.kind == FailureKind::Sampling && failed.message.starts_with(GRAMMAR) {
            return ApiError::invalid(failed.message);
        }
        let status = match failed.kind {
            FailureKind::Cancelled | FailureKind::Closing => 503,
            FailureKind::Sampling | FailureKind::Device => 500,
        };
        ApiError::new(status, failed.message)
    }
}

impl From<samite_text::TokenizeError> for ApiError {
    fn from(error: samite_text::TokenizeError) -> Self {
        ApiError::invalid(error.to_string())
    }
}

impl From<samite_chat::TemplateError> for ApiError {
    fn from(error: samite_chat::TemplateError) -> Self {
        match error {
            samite_chat::TemplateError::Conversation { place, message } => {
                ApiError::field(place, message)
            }
            other => ApiError::invalid(other.to_string()),
        }
    }
}
