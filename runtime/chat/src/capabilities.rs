//! Detects what a template supports: renders small conversations and looks for probe words in the
//! output.

use crate::template::{DateTime, Template};
use serde_json::{Value, json};

/// Parts of a conversation that a template shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// True if it shows system messages.
    pub system_role: bool,
    /// True if it shows content that is a text.
    pub text_content: bool,
    /// True if it shows content that is a list of parts.
    pub typed_content: bool,
    /// True if it shows content only with the languages to translate from and to.
    pub needs_languages: bool,
    /// True if it shows the available tools.
    pub tools: bool,
    /// True if it shows tool calls of a message.
    pub tool_calls: bool,
    /// True if it shows several calls of one message.
    pub parallel_calls: bool,
    /// True if arguments as an object are shown as JSON.
    pub object_arguments: bool,
    /// True if arguments as a text are shown unchanged.
    pub text_arguments: bool,
    /// True if it shows results of calls.
    pub tool_results: bool,
    /// True if it shows the reasoning before a tool call.
    pub reasoning: bool,
}

/// Probe words.
const WORDS: [&str; 8] = [
    "probe-system",
    "probe-user",
    "probe_tool",
    "probe_call",
    "probe_second",
    "probe-value",
    "probe-result",
    "probe-thought",
];

/// Members of a part that name the languages to translate from and to.
pub(crate) const LANGUAGES: [&str; 2] = ["source_lang_code", "target_lang_code"];

/// Language unless template arguments name others, as in llama.cpp.
pub(crate) const DEFAULT_LANGUAGE: &str = "en-GB";

impl Capabilities {
    /// Probes a template.
    pub fn probe(template: &Template, bos: &str, eos: &str) -> Self {
        let [system, user, tool, first, second, argument, result, thought] = WORDS;
        let shown = |messages: Value, tools: bool| {
            let mut context = json!({
                "messages": messages, "bos_token": bos, "eos_token": eos,
                "add_generation_prompt": true,
                "functions": "[]", "date_string": "01 Jan 1970",
                    "datetime": "Jan 01 1970 00:00:00 GMT"
            });
            if tools {
                let parameters =
                    json!({"type": "object", "properties": {"probe_argument": {"type": "string"}}});
                let tools = json!([{"type": "function",
                    "function": {"name": tool, "description": "", "parameters": parameters}}]);
                context["functions"] = tools.to_string().into();
                context["tools"] = tools;
            }
            template
                .render(&context, DateTime::new(0, 0))
                .unwrap_or_default()
        };
        let plain = |text: &str| json!({"role": "user", "content": text});
        let parts =
            |text: &str| json!({"role": "user", "content": [{"type": "text", "text": text}]});
        let text_content = shown(json!([plain(user)]), false).contains(user);
        let typed = shown(json!([parts(user)]), false);
        let typed_content =
            typed.contains(user) && !typed.contains("'text'") && !typed.contains("\"text\"");
        let mut with_languages = parts(user);
        for name in LANGUAGES {
            with_languages["content"][0][name] = json!(DEFAULT_LANGUAGE);
        }
        let needs_languages =
            !text_content && !typed_content && shown(json!([with_languages]), false).contains(user);
        let ask = || {
            if text_content {
                plain(user)
            } else {
                parts(user)
            }
        };
        let say = |text: &str| {
            if text_content {
                json!(text)
            } else {
                json!([{"type": "text", "text": text}])
            }
        };
        let call = |id: &str, name: &str, arguments: Value| {
            json!({"id": id, "type": "function",
            "function": {"name": name, "arguments": arguments}})
        };
        let calls = |calls: Value, thought: Option<&str>| {
            let mut message = json!({"role": "assistant", "content": "", "tool_calls": calls});
            if let Some(thought) = thought {
                message["reasoning_content"] = json!(thought);
            }
            let answer = |id: &str, name: &str| {
                json!({"role": "tool", "tool_call_id": id,
                "name": name, "content": say(result)})
            };
            shown(
                json!([
                    ask(),
                    message,
                    answer("call00001", first),
                    answer("call00002", second)
                ]),
                true,
            )
        };
        let object = json!({"probe_argument": argument});
        let as_text = object.to_string();
        let with_object = calls(json!([call("call00001", first, object.clone())]), None);
        let with_text = calls(json!([call("call00001", first, json!(as_text))]), None);
        let both = calls(
            json!([
                call("call00001", first, object.clone()),
                call("call00002", second, object)
            ]),
            None,
        );
        let is_call = |text: &str| text.contains(first) && text.contains(argument);
        // Objects printed in Python syntax. Some templates print tools that way, but calls as JSON.
        let is_shown_as_python = with_object.contains(&format!("{{'probe_argument': '{argument}'"));
        let object_arguments = is_call(&with_object) && !is_shown_as_python;
        let text_arguments = is_call(&with_text) && with_text.contains(&as_text);
        let calls_shown = if object_arguments {
            &with_object
        } else {
            &with_text
        };
        let with_thought = calls(
            json!([call(
                "call00001",
                first,
                if object_arguments {
                    json!({"probe_argument": argument})
                } else {
                    json!(as_text)
                }
            )]),
            Some(thought),
        );
        Self {
            system_role: shown(
                json!([{"role": "system", "content": say(system)}, ask()]),
                false,
            )
            .contains(system),
            text_content,
            typed_content,
            needs_languages,
            tools: shown(json!([ask()]), true).contains(tool),
            tool_calls: object_arguments || text_arguments,
            parallel_calls: both.contains(second) && both.contains(first),
            object_arguments,
            text_arguments,
            tool_results: calls_shown.contains(result),
            reasoning: with_thought.contains(thought),
        }
    }
}
