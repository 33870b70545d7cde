//! Behaviour that typical client loops rely on: chunks, truncated answers, budgets.

use crate::common::Server;
use samite_testing::wait_until;
use serde_json::{Value, json};
use std::io::Read;

/// Returns the names and data of a stream's events.
pub fn events(server: &Server, path: &str, body: &Value) -> Vec<(String, Value)> {
    let mut body = body.clone();
    body["stream"] = true.into();
    let (status, _, text) = server.ask("POST", path, "", &body.to_string());
    assert_eq!(status, 200, "{text}");
    let events = text
        .split("\n\n")
        .filter(|event| !event.ends_with("[DONE]"));
    let events = events.filter_map(|event| {
        let (name, data) = event.split_once("data: ")?;
        let name = name.trim().trim_start_matches("event: ").to_owned();
        Some((name, serde_json::from_str(data).unwrap()))
    });
    events.collect()
}

/// Returns a conversation that must call a tool, whose argument exceeds the token limit.
fn cut_call(tool: Value, choice: Value) -> Value {
    json!({
        "messages": [{"role": "user", "content": "Once upon a time"}],
        "input": "Once upon a time",
        "max_tokens": 150,
        "max_output_tokens": 150,
        "tools": [tool],
        "tool_choice": choice,
    })
}

fn long_text() -> Value {
    let text = json!({"type": "string", "minLength": 400, "maxLength": 500});
    json!({"type": "object", "properties": {"text": text}, "required": ["text"]})
}

#[test]
fn every_chat_chunk_has_a_choice_except_usage() {
    let server = Server::simple();
    let mut body = json!({
        "messages": [{"role": "user", "content": "Once upon a time"}],
        "max_tokens": 4,
    });
    for options in [json!(null), json!({}), json!({"include_usage": false})] {
        body["stream_options"] = options;
        let chunks = events(&server, "/v1/chat/completions", &body);
        for (_, chunk) in &chunks {
            assert_eq!(chunk["choices"].as_array().unwrap().len(), 1, "{chunk}");
            assert_eq!(chunk["usage"], Value::Null, "{chunk}");
        }
        let (_, last) = chunks.last().unwrap();
        assert_eq!(last["choices"][0]["finish_reason"], "length");
        assert_eq!(last["timings"]["predicted_n"], 4);
    }
}

#[test]
fn completion_usage_is_reported_once() {
    let server = Server::simple();
    let mut body = json!({"prompt": "Once upon a time", "max_tokens": 4});
    for asks in [false, true] {
        body["stream_options"] = json!({"include_usage": asks});
        let chunks = events(&server, "/v1/completions", &body);
        let told = chunks
            .iter()
            .filter(|(_, chunk)| chunk["usage"] != Value::Null);
        assert_eq!(told.count(), 1);
        let (_, last) = chunks.last().unwrap();
        assert_eq!(last["usage"]["completion_tokens"], 4);
        assert_eq!(last["choices"].as_array().unwrap().is_empty(), asks);
    }
}

#[test]
fn an_answer_calls_a_tool_or_matches_its_format() {
    let server = Server::simple();
    let object = |name: &str, kind: &str| {
        json!({
            "type": "object",
            "properties": {name: {"type": kind}},
            "required": [name],
            "additionalProperties": false,
        })
    };
    let function = json!({"name": "choose", "parameters": object("x", "boolean")});
    for choice in ["auto", "required", "none"] {
        let (status, answer) = server.post(
            "/v1/chat/completions",
            &json!({
                "messages": [{"role": "user", "content": "Once upon a time"}],
                "max_tokens": 200,
                "tools": [{"type": "function", "function": function}],
                "tool_choice": choice,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": object("a", "boolean")},
                },
            }),
        );
        assert_eq!(status, 200, "{answer}");
        let message = &answer["choices"][0]["message"];
        let calls = message["tool_calls"]
            .as_array()
            .map_or(&[][..], Vec::as_slice);
        for call in calls {
            assert_eq!(call["function"]["name"], "choose", "{message}");
        }
        assert!(
            choice == "auto" || calls.is_empty() == (choice == "none"),
            "{message}"
        );
        if calls.is_empty() {
            let content = message["content"].as_str().unwrap();
            let content: Value = serde_json::from_str(content).unwrap();
            assert!(content["a"].is_boolean(), "{message}");
        }
    }
    // Schemas that cannot be enforced are rejected, as without tools.
    let (status, answer) = server.post(
        "/v1/chat/completions",
        &json!({
            "messages": [{"role": "user", "content": "Once"}],
            "tools": [{"type": "function", "function": function}],
            "response_format": {"type": "json_object", "schema": {"not": {}}},
        }),
    );
    assert_eq!(status, 400, "{answer}");
}

