//! The server from a client's view: a small model on the CPU, and requests over a socket.

use crate::common::{CONTEXT, ENDLESS, Server};
use samite_requests::EngineOptions;
use samite_serve::{KvEventSource, ServeOptions};
use samite_testing::{HANG_GUARD, wait_until};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Returns the data of events.
fn events(body: &str) -> Vec<Value> {
    let lines = body.lines().filter_map(|line| line.strip_prefix("data: "));
    let lines = lines.filter(|line| *line != "[DONE]");
    lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn chat(more: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Once upon a time"}],
        "max_tokens": 8,
    });
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[test]
fn streamed_and_complete_answers_are_equal() {
    let server = Server::simple();
    let (status, whole) = server.post("/v1/chat/completions", &chat(json!({})));
    assert_eq!(status, 200, "{whole}");
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(!text.is_empty());
    assert_eq!(whole["usage"]["completion_tokens"], 8);
    let body = chat(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let (status, head, body) = server.ask("POST", "/v1/chat/completions", "", &body.to_string());
    assert_eq!(status, 200);
    assert!(head.contains("text/event-stream"), "{head}");
    assert!(body.ends_with("data: [DONE]\n\n"), "{body}");
    let events = events(&body);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let parts = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
    assert_eq!(parts.collect::<String>(), text);
    let last = events.last().unwrap();
    assert_eq!(last["usage"]["completion_tokens"], 8);
    // All but the last token of the prompt was cached.
    let prompt = last["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(
        last["usage"]["prompt_tokens_details"]["cached_tokens"],
        prompt - 1
    );
    assert_eq!(last["cache_miss"], Value::Null);
}

#[test]
fn all_apis_return_the_same_text() {
    let server = Server::simple();
    let options = json!({"temperature": 0.0});
    let (_, openai) = server.post("/v1/chat/completions", &chat(options.clone()));
    let text = &openai["choices"][0]["message"]["content"];
    let (status, anthropic) = server.post("/v1/messages", &chat(options));
    assert_eq!(
        (status, &anthropic["content"][0]["text"]),
        (200, text),
        "{anthropic}"
    );
    let responses =
        json!({"input": "Once upon a time", "max_output_tokens": 8, "temperature": 0.0});
    let (status, responses) = server.post("/v1/responses", &responses);
    assert_eq!(
        (status, &responses["output"][0]["content"][0]["text"]),
        (200, text),
        "{responses}"
    );
    let ollama = json!({
        "messages": [{"role": "user", "content": "Once upon a time"}],
        "stream": false,
        "options": {"num_predict": 8, "temperature": 0.0},
    });
    let (status, ollama) = server.post("/api/chat", &ollama);
    assert_eq!(
        (status, &ollama["message"]["content"]),
        (200, text),
        "{ollama}"
    );
    let (_, prompt) = server.post("/apply-template", &chat(json!({})));
    let native = json!({"prompt": prompt["prompt"], "n_predict": 8, "temperature": 0.0});
    let (status, native) = server.post("/completion", &native);
    assert_eq!((status, &native["content"]), (200, text), "{native}");
}

#[test]
fn invalid_request_fields_are_refused_by_name() {
    let server = Server::simple();
    let cases = [
        (
            "/v1/chat/completions",
            chat(json!({"temperature": "hot"})),
            "temperature",
        ),
        ("/v1/chat/completions", chat(json!({"top_p": 1.5})), "top_p"),
        (
            "/v1/chat/completions",
            chat(json!({"max_tokens": 1.5})),
            "n_predict|max_tokens",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"stream": "yes"})),
            "stream",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"messages": "hello"})),
            "messages",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"messages": [{"role": "<robot>", "content": ""}]})),
            "messages[0]",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"messages": [{"role": "user", "content": 1}]})),
            "messages[0].content",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"tools": [{"type": "function"}]})),
            "tools[0]",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"tool_choice": "required"})),
            "tool_choice",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"response_format": {"type": "sound"}})),
            "response_format",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"response_format": {"type": "json_object", "schema": {"type": 1}}})),
            "response_format",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"grammar": "root ::= ("})),
            "grammar",
        ),
        ("/v1/chat/completions", chat(json!({"n": 99})), "n"),
        (
            "/v1/chat/completions",
            chat(json!({"logit_bias": {"99999999": 1}})),
            "logit_bias",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"stop": [1]})),
            "stop[0]",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"lora": [{"id": 0, "scale": 1}]})),
            "lora",
        ),
        ("/completion", json!({}), "prompt"),
        (
            "/completion",
            json!({"prompt": "a", "lora": [{"id": 0, "scale": 1e20}]}),
            "lora.scale",
        ),
        (
            "/lora-adapters",
            json!([{"id": 0, "scale": -10_001}]),
            "body.scale",
        ),
        (
            "/completion",
            json!({"prompt": [1, 99_999_999]}),
            "prompt[1]",
        ),
        (
            "/completion",
            json!({"prompt": "a", "json_schema": {"properties": {"n": {"const": i64::MIN}}}}),
            "#/properties/n/const",
        ),
        (
            "/completion",
            json!({"prompt": "a", "json_schema": {"$ref": "#"}}),
            "json_schema",
        ),
        (
            "/completion",
            json!({"prompt": vec!["a"; 300]}),
            "256 texts",
        ),
        (
            "/completion",
            json!({"prompt": "x", "id_slot": 77}),
            "id_slot",
        ),
        (
            "/v1/responses",
            json!({"input": "x", "previous_response_id": "y"}),
            "previous_response_id",
        ),
        (
            "/slots/0?action=save",
            json!({"filename": "x"}),
            "--slot-save-path",
        ),
    ];
    for (path, body, part) in cases {
        let (status, answer) = server.post(path, &body);
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(
            status == 400 || status == 501,
            "{path} {body}: {status} {answer}"
        );
        assert!(
            part.split('|').any(|part| message.contains(part)),
            "{path} {body}: {message}"
        );
    }
    let (status, answer) = server.post("/v1/messages", &json!({"messages": [{"role": "x"}]}));
    assert_eq!((status, &answer["type"]), (400, &json!("error")));
    let (status, answer) = server.post("/api/chat", &json!({"messages": 5}));
    assert!(status == 400 && answer["error"].is_string(), "{answer}");
    for (body, wanted) in [
        ("{", 400),
        ("\u{1}", 400),
        ("[]", 400),
        (&*"[".repeat(100_000), 400),
        ("{\"prompt\": \"\\ud800\"}", 400),
    ] {
        let (status, _, answer) = server.ask("POST", "/completion", "", body);
        assert_eq!(status, wanted, "{answer}");
        assert!(answer.contains("\"error\""), "{answer}");
    }
    assert_eq!(server.get("/nothing").0, 404);
    // The next request is served.
    assert_eq!(
        server
            .post("/completion", &json!({"prompt": "a", "n_predict": 1}))
            .0,
        200
    );
}

