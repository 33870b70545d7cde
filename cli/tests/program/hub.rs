//! Models by name, from a hub on the loopback interface. Tests of the library cover hubs that stall
//! or send wrong data.

use crate::{command, tiny};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Starts a hub whose only repository has a model; all other requests are rejected.
fn hub(model: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            answer(&mut stream.unwrap(), &model);
        }
    });
    address
}

/// Returns git's hash of a file.
fn git_hash(bytes: &[u8]) -> String {
    let mut hash = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    hash.update(format!("blob {}\0", bytes.len()).as_bytes());
    hash.update(bytes);
    let bytes = hash.finish();
    bytes
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn answer(stream: &mut TcpStream, model: &[u8]) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    let path = first.split(' ').nth(1).unwrap();
    lines.find(|line| line.as_ref().is_ok_and(String::is_empty));
    let entry = |name: &str| {
        let (size, hash) = (model.len(), git_hash(model));
        format!(r#"{{"type":"file","path":"{name}","size":{size},"oid":"{hash}"}}"#)
    };
    let (status, body) = match path {
        path if !path.contains("owner/small") => ("401 Unauthorized", Vec::new()),
        path if path.contains("/revision/") => {
            ("200 OK", format!(r#"{{"sha":"{COMMIT}"}}"#).into())
        }
        path if path.contains("/tree/") => {
            let entries = [entry("small-Q8_0.gguf"), entry("small-F16.gguf")];
            ("200 OK", format!("[{}]", entries.join(",")).into())
        }
        _ => ("200 OK", model.to_vec()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let sent = stream.write_all(head.as_bytes());
    let _ = sent.and_then(|()| stream.write_all(&body));
}

/// Returns the program with a separate hub and cache.
fn with_hub(arguments: &[&str], address: &str, cache: &Path) -> Command {
    let mut command = command(arguments);
    command.env("HF_ENDPOINT", address);
    command.env("HF_HUB_CACHE", cache).env_remove("HF_TOKEN");
    command
}

#[test]
fn models_are_pulled_run_listed_and_removed() {
    let (folder, model) = tiny();
    let cache = folder.path().join("hub");
    let address = hub(std::fs::read(&model).unwrap());
    let run = |arguments: &[&str]| {
        let output = with_hub(arguments, &address, &cache).output();
        crate::Run::new(output.unwrap())
    };
    let list = run(&["pull", "owner/small", "--list"]).ok();
    assert!(
        list.contains("small-F16.gguf") && list.lines().count() == 2,
        "{list}"
    );
    assert!(!cache.exists(), "a list downloads nothing");
    let path = run(&["pull", "owner/small"]).ok();
    assert!(path.trim().ends_with("small-Q8_0.gguf"), "{path}");

    let text = ["-n", "5", "--temp", "0", "-t", "1", "-q", "hello"];
    let named = run(&[&["run", "-hf", "owner/small:f16"][..], &text].concat()).ok();
    let model = model.to_str().unwrap();
    assert_eq!(
        named,
        run(&[&["run", "-m", model][..], &text].concat()).ok()
    );
    let listed = run(&["models", "--json"]).ok();
    assert!(
        listed.contains("small-F16.gguf") && listed.contains("owner/small"),
        "{listed}"
    );

    // Without a connection, the cache is used.
    let nowhere = |arguments: &[&str]| {
        let mut command = with_hub(arguments, "http://127.0.0.1:9", &cache);
        crate::Run::new(command.output().unwrap())
    };
    let offline = ["run", "--offline", "-hf", "owner/small"];
    assert_eq!(nowhere(&[&offline[..], &text].concat()).ok(), named);
    nowhere(&["run", "--offline", "-hf", "owner/other", "hi"])
        .fails(1, &["owner/other", "samite pull"]);

    run(&["pull", "nobody/x"]).fails(1, &["401", "--hf-token"]);
    run(&["pull", "owner/small:Q5_K_M"]).fails(1, &["no Q5_K_M", "small-F16.gguf"]);
    run(&["pull", "small"]).fails(2, &["owner/name"]);
    run(&["run", "-hf", "owner/small", "-m", model]).fails(2, &["cannot be used with"]);
    run(&["models", "remove", "owner/small:F16"]).ok();
    run(&["models", "remove", "owner/small:F16"]).fails(1, &["no F16"]);
    run(&["models", "remove", "owner/small"]).ok();
    assert_eq!(run(&["models"]).ok(), "");
}

#[test]
#[cfg(feature = "serve")]
fn a_server_downloads_and_deletes_models() {
    use crate::serve::Server;
    use serde_json::json;

    let (folder, model) = tiny();
    let cache = folder.path().join("hub");
    let address = hub(std::fs::read(&model).unwrap());
    let flags = ["serve", "--port", "0", "-t", "1", "--models-cache"];
    let mut command = with_hub(&flags, &address, &cache);
    let server = Server::spawn(command.stderr(Stdio::piped()));
    let none = server.answer("POST", "/v1/completions", &json!({"prompt": "a"}));
    assert!(none.starts_with("HTTP/1.1 404"), "{none}");
    let pull = json!({"model": "hf.co/owner/small:F16", "stream": false});
    server.ask("POST", "/api/pull", &pull);
    let list = server.ask("GET", "/v1/models", &json!({}));
    assert_eq!(list["data"][0]["id"], "owner/small:F16", "{list}");
    let pull = json!({"model": "owner/small:f16", "stream": false});
    server.ask("POST", "/api/pull", &pull);
    for name in [
        "owner/small:F16",
        "owner/small:f16",
        "hf.co/owner/small:F16",
    ] {
        let text = json!({"model": name, "prompt": "a", "max_tokens": 2});
        server.ask("POST", "/v1/completions", &text);
    }
    // A new server finds it by all its names.
    drop(server);
    let mut command = with_hub(&flags, &address, &cache);
    let server = Server::spawn(command.stderr(Stdio::piped()));
    for name in [
        "owner/small:F16",
        "owner/small:small-F16.gguf",
        "owner/small",
    ] {
        let text = json!({"model": name, "prompt": "a", "max_tokens": 2});
        let answer = server.ask("POST", "/v1/completions", &text);
        assert_eq!(answer["model"], "owner/small:F16", "{answer}");
    }
    server.ask("DELETE", "/models?model=owner/small:F16", &json!({}));
    let list = server.ask("GET", "/v1/models", &json!({}));
    assert_eq!(list["data"], json!([]));
    assert!(!std::fs::read_dir(&cache).unwrap().flatten().any(|entry| {
        let blobs = entry.path().join("blobs");
        blobs
            .read_dir()
            .is_ok_and(|mut blobs| blobs.next().is_some())
    }));
}