#[test]
fn other_roles_reach_the_template() {
    let server = Server::simple();
    let messages = json!([
        {"role": "critic", "content": "Once"},
        {"role": "user", "content": "upon"},
    ]);
    let (status, answer) = server.post(
        "/v1/chat/completions",
        &json!({"messages": messages, "max_tokens": 2}),
    );
    assert_eq!(status, 200, "{answer}");
    let (status, answer) = server.post("/apply-template", &json!({"messages": messages}));
    assert_eq!(status, 200, "{answer}");
    assert!(
        answer["prompt"].as_str().unwrap().contains("critic"),
        "{answer}"
    );
}

#[test]
fn truncated_tool_calls_are_reported_as_truncated() {
    let server = Server::simple();
    let function = json!({"name": "write", "parameters": long_text()});
    let tool = json!({"type": "function", "function": function});
    let body = cut_call(tool, json!("required"));
    let (_, answer) = server.post("/v1/chat/completions", &body);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "length", "{choice}");
    // As with OpenAI, the answer contains the incomplete call.
    assert_eq!(
        choice["message"]["tool_calls"][0]["function"]["name"],
        "write"
    );
    let chunks = events(&server, "/v1/chat/completions", &body);
    let (_, last) = chunks.last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "length");

    let tool = json!({"name": "write", "input_schema": long_text()});
    let body = cut_call(tool, json!({"type": "any"}));
    let (_, message) = server.post("/v1/messages", &body);
    assert_eq!(message["stop_reason"], "max_tokens", "{message}");
    let blocks = message["content"].as_array().unwrap();
    assert!(
        blocks.iter().all(|block| block["type"] != "tool_use"),
        "{message}"
    );
    let parts = events(&server, "/v1/messages", &body);
    let reasons = parts.iter().filter(|(name, _)| name == "message_delta");
    let reasons = reasons.map(|(_, part)| part["delta"]["stop_reason"].clone());
    assert_eq!(reasons.collect::<Vec<_>>(), ["max_tokens"]);

    let tool = json!({"type": "function", "name": "write", "parameters": long_text()});
    let body = cut_call(tool, json!("required"));
    let (_, response) = server.post("/v1/responses", &body);
    assert_eq!(response["status"], "incomplete", "{response}");
    let item = &response["output"][0];
    assert_eq!(
        (&item["type"], &item["status"]),
        (&json!("function_call"), &json!("incomplete"))
    );
    let parts = events(&server, "/v1/responses", &body);
    let (name, last) = parts.last().unwrap();
    assert_eq!(name, "response.incomplete");
    assert_eq!(last["response"]["output"][0]["status"], "incomplete");
}

