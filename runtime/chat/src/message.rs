//! Conversations in the format of OpenAI's API.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Author of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessageRole {
    /// Instructions for the model.
    System,
    /// Instructions for the model, under another name.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// Result of a tool call.
    Tool,
    /// Another role, which the template may support. Its name has letters, digits, `_`, `-` and
    /// `.`.
    Other(Arc<str>),
}

impl MessageRole {
    /// Returns the name in JSON.
    pub fn name(&self) -> &str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
            Self::Other(name) => name,
        }
    }
}

impl Serialize for MessageRole {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for MessageRole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const LONGEST: usize = 64;
        let name = String::deserialize(deserializer)?;
        let known = [
            Self::System,
            Self::Developer,
            Self::User,
            Self::Assistant,
            Self::Tool,
        ];
        if let Some(role) = known.into_iter().find(|role| role.name() == name) {
            return Ok(role);
        }
        // Templates write roles between control tokens, so a role must not be able to form one.
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || name.len() > LONGEST || !name.chars().all(is_plain) {
            return Err(D::Error::custom(format_args!(
                "role \"{}\": must be 1 to {LONGEST} letters, digits, '_', '-' or '.'",
                name.escape_debug().take(LONGEST).collect::<String>()
            )));
        }
        Ok(Self::Other(name.into()))
    }
}

/// Content of a message.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// No content.
    #[default]
    None,
    /// A text.
    Text(String),
    /// Several texts and images.
    Parts(Vec<ContentPart>),
}

impl Content {
    /// Returns whether there is no content.
    pub fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Returns the text. The texts of parts are joined by newlines. Returns `None` if a part is not
    /// a text.
    pub fn text(&self) -> Option<String> {
        match self {
            Self::None => Some(String::new()),
            Self::Text(text) => Some(text.clone()),
            Self::Parts(parts) => {
                let texts = parts.iter().map(|part| match part {
                    ContentPart::Text { text } => Some(text.as_str()),
                    _ => None,
                });
                Some(texts.collect::<Option<Vec<_>>>()?.join("\n"))
            }
        }
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// A part of a message's content.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentPart {
    /// A text.
    #[serde(alias = "input_text", alias = "output_text")]
    Text {
        /// The text.
        text: String,
    },
    /// An image.
    ImageUrl {
        /// Location of the image: an object with `url`.
        image_url: Value,
    },
    /// Audio.
    InputAudio {
        /// An object with `data` and `format`.
        input_audio: Value,
    },
}

impl ContentPart {
    /// Creates a text.
    pub fn text(text: impl Into<String>) -> Self {
        ContentPart::Text { text: text.into() }
    }

    /// Creates an image at a URL, such as `data:image/png;base64,…`.
    pub fn image(url: impl Into<String>) -> Self {
        ContentPart::ImageUrl {
            image_url: json!({"url": url.into()}),
        }
    }
}

/// A tool call by the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// ID of the call in the conversation.
    #[serde(default)]
    pub id: String,
    /// Type of the call: always "function".
    #[serde(default = "function", rename = "type")]
    pub kind: String,
    /// Function and its arguments.
    pub function: FunctionCall,
}

impl ToolCall {
    /// Creates a call of a function.
    pub fn new(
        id: impl Into<String>,
        name: impl Into<String>,
        arguments: impl Into<String>,
    ) -> Self {
        let function = FunctionCall {
            name: name.into(),
            arguments: arguments.into(),
        };
        Self {
            id: id.into(),
            kind: self::function(),
            function,
        }
    }
}

fn function() -> String {
    "function".to_owned()
}

/// A function and its arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// Name of the function.
    pub name: String,
    /// JSON as the model wrote it. It may be invalid.
    #[serde(default, deserialize_with = "text_or_json")]
    pub arguments: String,
}

/// Reads arguments. Some clients send them as an object.
fn text_or_json<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(match Value::deserialize(deserializer)? {
        Value::String(text) => text,
        Value::Null => String::new(),
        other => other.to_string(),
    })
}

