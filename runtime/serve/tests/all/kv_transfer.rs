//! One server computes a prompt, and another one generates from it.

use crate::common::Server;
use samite_requests::EngineOptions;
use samite_serve::{KvTransferOptions, ServeOptions, TransferSecret};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;

fn options(secret: u8, listens: bool) -> ServeOptions {
    ServeOptions {
        kv_transfer: Some(KvTransferOptions {
            listen: listens.then(|| "127.0.0.1:0".to_owned()),
            host: None,
            secret: TransferSecret::new(&[secret; 32]).unwrap(),
        }),
        ..ServeOptions::default()
    }
}

fn server(secret: u8, listens: bool) -> Server {
    Server::start(options(secret, listens), EngineOptions::default())
}

/// A request of each API, and where its text is in the response.
fn requests() -> [(&'static str, Value, &'static str); 3] {
    let story = "Once upon a time, there was a little girl named Lily. ".repeat(4);
    let messages = json!([{"role": "user", "content": story}]);
    [
        (
            "/v1/chat/completions",
            json!({"messages": messages, "max_tokens": 24, "temperature": 0}),
            "/choices/0/message/content",
        ),
        (
            "/v1/completions",
            json!({"prompt": story, "max_tokens": 24, "temperature": 0}),
            "/choices/0/text",
        ),
        (
            "/v1/responses",
            json!({"input": messages, "max_output_tokens": 24, "temperature": 0}),
            "/output/0/content/0/text",
        ),
    ]
}

fn with(body: &Value, changes: Value) -> Value {
    let mut body = body.clone();
    let changes = changes.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(changes);
    body
}

fn offered(server: &Server, path: &str, body: &Value) -> Value {
    let first = json!({
        "max_tokens": 1,
        "max_output_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false},
    });
    let (status, answer) = server.post(path, &with(body, first));
    assert_eq!(status, 200, "{answer}");
    answer["kv_transfer_params"].clone()
}

/// Returns the numbers of prompt tokens, and of those that were cached.
fn counts(answer: &Value) -> (u64, u64) {
    let usage = &answer["usage"];
    let prompt = usage.get("prompt_tokens").or(usage.get("input_tokens"));
    let details = usage.get("prompt_tokens_details");
    let details = details.or(usage.get("input_tokens_details")).unwrap();
    let cached = details["cached_tokens"].as_u64().unwrap();
    (prompt.unwrap().as_u64().unwrap(), cached)
}

#[test]
fn a_prompt_is_computed_on_one_server_and_generated_from_on_another() {
    for (path, body, place) in requests() {
        let (prefill, decode) = (server(1, true), server(1, false));
        let (_, expected) = Server::simple().post(path, &body);
        let params = offered(&prefill, path, &body);
        assert_eq!(params["do_remote_prefill"], true, "{params}");
        let (status, answer) =
            decode.post(path, &with(&body, json!({"kv_transfer_params": params})));
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer.pointer(place), expected.pointer(place), "{answer}");
        let (prompt, cached) = counts(&answer);
        assert_eq!(cached, prompt - 1, "{answer}");
        assert_eq!(answer.get("kv_transfer_params"), None);
    }
}

#[test]
fn a_prompt_that_cannot_be_fetched_is_computed() {
    let (path, body, place) = &requests()[1];
    let (_, expected) = Server::simple().post(path, body);
    let prefill = server(1, true);
    let decode = |server: &Server, params: &Value| {
        let body = with(body, json!({"kv_transfer_params": params}));
        let (status, answer) = server.post(path, &body);
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer.pointer(place), expected.pointer(place), "{answer}");
        counts(&answer).1
    };
    let params = offered(&prefill, path, body);
    // It is not the request's host, which a client chooses.
    assert_eq!(params["remote_host"], "127.0.0.1", "{params}");
    // A server with another secret, and one without any, do not fetch.
    assert_eq!(decode(&server(2, false), &params), 0);
    assert_eq!(decode(&Server::simple(), &params), 0);
    // A changed description is not signed.
    for change in [
        json!({"remote_host": "localhost"}),
        json!({"remote_port": 1}),
        json!({"remote_request_id": "0".repeat(32)}),
        json!({"samite_signature": "0".repeat(64)}),
        json!({"samite_signature": null}),
    ] {
        assert_eq!(decode(&server(1, false), &with(&params, change)), 0);
    }
    // A cache is fetched once.
    assert!(decode(&server(1, false), &params) > 0);
    assert_eq!(decode(&server(1, false), &params), 0);
    // The server is gone.
    let params = offered(&prefill, path, body);
    drop(prefill);
    assert_eq!(decode(&server(1, false), &params), 0);
}

