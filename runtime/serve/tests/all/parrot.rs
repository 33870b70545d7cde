//! Answers of a model that generates a chosen text, complete and truncated after each of its
//! tokens.

use crate::common::parrot::parrot;
use crate::common::{Server, engine};
use crate::loops::events;
use samite_core::Environment;
use samite_requests::EngineOptions;
use samite_serve::ServeOptions;
use serde_json::{Value, json};

const THOUGHTS: &str = "Which number do they like?";
const CONTENT: &str = "I pick one for you.";
const CALL: &str = r#"{"name": "pick", "arguments": {"n": 7, "why": "a \"lucky\" one"}}"#;

/// An answer as a client assembles it.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    thoughts: String,
    content: String,
    /// Names and arguments of the calls that a client would execute.
    calls: Vec<(String, Value)>,
    end: String,
}

/// Returns true for a prefix of the arguments as the model writes them.
fn cut_of_arguments(text: &str) -> bool {
    let (_, written) = CALL.split_once("\"arguments\": ").unwrap();
    written.starts_with(text)
}

fn arguments() -> Value {
    let call: Value = serde_json::from_str(CALL).unwrap();
    call["arguments"].clone()
}

fn answer_text() -> String {
    format!("<think>\n{THOUGHTS}\n</think>\n\n{CONTENT}\n<tool_call>\n{CALL}\n</tool_call>")
}

/// Starts a server whose model generates `text`; also returns the text's number of tokens.
pub fn saying(text: &str) -> (Server, usize) {
    let (model, count) = parrot(text);
    let options = EngineOptions::default();
    let engine = engine(&model, options, Environment::system());
    (Server::with(ServeOptions::default(), engine), count)
}

fn add(text: &mut String, part: &Value) {
    *text += part.as_str().unwrap_or_default();
}

/// Assembles the parts of calls by index, as clients do.
#[derive(Default)]
struct Calls(Vec<(String, String)>);

impl Calls {
    fn add(&mut self, index: usize, name: &Value, arguments: &Value) {
        self.0
            .resize(self.0.len().max(index + 1), Default::default());
        add(&mut self.0[index].0, name);
        add(&mut self.0[index].1, arguments);
    }

    /// Checks that a truncated call contains only text of the model.
    fn check_cut(self) {
        for (name, arguments) in self.0 {
            assert_eq!(name, "pick");
            assert!(cut_of_arguments(&arguments), "{arguments}");
        }
    }

    fn whole(self) -> Vec<(String, Value)> {
        let read = |arguments: &str| serde_json::from_str(arguments).unwrap();
        let calls = self.0.into_iter();
        calls
            .map(|(name, arguments)| (name, read(&arguments)))
            .collect()
    }
}

fn tool(schema_key: &str) -> Value {
    let properties = json!({"n": {"type": "integer"}, "why": {"type": "string"}});
    json!({"name": "pick", schema_key: {"type": "object", "properties": properties}})
}

fn asked(limit: (&str, Option<usize>), tools: Value) -> Value {
    let mut body = json!({
        "model": "parrot",
        "messages": [{"role": "user", "content": "Pick a number"}],
        "input": "Pick a number",
        "tools": [tools],
        "temperature": 0,
    });
    if let (name, Some(count)) = limit {
        body[name] = count.into();
    }
    body
}

fn chat_completions(server: &Server, most: Option<usize>, is_streamed: bool) -> Heard {
    let tools = json!({"type": "function", "function": tool("parameters")});
    let body = asked(("max_tokens", most), tools);
    let mut heard = Heard::default();
    let mut calls = Calls::default();
    let parts: Vec<Value> = if is_streamed {
        events(server, "/v1/chat/completions", &body)
            .into_iter()
            .map(|(_, part)| part)
            .collect()
    } else {
        vec![server.post("/v1/chat/completions", &body).1]
    };
    for part in parts {
        let choice = &part["choices"][0];
        let said = &choice[if is_streamed { "delta" } else { "message" }];
        add(&mut heard.thoughts, &said["reasoning_content"]);
        add(&mut heard.content, &said["content"]);
        for (place, call) in said["tool_calls"]
            .as_array()
            .into_iter()
            .flatten()
            .enumerate()
        {
            let index = call["index"].as_u64().map_or(place, |index| index as usize);
            calls.add(
                index,
                &call["function"]["name"],
                &call["function"]["arguments"],
            );
        }
        add(&mut heard.end, &choice["finish_reason"]);
    }
    // OpenAI's clients see the available part of a truncated call, and `length`.
    match &*heard.end {
        "length" => calls.check_cut(),
        _ => heard.calls = calls.whole(),
    }
    heard
}