#[test]
fn tools_with_unenforceable_schemas_accept_any_object() {
    let server = Server::simple();
    let tool = |name: &str, schema: Value| {
        let properties = json!({"text": schema});
        let parameters = json!({"type": "object", "properties": properties, "required": ["text"]});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    let wrong = [
        json!({"type": "string", "pattern": "(?=a)b"}),
        json!({"$ref": "#/nowhere"}),
        json!({"type": "colour"}),
    ];
    let mut whole = 0;
    for wrong in wrong {
        let tools = [
            tool("first", wrong.clone()),
            tool("second", json!({"const": "yes"})),
        ];
        for seed in 0..4 {
            let body = json!({
                "messages": [{"role": "user", "content": "Once upon a time"}],
                "max_tokens": 300,
                "seed": seed,
                "temperature": 2,
                "tools": tools,
                "tool_choice": "required",
                "parallel_tool_calls": false,
            });
            let (status, answer) = server.post("/v1/chat/completions", &body);
            assert_eq!(status, 200, "{wrong}: {answer}");
            let choice = &answer["choices"][0];
            let call = &choice["message"]["tool_calls"][0]["function"];
            if call["name"] == "second" && choice["finish_reason"] == "tool_calls" {
                let arguments = call["arguments"].as_str().unwrap();
                let arguments: Value = serde_json::from_str(arguments).unwrap();
                assert_eq!(arguments["text"], "yes");
                whole += 1;
            }
        }
    }
    assert!(whole > 0, "no call of the second tool");
}

#[test]
fn reasoning_is_counted_and_ends_with_a_signature() {
    let server = Server::simple();
    let body = json!({
        "messages": [{"role": "user", "content": "Once upon a time"}],
        "input": "Once upon a time",
        "max_tokens": 60,
        "grammar": r#"root ::= "<think>a cat and a dog</think>yes""#,
    });
    let (_, answer) = server.post("/v1/chat/completions", &body);
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "a cat and a dog", "{answer}");
    let count = |details: &Value| details["reasoning_tokens"].as_u64().unwrap();
    let thought = count(&answer["usage"]["completion_tokens_details"]);
    let written = answer["usage"]["completion_tokens"].as_u64().unwrap();
    assert!(0 < thought && thought < written, "{answer}");
    let (_, response) = server.post("/v1/responses", &body);
    assert_eq!(count(&response["usage"]["output_tokens_details"]), thought);
    let parts = events(&server, "/v1/messages", &body);
    let names = parts
        .iter()
        .filter_map(|(_, part)| part["delta"]["type"].as_str());
    let names: Vec<&str> = names.filter(|name| !name.starts_with("thinking")).collect();
    assert_eq!(names.first(), Some(&"signature_delta"), "{names:?}");
}

#[test]
fn items_of_other_services_are_ignored() {
    let server = Server::simple();
    let ask = json!({"role": "user", "content": "Once upon a time"});
    let other = json!({"type": "web_search_call", "id": "ws_1", "status": "completed"});
    let count = |input: Value| {
        let body = json!({"input": input, "max_output_tokens": 1});
        let (status, answer) = server.post("/v1/responses", &body);
        assert_eq!(status, 200, "{answer}");
        answer["usage"]["input_tokens"].clone()
    };
    assert_eq!(count(json!([other, ask])), count(json!([ask])));
}

#[test]
fn errors_name_the_field_of_the_requested_api() {
    let server = Server::simple();
    let message = |role: &str, text: &str| json!({"role": role, "content": text});
    let say = |role: &str| message(role, "Once");
    let thoughts = json!({"type": "reasoning", "content": []});
    for (body, param) in [
        (
            json!({"input": [say("user"), thoughts, say("no role!")]}),
            "input[2]",
        ),
        (
            json!({"input": [say("system"), say("user"), say("no role!")]}),
            "input[2]",
        ),
        (
            json!({"instructions": "x", "input": [say("no role!")]}),
            "input[0]",
        ),
        (json!({"input": []}), "input"),
        (
            json!({"input": "x", "max_output_tokens": -5}),
            "max_output_tokens",
        ),
        (
            json!({"input": "x", "tools": [{"type": "web_search"}, {"type": "function"}]}),
            "tools[1]",
        ),
        (
            json!({"input": "x", "text": {"format": {"type": "nope"}}}),
            "text.format",
        ),
    ] {
        for path in ["/v1/responses", "/v1/responses/input_tokens"] {
            let (status, answer) = server.post(path, &body);
            if path.ends_with("tokens") && !param.starts_with("input") {
                continue;
            }
            assert_eq!(status, 400, "{path} {body}: {answer}");
            let error = &answer["error"];
            let found = error["param"].as_str().unwrap();
            assert!(found.starts_with(param), "{path} {body}: {answer}");
            let text = error["message"].as_str().unwrap();
            assert!(
                text.contains(param) && !text.contains("messages"),
                "{answer}"
            );
        }
    }
}