#[test]
fn a_salt_is_of_the_prompt_on_both_servers() {
    let (path, body, _) = &requests()[1];
    let salted = with(body, json!({"cache_salt": "mine"}));
    let (prefill, decode) = (server(1, true), server(1, false));
    let params = offered(&prefill, path, &salted);
    let (_, answer) = decode.post(path, &with(&salted, json!({"kv_transfer_params": params})));
    assert!(counts(&answer).1 > 0, "{answer}");
    for server in [&prefill, &decode] {
        let (_, answer) = server.post(path, body);
        assert_eq!(counts(&answer).1, 0, "{answer}");
    }
}

#[test]
fn invalid_params_are_refused_by_name() {
    let server = server(1, true);
    for (params, field) in [
        (json!(1), "kv_transfer_params"),
        (
            json!({"do_remote_decode": 1}),
            "kv_transfer_params.do_remote_decode",
        ),
        (
            json!({"do_remote_prefill": true, "remote_port": 70000}),
            "kv_transfer_params.remote_port",
        ),
    ] {
        let body = json!({"prompt": "Once", "kv_transfer_params": params});
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!(status, 400, "{answer}");
        assert!(answer.to_string().contains(field), "{answer}");
    }
    // A list has no place for an offer.
    let asks = json!({"do_remote_decode": true});
    let body = json!({"prompt": ["Once"], "n_predict": 1, "kv_transfer_params": asks});
    let (status, answer) = server.post("/completion", &body);
    assert_eq!(status, 200, "{answer}");
    // Those of other programs are ignored.
    let foreign = json!({"do_remote_prefill": true, "remote_host": "10.0.0.1", "remote_port": 1});
    let body = json!({"prompt": "Once", "max_tokens": 1, "kv_transfer_params": foreign});
    assert_eq!(server.post("/v1/completions", &body).0, 200);
}

#[test]
fn a_peer_without_the_secret_learns_nothing() {
    let prefill = server(1, true);
    let (path, body, _) = &requests()[1];
    let params = offered(&prefill, path, body);
    let port = params["remote_port"].as_u64().unwrap();
    for hello in [&b""[..], &[0; 72], &[b'x'; 500]] {
        let mut stream = TcpStream::connect(("127.0.0.1", port as u16)).unwrap();
        // The connection may be reset, because the hello is not read completely.
        let _ = stream.write_all(hello);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty());
    }
    // The cache is still there.
    let decode = server(1, false);
    let (_, answer) = decode.post(path, &with(body, json!({"kv_transfer_params": params})));
    assert!(counts(&answer).1 > 0, "{answer}");
}

#[test]
fn offers_take_no_more_memory_than_requests_may() {
    let (path, body, _) = &requests()[1];
    let small = ServeOptions {
        // A quarter is for offers, so that the accounts of requests are never full.
        request_memory: 12 << 20,
        ..options(1, true)
    };
    let prefill = Server::start(small, EngineOptions::default());
    let offers: Vec<bool> = (0..60)
        .map(|_| offered(&prefill, path, body).is_object())
        .collect();
    assert!(offers[0]);
    let accepted = offers.iter().filter(|accepted| **accepted).count();
    assert!(accepted < 60, "{accepted}");
    assert_eq!(
        offers.iter().rposition(|accepted| *accepted),
        Some(accepted - 1)
    );
}