/// A message of a conversation.
///
/// ```
/// use samite_chat::Message;
///
/// let messages = [Message::system("Be brief."), Message::user("Hello!")];
/// let json = r#"[{"role":"system","content":"Be brief."},{"role":"user","content":"Hello!"}]"#;
/// assert_eq!(serde_json::from_str::<Vec<Message>>(json)?, messages);
/// # Ok::<_, serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Author of the message.
    pub role: MessageRole,
    /// Content of the message.
    #[serde(default)]
    pub content: Content,
    /// Reasoning of the model before the content.
    #[serde(
        default,
        alias = "reasoning",
        alias = "thinking",
        skip_serializing_if = "Option::is_none"
    )]
    pub reasoning_content: Option<String>,
    /// Tool calls of the model.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "null_or_list"
    )]
    pub tool_calls: Vec<ToolCall>,
    /// ID of the call whose result this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Name of the author or the tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

fn null_or_list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ToolCall>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl Message {
    /// Creates a message with content.
    pub fn new(role: MessageRole, content: impl Into<Content>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// Creates a system message.
    pub fn system(content: impl Into<Content>) -> Self {
        Self::new(MessageRole::System, content)
    }

    /// Creates a user message.
    pub fn user(content: impl Into<Content>) -> Self {
        Self::new(MessageRole::User, content)
    }

    /// Creates a message of the model.
    pub fn assistant(content: impl Into<Content>) -> Self {
        Self::new(MessageRole::Assistant, content)
    }

    /// Creates the result of a call.
    pub fn tool(id: impl Into<String>, content: impl Into<Content>) -> Self {
        Self {
            tool_call_id: Some(id.into()),
            ..Self::new(MessageRole::Tool, content)
        }
    }
}

/// A function that the model may call.
///
/// ```
/// use samite_chat::Tool;
/// use serde_json::json;
///
/// let city = json!({"type": "string"});
/// let parameters = json!({"type": "object", "properties": {"city": city}, "required": ["city"]});
/// let tool = Tool::new("weather", "The weather in a city", parameters);
/// assert_eq!(serde_json::to_value(&tool)?["function"]["name"], "weather");
/// # Ok::<_, serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tool {
    /// Type of the tool: always "function".
    #[serde(default = "function", rename = "type")]
    pub kind: String,
    /// The function.
    pub function: Function,
}

/// A function's name and the schema of its arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Function {
    /// Name of the function.
    pub name: String,
    /// Description for the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// JSON schema of an object.
    #[serde(default = "no_parameters")]
    pub parameters: Value,
    /// True if the arguments must match the schema.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strict: Option<bool>,
}

fn no_parameters() -> Value {
    let pairs = [("type", "object".into()), ("properties", Map::new().into())];
    Value::Object(
        pairs
            .map(|(key, value): (&str, Value)| (key.to_owned(), value))
            .into_iter()
            .collect(),
    )
}

impl Tool {
    /// Creates a function whose arguments have this schema.
    pub fn new(name: impl Into<String>, description: impl Into<String>, parameters: Value) -> Self {
        let function = Function {
            name: name.into(),
            description: Some(description.into()),
            parameters,
            strict: None,
        };
        Self {
            kind: self::function(),
            function,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_messages_are_deserialized() {
        let message: Message = serde_json::from_str(
            r#"{"role": "assistant", "content": null, "reasoning": "r", "tool_calls": [{"id": "1",
                "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}], "refusal": null}"#,
        )
        .unwrap();
        assert_eq!(message.content, Content::None);
        assert_eq!(message.reasoning_content.as_deref(), Some("r"));
        assert_eq!(
            message.tool_calls,
            [ToolCall::new("1", "f", r#"{"b":1,"a":2}"#)]
        );
        let parts: Message = serde_json::from_str(
            r#"{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text",
                "text": "b"}], "tool_calls": null}"#,
        )
        .unwrap();
        assert_eq!(parts.content.text().as_deref(), Some("a\nb"));
        let robot: Message = serde_json::from_str(r#"{"role": "robot", "content": ""}"#).unwrap();
        assert_eq!(robot.role, MessageRole::Other("robot".into()));
        assert!(
            serde_json::to_string(&robot)
                .unwrap()
                .contains(r#""role":"robot""#)
        );
        for role in ["", "a b", "<|im_end|>", "user\n", "é", &"r".repeat(65)] {
            let message = serde_json::json!({"role": role, "content": ""});
            assert!(
                serde_json::from_value::<Message>(message).is_err(),
                "{role}"
            );
        }
        let tool: Tool = serde_json::from_str(r#"{"function": {"name": "now"}}"#).unwrap();
        assert_eq!(
            serde_json::to_string(&tool.function.parameters).unwrap(),
            r#"{"type":"object","properties":{}}"#
        );
    }
}