#[test]
fn completions_list_probabilities_as_in_openai() {
    let server = Server::simple();
    let body = json!({"prompt": "Once", "max_tokens": 5, "logprobs": 2, "echo": false});
    let (_, answer) = server.post("/v1/completions", &body);
    let choice = &answer["choices"][0];
    let logprobs = &choice["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    let texts = tokens.iter().map(|token| token.as_str().unwrap());
    assert_eq!(texts.collect::<String>(), choice["text"].as_str().unwrap());
    let mut offset = 0;
    for (number, token) in tokens.iter().enumerate() {
        assert_eq!(logprobs["text_offset"][number], offset);
        offset += token.as_str().unwrap().chars().count();
        let top = logprobs["top_logprobs"][number].as_object().unwrap();
        assert_eq!(top.len(), 2);
        let own = logprobs["token_logprobs"][number].as_f64().unwrap();
        assert!(
            top.get(token.as_str().unwrap())
                .is_none_or(|top| *top == own)
        );
        assert!(own < 0.0, "{logprobs}");
    }
    let whole = logprobs["text_offset"].as_array().unwrap();
    let chunks = events(&server, "/v1/completions", &body);
    // No empty chunk comes before the first token.
    assert_eq!(
        chunks[0].1["choices"][0]["logprobs"]["text_offset"][0],
        whole[0]
    );
    let offsets = chunks.iter();
    let offsets: Vec<&Value> = offsets
        .map(|(_, chunk)| &chunk["choices"][0]["logprobs"]["text_offset"][0])
        .filter(|offset| !offset.is_null())
        .collect();
    assert_eq!(offsets, whole.iter().collect::<Vec<_>>());
}

/// Chunks count the processed tokens of the prompt, as those of llama-server do.
#[test]
fn prompt_progress_is_streamed_when_requested() {
    let server = Server::simple();
    let prompt = "Once upon a time ".repeat(20);
    let body = json!({"prompt": prompt, "max_tokens": 1, "return_progress": true,
        "stream_options": {"include_usage": true}});
    let chunks = events(&server, "/v1/completions", &body);
    let usages = chunks
        .iter()
        .map(|(_, chunk)| &chunk["usage"]["prompt_tokens"]);
    let total = usages.filter_map(Value::as_u64).next_back().unwrap();
    let reports = chunks.iter().map(|(_, chunk)| &chunk["prompt_progress"]);
    let reports: Vec<&Value> = reports.filter(|report| !report.is_null()).collect();
    assert!(!reports.is_empty(), "{chunks:?}");
    let mut before = 0;
    for report in &reports {
        assert_eq!(report["total"], total, "{report}");
        assert_eq!(report["cache"], 0, "{report}");
        assert!(report["time_ms"].is_u64(), "{report}");
        let processed = report["processed"].as_u64().unwrap();
        assert!((before..=total).contains(&processed), "{report}");
        before = processed;
    }
    assert!(before > 0, "{reports:?}");
}

#[test]
fn ollama_paths_answer_404_for_unknown_models() {
    let server = Server::simple();
    let (_, tags) = server.get("/api/tags");
    let name = tags["models"][0]["name"].as_str().unwrap();
    let ask = |path: &str, name: &str| {
        let body = json!({
            "model": name,
            "prompt": "Once",
            "messages": [{"role": "user", "content": "Once"}],
            "options": {"num_predict": 1},
            "stream": false,
        });
        server.post(path, &body)
    };
    for path in ["/api/chat", "/api/generate", "/api/show"] {
        let (status, answer) = ask(path, "not-there");
        assert_eq!(status, 404, "{path}: {answer}");
        assert!(
            answer["error"].as_str().unwrap().contains("not-there"),
            "{answer}"
        );
        for name in [
            name,
            &format!("{}:latest", name.trim_end_matches(":latest")),
        ] {
            let (status, answer) = ask(path, name);
            assert_eq!(status, 200, "{path} {name}: {answer}");
        }
    }
}

#[test]
fn reasoning_ends_after_its_budget() {
    let server = Server::simple();
    let mut body = json!({
        "messages": [{"role": "user", "content": "Once upon a time"}],
        "max_tokens": 100,
        "grammar": r#"root ::= "<think>" [a-z ]* "</think>yes""#,
    });
    let (_, answer) = server.post("/v1/chat/completions", &body);
    let free = answer["choices"][0]["message"]["reasoning_content"].clone();
    let length = |reasoning: &Value| {
        let body = json!({"content": reasoning});
        let (_, tokens) = server.post("/tokenize", &body);
        tokens["tokens"].as_array().unwrap().len()
    };
    assert!(length(&free) > 20, "{answer}");
    for (name, budget) in [
        ("thinking_budget_tokens", 8),
        ("reasoning_budget_tokens", 8),
        ("reasoning_budget_tokens", 0),
    ] {
        let mut body = body.clone();
        body[name] = budget.into();
        let (_, answer) = server.post("/v1/chat/completions", &body);
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["content"], "yes", "{answer}");
        assert_eq!(choice["finish_reason"], "stop", "{answer}");
        let reasoning = &choice["message"]["reasoning_content"];
        if budget == 0 {
            assert_eq!(reasoning.as_str().unwrap_or_default(), "", "{answer}");
        } else {
            assert!((1..=9).contains(&length(reasoning)), "{answer}");
            let free = free.as_str().unwrap();
            assert!(free.starts_with(reasoning.as_str().unwrap()), "{answer}");
        }
    }
    body["thinking"] = json!({"type": "enabled", "budget_tokens": 8});
    let (_, message) = server.post("/v1/messages", &body);
    assert_eq!(message["content"][0]["type"], "thinking", "{message}");
    assert_eq!(message["content"][1]["text"], "yes", "{message}");
}

