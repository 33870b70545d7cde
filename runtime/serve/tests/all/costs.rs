//! Requests and connections whose cost would exceed their size by far. Each must be bounded, and
//! the next request must be served.

use crate::common::{ENDLESS, Server, app, served};
use samite_requests::EngineOptions;
use samite_serve::{Hub, ServeOptions};
use samite_testing::{HANG_GUARD, wait_until};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;

const MIB: usize = 1 << 20;

/// Starts a server whose requests may use 32 MiB, with these other options.
fn small(options: ServeOptions) -> Server {
    let options = ServeOptions {
        request_memory: 32 * MIB,
        ..options
    };
    Server::start(options, EngineOptions::default())
}

fn is_served(server: &Server) {
    let (status, answer) = server.post("/completion", &json!({"prompt": "a", "n_predict": 1}));
    assert_eq!(status, 200, "{answer}");
}

/// Returns a completion request with one more field.
fn with(name: &str, value: Value) -> Value {
    let mut body = json!({"prompt": "a", "n_predict": 1});
    body[name] = value;
    body
}

#[test]
fn memory_derived_from_a_body_is_bounded() {
    let server = small(ServeOptions::default());
    let long = "a b".repeat(MIB / 3);
    let half = &long[..MIB / 2];
    let bias = [json!([half, 1]), json!([half, 1])];
    // Each of many texts has the stop strings.
    let mut stops = with("stop", json!(["a ".repeat(20_000)]));
    stops["prompt"] = json!(vec!["a"; 256]);
    let texts = json!({"prompt": vec!["a"; 256], "n_predict": 8, "n_probs": 100});
    let cases = [
        (
            "/completion",
            with("samplers", json!("k".repeat(33))),
            400,
            "samplers",
        ),
        (
            "/completion",
            with("samplers", json!("t".repeat(5 * MIB))),
            400,
            "samplers",
        ),
        (
            "/completion",
            with("logit_bias", json!(bias)),
            413,
            "logit_bias",
        ),
        (
            "/completion",
            with("logit_bias", json!([["ab ".repeat(4096), 1]])),
            400,
            "logit_bias",
        ),
        ("/completion", with("stop", json!([half])), 400, "stop"),
        ("/completion", stops, 413, "prompt"),
        ("/completion", texts, 413, "max_tokens"),
        (
            "/completion",
            json!({"prompt": long, "n_predict": 1}),
            413,
            "prompt",
        ),
        (
            "/tokenize",
            json!({"content": "a ".repeat(50_000), "with_pieces": true}),
            413,
            "with_pieces",
        ),
        (
            "/detokenize",
            json!({"tokens": vec![1; 700_000]}),
            413,
            "body",
        ),
        (
            "/completion",
            with("extra", json!("a".repeat(6 * MIB))),
            413,
            "body",
        ),
        (
            "/completion",
            with("extra", json!("a".repeat(9 * MIB))),
            413,
            "body",
        ),
    ];
    for (path, body, expected, field) in cases {
        let (status, answer) = server.post(path, &body);
        let shown: String = answer.to_string().chars().take(300).collect();
        assert_eq!(status, expected, "{path} {field}: {shown}");
        assert_eq!(answer["error"]["param"], field, "{shown}");
        is_served(&server);
    }
    // Everything that they held is released.
    let many = (0..20).map(|_| with("extra", json!("a".repeat(4 * MIB))));
    for body in many {
        assert_eq!(server.post("/completion", &body).0, 200);
    }
}

#[test]
fn requests_at_the_sampler_limits_are_served() {
    let server = Server::simple();
    let (status, answer) = server.post("/completion", &with("samplers", json!("k".repeat(32))));
    assert_eq!(status, 200, "{answer}");
    let bias: Vec<Value> = (0..4096).map(|i| json!([i % 200, 0.5])).collect();
    let (status, answer) = server.post("/completion", &with("logit_bias", json!(bias)));
    assert_eq!(status, 200, "{answer}");
}

