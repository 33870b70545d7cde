//! Models that a server downloads and deletes while it runs.

use crate::common::{Server, app, served};
use samite_core::CancelToken;
use samite_requests::EngineOptions;
use samite_serve::{
    FileProgress, Hub, HubLimits, Library, Loaded, ServeOptions, ServedModel, Source,
};
use samite_testing::wait_until;
use serde_json::{Value, json};
use std::io::Read;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// A shelf of names. `owner/large` is downloaded until it is cancelled; `owner/bad` fails.
#[derive(Clone, Default)]
struct Shelf(Arc<Mutex<Vec<String>>>);

struct Stories(String);

impl Source for Stories {
    fn plan(&self) -> Result<u64, String> {
        Ok(1)
    }

    fn load(&self) -> Result<Loaded, String> {
        let options = ServeOptions {
            aliases: vec![self.0.clone()],
            ..ServeOptions::default()
        };
        let (app, thread) = app(options, EngineOptions::default());
        Ok(Loaded {
            app,
            thread: Some(thread),
        })
    }
}

fn model(name: &str) -> ServedModel {
    ServedModel {
        names: vec![name.to_owned(), format!("{name}:file.gguf")],
        path: PathBuf::from(name),
        source: Box::new(Stories(name.to_owned())),
    }
}

impl Library for Shelf {
    fn models(&self) -> Result<Vec<ServedModel>, String> {
        let names = self.0.lock().unwrap();
        Ok(names.iter().map(|name| model(name)).collect())
    }

    fn name(&self, text: &str) -> Result<String, String> {
        match text.split_once('/') {
            Some(_) => Ok(text.to_lowercase()),
            None => Err(format!("{text} has no owner")),
        }
    }

    fn download(
        &self,
        name: &str,
        progress: &mut dyn FnMut(FileProgress),
        cancel: &CancelToken,
    ) -> Result<ServedModel, String> {
        for done in [0, 500, 501, 1000] {
            progress(FileProgress {
                file: "file.gguf".to_owned(),
                sha256: Some("ab".repeat(32)),
                done,
                total: 1000,
            });
        }
        match name {
            "owner/bad" => return Err("its hash is wrong".to_owned()),
            "owner/large" => {
                wait_until("the download is cancelled", || cancel.is_cancelled());
                return Err("it was cancelled".to_owned());
            }
            _ => {}
        }
        self.0.lock().unwrap().push(name.to_owned());
        Ok(model(name))
    }

    fn delete(&self, path: &Path) -> Result<(), String> {
        let name = path.to_str().unwrap();
        let mut names = self.0.lock().unwrap();
        let at = names.iter().position(|known| known == name);
        names.remove(at.ok_or("it is not there")?);
        Ok(())
    }
}

fn start(options: ServeOptions) -> (Server, Shelf) {
    let shelf = Shelf::default();
    shelf.0.lock().unwrap().push("owner/old".to_owned());
    let hub = Hub::new(
        served(options),
        vec![model("own")],
        HubLimits::default(),
        false,
    )
    .unwrap();
    let hub = hub.with_library(shelf.clone()).unwrap();
    (Server::with_hub(hub), shelf)
}