#[test]
fn oversized_prompts_are_refused_before_headers() {
    let server = Server::simple();
    let long = "once ".repeat(4000);
    for is_stream in [false, true] {
        let body = json!({"prompt": long, "stream": is_stream});
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!(status, 400);
        let error = &answer["error"];
        assert_eq!(error["type"], "exceed_context_size_error");
        assert_eq!(error["n_ctx"], CONTEXT);
        assert!(error["n_prompt_tokens"].as_u64().unwrap() > CONTEXT as u64);
    }
}

#[test]
fn api_keys_protect_everything_except_health_and_the_page() {
    let options = ServeOptions {
        api_keys: vec!["one".to_owned(), "two".to_owned()],
        ..ServeOptions::default()
    };
    let server = Server::start(options, EngineOptions::default());
    for path in ["/health", "/ready", "/", "/app.js", "/style.css"] {
        assert_eq!(server.ask("GET", path, "", "").0, 200, "{path}");
    }
    for path in [
        "/v1/models",
        "/props",
        "/slots",
        "/metrics",
        "/api/tags",
        "/nothing",
    ] {
        for headers in [
            "",
            "Authorization: Bearer on\r\n",
            "X-Api-Key: three\r\n",
            "Authorization: one\r\n",
        ] {
            assert_eq!(
                server.ask("GET", path, headers, "").0,
                401,
                "{path} {headers}"
            );
        }
    }
    for headers in [
        "Authorization: Bearer two\r\n",
        "Authorization: bearer two\r\n",
        "X-Api-Key: one\r\n",
    ] {
        assert_eq!(server.ask("GET", "/v1/models", headers, "").0, 200);
    }
}

#[test]
fn other_origins_are_blocked_unless_allowed() {
    let server = Server::simple();
    let allowed = |origin: &str| {
        let (_, head, _) = server.ask("GET", "/v1/models", &format!("Origin: {origin}\r\n"), "");
        head.contains("Access-Control-Allow-Origin")
    };
    assert!(allowed("http://localhost:3000") && allowed("http://127.0.0.1"));
    assert!(!allowed("http://evil.com") && !allowed("http://localhost.evil.com"));
    let (_, head, page) = server.ask("GET", "/", "", "");
    assert!(head.contains("default-src 'none'") && page.contains("<!doctype html>"));
}

#[test]
fn disconnecting_frees_the_slot() {
    let engine = EngineOptions {
        slots: 1,
        context: Some(ENDLESS),
        ..EngineOptions::default()
    };
    let server = Server::start(ServeOptions::default(), engine);
    for is_stream in [true, false] {
        let body = json!({"prompt": "Once", "stream": is_stream, "ignore_eos": true,
            "n_predict": 100_000});
        let mut stream = server.send("POST", "/completion", "", &body.to_string());
        if is_stream {
            let mut some = [0; 200];
            stream.read_exact(&mut some).unwrap();
        } else {
            server.wait_until(true);
        }
        drop(stream);
        server.wait_until(false);
        assert_eq!(
            server
                .post("/completion", &json!({"prompt": "a", "n_predict": 1}))
                .0,
            200
        );
    }
    // They were stopped before their natural end.
    let (_, metrics) = server.get("/metrics");
    let metrics = metrics.as_str().unwrap();
    assert!(
        metrics.contains("samite:requests_cancelled_total 2"),
        "{metrics}"
    );
}

#[test]
fn many_clients_are_served_despite_a_slow_reader() {
    let server = Server::simple();
    let body = json!({"prompt": "Once", "stream": true, "ignore_eos": true, "n_probs": 50,
        "n_predict": 200});
    let slow = server.send("POST", "/completion", "", &body.to_string());
    let alone = server.post(
        "/completion",
        &json!({"prompt": "The cat", "n_predict": 12, "temperature": 0.0}),
    );
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..24)
            .map(|i| {
                let server = &server;
                scope.spawn(move || {
                    let body = json!({"prompt": "The cat", "n_predict": 12, "temperature": 0.0,
                        "cache_prompt": i % 2 == 0});
                    server.post("/completion", &body)
                })
            })
            .collect();
        for thread in threads {
            let (status, answer) = thread.join().unwrap();
            assert_eq!((status, &answer["content"]), (200, &alone.1["content"]));
        }
    });
    drop(slow);
    server.wait_until(false);
    let (_, metrics) = server.get("/metrics");
    assert!(
        metrics
            .as_str()
            .unwrap()
            .contains("samite:requests_failed_total 0"),
        "{metrics}"
    );
}