/// Sends the head of a request with a body of `length` bytes, and a part of the body.
fn unfinished(server: &Server, length: usize, part: usize) -> TcpStream {
    let mut stream = TcpStream::connect(&server.address).unwrap();
    let head =
        format!("POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    // A server without room for more may close the connection.
    let _ = stream.write_all(" ".repeat(part).as_bytes());
    stream
}

/// Requests an endless stream and reads none of it.
fn unread(server: &Server) -> TcpStream {
    let mut body = with("n_probs", json!(100));
    body["stream"] = json!(true);
    body["n_predict"] = json!(-1);
    body["ignore_eos"] = json!(true);
    server.send("POST", "/completion", "", &body.to_string())
}

#[test]
fn unfinished_bodies_are_dropped_for_others() {
    let server = small(ServeOptions::default());
    let unfinished: Vec<TcpStream> = (0..40).map(|_| unfinished(&server, 2 * MIB, MIB)).collect();
    for _ in 0..4 {
        let body = with("extra", json!("a".repeat(4 * MIB)));
        assert_eq!(server.post("/completion", &body).0, 200);
    }
    drop(unfinished);
}

#[test]
fn waiting_connections_are_closed_for_others() {
    let options = ServeOptions {
        connections: Some(8),
        ..ServeOptions::default()
    };
    let engine = EngineOptions {
        context: Some(ENDLESS),
        ..EngineOptions::default()
    };
    let server = Server::start(options, engine);
    let silent: Vec<TcpStream> = (0..30)
        .map(|_| TcpStream::connect(&server.address).unwrap())
        .collect();
    is_served(&server);
    let bodies: Vec<TcpStream> = (0..30).map(|_| unfinished(&server, 100, 10)).collect();
    is_served(&server);
    let unread: Vec<TcpStream> = (0..30).map(|_| unread(&server)).collect();
    is_served(&server);
    drop((silent, bodies, unread));
    server.wait_until(false);
}

#[test]
fn an_unread_answer_is_ended() {
    let options = ServeOptions {
        write_seconds: 1,
        ..ServeOptions::default()
    };
    let engine = EngineOptions {
        context: Some(ENDLESS),
        ..EngineOptions::default()
    };
    let server = Server::start(options, engine);
    let unread = unread(&server);
    server.wait_until(true);
    server.wait_until(false);
    drop(unread);
}

#[test]
fn a_model_is_unloaded_despite_an_unread_stream() {
    struct Stories(ServeOptions);

    impl samite_serve::Source for Stories {
        fn plan(&self) -> Result<u64, String> {
            Ok(1)
        }

        fn load(&self) -> Result<samite_serve::Loaded, String> {
            let engine = EngineOptions {
                context: Some(ENDLESS),
                ..EngineOptions::default()
            };
            let (app, thread) = app(self.0.clone(), engine);
            Ok(samite_serve::Loaded {
                app,
                thread: Some(thread),
            })
        }
    }

    let options = served(ServeOptions {
        write_seconds: 1,
        ..ServeOptions::default()
    });
    let model = samite_serve::ServedModel {
        names: vec!["stories".to_owned()],
        path: "stories.gguf".into(),
        source: Box::new(Stories(options.clone())),
    };
    let limits = samite_serve::HubLimits::default();
    let hub = Hub::new(options, vec![model], limits, true).unwrap();
    let server = Server::with_hub(hub);
    is_served(&server);
    // Engines that are loaded on request run before HTTP, like all others.
    #[cfg(target_os = "linux")]
    assert_eq!(
        priorities("requests"),
        priorities("http").map(|nice| nice - 5)
    );
    let unread = unread(&server);
    server.wait_until(true);
    let (status, answer) = server.post("/models/unload", &json!({"model": "stories"}));
    assert_eq!(status, 200, "{answer}");
    is_served(&server);
    drop(unread);
}

/// Returns the lowest and the highest nice value of this process's threads with a name.
#[cfg(target_os = "linux")]
fn priorities(name: &str) -> [i32; 2] {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let nice = tasks.filter_map(|task| {
        // The thread may end meanwhile.
        let stat = std::fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
        let (start, rest) = stat.rsplit_once(") ")?;
        let is_named = start.split_once(" (")?.1 == name;
        // Field 19; the first one behind the name is field 3.
        rest.split(' ').nth(16)?.parse().ok().filter(|_| is_named)
    });
    let nice: Vec<i32> = nice.collect();
    [*nice.iter().min().unwrap(), *nice.iter().max().unwrap()]
}

#[test]
fn endless_heads_hold_little_memory() {
    let server = Server::simple();
    let mut stream = TcpStream::connect(&server.address).unwrap();
    stream.set_read_timeout(Some(HANG_GUARD)).unwrap();
    let part = format!("GET / HTTP/1.1\r\nX: {}", "a".repeat(128 << 10));
    let _ = stream.write_all(part.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 431"),
        "{answer}"
    );
    wait_until("the server answers", || server.get("/health").0 == 200);
}