fn messages(server: &Server, most: Option<usize>, is_streamed: bool) -> Heard {
    let body = asked(
        ("max_tokens", Some(most.unwrap_or(1000))),
        tool("input_schema"),
    );
    let mut heard = Heard::default();
    let mut block = |block: &Value, input: Value| match block["type"].as_str().unwrap() {
        "thinking" => add(&mut heard.thoughts, &block["thinking"]),
        "text" => add(&mut heard.content, &block["text"]),
        "tool_use" => heard
            .calls
            .push((block["name"].as_str().unwrap().to_owned(), input)),
        other => panic!("{other}"),
    };
    if !is_streamed {
        let (_, message) = server.post("/v1/messages", &body);
        for part in message["content"].as_array().unwrap() {
            block(part, part["input"].clone());
        }
        add(&mut heard.end, &message["stop_reason"]);
        return heard;
    }
    let (mut current, mut input) = (Value::Null, String::new());
    let mut end = String::new();
    for (name, part) in events(server, "/v1/messages", &body) {
        let delta = &part["delta"];
        match &*name {
            "content_block_start" => current = part["content_block"].clone(),
            "content_block_delta" => {
                for key in ["thinking", "text"] {
                    if let Some(more) = delta[key].as_str() {
                        let before = current[key].as_str().unwrap_or_default();
                        current[key] = (before.to_owned() + more).into();
                    }
                }
                add(&mut input, &delta["partial_json"]);
            }
            "content_block_stop" => {
                let block_now = std::mem::take(&mut current);
                let input = std::mem::take(&mut input);
                match serde_json::from_str(&input) {
                    Ok(input) => block(&block_now, input),
                    Err(_) if block_now["type"] != "tool_use" => block(&block_now, Value::Null),
                    // A truncated call, as with Anthropic: its input is incomplete.
                    Err(_) => {
                        assert_eq!(block_now["name"], "pick");
                        assert!(cut_of_arguments(&input), "{input}");
                    }
                }
            }
            "message_delta" => add(&mut end, &delta["stop_reason"]),
            _ => {}
        }
    }
    assert_eq!(current, Value::Null, "a block without an end");
    heard.end = end;
    heard
}

fn responses(server: &Server, most: Option<usize>, is_streamed: bool) -> Heard {
    let mut tools = tool("parameters");
    tools["type"] = "function".into();
    let body = asked(("max_output_tokens", most), tools);
    let mut heard = Heard::default();
    let mut said = (String::new(), String::new(), String::new());
    let response = if is_streamed {
        let events = events(server, "/v1/responses", &body);
        for (name, part) in &events {
            match &**name {
                "response.reasoning_text.delta" => add(&mut said.0, &part["delta"]),
                "response.output_text.delta" => add(&mut said.1, &part["delta"]),
                "response.function_call_arguments.delta" => add(&mut said.2, &part["delta"]),
                _ => {}
            }
        }
        events.last().unwrap().1["response"].clone()
    } else {
        server.post("/v1/responses", &body).1
    };
    let mut begun = String::new();
    for item in response["output"].as_array().unwrap() {
        match item["type"].as_str().unwrap() {
            "reasoning" => add(&mut heard.thoughts, &item["content"][0]["text"]),
            "message" => add(&mut heard.content, &item["content"][0]["text"]),
            "function_call" => {
                add(&mut begun, &item["arguments"]);
                if item["status"] == "completed" {
                    let arguments = item["arguments"].as_str().unwrap();
                    let arguments = serde_json::from_str(arguments).unwrap();
                    heard
                        .calls
                        .push((item["name"].as_str().unwrap().to_owned(), arguments));
                }
            }
            other => panic!("{other}"),
        }
    }
    if is_streamed {
        assert_eq!(said, (heard.thoughts.clone(), heard.content.clone(), begun));
    }
    heard.end = match response["incomplete_details"]["reason"].as_str() {
        Some(reason) => reason.to_owned(),
        None => response["status"].as_str().unwrap().to_owned(),
    };
    heard
}