#[test]
fn answers_match_schemas_and_grammars() {
    let server = Server::simple();
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"], "additionalProperties": false});
    let body = chat(
        json!({"max_tokens": 60, "response_format": {"type": "json_schema",
            "json_schema": {"schema": schema}}}),
    );
    let (status, answer) = server.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{answer}");
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap();
    assert!(value["a"] == "x" || value["a"] == "y", "{text}");
    let body = json!({"prompt": "x", "grammar": "root ::= \"yes\" | \"no\"", "n_predict": 20});
    let (_, answer) = server.post("/completion", &body);
    assert!(
        ["yes", "no"].contains(&answer["content"].as_str().unwrap()),
        "{answer}"
    );
    let parameters = json!({"type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"],
        "additionalProperties": false});
    let tool = json!({"type": "function", "function": {"name": "pick", "parameters": parameters}});
    let body = chat(
        json!({"max_tokens": 200, "tools": [tool], "tool_choice": "required",
            "parallel_tool_calls": false}),
    );
    let (status, answer) = server.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
    let call = &choice["message"]["tool_calls"][0]["function"];
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(call["name"], "pick");
    assert!(
        (1..=9).contains(&arguments["n"].as_i64().unwrap()),
        "{arguments}"
    );
}

#[test]
fn slots_are_saved_and_restored() {
    let folder = tempfile::tempdir().unwrap();
    let options = ServeOptions {
        slot_save_path: Some(folder.path().to_owned()),
        ..ServeOptions::default()
    };
    let server = Server::start(options, EngineOptions::default());
    let ask = |slot: usize| {
        let body = json!({"prompt": "Once upon a time there was", "n_predict": 4, "id_slot": slot});
        server.post("/completion", &body).1["timings"]["cache_n"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(ask(1), 0);
    let name = json!({"filename": "one"});
    let (status, saved) = server.post("/slots/1?action=save", &name);
    assert_eq!(status, 200, "{saved}");
    assert_eq!(server.post("/slots/1?action=erase", &json!({})).0, 200);
    assert_eq!(ask(1), 0);
    let (status, restored) = server.post("/slots/2?action=restore", &name);
    assert_eq!((status, &restored["n_restored"]), (200, &saved["n_saved"]));
    assert!(ask(2) > 3);
    std::fs::write(folder.path().join("bad"), "no").unwrap();
    for name in ["bad", "missing", "../one", "a/b", ""] {
        let (status, answer) = server.post("/slots/2?action=restore", &json!({"filename": name}));
        assert_eq!(status, 400, "{name}: {answer}");
    }
    assert!(ask(2) > 3);
}

#[test]
fn the_server_drains() {
    let server = Server::simple();
    // More data than socket buffers hold, so that it cannot finish before it is read.
    let body = json!({"prompt": "Once", "stream": true, "ignore_eos": true, "n_predict": 900,
        "n_probs": 100});
    let mut stream = server.send("POST", "/completion", "", &body.to_string());
    let mut some = [0; 200];
    stream.read_exact(&mut some).unwrap();
    server.stop.cancel();
    // Requests meanwhile are rejected.
    wait_until("the server is not ready", || server.get("/ready").0 == 503);
    assert_eq!(server.get("/health").0, 200);
    let (status, head, _) = server.ask("POST", "/completion", "", "{\"prompt\": \"a\"}");
    assert!(status == 503 && head.contains("Retry-After"), "{head}");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(
        rest.contains("\"stop\":true") && rest.contains("\"tokens_predicted\":900"),
        "{rest}"
    );
}

#[test]
fn wrong_methods_get_the_allow_header() {
    let server = Server::simple();
    for (method, path, allowed) in [
        ("POST", "/health", "GET, HEAD"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/stories", "GET, HEAD"),
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/completion", "POST"),
        ("GET", "/slots/0?action=save", "POST"),
        ("GET", "/v1/messages", "POST"),
        ("GET", "/api/chat", "POST"),
        ("POST", "/api/tags", "GET, HEAD"),
        ("PATCH", "/props", "GET, HEAD, POST"),
        ("POST", "/", "GET, HEAD"),
    ] {
        let (status, head, body) = server.ask(method, path, "", "");
        assert_eq!(status, 405, "{method} {path}: {body}");
        assert!(head.contains(&format!("Allow: {allowed}\r\n")), "{head}");
        let body: Value = serde_json::from_str(&body).unwrap();
        assert!(!body["error"].is_null(), "{body}");
    }
    assert_eq!(server.ask("POST", "/nothing", "", "").0, 404);
}

#[test]
fn a_model_is_described_by_its_id() {
    let server = Server::simple();
    let (_, list) = server.get("/v1/models");
    let id = list["data"][0]["id"].as_str().unwrap();
    let (status, one) = server.get(&format!("/v1/models/{id}"));
    assert_eq!((status, &one), (200, &list["data"][0]));
    let (status, none) = server.get("/v1/models/another");
    assert_eq!(
        (status, &none["error"]["param"]),
        (404, &json!("model")),
        "{none}"
    );
}

#[test]
fn seeds_have_64_bits_and_reproduce_the_text() {
    let server = Server::simple();
    let text = |seed: Value| {
        let body = json!({"prompt": "Once", "n_predict": 12, "temperature": 2.0, "top_k": 0,
            "seed": seed});
        let (status, answer) = server.post("/completion", &body);
        assert_eq!(status, 200, "{answer}");
        (
            answer["content"].clone(),
            answer["generation_settings"]["seed"].clone(),
        )
    };
    let large = json!(6_000_000_000_u64);
    assert_eq!(text(large.clone()), text(large.clone()));
    assert_eq!(text(large.clone()).1, large);
    assert_ne!(text(json!(1)).0, text(json!(2)).0);
    assert_eq!(text(json!(-7)).1, json!(u64::MAX - 6));
    assert!(text(json!(-1)).1.as_u64().unwrap() < 1 << 31);
}

#[test]
fn the_tokenizer_speaks_vllms_format_too() {
    let server = Server::simple();
    let (_, info) = server.get("/tokenizer_info");
    assert_eq!(
        (&info["bos_token"], &info["eos_token"]),
        (&json!("<s>"), &json!("</s>"))
    );
    assert_eq!(info["add_bos_token"], true);
    assert!(info["model_max_length"].as_u64().unwrap() > 0);
    let tokenize = |body: Value| server.post("/tokenize", &body).1;
    let own = tokenize(json!({"content": "Once upon"}));
    let mut same = tokenize(json!({"prompt": "Once upon", "add_special_tokens": false}));
    assert_eq!(own["tokens"], same["tokens"]);
    assert_eq!(same["count"], same["tokens"].as_array().unwrap().len());
    assert_eq!(same["max_model_len"], info["model_max_length"]);
    // vLLM adds special tokens unless told otherwise, llama-server only if told.
    same["tokens"].as_array_mut().unwrap().insert(0, json!(1));
    assert_eq!(
        tokenize(json!({"prompt": "Once upon"}))["tokens"],
        same["tokens"]
    );
    let (_, text) = server.post("/detokenize", &json!({"tokens": own["tokens"]}));
    assert_eq!(text["prompt"], text["content"]);
    assert_eq!(text["prompt"].as_str().unwrap().trim(), "Once upon");
}

#[test]
fn echoed_prompts_have_log_probabilities() {
    let server = Server::simple();
    let ask = |body: Value| {
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"].clone()
    };
    let logprobs = |choice: &Value| choice["logprobs"].clone();
    let body = json!({"prompt": "Once üpon", "max_tokens": 3, "temperature": 0.0, "echo": true,
        "logprobs": 1});
    let choice = &ask(body.clone())[0];
    let found = logprobs(choice);
    let text = choice["text"].as_str().unwrap();
    let tokens = found["tokens"].as_array().unwrap();
    for name in ["token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(
            found[name].as_array().unwrap().len(),
            tokens.len(),
            "{found}"
        );
    }
    // Nothing predicts the first token.
    assert_eq!(found["token_logprobs"][0], Value::Null);
    assert_eq!(found["top_logprobs"][0], Value::Null);
    for at in 1..tokens.len() {
        let own = found["token_logprobs"][at].as_f64().unwrap();
        assert!(own < 0.0, "{found}");
        // The token itself is among the most probable ones.
        let top = found["top_logprobs"][at].as_object().unwrap();
        assert!(
            top.values().any(|other| other.as_f64().unwrap() >= own),
            "{found}"
        );
        assert!(top.contains_key(tokens[at].as_str().unwrap()), "{found}");
        // Offsets count characters of the text.
        let offset = found["text_offset"][at].as_u64().unwrap() as usize;
        let rest: String = text.chars().skip(offset).collect();
        // The tokenizer adds a space to the first word.
        let token = tokens[at].as_str().unwrap();
        let token = if offset == 0 {
            token.trim_start()
        } else {
            token
        };
        assert!(
            rest.starts_with(token) || token.contains('\u{FFFD}'),
            "{found}"
        );
    }
    // A generated token has the same log-probability as part of a prompt.
    let ids = found["content"].as_array().unwrap().iter();
    let ids: Vec<_> = ids.map(|entry| entry["id"].clone()).collect();
    for most in [0, 1] {
        let again = &ask(
            json!({"prompt": ids, "max_tokens": most, "temperature": 0.0,
            "echo": true, "logprobs": 0}),
        )[0];
        let again = logprobs(again);
        assert_eq!(
            again["tokens"].as_array().unwrap().len(),
            tokens.len() + most,
            "{again}"
        );
        for at in 1..tokens.len() {
            let [one, other] =
                [&found, &again].map(|of| of["token_logprobs"][at].as_f64().unwrap());
            assert!((one - other).abs() < 1e-4, "{found} {again}");
        }
    }
    // A stream has them with the text of the prompt.
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let (_, _, stream) = server.ask("POST", "/v1/completions", "", &streamed.to_string());
    let parts = events(&stream);
    assert_eq!(parts[0]["choices"][0]["text"], "Once üpon");
    let parts = parts.iter().map(|part| logprobs(&part["choices"][0]));
    let parts = parts.filter_map(|part| part["tokens"].as_array().cloned());
    assert_eq!(parts.flatten().collect::<Vec<_>>(), *tokens);
    // Each prompt of a list has its own.
    let both = ask(
        json!({"prompt": ["Once", "A cat"], "max_tokens": 1, "echo": true,
        "logprobs": 1}),
    );
    for (number, prompt) in ["Once", "A cat"].into_iter().enumerate() {
        let tokens = &logprobs(&both[number])["tokens"];
        let tokens = tokens.as_array().unwrap().iter().filter_map(Value::as_str);
        let joined = tokens.collect::<String>();
        assert!(joined.contains(prompt), "{joined}");
    }
}

#[test]
fn echo_prepends_the_prompt_to_a_completion() {
    let server = Server::simple();
    let body = |more: Value| {
        let mut body =
            json!({"prompt": ["Once upon", "A cat"], "max_tokens": 4, "temperature": 0.0});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        server.post("/v1/completions", &body)
    };
    let (_, plain) = body(json!({}));
    let (status, echoed) = body(json!({"echo": true, "best_of": 1}));
    assert_eq!(status, 200, "{echoed}");
    for (at, prompt) in ["Once upon", "A cat"].into_iter().enumerate() {
        let text = plain["choices"][at]["text"].as_str().unwrap();
        assert_eq!(echoed["choices"][at]["text"], format!("{prompt}{text}"));
    }
    let stream = json!({"prompt": "Once upon", "max_tokens": 4, "temperature": 0.0, "stream": true,
        "echo": true});
    let (_, _, stream) = server.ask("POST", "/v1/completions", "", &stream.to_string());
    let parts = events(&stream);
    let parts = parts
        .iter()
        .filter_map(|event| event["choices"][0]["text"].as_str());
    assert_eq!(parts.collect::<String>(), echoed["choices"][0]["text"]);
    for (more, name) in [
        (
            json!({"echo": true, "logprobs": 2, "post_sampling_probs": true}),
            "post_sampling_probs",
        ),
        (json!({"best_of": 3}), "best_of"),
        (json!({"n": 2, "best_of": 3}), "best_of"),
        (json!({"suffix": "end"}), "suffix"),
        (json!({"guided_json": {}}), "guided_json"),
        (json!({"min_tokens": 3, "max_tokens": 2}), "min_tokens"),
    ] {
        let (status, answer) = body(more);
        assert_eq!(
            (status, &answer["error"]["param"]),
            (400, &json!(name)),
            "{answer}"
        );
    }
    let (status, _) = server.post("/v1/chat/completions", &chat(json!({"echo": true})));
    assert_eq!(status, 400);
}

/// A foreign page can make its own host name resolve to this machine (DNS rebinding).
#[test]
fn a_server_without_keys_answers_only_to_private_host_names() {
    // Other systems have no second loopback address by default.
    let second = if cfg!(target_os = "linux") {
        "127.0.0.2"
    } else {
        "127.0.0.1"
    };
    for host in ["127.0.0.1", second, "127.1", "LOCALHOST", "0.0.0.0"] {
        let options = ServeOptions {
            hosts: vec![host.to_owned()],
            allowed_hosts: vec!["Models.example.org".to_owned()],
            ..ServeOptions::default()
        };
        let server = Server::start(options, EngineOptions::default());
        let status = |name: &str| {
            let mut stream = TcpStream::connect(&server.address).unwrap();
            stream.set_read_timeout(Some(HANG_GUARD)).unwrap();
            let request =
                format!("GET /props HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text.split(' ').nth(1).unwrap().to_owned()
        };
        for name in [
            "evil.com",
            "evil.com:8080",
            "localhost.evil.com",
            "127.0.0.1.evil.com",
            "a.models.example.org",
            "evillocal.com",
            "a.notlocal",
        ] {
            assert_eq!(status(name), "403", "{name} at {host}");
        }
        for name in [
            "localhost",
            "LocalHost:8080",
            // The configured host name is one of its names.
            &format!("{host}:80"),
            "a.localhost",
            "127.0.0.2:80",
            "models.example.org:80",
            "gpu:8080",
            "gpu.local",
            "gpu.home.arpa",
            "[::1]:80",
        ] {
            assert_eq!(status(name), "200", "{name} at {host}");
        }
    }
}

#[test]
fn foreign_pages_cannot_use_the_model() {
    let server = Server::simple();
    let body = json!({"prompt": "a", "n_predict": 1}).to_string();
    let status =
        |server: &Server, headers: &str| server.ask("POST", "/completion", headers, &body).0;
    for (origin, wanted) in [
        ("http://evil.com", 403),
        ("https://evil.com:8080", 403),
        ("http://localhost.evil.com", 403),
        ("null", 403),
        // The host that the request names, a page of this machine, and a program's own page.
        ("http://localhost", 200),
        ("http://127.0.0.1:3000", 200),
        ("vscode-webview://abc", 200),
    ] {
        assert_eq!(
            status(&server, &format!("Origin: {origin}\r\n")),
            wanted,
            "{origin}"
        );
    }
    assert_eq!(status(&server, ""), 200);
    let named = ServeOptions {
        cors_origins: vec!["https://mine.org".to_owned()],
        ..ServeOptions::default()
    };
    let server = Server::start(named, EngineOptions::default());
    assert_eq!(status(&server, "Origin: https://mine.org\r\n"), 200);
    assert_eq!(status(&server, "Origin: https://other.org\r\n"), 403);
    let keyed = ServeOptions {
        api_keys: vec!["key".to_owned()],
        ..ServeOptions::default()
    };
    let server = Server::start(keyed, EngineOptions::default());
    assert_eq!(
        status(&server, "Origin: https://other.org\r\nX-Api-Key: key\r\n"),
        200
    );
}

#[test]
fn a_path_prefix_can_be_configured() {
    let options = ServeOptions {
        prefix: "/llm".to_owned(),
        ..ServeOptions::default()
    };
    let server = Server::start(options, EngineOptions::default());
    assert_eq!(server.ask("GET", "/llm/health", "", "").0, 200);
    assert!(
        server
            .ask("GET", "/llm/", "", "")
            .2
            .contains("<!doctype html>")
    );
    let (status, head, _) = server.ask("GET", "/llm", "", "");
    assert!(
        status == 308 && head.contains("Location: /llm/\r\n"),
        "{head}"
    );
    for path in ["/health", "/", "/llmhealth", "/other"] {
        assert_eq!(server.ask("GET", path, "", "").0, 404, "{path}");
    }
}

#[test]
fn streams_report_a_server_shutdown() {
    let options = ServeOptions {
        drain_seconds: 0,
        ..ServeOptions::default()
    };
    let engine = EngineOptions {
        context: Some(ENDLESS),
        ..EngineOptions::default()
    };
    let server = Server::start(options, engine);
    let endless = json!({"ignore_eos": true, "stream": true, "max_tokens": 1_000_000});
    let mut streams: Vec<_> = [
        (
            "/v1/chat/completions",
            chat(endless.clone()),
            "data: {\"error\"",
        ),
        (
            "/v1/messages",
            chat(endless.clone()),
            "event: error\ndata: ",
        ),
        (
            "/api/chat",
            chat(json!({"options": {"num_predict": -1, "ignore_eos": true}})),
            "{\"error\"",
        ),
    ]
    .into_iter()
    .map(|(path, body, last)| (server.send("POST", path, "", &body.to_string()), last))
    .collect();
    for (stream, _) in &mut streams {
        stream.read_exact(&mut [0; 400]).unwrap();
    }
    server.stop.cancel();
    for (stream, last) in &mut streams {
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        let (_, end) = rest
            .rsplit_once(*last)
            .unwrap_or_else(|| panic!("{last}: {rest}"));
        assert!(end.contains("ended") || end.contains("end"), "{end}");
        assert!(rest.ends_with("\r\n0\r\n\r\n"), "{rest}");
    }
}

#[test]
fn bodies_that_expand_in_memory_are_refused() {
    let server = Server::simple();
    let many = format!(
        "{{\"prompt\": \"a\", \"x\": [{}{{}}]}}",
        "{},".repeat(1 << 17)
    );
    let (status, _, answer) = server.ask("POST", "/completion", "", &many);
    assert!(
        status == 413 && answer.contains("objects"),
        "{status} {answer}"
    );
}

#[test]
fn metrics_have_one_series_per_name() {
    let options = ServeOptions {
        metrics_names: "vllm".to_owned(),
        ..ServeOptions::default()
    };
    let server = Server::start(options, EngineOptions::default());
    for _ in 0..2 {
        server.post(
            "/completion",
            &json!({"prompt": "Once upon a time", "n_predict": 5}),
        );
    }
    server.wait_until(false);
    let (_, text) = server.get("/metrics");
    let text = text.as_str().unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let name = series.split('{').next().unwrap();
        assert!(value.parse::<f64>().is_ok(), "{line}");
        assert!(name.ends_with("_bucket") || seen.insert(name), "{line}");
        let base = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| name.strip_suffix(end));
        let has_type = |name: &str| text.contains(&format!("# TYPE {name} "));
        assert!(has_type(name) || base.is_some_and(has_type), "{line}");
    }
    for line in [
        "vllm:num_requests_running 0",
        "vllm:num_requests_waiting 0",
        "vllm:generation_tokens_total 10",
        "vllm:request_success_total 2",
        "vllm:time_to_first_token_seconds_count 2",
        "vllm:inter_token_latency_seconds_count 8",
        "vllm:e2e_request_latency_seconds_bucket{le=\"+Inf\"} 2",
        "llamacpp:tokens_predicted_total 10",
        "samite:requests_failed_total 0",
    ] {
        assert!(
            text.lines().any(|found| found == line),
            "{line} is not in {text}"
        );
    }
    let hits = text
        .lines()
        .find_map(|line| line.strip_prefix("vllm:prefix_cache_hits_total "));
    assert!(hits.unwrap().parse::<u64>().unwrap() >= 4, "{text}");
}

#[test]
fn slowly_sent_headers_hold_no_connection() {
    let options = ServeOptions {
        head_seconds: 1,
        ..ServeOptions::default()
    };
    let server = Server::start(options, EngineOptions::default());
    let mut idle = TcpStream::connect(&server.address).unwrap();
    // The first request of a connection, and the second one.
    for is_second in [false, true] {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        let limit = Duration::from_millis(20);
        stream.set_read_timeout(Some(limit)).unwrap();
        let mut part = [0; 4096];
        if is_second {
            stream
                .write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                .unwrap();
            while stream.read(&mut part).is_err() {}
        }
        let start = Instant::now();
        stream.write_all(b"GET /health HTTP/1.1\r\n").unwrap();
        loop {
            match stream.read(&mut part) {
                Ok(0) => break,
                Ok(_) => panic!("half a request is answered"),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
                Err(_) => {}
            }
            let _ = stream.write_all(b"X: y\r\n");
            assert!(start.elapsed() < HANG_GUARD, "it is held");
        }
        assert!(start.elapsed() > Duration::from_millis(900));
    }
    // A connection without a request stays open and is served later.
    idle.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    idle.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}

#[test]
fn errors_name_fields_of_messages_tools_and_queries() {
    let server = Server::simple();
    let message = |message: Value| json!({"messages": [message]});
    let call = |call: Value| message(json!({"role": "assistant", "tool_calls": [call]}));
    let user = |content: Value| json!({"role": "user", "content": content});
    let tool = |function: Value| json!({"messages": [user(json!("a"))], "tools": [{"function": function}]});
    let cases = [
        (
            message(user(json!([{"text": 5}]))),
            "messages[0].content[0].text",
        ),
        (
            message(json!({"role": "tool", "name": 5})),
            "messages[0].name",
        ),
        (call(json!({})), "messages[0].tool_calls[0].function"),
        (
            call(json!({"function": {}})),
            "messages[0].tool_calls[0].function.name",
        ),
        (tool(json!({"name": 5})), "tools[0].function.name"),
        (
            tool(json!({"name": "a", "strict": 5})),
            "tools[0].function.strict",
        ),
        (
            tool(json!({"name": "a", "parameters": []})),
            "tools[0].function.parameters",
        ),
    ];
    for (body, field) in cases {
        let (status, answer) = server.post("/apply-template", &body);
        assert_eq!(
            (status, &answer["error"]["param"]),
            (400, &json!(field)),
            "{answer}"
        );
    }
    let input = json!([{"type": "tool_search_output", "tools": [
        {"type": "custom", "name": "a", "defer_loading": 5},
    ]}]);
    // These values are wrong even where they do not matter.
    let count = "/v1/responses/input_tokens";
    let cases = [
        ("/tokenize?autoload=soon", json!({}), "autoload"),
        (
            "/tokenize",
            json!({"add_special_tokens": 5}),
            "add_special_tokens",
        ),
        (count, json!({"input": "a", "truncation": 5}), "truncation"),
        (
            count,
            json!({"input": "a", "max_tokens": -2, "max_output_tokens": 1}),
            "max_tokens",
        ),
        (
            count,
            json!({"input": input}),
            "input[0].tools[0].defer_loading",
        ),
        (
            "/v1/responses",
            json!({"input": "a", "top_logprobs": 1, "logprobs": 101}),
            "logprobs",
        ),
        (
            "/completion",
            json!({"prompt": "a", "n_predict": 1, "max_tokens": -2}),
            "max_tokens",
        ),
        (
            "/completion",
            json!({"prompt": "a", "grammar": "root ::= \"a\"", "response_format": {"schema": 5}}),
            "response_format",
        ),
    ];
    for (path, body, field) in cases {
        let (status, answer) = server.post(path, &body);
        assert_eq!(
            (status, &answer["error"]["param"]),
            (400, &json!(field)),
            "{answer}"
        );
    }
    let tools = json!([{"name": "a", "input_schema": {}, "type": 5}]);
    let call = json!({"id": 5, "function": {"name": "a"}});
    let called = json!({"role": "assistant", "content": "a", "tool_calls": [call]});
    for (path, body) in [
        (
            "/v1/messages/count_tokens",
            json!({"messages": [user(json!("a"))], "tools": tools}),
        ),
        ("/api/chat", json!({"top_logprobs": 101})),
        ("/api/chat", json!({"messages": [called]})),
        ("/models/load", json!([])),
    ] {
        let (status, answer) = server.post(path, &body);
        assert_eq!(status, 400, "{answer}");
    }
    for id in ["é".to_owned(), "a".repeat(1025)] {
        let header = format!("X-Conversation-Id: {id}\r\n");
        let (status, _, answer) = server.ask("POST", "/tokenize", &header, "{}");
        assert_eq!(status, 400, "{answer}");
        assert!(answer.contains("x-conversation-id"), "{answer}");
    }
}

#[test]
fn an_empty_grammar_is_none() {
    let server = Server::simple();
    let body = json!({"prompt": "a", "n_predict": 1, "grammar": "", "json_schema": {}});
    let (status, answer) = server.post("/completion", &body);
    assert_eq!(status, 200, "{answer}");
}

#[test]
fn null_and_missing_members_of_messages_and_tools_have_defaults() {
    let server = Server::simple();
    let call = json!({"id": null, "type": null, "function": {"name": "f", "arguments": null}});
    let function = json!({"name": "f", "description": null, "parameters": null, "strict": null});
    let body = json!({
        "messages": [
            {"role": "user", "content": [{"text": "a"}, {"type": null, "text": "b"}]},
            {"role": "assistant", "content": "c", "tool_calls": [call]},
        ],
        "tools": [{"type": null, "function": function}],
    });
    let (status, answer) = server.post("/apply-template", &body);
    assert_eq!(status, 200, "{answer}");
    assert!(
        answer["prompt"].as_str().unwrap().contains("a\nb"),
        "{answer}"
    );
}

#[test]
fn a_text_does_not_end_before_min_tokens() {
    let server = Server::simple();
    let eos = 2;
    let generated = |more: Value| {
        let mut body = json!({
            "prompt": "Once", "n_predict": 20, "logit_bias": [[eos, 100.0]], "temperature": 0,
        });
        let more = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(more);
        let (status, answer) = server.post("/completion", &body);
        assert_eq!(status, 200, "{answer}");
        let count = answer["tokens_predicted"].as_u64().unwrap();
        (count, answer["content"].as_str().unwrap().to_owned())
    };
    assert_eq!(generated(json!({})).0, 1);
    assert_eq!(generated(json!({"min_tokens": 0})).0, 1);
    assert_eq!(generated(json!({"min_tokens": 7})).0, 8);
    assert_eq!(generated(json!({"min_tokens": 20})).0, 20);
    let (_, text) = generated(json!({"min_tokens": 7, "grammar": "root ::= \"ab\" \"c\"*"}));
    assert!(text.starts_with("abcc"), "{text}");
    // A complete form ends the text.
    let (_, text) = generated(json!({"min_tokens": 7, "grammar": "root ::= \"ab\""}));
    assert_eq!(text, "ab");
}

/// A router can send a request again as long as it has no headers.
#[test]
fn a_stream_without_a_token_has_no_headers() {
    let options = ServeOptions {
        drain_seconds: 0,
        ..ServeOptions::default()
    };
    let engine = EngineOptions {
        slots: 1,
        context: Some(ENDLESS),
        ..EngineOptions::default()
    };
    let server = Server::start(options, engine);
    let body = json!({"prompt": "Once", "stream": true, "ignore_eos": true}).to_string();
    let mut first = server.send("POST", "/v1/completions", "", &body);
    first.read_exact(&mut [0; 100]).unwrap();
    let mut second = server.send("POST", "/v1/completions", "", &body);
    samite_testing::wait_until("the second request waits", || {
        server.get("/load").1["server_load"] == 2
    });
    server.stop.cancel();
    let mut answer = String::new();
    second.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    let mut rest = String::new();
    first.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("error"), "{rest}");
}