#[test]
fn a_client_ends_the_reasoning_of_a_running_answer() {
    let server = Server::simple();
    let path = "/v1/chat/completions/control";
    let body = json!({
        "messages": [{"role": "user", "content": "Once upon a time"}],
        "max_tokens": 400,
        "grammar": r#"root ::= "<think>" [a-z ]* "</think>yes""#,
        "reasoning_control": true,
        "stream": true,
    });
    // The answer may end before the control arrives. Then another one is asked for.
    let is_ended = (0..100).any(|_| {
        let mut stream = server.send("POST", "/v1/chat/completions", "", &body.to_string());
        let mut text = vec![0; 600];
        stream.read_exact(&mut text).unwrap();
        let begin = String::from_utf8(text).unwrap();
        let id = begin.split("\"id\":\"").nth(1).unwrap();
        let id = id.split('"').next().unwrap();
        let mut control = json!({"id": id, "action": "pause"});
        let (status, error) = server.post(path, &control);
        assert_eq!((status, &error["error"]["param"]), (400, &json!("action")));
        control["action"] = "reasoning_end".into();
        let (status, answer) = server.post(path, &control);
        assert_eq!(status, 200, "{answer}");
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        // An answer that has ended cannot be controlled.
        wait_until("the answer is not controlled any more", || {
            server.post(path, &control).1["success"] == false
        });
        let content = rest.split("{\"content\":\"").skip(1);
        let content = content.filter_map(|part| part.split('"').next());
        answer["success"] == true && content.collect::<String>() == "yes"
    });
    assert!(is_ended);
    let mut other = body;
    other["reasoning_control"] = 5.into();
    assert_eq!(server.post("/v1/chat/completions", &other).0, 400);
    assert_eq!(
        server.post(path, &json!({"action": "reasoning_end"})).0,
        400
    );
}