fn ollama_chat(server: &Server, most: Option<usize>, is_streamed: bool) -> Heard {
    let tools = json!({"type": "function", "function": tool("parameters")});
    let mut body = asked(("", None), tools);
    body["stream"] = is_streamed.into();
    body["think"] = true.into();
    body["options"] = json!({"temperature": 0, "num_predict": most.map_or(-1, |most| most as i64)});
    let (_, _, text) = server.ask("POST", "/api/chat", "", &body.to_string());
    let mut heard = Heard::default();
    for line in text.lines() {
        let part: Value = serde_json::from_str(line).unwrap();
        add(&mut heard.thoughts, &part["message"]["thinking"]);
        add(&mut heard.content, &part["message"]["content"]);
        for call in part["message"]["tool_calls"]
            .as_array()
            .into_iter()
            .flatten()
        {
            let function = &call["function"];
            assert_eq!(function["index"], heard.calls.len(), "{call}");
            assert!(call["id"].as_str().unwrap().starts_with("call_"), "{call}");
            let name = function["name"].as_str().unwrap().to_owned();
            heard.calls.push((name, function["arguments"].clone()));
        }
        add(&mut heard.end, &part["done_reason"]);
    }
    heard
}

type Ask = fn(&Server, Option<usize>, bool) -> Heard;

/// Each API, with its finish reasons for a plain answer, one with a call, and a truncated one.
const INTERFACES: [(&str, Ask, [&str; 3]); 4] = [
    ("OpenAI", chat_completions, ["stop", "tool_calls", "length"]),
    (
        "Anthropic",
        messages,
        ["end_turn", "tool_use", "max_tokens"],
    ),
    (
        "Responses",
        responses,
        ["completed", "completed", "max_output_tokens"],
    ),
    ("ollama", ollama_chat, ["stop", "stop", "length"]),
];

#[test]
fn reasoning_text_and_calls_are_separated_in_all_apis() {
    let (server, _) = saying(&answer_text());
    for (name, ask, [_, end, _]) in INTERFACES {
        for is_streamed in [false, true] {
            let heard = ask(&server, None, is_streamed);
            let content = heard.content.trim();
            assert_eq!(
                (heard.thoughts.trim(), content),
                (THOUGHTS, CONTENT),
                "{name}"
            );
            assert_eq!(heard.calls, [("pick".to_owned(), arguments())], "{name}");
            assert_eq!(heard.end, end, "{name}");
        }
    }
}

#[test]
fn truncated_answers_contain_no_partial_call() {
    let (server, count) = saying(&answer_text());
    for most in 1..count {
        for (name, ask, [.., end]) in INTERFACES {
            for is_streamed in [false, true] {
                let heard = ask(&server, Some(most), is_streamed);
                let place = format!("{name}, {most} of {count} tokens, streamed: {is_streamed}");
                assert_eq!(heard.end, end, "{place}");
                // Only the last tokens follow complete arguments.
                let is_whole = heard.calls == [("pick".to_owned(), arguments())];
                assert!(heard.calls.is_empty() || is_whole, "{place}: {heard:?}");
                assert!(!is_whole || most + 5 > count, "{place}: {heard:?}");
                assert!(
                    THOUGHTS.starts_with(heard.thoughts.trim()),
                    "{place}: {heard:?}"
                );
                assert!(
                    CONTENT.starts_with(heard.content.trim()),
                    "{place}: {heard:?}"
                );
            }
        }
    }
}

#[test]
fn call_like_text_stays_text_without_tools() {
    let text = format!("So: <tool_call>{CALL}</tool_call> {{\"a\": [1, 2]}} </think>");
    let (server, _) = saying(&text);
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0});
    let (_, answer) = server.post("/v1/chat/completions", &body);
    assert_eq!(answer["choices"][0]["message"]["content"], text, "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[test]
fn ollama_numbers_the_calls_of_an_answer() {
    let call = |number: usize| {
        format!(
            "<tool_call>\n{{\"name\": \"pick\", \"arguments\": {{\"n\": {number}}}}}\n</tool_call>"
        )
    };
    let (server, _) = saying(&format!("{}\n{}", call(1), call(2)));
    for is_streamed in [false, true] {
        let heard = ollama_chat(&server, None, is_streamed);
        let numbers: Vec<&Value> = heard.calls.iter().map(|(_, call)| &call["n"]).collect();
        assert_eq!(numbers, [&json!(1), &json!(2)], "{heard:?}");
    }
}
