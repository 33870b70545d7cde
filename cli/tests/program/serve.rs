//! `samite serve` as a process, with a draft model.

use crate::{command, samite, tiny};
use samite::llm::SyntheticModel;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A server on the loopback interface, for the duration of the test.
pub struct Server {
    child: Child,
    address: String,
}

impl Server {
    pub fn start(model: &Path, flags: &[&str]) -> Self {
        let mut command = command(["serve", "--port", "0", "-t", "1", "-m"]);
        command.arg(model).args(flags).stderr(Stdio::piped());
        Server::spawn(&mut command)
    }

    /// Starts a command that prints its address to a pipe.
    pub fn spawn(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut lines = lines.by_ref().map_while(Result::ok);
        let address = lines.find_map(|line| {
            let (_, address) = line.split_once(" served at http://")?;
            Some(address.trim_end_matches('/').to_owned())
        });
        Server {
            child,
            address: address.unwrap(),
        }
    }

    pub fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let text = self.answer(method, path, body);
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    /// Returns the complete response.
    pub fn answer(&self, method: &str, path: &str, body: &Value) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let body = body.to_string();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
        write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes a smaller model with the same vocabulary next to `model`.
fn smaller(model: &Path) -> PathBuf {
    let path = model.with_file_name("smaller.gguf");
    let whole = SyntheticModel::tiny("llama");
    let small = SyntheticModel {
        n_layer: 1,
        n_ff: whole.n_ff / 2,
        ..whole
    };
    small.write(&path).unwrap();
    path
}

/// Returns the memory in MB that a model needs, as reported by a server of two models with too
/// little memory.
fn needed(model: &Path, flags: &[&str]) -> u64 {
    let file = model.to_str().unwrap();
    let base = ["serve", "--port", "0", "-m", file];
    let base = base
        .iter()
        .chain(["--models-memory", "1", "-c", "65536"].iter());
    let run = samite(base.chain(flags));
    let (_, rest) = run.stderr.split_once(" needs ").expect(&run.stderr);
    rest.split_once(" MiB").unwrap().0.parse().unwrap()
}

#[test]
fn a_draft_model_keeps_the_text_and_its_memory_is_planned() {
    let (_dir, model) = tiny();
    let draft = smaller(&model);
    let draft = draft.to_str().unwrap();
    let flags = ["-md", draft, "--draft", "8", "--draft-p-min", "0"];
    let (plain, drafting) = (Server::start(&model, &[]), Server::start(&model, &flags));
    for temperature in [0.0, 1.0] {
        let body = json!({"prompt": [3, 70, 9, 120], "n_predict": 60, "temperature": temperature,
            "seed": 5, "ignore_eos": true});
        let [expected, text] = [&plain, &drafting].map(|server| {
            let answer = server.ask("POST", "/completion", &body);
            assert_eq!(answer["tokens_predicted"], 60, "{answer}");
            answer["content"].clone()
        });
        assert_eq!(text, expected);
    }
    let plan = drafting.ask("GET", "/plan", &json!({}));
    assert_eq!(plan["draft"]["model"], "smaller.gguf", "{plan}");
    let sum = |rows: &Value, what: &str| -> u64 {
        let rows = rows.as_array().unwrap().iter();
        rows.map(|row| row[what].as_u64().unwrap()).sum()
    };
    let (own, drafts) = (&plan["memory"], &plan["draft"]["memory"]);
    for what in ["weights", "kv"] {
        let (own, drafts) = (sum(own, what), sum(drafts, what));
        assert!(drafts > 0 && drafts < own, "{what}: {drafts} beside {own}");
    }
    assert_eq!(plain.ask("GET", "/plan", &json!({}))["draft"], Value::Null);
    let other = model.with_file_name("other.gguf");
    std::fs::copy(&model, &other).unwrap();
    let others = ["-m", other.to_str().unwrap()];
    let (plain, drafting) = (
        needed(&model, &others),
        needed(&model, &[others.as_slice(), &["-md", draft]].concat()),
    );
    assert!(
        drafting > plain + plain / 4,
        "{drafting} MiB, and {plain} MiB without"
    );
}

#[test]
fn transfers_need_a_secret() {
    let folder = tempfile::tempdir().unwrap();
    let (missing, short) = (folder.path().join("missing"), folder.path().join("short"));
    std::fs::write(&short, "31 bytes are not enough for it\n").unwrap();
    let key = |path: &std::path::Path| format!("--kv-transfer-key={}", path.display());
    samite(["serve", "--port", "0", &key(&missing)]).fails(2, &["--kv-transfer-key", "missing"]);
    samite(["serve", "--port", "0", &key(&short)]).fails(2, &["--kv-transfer-key", "32 bytes"]);
    samite(["serve", "--kv-transfer", "127.0.0.1:0"]).fails(2, &["--kv-transfer-key"]);
    let good = folder.path().join("good");
    std::fs::write(&good, "x".repeat(32)).unwrap();
    samite([
        "serve",
        "--port",
        "0",
        &key(&good),
        "--kv-transfer",
        "nowhere",
    ])
    .fails(1, &["--kv-transfer nowhere"]);
}

#[cfg(not(feature = "kv-events"))]
#[test]
fn kv_events_need_their_feature() {
    for flag in ["--kv-events=tcp://*:5557", "--kv-events-block"] {
        samite(["serve", flag]).fails(2, &["--kv-events", "--features kv-events"]);
    }
}

#[cfg(feature = "kv-events")]
#[test]
fn kv_events_are_of_one_model() {
    let (_folder, model) = tiny();
    let file = model.to_str().unwrap();
    let several = ["serve", "--port", "0", "-m", file, "-m", file];
    samite(
        several
            .into_iter()
            .chain(["--kv-events", "tcp://127.0.0.1:0"]),
    )
    .fails(2, &["--kv-events: routers expect one model"]);
    let serve = ["serve", "--port", "0", "-m", file, "--kv-events"];
    samite(serve.into_iter().chain(["nowhere"])).fails(2, &["--kv-events: "]);
    let deterministic = ["tcp://127.0.0.1:0", "--deterministic"];
    samite(serve.into_iter().chain(deterministic)).fails(2, &["--kv-events: nothing is cached"]);
}

#[test]
fn models_of_a_folder_have_their_own_templates() {
    let (folder, _) = tiny();
    let flags = ["serve", "--port", "0", "-t", "1", "--models-dir"];
    let mut command = command(flags);
    let server = Server::spawn(command.arg(folder.path()).stderr(Stdio::piped()));
    let list = server.ask("GET", "/v1/models", &json!({}));
    let messages = ["Hello", "Again"].map(|text| json!({"role": "user", "content": text}));
    let body = json!({"model": list["data"][0]["id"], "messages": messages});
    let prompt = server.ask("POST", "/apply-template", &body)["prompt"].clone();
    let prompt = prompt.as_str().unwrap();
    // The built-in model's template shows the last message only.
    assert!(
        prompt.contains("Hello") && prompt.contains("Again"),
        "{prompt}"
    );
}