#[test]
fn ollama_ignores_options_that_it_does_not_have() {
    let server = Server::simple();
    let (_, tags) = server.get("/api/tags");
    let model = &tags["models"][0];
    let details = &model["details"];
    assert!(
        details["parameter_size"].as_str().unwrap().ends_with('M'),
        "{model}"
    );
    assert_ne!(details["quantization_level"], "unknown", "{model}");
    let mut body = json!({"model": model["name"], "prompt": "Once", "stream": false});
    let mut ask = |name: &str, value: Value| {
        body["options"] = json!({"num_predict": 2});
        body["options"][name] = value;
        server.post("/api/generate", &body).0
    };
    for (name, value) in [
        ("logit_bias", json!("5432:100")),
        ("grammar", json!(5)),
        ("num_ctx", json!("many")),
        ("n", json!(9)),
        ("unknown", json!([])),
    ] {
        assert_eq!(ask(name, value), 200, "{name}");
    }
    for name in [
        "temperature",
        "top_k",
        "num_predict",
        "stop",
        "xtc_threshold",
    ] {
        assert_eq!(ask(name, json!({})), 400, "{name}");
    }
}

#[test]
fn requests_with_the_same_grammar_do_not_share_a_state() {
    let server = Server::simple();
    let ask = |grammar: &str| {
        let body = json!({"prompt": "Once", "grammar": grammar, "n_predict": 20, "seed": 1});
        server.post("/completion", &body).1["content"].clone()
    };
    let yes_or_no = r#"root ::= "yes" | "no""#;
    for grammar in [yes_or_no, r#"root ::= "maybe""#, yes_or_no, yes_or_no] {
        let answer = ask(grammar);
        assert_eq!(answer == "maybe", grammar.contains("maybe"), "{answer}");
    }
    for number in 0..20 {
        assert_eq!(
            ask(&format!("root ::= \"a{number}\"")),
            format!("a{number}")
        );
    }
}

#[test]
fn ollama_context_continues_a_text_with_probabilities() {
    let server = Server::simple();
    let mut body = json!({
        "model": "stories",
        "prompt": "Once upon a time",
        "stream": false,
        "logprobs": true,
        "top_logprobs": 2,
        "options": {"num_predict": 4, "temperature": 0},
    });
    let (_, tags) = server.get("/api/tags");
    body["model"] = tags["models"][0]["name"].clone();
    let (_, first) = server.post("/api/generate", &body);
    let count = |answer: &Value| answer["context"].as_array().unwrap().len() as u64;
    let prompt = first["prompt_eval_count"].as_u64().unwrap();
    assert_eq!(count(&first), prompt + 4, "{first}");
    let listed = first["logprobs"].as_array().unwrap();
    assert_eq!(listed.len(), 4, "{first}");
    for token in listed {
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
    }
    // The next prompt follows the text so far.
    body["context"] = first["context"].clone();
    body["prompt"] = "And then".into();
    let (_, second) = server.post("/api/generate", &body);
    assert!(
        second["prompt_eval_count"].as_u64().unwrap() > count(&first),
        "{second}"
    );
    let begin = &second["context"].as_array().unwrap()[..count(&first) as usize];
    assert_eq!(begin, first["context"].as_array().unwrap().as_slice());
    let lines = {
        body["stream"] = true.into();
        let (_, _, text) = server.ask("POST", "/api/generate", "", &body.to_string());
        text
    };
    let lines = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let lines: Vec<Value> = lines.collect();
    let told = lines.iter().filter_map(|line| line["logprobs"].as_array());
    assert_eq!(told.map(Vec::len).sum::<usize>(), 4);
    assert_eq!(lines.last().unwrap()["context"], second["context"]);
    for (field, value) in [
        ("context", json!([-1])),
        ("context", json!("x")),
        ("template", json!("{{ .Prompt }}")),
    ] {
        let mut wrong = body.clone();
        wrong["stream"] = false.into();
        wrong[field] = value;
        let (status, answer) = server.post("/api/generate", &wrong);
        assert_eq!(status, 400, "{answer}");
        assert!(
            answer["error"].as_str().unwrap().contains(field),
            "{answer}"
        );
    }
}
