//! Invalid requests, generated from a table: each is rejected quickly, with the documented status
//! and an error object that names the problem, and the next request is served.

use crate::common::Server;
use samite_requests::EngineOptions;
use samite_serve::ServeOptions;
use samite_testing::HANG_GUARD;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// A field with space-separated invalid values.
type Field = (&'static str, &'static str);

/// Fields of all text requests.
const TEXT: &[Field] = &[
    ("temperature", r#"-1 "hot" [] {} true"#),
    ("dynatemp_range", r#"-1 "x" []"#),
    ("dynatemp_exponent", r#"-1 "x" {}"#),
    ("top_k", r#"-2 1.5 "x" [] 99999999999"#),
    ("top_p", r#"-0.1 1.1 "x" [] true"#),
    ("min_p", r#"-0.1 1.1 "x""#),
    ("typical_p", r#"-0.1 1.1 "x""#),
    ("top_n_sigma", r#""x" [] {}"#),
    ("xtc_probability", r#"-0.1 1.1 "x""#),
    ("xtc_threshold", r#"-0.1 1.1 "x""#),
    ("repeat_penalty", r#"0 -1 "x" []"#),
    ("frequency_penalty", r#""x" [] 1e300"#),
    ("presence_penalty", r#""x" [] 1e300"#),
    ("repeat_last_n", r#"-2 1.5 "x""#),
    ("dry_multiplier", r#"-1 "x""#),
    ("dry_base", r#"-1 "x""#),
    ("dry_allowed_length", r#"-2 "x""#),
    ("dry_penalty_last_n", r#"-2 "x""#),
    ("dry_sequence_breakers", r#"5 [5] {} []"#),
    ("mirostat", r#"3 -1 1.5 "x""#),
    ("mirostat_tau", r#"-1 "x""#),
    ("mirostat_eta", r#"-1 "x""#),
    ("adaptive_target", r#"2 "x""#),
    ("adaptive_decay", r#"1 -1 "x""#),
    ("min_keep", r#"-2 "x""#),
    ("seed", r#"1.5 "x" [] {} true 1e30 99999999999999999999"#),
    ("samplers", r#"5 {} [5] ["nothing"]"#),
    (
        "logit_bias",
        r#"5 "x" [5] [[1]] [[99999999,1]] [[1,"x"]] {"1":[]} {"99999999":1} [[-1,1]]"#,
    ),
    ("ignore_eos", r#""x" 1 []"#),
    ("stream", r#""yes" 1 [] {}"#),
    ("stop", r#"5 [5] {} true"#),
    ("cache_prompt", r#"1 "x""#),
    ("id_slot", r#"-2 999 "x""#),
    ("n_keep", r#"-2 "x""#),
    ("n_discard", r#"-1 "x""#),
    ("t_max_predict_ms", r#"-2 "x""#),
    ("t_max_total_ms", r#"-2 "x""#),
    ("timings_per_token", r#"1 "x""#),
    ("lora", r#"5 {} [5] [{"id":0,"scale":1}] [{}] "x""#),
    ("model", r#"5 [] {} true"#),
];

/// Additional fields of OpenAI's and llama-server's APIs.
const OPEN: &[Field] = &[
    ("n", r#"0 -1 999 "x" 1.5"#),
    ("best_of", r#"0 2 "x""#),
    ("n_predict", r#"-2 1.5 "x" [] {}"#),
    ("stream_options", r#"5 [] "x" {"include_usage":1}"#),
    ("return_progress", r#"1 "x""#),
    ("return_tokens", r#"1 "x""#),
    ("verbose", r#"1 "x""#),
    ("n_probs", r#"-1 101 "x" []"#),
    ("post_sampling_probs", r#"1 "x""#),
    ("response_fields", r#"5 [5]"#),
    ("sse_ping_interval", r#"-2 "x""#),
    ("echo", r#"1 "x""#),
    (
        "grammar",
        r#"5 [] {} "root" "root::=(" "x::=y" "root::=root" "root::=[z-a]" "root::=nothing"
            "root::=\"a\"{5,2}""#,
    ),
    (
        "json_schema",
        r##"5 "x" [] {"type":5} {"type":"nothing"} {"$ref":"#"} {"$ref":"#/nothing"}
            {"$ref":"http://evil.com/x"} {"pattern":"("} {"enum":[]} {"allOf":5} {"properties":[]}
            {"minLength":-1} {"not":{}} {"minimum":5,"maximum":1,"type":"integer"}
            {"type":"array","minItems":9,"maxItems":2} {"$ref":"file:///etc/passwd"}
            {"properties":{"a":5}} {"required":"a"}"##,
    ),
    (
        "response_format",
        r#"5 [] "x" {"type":"sound"} {"type":5} {"type":"json_schema","json_schema":5}
            {"type":"json_object","schema":{"type":1}}"#,
    ),
    ("modalities", r#"5 ["audio"]"#),
    ("functions", r#"[{}] {} 5"#),
    ("guided_regex", r#""a+" {}"#),
    ("min_tokens", "5"),
];

/// Fields of OpenAI's chat API.
const CHAT: &[Field] = &[
    (
        "messages",
        r#"5 "x" {} [] [5] [{}] [{"role":5}] [{"role":"<robot>","content":"x"}]
            [{"role":"user","content":5}] [{"role":"user","content":[5]}]
            [{"role":"user","content":[{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}]}]
            [{"role":"user","content":[{"type":"sound"}]}]
            [{"role":"assistant","content":"a"},{"role":"assistant","content":"b"}]
            [{"role":"assistant","content":null,"tool_calls":5}]
            [{"role":"assistant","tool_calls":[{"function":5}]}]"#,
    ),
    (
        "tools",
        r#"5 "x" {} [5] [{}] [{"type":"function"}] [{"type":"magic"}]
            [{"type":"function","function":{"name":5}}]"#,
    ),
    (
        "tool_choice",
        r#"5 "x" [] "required" {} {"function":{"name":"nothing"}} {"function":5}"#,
    ),
    ("parallel_tool_calls", r#"5 "x""#),
    ("max_tokens", r#"-2 1.5 "x" [] {}"#),
    ("max_completion_tokens", r#"-2 1.5 "x" [] {}"#),
    ("chat_template_kwargs", r#"5 [] "x" {"enable_thinking":5}"#),
    ("enable_thinking", r#"5 "x""#),
    ("reasoning_effort", "5 []"),
    ("reasoning_format", r#"5 "x""#),
    ("add_generation_prompt", r#"5 "x""#),
    ("continue_final_message", r#"5 "x""#),
    ("logprobs", r#""x" [] -1"#),
    ("top_logprobs", r#"3 -1 101 "x""#),
];

const PROMPT: &[Field] = &[(
    "prompt",
    r#"5 true {} [] [[]] [true] [99999999] [-1] [1.5] [null] {"prompt_string":5}
        {"prompt_string":"a","multimodal_data":["x"]} ["a",{}] [[[1]]]"#,
)];

const MESSAGE: &[Field] = &[
    (
        "messages",
        r#"5 "x" {} [] [5] [{}] [{"role":"tool","content":"x"}] [{"role":"user"}]
            [{"role":"user","content":5}] [{"role":"user","content":[{"type":"image"}]}]
            [{"role":"user","content":[{"type":"magic"}]}]
            [{"role":"user","content":[{"type":"text"}]}]
            [{"role":"assistant","content":[{"type":"tool_use"}]}]
            [{"role":"user","content":[{"type":"tool_result","content":5}]}]"#,
    ),
    ("system", r#"5 {} [5] [{"type":"image"}]"#),
    ("max_tokens", r#"-1 1.5 "x" []"#),
    ("stop_sequences", r#"5 [5] {}"#),
    ("tools", r#"5 "x" {} [5] [{}] [{"name":5}]"#),
    (
        "tool_choice",
        r#"5 "x" {"type":"magic"} {"type":"tool"} {"type":"any"}"#,
    ),
    ("thinking", r#"5 "x" {"type":"magic"} {"type":5}"#),
];

const RESPONSE: &[Field] = &[
    (
        "input",
        r#"5 {} [5] [{}] [{"type":"magic"}] [{"role":"user","content":5}]
            [{"role":"user","content":[{"type":"input_image"}]}]"#,
    ),
    ("instructions", r#"5 [] {}"#),
    ("max_output_tokens", r#"-2 1.5 "x""#),
    ("previous_response_id", r#""x" 5"#),
    ("tools", r#"5 "x" {}"#),
    ("text", r#"5 "x" {"format":5} {"format":{"type":"sound"}}"#),
    ("reasoning", r#"5 "x" {"effort":5}"#),
    ("background", r#"5 "x""#),
    ("metadata", r#"5 "x" []"#),
    ("truncation", "5 []"),
];

const OLLAMA: &[Field] = &[
    (
        "options",
        r#"5 "x" [] {"temperature":"hot"} {"top_p":2} {"num_predict":"x"} {"seed":"x"} {"stop":5}
            {"mirostat":9}"#,
    ),
    ("format", r#"5 "xml" [] {"type":5} {"pattern":"("}"#),
    ("think", r#"5 []"#),
    ("stream", r#"5 "x""#),
    ("keep_alive", r#"[] {} "soon" true"#),
    ("model", "5 []"),
];

/// For each path: a valid body, and the fields to insert.
const CASES: &[(&str, &str, &[&[Field]])] = &[
    (
        "/completion",
        r#"{"prompt":"a","n_predict":1}"#,
        &[TEXT, OPEN, PROMPT],
    ),
    (
        "/v1/completions",
        r#"{"prompt":"a","max_tokens":1}"#,
        &[TEXT, OPEN, PROMPT],
    ),
    (
        "/v1/chat/completions",
        r#"{"messages":[{"role":"user","content":"a"}],"max_tokens":1}"#,
        &[TEXT, OPEN, CHAT],
    ),
    (
        "/v1/messages",
        r#"{"messages":[{"role":"user","content":"a"}],"max_tokens":1}"#,
        &[TEXT, MESSAGE],
    ),
    (
        "/v1/responses",
        r#"{"input":"a","max_output_tokens":1}"#,
        &[TEXT, RESPONSE],
    ),
    (
        "/api/chat",
        r#"{"messages":[{"role":"user","content":"a"}],"stream":false,
            "options":{"num_predict":1}}"#,
        &[
            OLLAMA,
            &[
                (
                    "messages",
                    r#"5 "x" {} [5] [{}] [{"role":5}] [{"role":"user","content":5}]
                        [{"role":"user","content":"a","images":["x"]}]
                        [{"role":"assistant","tool_calls":[5]}]"#,
                ),
                ("tools", r#"5 "x" [5] [{}]"#),
            ],
        ],
    ),
    (
        "/api/generate",
        r#"{"prompt":"a","stream":false,"options":{"num_predict":1}}"#,
        &[
            OLLAMA,
            &[
                ("prompt", "5 [1] {}"),
                ("images", r#"["x"] 5"#),
                ("system", "5 []"),
                ("raw", r#"5 "x""#),
                ("suffix", "5 []"),
            ],
        ],
    ),
    (
        "/tokenize",
        r#"{"content":"a"}"#,
        &[&[
            ("content", r#"5 {} true [true] [99999999] [[]] [-1]"#),
            ("add_special", r#"5 "x""#),
            ("parse_special", r#"5 "x""#),
            ("with_pieces", r#"5 "x""#),
        ]],
    ),
    (
        "/detokenize",
        r#"{"tokens":[1]}"#,
        &[&[("tokens", r#"5 "x" {} ["a"] [99999999] [-1] [1.5] [[1]]"#)]],
    ),
    (
        "/apply-template",
        r#"{"messages":[{"role":"user","content":"a"}]}"#,
        &[CHAT_ONLY],
    ),
    (
        "/v1/messages/count_tokens",
        r#"{"messages":[{"role":"user","content":"a"}]}"#,
        &[&[("messages", r#"5 [5] [{}]"#), ("system", "5 {}")]],
    ),
    ("/slots/0?action=erase", "{}", &[&[("model", "5 []")]]),
];

/// Fields for templates.
const CHAT_ONLY: &[Field] = &[
    (
        "messages",
        r#"5 "x" {} [] [5] [{}] [{"role":"<robot>","content":"x"}]"#,
    ),
    ("tools", r#"5 [5] [{}]"#),
    ("chat_template_kwargs", "5 []"),
];

/// Malformed bodies.
const BROKEN: &[&[u8]] = &[
    b"{",
    b"}",
    b"[",
    b"nul",
    b"5",
    b"\"x\"",
    b"true",
    b"{\"a\":}",
    b"{\"a\":1,}",
    b"{'a':1}",
    b"{\"a\":1} {\"b\":2}",
    b"{\"a\":NaN}",
    b"{\"a\":1e999}",
    b"{\"a\":\"\\ud800\"}",
    b"{\"a\":\"\xff\xfe\"}",
    b"{\"a\":\"\x01\"}",
    b"\xef\xbb\xbf{}x",
    b"\x00",
    b"a=1&b=2",
];

/// Invalid HTTP, or requests that no server accepts. The server responds with 4xx or closes the
/// connection.
const RAW: &[&str] = &[
    "\r\n\r\n\r\n",
    "GET\r\n\r\n",
    "GET / HTTP/9.9\r\n\r\n",
    "GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "G\u{1}T / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{}",
    "POST /completion HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "POST /completion HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
    "POST /completion HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: magic\r\n\r\n{}",
    "GET /health HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
    "GET /health HTTP/1.1\r\nHost: evil.com\r\nConnection: close\r\n\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "\u{16}\u{3}\u{1}\u{0}\u{5}hello",
];

/// Returns fields with generated values: schemas that expand far beyond their size, and grammars.
fn exploding() -> Vec<(&'static str, String)> {
    let nested = |open: &str, close: &str, count: usize| open.repeat(count) + &close.repeat(count);
    let list = |count: usize, item: &dyn Fn(usize) -> String| {
        (0..count).map(item).collect::<Vec<_>>().join(",")
    };
    let schema = |text: String| ("json_schema", text);
    let grammar = |text: String| ("grammar", serde_json::json!(text).to_string());
    vec![
        schema(r#"{"type":"array","minItems":1000000000,"items":{"type":"string"}}"#.to_owned()),
        schema(r#"{"type":"string","minLength":1000000000}"#.to_owned()),
        schema(r#"{"type":"string","maxLength":1000000000}"#.to_owned()),
        schema(r#"{"type":"string","pattern":"((a{1,1000}){1,1000}){1,1000}"}"#.to_owned()),
        schema(r#"{"type":"string","pattern":"(a*)*(a*)*(a*)*b{5000}"}"#.to_owned()),
        schema(format!(
            r#"{{"type":"string","pattern":"{}"}}"#,
            nested("(", ")", 3000)
        )),
        schema(format!(
            r#"{{"enum":[{}]}}"#,
            list(50_000, &|i| format!("\"{i}\""))
        )),
        schema(format!(
            r#"{{"properties":{{{}}},"required":[{}]}}"#,
            list(5000, &|i| format!("\"p{i}\":{{}}")),
            list(5000, &|i| format!("\"p{i}\""))
        )),
        schema(format!(
            r#"{{"anyOf":[{}]}}"#,
            list(5000, &|i| format!(
                r#"{{"properties":{{"a{i}":{{"const":{i}}}}}}}"#
            ))
        )),
        schema(format!(
            r#"{{"allOf":[{}]}}"#,
            list(2000, &|i| format!(r#"{{"pattern":"a{i}"}}"#))
        )),
        schema(nested(r#"{"items":"#, "}", 60).replace("\"items\":}", "\"items\":{}}")),
        // Each refers to the next one twice.
        schema(format!(
            r##"{{"$defs":{{{},"d40":{{"const":1}}}},"$ref":"#/$defs/d0"}}"##,
            list(40, &|i| format!(
                r##""d{i}":{{"type":"array","prefixItems":[{{"$ref":"#/$defs/d{n}"}},
                    {{"$ref":"#/$defs/d{n}"}}],"minItems":2,"items":false}}"##,
                n = i + 1
            ))
        )),
        schema(
            r##"{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}"##
                .to_owned(),
        ),
        schema(
            r#"{"type":"integer","minimum":-9223372036854775808,"maximum":9223372036854775807}"#
                .to_owned(),
        ),
        schema(r#"{"type":"number","multipleOf":1e-300}"#.to_owned()),
        grammar(format!("root ::= {}", nested("(", ")", 5000))),
        grammar("root ::= \"a\"{1,1000000000}".to_owned()),
        grammar("root ::= ((\"a\"{1,1000}){1,1000}){1,1000}".to_owned()),
        grammar("root ::= root root | root \"a\"".to_owned()),
        grammar("root ::= a\na ::= b\nb ::= a".to_owned()),
        grammar(format!("root ::= {}", "\"a\" | ".repeat(20_000) + "\"b\"")),
        grammar("root ::= ".to_owned() + &"x".repeat(1 << 20)),
        grammar(
            (0..40)
                .map(|i| format!("r{i} ::= r{n} r{n}\n", n = i + 1))
                .collect::<String>()
                + "r40 ::= \"a\"\nroot ::= r0",
        ),
    ]
}

/// Splits a list at white space.
fn values(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// Response to a request.
struct Answer {
    status: u16,
    body: String,
}

fn ask(server: &Server, path: &str, body: &[u8]) -> Answer {
    let mut stream = TcpStream::connect(&server.address).unwrap();
    stream.set_read_timeout(Some(HANG_GUARD)).unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    // A server that has read enough may close the connection.
    let _ = stream.write_all(body);
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    let text = String::from_utf8_lossy(&text);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    Answer {
        status: head
            .split(' ')
            .nth(1)
            .and_then(|code| code.parse().ok())
            .unwrap_or(0),
        body: body.to_owned(),
    }
}

/// Returns the message of an error object in the path's format.
fn message(path: &str, body: &str) -> Option<String> {
    let body: Value = serde_json::from_str(body).ok()?;
    let error = match path {
        _ if path.starts_with("/api/") => &body["error"],
        _ if path.starts_with("/v1/messages") && body["type"] != "error" => return None,
        _ => &body["error"]["message"],
    };
    error.as_str().map(str::to_owned)
}

/// Failures of the tests of invalid requests.
#[derive(Default)]
struct Report {
    count: usize,
    found: Vec<String>,
}

impl Report {
    /// Checks a response: it must have one of these statuses, and its error must contain this text.
    fn take(&mut self, what: &str, path: &str, answer: &Answer, statuses: &[u16], part: &str) {
        self.count += 1;
        let shown: String = what.chars().take(160).collect();
        let told: String = answer.body.chars().take(240).collect();
        let mut wrong = |how: &str| {
            self.found
                .push(format!("{path} {shown}: {how}: {} {told}", answer.status))
        };
        if !statuses.contains(&answer.status) {
            wrong("status");
        }
        if answer.status >= 400 {
            match message(path, &answer.body) {
                None => wrong("no error object"),
                Some(message) if !message.contains(part) => wrong(&format!("does not name {part}")),
                Some(_) => {}
            }
        }
    }

    fn end(self, server: &Server, least: usize) {
        self.end_with(server, least, 0);
    }

    /// Asserts that no check failed and that the server counted exactly `failed` failed requests.
    fn end_with(self, server: &Server, least: usize, failed: usize) {
        let found = self.found;
        assert!(
            found.is_empty(),
            "{} of {}:\n{}",
            found.len(),
            self.count,
            found.join("\n")
        );
        assert!(self.count >= least, "{} requests", self.count);
        next_is_served(server);
        let (_, metrics) = server.get("/metrics");
        assert!(
            metrics
                .as_str()
                .unwrap()
                .contains(&format!("samite:requests_failed_total {failed}")),
            "{metrics}"
        );
        server.wait_until(false);
    }
}

fn next_is_served(server: &Server) {
    let answer = ask(server, "/completion", br#"{"prompt":"a","n_predict":1}"#);
    assert_eq!(answer.status, 200, "{}", answer.body);
}

#[test]
fn fields_of_wrong_types_and_sizes_are_refused_by_name() {
    let server = Server::simple();
    let mut report = Report::default();
    for (path, base, fields) in CASES {
        let right = ask(&server, path, base.as_bytes());
        assert_eq!(right.status, 200, "{path}: {}", right.body);
        for (name, bad) in fields.iter().copied().flatten() {
            for value in values(bad) {
                let mut body: Value = serde_json::from_str(base).unwrap();
                // Parsing would change numbers that this parser cannot represent, so insert the
                // value as text.
                body[*name] = "\u{1}".into();
                let body = body.to_string().replace("\"\\u0001\"", value);
                let answer = ask(&server, path, body.as_bytes());
                report.take(
                    &format!("{name}: {value}"),
                    path,
                    &answer,
                    &[400],
                    expected(path, name, value),
                );
            }
        }
        next_is_served(&server);
    }
    report.end(&server, 600);
}

/// Returns the text that the message about a field must contain.
fn expected(path: &str, name: &'static str, value: &'static str) -> &'static str {
    match (path, name) {
        // Errors within `options` name the inner field.
        ("/api/chat" | "/api/generate", "options") if value.starts_with('{') => "\"",
        (_, "prompt") if value.contains("multimodal_data") => "multimodal_data",
        _ => name,
    }
}

#[test]
fn invalid_request_bodies_are_refused() {
    let server = Server::simple();
    let mut report = Report::default();
    let paths = CASES.iter().map(|(path, ..)| *path);
    for path in paths.chain([
        "/infill",
        "/v1/chat/completions/input_tokens",
        "/v1/embeddings",
        "/rerank",
        "/api/show",
        "/api/embed",
    ]) {
        for body in BROKEN {
            let answer = ask(&server, path, body);
            let what = String::from_utf8_lossy(body).into_owned();
            // If the path computes nothing at all, that is reported first.
            report.take(&what, path, &answer, &[400, 501], "");
        }
        let deep = "[".repeat(100_000);
        report.take(
            "deep",
            path,
            &ask(&server, path, deep.as_bytes()),
            &[400],
            "deep",
        );
    }
    let long = format!(r#"{{"prompt":"{}"}}"#, "a".repeat(20 << 20));
    report.take(
        "long",
        "/completion",
        &ask(&server, "/completion", long.as_bytes()),
        &[400],
        "prompt",
    );
    report.end(&server, 300);
}

#[test]
fn exploding_schemas_and_grammars_are_refused_or_served() {
    let server = Server::simple();
    let mut report = Report::default();
    let (mut failed, mut meanwhile) = (0, 0);
    for (name, value) in exploding() {
        for path in ["/completion", "/v1/completions"] {
            let body = format!(r#"{{"prompt":"a","n_predict":4,"{name}":{value}}}"#);
            let answer = std::thread::scope(|scope| {
                let asking = scope.spawn(|| ask(&server, path, body.as_bytes()));
                loop {
                    next_is_served(&server);
                    if asking.is_finished() {
                        return asking.join().unwrap();
                    }
                    meanwhile += 1;
                }
            });
            // A problem that only shows during generation is reported without the field.
            let part = match message(path, &answer.body) {
                Some(told) if told.starts_with("the grammar") => {
                    failed += 1;
                    "grammar"
                }
                _ => name,
            };
            report.take(&value, path, &answer, &[200, 400], part);
        }
    }
    // If they blocked other requests, at most one would be served per invalid request.
    println!("{meanwhile} requests meanwhile");
    assert!(meanwhile > 2 * report.count, "{meanwhile}");
    report.end_with(&server, 46, failed);
}

#[test]
fn slot_file_names_cannot_escape_their_folder() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("slots");
    std::fs::create_dir(&inner).unwrap();
    std::fs::write(folder.path().join("secret"), "x").unwrap();
    let options = ServeOptions {
        slot_save_path: Some(inner),
        ..ServeOptions::default()
    };
    let server = Server::start(options, EngineOptions::default());
    next_is_served(&server);
    let mut report = Report::default();
    for name in [
        "../secret",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/b",
        "a\\b",
        ".hidden",
        "C:x",
        "a\u{0}b",
        "a\nb",
        " a",
        "a ",
        "a.",
        "*",
        "a|b",
        "<a>",
    ] {
        for action in ["save", "restore"] {
            let path = format!("/slots/0?action={action}");
            let body = serde_json::json!({"filename": name}).to_string();
            let answer = ask(&server, &path, body.as_bytes());
            report.take(name, &path, &answer, &[400], "filename");
        }
    }
    let long = serde_json::json!({"filename": "a".repeat(300)}).to_string();
    for (path, body, part) in [
        ("/slots/0?action=save", long.as_str(), "filename"),
        ("/slots/0?action=save", r#"{"filename":5}"#, "filename"),
        ("/slots/0?action=save", "{}", "filename"),
        ("/slots/0?action=magic", "{}", "action"),
        ("/slots/0", "{}", "action"),
        ("/slots/99?action=erase", "{}", "id_slot"),
        ("/slots/-1?action=erase", "{}", "id_slot"),
        ("/slots/x?action=erase", "{}", "id_slot"),
        ("/slots/99999999999999999999?action=erase", "{}", "id_slot"),
    ] {
        report.take(
            body,
            path,
            &ask(&server, path, body.as_bytes()),
            &[400],
            part,
        );
    }
    report.end(&server, 43);
}

#[test]
fn invalid_http_does_not_block_other_clients() {
    let server = Server::simple();
    let mut open = Vec::new();
    let long = "a".repeat(1 << 20);
    let more = [
        format!("GET /{long} HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        format!("GET /health HTTP/1.1\r\nHost: localhost\r\nX: {long}\r\n\r\n"),
        format!(
            "GET /health HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
            "A: b\r\n".repeat(5000)
        ),
    ];
    for text in RAW.iter().copied().chain(more.iter().map(String::as_str)) {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        let _ = stream.write_all(text.as_bytes());
        let mut answer = [0; 4096];
        let read = stream.read(&mut answer).unwrap_or(0);
        let answer = String::from_utf8_lossy(&answer[..read]).into_owned();
        let shown: String = text.chars().take(80).collect();
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 4"),
            "{shown}: {answer}"
        );
        next_is_served(&server);
        open.push(stream);
    }
}

#[test]
fn slow_connections_do_not_block_other_clients() {
    let server = Server::simple();
    let mut open = Vec::new();
    for i in 0..200 {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        let part = [
            "",
            "P",
            "POST /completion HTTP/1.1\r\nHost: localh",
            "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n",
            "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{\"prompt\"",
            "POST /completion HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        ][i % 6];
        stream.write_all(part.as_bytes()).unwrap();
        open.push(stream);
    }
    next_is_served(&server);
    // Large bodies that never arrive do not block other requests.
    let large = format!(
        r#"{{"prompt":"a","n_predict":1,"x":"{}"}}"#,
        "a".repeat(2 << 20)
    );
    let answer = ask(&server, "/completion", large.as_bytes());
    assert_eq!(answer.status, 200, "{}", answer.body);
    // It did not wait for the body timeout of one minute.
    let is_open = |mut stream: TcpStream| {
        stream.set_nonblocking(true).unwrap();
        let end = stream.read(&mut [0]);
        end.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    assert!(open.into_iter().skip(3).step_by(6).any(is_open));
}
