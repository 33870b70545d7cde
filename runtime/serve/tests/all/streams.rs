//! Streams that clients resume.

use crate::common::{Server, app, served};
use samite_requests::EngineOptions;
use samite_serve::{Hub, HubLimits, Loaded, ServeOptions, ServedModel, Source};
use samite_testing::wait_until;
use serde_json::{Value, json};
use std::io::Read;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};

const CONVERSATION: &str = "X-Conversation-Id: a chat::org/model\r\n";
const PATH: &str = "/v1/stream?conv_id=a%20chat%3A%3Aorg%2Fmodel";

fn body(count: usize) -> String {
    let messages = json!([{"role": "user", "content": "Once upon a time"}]);
    json!({"messages": messages, "max_tokens": count, "temperature": 0, "stream": true,
        "ignore_eos": true})
    .to_string()
}

/// Returns the number of tokens in a stream that has ended.
fn count(stream: &str) -> usize {
    assert!(stream.ends_with("data: [DONE]\n\n"), "{stream}");
    stream.matches("\"content\":\"").count()
}

fn look_up(server: &Server, headers: &str) -> Value {
    let asked = json!({"conversation_ids": ["a chat", "another"]}).to_string();
    let (status, _, body) = server.ask("POST", "/v1/streams/lookup", headers, &asked);
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

#[test]
fn an_answer_goes_on_without_its_client() {
    let server = Server::simple();
    // The client leaves after the first bytes.
    let mut client = server.send("POST", "/v1/chat/completions", CONVERSATION, &body(300));
    client.read_exact(&mut [0; 200]).unwrap();
    drop(client);
    // Another connection follows it to its end.
    let (status, head, whole) = server.ask("GET", &format!("{PATH}&from=0"), "", "");
    assert_eq!(status, 200, "{whole}");
    assert!(head.contains("text/event-stream"), "{head}");
    assert!(count(&whole) >= 250, "{}", count(&whole));
    // An ended one is replayed, from any offset.
    for offset in [0, 1, whole.len() - 5, whole.len(), whole.len() + 9] {
        let (status, _, rest) = server.ask("GET", &format!("{PATH}&from={offset}"), "", "");
        assert_eq!(status, 200, "{rest}");
        assert_eq!(rest, whole[offset.min(whole.len())..]);
    }
    let told = look_up(&server, "");
    let [session] = told.as_array().unwrap().as_slice() else {
        panic!("{told}");
    };
    assert_eq!(session["conversation_id"], "a chat::org/model");
    assert_eq!(
        (&session["is_done"], &session["total_bytes"]),
        (&json!(true), &json!(whole.len()))
    );

    assert_eq!(server.ask("DELETE", PATH, "", "").0, 204);
    assert_eq!(server.ask("DELETE", PATH, "", "").0, 204);
    let (status, _, body) = server.ask("GET", PATH, "", "");
    assert_eq!(status, 404, "{body}");
    assert_eq!(look_up(&server, ""), json!([]));
}

#[test]
fn a_stream_is_stopped_by_its_owner_only() {
    let options = ServeOptions {
        api_keys: vec!["first".to_owned(), "second".to_owned()],
        ..ServeOptions::default()
    };
    let server = Server::start(options, EngineOptions::default());
    let [first, second] = ["first", "second"].map(|key| format!("Authorization: Bearer {key}\r\n"));
    let headers = format!("{first}{CONVERSATION}");
    // Its context would last for long.
    let mut client = server.send("POST", "/v1/chat/completions", &headers, &body(1_000_000));
    client.read_exact(&mut [0; 200]).unwrap();
    let of = |method: &str, key: &str| server.ask(method, PATH, key, "").0;
    assert_eq!(of("GET", &second), 404);
    assert_eq!(of("DELETE", &second), 204);
    assert_eq!(look_up(&server, &second), json!([]));
    assert_eq!(
        look_up(&server, &first)[0]["conversation_id"],
        "a chat::org/model"
    );
    assert_eq!(of("DELETE", &first), 204);
    // That also ends the client's connection.
    let mut rest = String::new();
    client.read_to_string(&mut rest).unwrap();
    assert_eq!(of("GET", &first), 404);
    samite_testing::wait_until("no slot is at work", || {
        let (_, _, slots) = server.ask("GET", "/slots", &first, "");
        !slots.contains("\"is_processing\":true")
    });
}

#[test]
fn wrong_requests_for_streams_are_refused() {
    let server = Server::simple();
    for (path, wanted) in [
        ("/v1/stream", "conv_id"),
        ("/v1/stream?conv_id=", "conv_id"),
        ("/v1/stream?conv_id=x&from=-1", "from"),
    ] {
        let (status, answer) = server.get(path);
        assert_eq!(
            (status, &answer["error"]["param"]),
            (400, &json!(wanted)),
            "{answer}"
        );
    }
    let (status, head, _) = server.ask("PUT", "/v1/stream?conv_id=x", "", "");
    assert_eq!(status, 405);
    assert!(head.contains("GET, HEAD, DELETE"), "{head}");
    assert_eq!(server.ask("DELETE", "/v1/models", "", "").0, 405);
    // Without the header, the stream is not kept.
    let (status, _, stream) = server.ask("POST", "/v1/chat/completions", "", &body(3));
    assert_eq!(status, 200, "{stream}");
    assert_eq!(server.ask("GET", PATH, "", "").0, 404);
}

/// A model that loads once it may.
#[derive(Clone, Default)]
struct Gated(Arc<(Mutex<bool>, Condvar)>);

impl Gated {
    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }
}

impl Source for Gated {
    fn plan(&self) -> Result<u64, String> {
        Ok(1)
    }

    fn load(&self) -> Result<Loaded, String> {
        let is_open = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(is_open, |is_open| !*is_open).unwrap());
        let (app, thread) = app(ServeOptions::default(), EngineOptions::default());
        Ok(Loaded {
            app,
            thread: Some(thread),
        })
    }
}

fn gated() -> (Server, Gated) {
    let model = Gated::default();
    let served_model = ServedModel {
        names: vec!["model".to_owned()],
        path: PathBuf::from("model"),
        source: Box::new(model.clone()),
    };
    let options = served(ServeOptions::default());
    let hub = Hub::new(options, vec![served_model], HubLimits::default(), true).unwrap();
    (Server::with_hub(hub), model)
}

fn wait_for_status(server: &Server, expected: u16) {
    wait_until(format_args!("the stream answers {expected}"), || {
        server.ask("GET", &format!("{PATH}&from=0"), "", "").0 == expected
    });
}

#[test]
fn a_stream_outlives_its_client_while_the_model_is_loaded() {
    let (server, model) = gated();
    let client = server.send("POST", "/v1/chat/completions", CONVERSATION, &body(20));
    wait_for_status(&server, 503);
    drop(client);
    model.open();
    wait_for_status(&server, 200);
    let (_, _, whole) = server.ask("GET", &format!("{PATH}&from=0"), "", "");
    assert!(count(&whole) >= 15, "{whole}");
}

#[test]
fn a_stream_is_stopped_while_the_model_is_loaded() {
    let (server, model) = gated();
    let mut client = server.send("POST", "/v1/chat/completions", CONVERSATION, &body(20));
    wait_for_status(&server, 503);
    assert_eq!(server.ask("DELETE", PATH, "", "").0, 204);
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(answer.contains("cancelled"), "{answer}");
    wait_for_status(&server, 404);
    // A new request waits as usual.
    let mut client = server.send("POST", "/v1/chat/completions", CONVERSATION, &body(20));
    wait_for_status(&server, 503);
    model.open();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}