#[test]
fn requests_with_other_cache_salts_share_nothing() {
    let server = Server::simple();
    let cached = |salt: Value| {
        let body = json!({"prompt": "Once upon a time", "max_tokens": 1, "cache_salt": salt});
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    for salt in [json!("a"), json!("b"), Value::Null] {
        assert_eq!(cached(salt.clone()), 0, "{salt}");
        assert_ne!(cached(salt.clone()), 0, "{salt}");
    }
    let empty = json!({"prompt": "Once", "cache_salt": ""});
    let (status, answer) = server.post("/v1/completions", &empty);
    assert_eq!(status, 400);
    assert!(answer.to_string().contains("cache_salt"), "{answer}");
}

#[test]
fn routers_get_tokens_and_sizes() {
    let source = KvEventSource {
        endpoint: "tcp://0.0.0.0:5557".to_owned(),
        replay: None,
        topic: "kv".to_owned(),
        block_size: 8,
    };
    let options = ServeOptions {
        kv_events: Some(source),
        ..ServeOptions::default()
    };
    let server = Server::start(options, EngineOptions::default());
    let body = json!({
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "Once"}],
        "prompt": ["Once", [5, 6, 7]],
        "input": "Once",
    });
    let render = |path: &str| {
        let (status, answer) = server.post(path, &body);
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let chat = render("/v1/chat/completions/render");
    let (_, applied) = server.post("/apply-template", &body);
    let content = json!({"content": applied["prompt"], "add_special": true});
    let (_, tokens) = server.post("/tokenize", &content);
    assert_eq!(chat["token_ids"], tokens["tokens"], "{chat}");
    assert_eq!(
        render("/v1/responses/render")["token_ids"],
        tokens["tokens"]
    );
    assert_eq!(render("/v1/messages/render")["token_ids"], tokens["tokens"]);
    let conversation = json!({"messages": body["messages"], "return_token_strs": true});
    let (_, of_chat) = server.post("/tokenize", &conversation);
    assert_eq!(of_chat["tokens"], tokens["tokens"]);
    let strings = of_chat["token_strs"].as_array().unwrap();
    assert_eq!(strings.len(), of_chat["count"].as_u64().unwrap() as usize);
    let text: String = strings.iter().map(|text| text.as_str().unwrap()).collect();
    assert!(
        text.ends_with(applied["prompt"].as_str().unwrap()),
        "{text}"
    );
    let counts = server.post("/v1/chat/completions/input_tokens", &body).1;
    assert_eq!(
        counts["input_tokens"],
        tokens["tokens"].as_array().unwrap().len()
    );
    let prompts = render("/v1/completions/render");
    assert_eq!(prompts[1]["token_ids"], json!([5, 6, 7]), "{prompts}");
    assert_eq!(prompts.as_array().unwrap().len(), 2, "{prompts}");

    let (_, list) = server.get("/v1/models");
    let model = &list["data"][0];
    let (_, info) = server.get("/get_model_info");
    assert_eq!(
        (&info["model_path"], &info["is_generation"]),
        (&model["id"], &json!(true))
    );
    let (_, about) = server.get("/get_server_info");
    assert_eq!(server.get("/server_info").1, about);
    assert_eq!(about["served_model_name"], model["root"]);
    assert_eq!(about["kv_block_size"], 8);
    let other = Server::simple();
    let (_, other_info) = other.get("/get_server_info");
    assert_ne!(about["instance_id"], other_info["instance_id"]);
    let (_, sources) = server.get("/kv_event_sources");
    assert_eq!(sources["0"]["endpoint"], "tcp://0.0.0.0:5557", "{sources}");
    assert_eq!(other.get("/kv_event_sources").1, json!({}));
    assert_eq!(server.get("/version").1["version"], about["version"]);
    assert_eq!(about["context_length"], model["max_model_len"]);
    assert!(about["max_total_num_tokens"].as_u64() >= about["context_length"].as_u64());
    assert_eq!(server.get("/health_generate").0, 200);
    assert_eq!(server.get("/load").1, json!({"server_load": 0}));
    let endless = json!({"prompt": "Once", "stream": true, "ignore_eos": true});
    let mut stream = server.send("POST", "/completion", "", &endless.to_string());
    stream.read_exact(&mut [0; 100]).unwrap();
    let (_, load) = server.get("/load");
    assert!(load["server_load"].as_u64() <= Some(1), "{load}");
}