/// Returns the names and states of all models.
fn listed(server: &Server) -> Vec<(String, String)> {
    let (_, list) = server.get("/models");
    let models = list["data"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    models
        .map(|model| (text(&model["id"]), text(&model["status"]["value"])))
        .collect()
}

/// Follows the events about models. The server counts a listener once its headers are sent.
fn follow(server: &Server) -> TcpStream {
    let mut stream = server.send("GET", "/models/sse", "", "");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    stream
}

/// Reads events up to the one with this name. Returns `event` or `event status` of each, for one
/// model.
fn until(stream: &mut TcpStream, model: &str, last: &str) -> Vec<String> {
    let mut text = String::new();
    loop {
        let events = text
            .split("\n\n")
            .filter_map(|part| part.split_once("data: "));
        let events = events.filter_map(|(_, data)| serde_json::from_str::<Value>(data).ok());
        let events = events.filter(|event| event["model"] == model);
        let names = events.map(|event| match event["data"]["status"].as_str() {
            Some(status) => format!("{} {status}", event["event"].as_str().unwrap()),
            None => event["event"].as_str().unwrap().to_owned(),
        });
        let names: Vec<String> = names.collect();
        if names.iter().any(|name| name == last) {
            return names;
        }
        let mut part = [0; 512];
        let count = stream.read(&mut part).unwrap();
        assert!(count > 0, "{text}");
        text.push_str(std::str::from_utf8(&part[..count]).unwrap());
    }
}

#[test]
fn models_are_downloaded_used_and_deleted() {
    let (server, shelf) = start(ServeOptions::default());
    let states = |expected: &[(&str, &str)]| {
        let found = listed(&server);
        let found: Vec<_> = found
            .iter()
            .map(|(a, b)| (a.as_str(), b.as_str()))
            .collect();
        assert_eq!(found, expected);
    };
    states(&[("own", "unloaded"), ("owner/old", "unloaded")]);
    let mut events = follow(&server);
    let name = json!({"model": "owner/New"});
    let done = (200, json!({"success": true}));
    assert_eq!(server.post("/models", &name), done);
    assert_eq!(
        until(&mut events, "owner/new", "download_finished"),
        [
            "download_progress",
            "download_progress",
            "download_progress",
            "download_finished"
        ],
        "one event at each end and each percent"
    );
    let again = server.post("/models", &name).1;
    let message = again["error"]["message"].as_str().unwrap();
    assert!(message.contains("owner/new is present already"), "{again}");
    let chat = json!({"model": "owner/new", "max_tokens": 2,
        "messages": [{"role": "user", "content": "Hi"}]});
    assert_eq!(server.post("/v1/chat/completions", &chat).0, 200);
    assert_eq!(
        until(&mut events, "owner/new", "model_status loaded"),
        ["model_status loading", "model_status loaded"]
    );
    states(&[
        ("own", "unloaded"),
        ("owner/old", "unloaded"),
        ("owner/new", "loaded"),
    ]);
    let delete = |path: &str| server.ask("DELETE", path, "", "").0;
    assert_eq!(delete("/models?model=owner%2Fnew"), 200);
    assert_eq!(
        until(&mut events, "owner/new", "model_remove"),
        ["model_status unloaded", "model_remove"]
    );
    assert_eq!(*shelf.0.lock().unwrap(), ["owner/old"]);
    assert_eq!(server.post("/v1/chat/completions", &chat).0, 404);
    // A file of the server's own is not deleted.
    for (path, status) in [
        ("/models?model=own", 400),
        ("/models?model=x", 404),
        ("/models", 400),
    ] {
        assert_eq!(delete(path), status, "{path}");
    }
    states(&[("own", "unloaded"), ("owner/old", "unloaded")]);
    assert_eq!(server.post("/models", &json!({"model": "plain"})).0, 400);
}

#[test]
fn downloads_can_fail_and_be_cancelled() {
    let (server, _) = start(ServeOptions::default());
    let mut events = follow(&server);
    server.post("/models", &json!({"model": "owner/bad"}));
    until(&mut events, "owner/bad", "download_failed");
    let large = json!({"model": "owner/large"});
    assert_eq!(server.post("/models", &large).0, 200);
    wait_until("the download is listed", || {
        let state = ("owner/large".to_owned(), "downloading".to_owned());
        listed(&server).contains(&state)
    });
    let twice = server.post("/models", &large).1;
    let message = twice["error"]["message"].as_str().unwrap();
    assert!(message.contains("being downloaded already"), "{twice}");
    assert_eq!(server.post("/models/unload", &large).0, 200);
    until(&mut events, "owner/large", "download_failed");
    assert_eq!(listed(&server).len(), 2);
    // Ending the server cancels a download and ends the streams of events.
    assert_eq!(server.post("/models", &large).0, 200);
    server.stop.cancel();
    let mut rest = String::new();
    events.read_to_string(&mut rest).unwrap();
}

#[test]
fn ollama_pulls_and_deletes_models() {
    let (server, shelf) = start(ServeOptions::default());
    let pull = |name: &str| {
        let body = json!({"model": name});
        let (status, _, text) = server.ask("POST", "/api/pull", "", &body.to_string());
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        (status, lines.collect::<Vec<Value>>())
    };
    let (status, lines) = pull("hf.co/owner/new");
    assert_eq!(
        (status, &lines[0]["status"]),
        (200, &json!("pulling manifest"))
    );
    assert_eq!(lines.last().unwrap()["status"], "success", "{lines:?}");
    // Requests call it by the name that was pulled.
    let body = json!({"model": "hf.co/owner/new", "stream": false, "options": {"num_predict": 1}});
    assert_eq!(server.post("/api/generate", &body).0, 200);
    let (_, lines) = pull("owner/bad");
    assert_eq!(
        lines.last().unwrap()["error"],
        "its hash is wrong",
        "{lines:?}"
    );
    let whole = json!({"name": "owner/bad", "stream": false});
    assert_eq!(server.post("/api/pull", &whole).0, 500);
    let there = json!({"name": "owner/old", "stream": false});
    assert_eq!(
        server.post("/api/pull", &there),
        (200, json!({"status": "success"}))
    );
    let (status, lines) = pull("llama3.2");
    assert_eq!(status, 400, "{lines:?}");
    for (name, status) in [("owner/new", 200), ("owner/new", 404), ("own", 400)] {
        let body = json!({"model": name}).to_string();
        assert_eq!(
            server.ask("DELETE", "/api/delete", "", &body).0,
            status,
            "{name}"
        );
    }
    assert_eq!(*shelf.0.lock().unwrap(), ["owner/old"]);
}

#[test]
fn only_administrators_change_the_library() {
    let options = ServeOptions {
        api_keys: vec!["user".to_owned()],
        admin_keys: vec!["admin".to_owned()],
        ..ServeOptions::default()
    };
    let (server, shelf) = start(options);
    let body = json!({"model": "owner/new"}).to_string();
    for (method, path) in [
        ("POST", "/models"),
        ("POST", "/api/pull"),
        ("DELETE", "/models?model=owner%2Fold"),
        ("DELETE", "/api/delete"),
        ("GET", "/models/sse"),
    ] {
        let (status, _, text) = server.ask(method, path, "X-Api-Key: user\r\n", &body);
        assert_eq!(status, 403, "{method} {path}: {text}");
    }
    assert_eq!(*shelf.0.lock().unwrap(), ["owner/old"]);
    let (status, ..) = server.ask("POST", "/models", "X-Api-Key: admin\r\n", &body);
    assert_eq!(status, 200);
}

#[test]
fn a_reload_lists_the_library_anew() {
    let (server, shelf) = start(ServeOptions::default());
    *shelf.0.lock().unwrap() = vec!["owner/other".to_owned()];
    assert_eq!(listed(&server)[1].0, "owner/old");
    server.get("/models?reload=1");
    assert_eq!(listed(&server)[1].0, "owner/other");
    assert_eq!(listed(&server).len(), 2);
    let (_, props) = server.get("/props");
    assert_eq!(
        (&props["role"], &props["models_autoload"]),
        (&json!("router"), &json!(true))
    );
}

#[test]
fn a_server_without_a_library_names_its_flag() {
    let server = Server::simple();
    let name = json!({"model": "owner/new"});
    let body = name.to_string();
    for (method, path) in [
        ("POST", "/models"),
        ("POST", "/api/pull"),
        ("DELETE", "/models?model=owner%2Fnew"),
        ("DELETE", "/api/delete"),
    ] {
        let (status, _, text) = server.ask(method, path, "", &body);
        assert!(
            status == 501 && text.contains("--models-cache"),
            "{method} {path}: {text}"
        );
    }
}
