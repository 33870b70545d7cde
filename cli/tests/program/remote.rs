//! Remote devices over gRPC and TLS: `samite remote-server` and `--remote`.

use crate::{command, samite, tiny};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Stdio};

/// A server on the loopback interface, for the duration of the test.
pub(crate) struct Server {
    child: Child,
    pub address: String,
}

impl Server {
    pub fn start(folder: &Path, port: &str, flags: &[&str]) -> Self {
        let mut child = command(["remote-server", "--port", port, "-t", "1"])
            .arg("--key")
            .arg(folder.join("key"))
            .arg("--tokens")
            .arg(folder.join("tokens"))
            .arg("--store")
            .arg(folder.join("store"))
            .args(flags)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = lines.map_while(Result::ok);
        let address = lines.find_map(|line| Some(line.strip_prefix("listening at ")?.to_owned()));
        Server {
            child,
            address: address.unwrap(),
        }
    }

    pub fn port(&self) -> &str {
        let place = self.address.split('#').next().unwrap();
        place.rsplit(':').next().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const STORY: [&str; 7] = ["run", "-p", "Once upon a time", "--temp", "0", "-t", "1"];

#[test]
fn remote_servers_generate_the_same_text() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let servers = folders
        .each_ref()
        .map(|folder| Server::start(folder.path(), "0", &["--device", "cpu"]));
    // Both servers have the same token: one token file is a copy of the other.
    std::fs::copy(
        folders[0].path().join("tokens"),
        folders[1].path().join("tokens"),
    )
    .unwrap();
    let [first, second] = servers;
    drop(second);
    let second = Server::start(folders[1].path(), "0", &["--device", "cpu"]);
    let token = folders[0].path().join("tokens");
    let token = token.to_str().unwrap();
    let addresses = format!("{},{}", first.address, second.address);
    let text = |flags: &[&str]| {
        let remote = ["--remote", &addresses, "--remote-token", token, "-n", "24"];
        samite(STORY.iter().chain(&remote).chain(flags)).ok()
    };
    let here = text(&["--device", "cpu"]);
    assert!(here.len() > 20, "{here}");
    assert_eq!(text(&["--device", "remote0"]), here);
    // Sampling from several likely tokens, with top-k on the server.
    let sampled = |device: &str| {
        let line = "run -p Once --temp 1.5 --top-k 5 --seed 3 -t 1 -n 24 --device";
        let remote = ["--remote", &addresses, "--remote-token", token];
        samite(line.split(' ').chain([device]).chain(remote)).ok()
    };
    assert_eq!(sampled("remote0"), sampled("cpu"));
    let two = [
        "--device",
        "remote0,remote1,cpu",
        "--place",
        "layers=0-1:remote0",
        "--place",
        "layers=2-2:remote1",
    ];
    assert_eq!(text(&two), here);
    assert_eq!(text(&[&two[..], &["--copies", "4"]].concat()), here);
    let listed = samite(["devices", "--remote", &addresses, "--remote-token", token]).ok();
    assert!(
        listed.contains("remote1") && listed.contains(first.port()),
        "{listed}"
    );
}

/// Returns the flags for a server's device.
pub(crate) fn on<'a>(address: &'a str, token: &'a str) -> [&'a str; 6] {
    [
        "--device",
        "remote0",
        "--remote",
        address,
        "--remote-token",
        token,
    ]
}

/// Flags for a long story, which is killed in the middle.
const LONG: [&str; 5] = ["-n", "1000", "-c", "2048", "--ignore-eos"];

/// Starts the program and waits until it has written this many bytes.
fn begun(flags: &[&str], bytes: usize) -> (Child, Vec<u8>) {
    let mut child = command(STORY.iter().chain(&LONG).chain(flags))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut text = vec![0; bytes];
    let out = child.stdout.as_mut().unwrap();
    out.read_exact(&mut text).unwrap();
    (child, text)
}

/// Waits until the program exits. Returns its exit code, its whole text and its notes.
fn ended((child, mut text): (Child, Vec<u8>)) -> (Option<i32>, String, String) {
    let output = child.wait_with_output().unwrap();
    text.extend(output.stdout);
    let string = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), string(text), string(output.stderr))
}

#[test]
fn a_restarted_server_is_used_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(folder.path(), "0", &["--device", "cpu"]);
    let (address, port) = (server.address.clone(), server.port().to_owned());
    let token = folder.path().join("tokens");
    let flags = on(&address, token.to_str().unwrap());
    let whole = samite(STORY.iter().chain(&LONG).chain(&["--device", "cpu"])).ok();
    for bytes in [20, 500, 1500] {
        let child = begun(&flags, bytes);
        drop(server);
        server = Server::start(folder.path(), &port, &["--device", "cpu"]);
        assert_eq!(server.address, address, "the key is kept");
        let (code, text, notes) = ended(child);
        assert_eq!(code, Some(0), "{notes}");
        assert!(notes.contains("it is back"), "{notes}");
        assert_eq!(text, whole);
    }
}

#[test]
fn a_lost_server_is_an_error_not_a_hang() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path(), "0", &["--device", "cpu"]);
    let (address, port) = (server.address.clone(), server.port().to_owned());
    let token = folder.path().join("tokens");
    let flags = on(&address, token.to_str().unwrap());
    let children = ["0", "1"].map(|wait| {
        let flags = [&flags[..], &["--remote-wait", wait]].concat();
        begun(&flags, 40)
    });
    drop(server);
    let [at_once, waited] = children.map(ended);
    for (code, _, notes) in [&at_once, &waited] {
        assert_eq!(*code, Some(1), "{notes}");
        let mut errors = notes.lines().filter(|line| line.starts_with("error: "));
        let error = errors.next().unwrap();
        assert!(
            error.contains(&port) && error.contains("remote0"),
            "{error}"
        );
        assert_eq!(errors.next(), None);
    }
    assert!(!at_once.2.contains("come back"), "{}", at_once.2);
    let patient = waited.2;
    assert!(
        patient.contains("did not come back within 1 s"),
        "{patient}"
    );
}

#[test]
fn a_conversation_survives_a_server_restart() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path(), "0", &["--device", "cpu"]);
    let (address, port) = (server.address.clone(), server.port().to_owned());
    let token = folder.path().join("tokens");
    let flags = on(&address, token.to_str().unwrap());
    let talk = |flags: &[&str], between: &mut dyn FnMut()| {
        let mut child = command(
            [
                "chat", "--lines", "-t", "1", "-n", "12", "-q", "--seed", "1",
            ]
            .iter()
            .chain(flags),
        )
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
        let mut input = child.stdin.take().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap()).lines();
        input.write_all(b"Once upon a time\n").unwrap();
        let first = answers.next().unwrap().unwrap();
        between();
        input.write_all(b"And then\n").unwrap();
        let second = answers.next().unwrap().unwrap();
        drop(input);
        assert!(child.wait().unwrap().success());
        (first, second)
    };
    let expected = talk(&["--device", "cpu"], &mut || {});
    let mut server = Some(server);
    let answers = talk(&flags, &mut || {
        drop(server.take());
        server = Some(Server::start(folder.path(), &port, &["--device", "cpu"]));
    });
    assert_eq!(answers, expected);
}

#[cfg(feature = "serve")]
#[test]
fn a_served_model_is_reloaded_when_its_remote_server_returns() {
    let (_dir, model) = tiny();
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(folder.path(), "0", &["--device", "cpu"]);
    let (address, port) = (server.address.clone(), server.port().to_owned());
    let token = folder.path().join("tokens");
    let flags = on(&address, token.to_str().unwrap());
    let over_http = crate::serve::Server::start(&model, &flags);
    let body = serde_json::json!({"prompt": [3, 70, 9, 120], "n_predict": 20, "temperature": 0});
    let answer = |words: &str| {
        let text = over_http.answer("POST", "/completion", &body);
        let head = text.lines().next().unwrap_or_default();
        assert!(head.contains(words), "{text}");
        let body = text.split_once("\r\n\r\n").unwrap().1;
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        body["content"].clone()
    };
    let expected = answer("200");
    for _ in 0..2 {
        drop(server);
        // This request notices that the server is gone; the next one, that it is still unavailable.
        answer("500");
        // 503 if it arrives before the engine has stopped.
        answer(" 50");
        server = Server::start(folder.path(), &port, &["--device", "cpu"]);
        assert_eq!(answer("200"), expected);
    }
}

#[test]
fn unusable_servers_are_reported() {
    let (_dir, model) = tiny();
    let model = model.to_str().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path(), "0", &["--device", "cpu"]);
    let token = folder.path().join("tokens");
    let token = token.to_str().unwrap();
    let run = |address: &str, token: &str| {
        let run = [
            "run", "-m", model, "-p", "x", "-n", "1", "--device", "remote0",
        ];
        samite(
            run.into_iter()
                .chain(["--remote", address, "--remote-token", token]),
        )
    };
    let key = server.address.split('#').nth(1).unwrap();
    let wrong = server.address.replace(key, &"0".repeat(64));
    run(&wrong, token).fails(2, &["remote0", "has the key", key]);
    run("127.0.0.1:50053", token).fails(2, &["samite://host:port#key"]);
    run(&format!("samite://127.0.0.1:1#{key}"), token).fails(2, &["127.0.0.1:1", "remote-server"]);
    run(&server.address, "/nonexistent").fails(2, &["/nonexistent", "--remote-token"]);
    let other = tempfile::tempdir().unwrap();
    let _other = Server::start(other.path(), "0", &["--device", "cpu"]);
    let other = other.path().join("tokens");
    run(&server.address, other.to_str().unwrap()).fails(2, &["does not know the token"]);
    let serve = |flags: &[&str]| {
        let key = folder.path().join("key");
        samite(
            ["remote-server", "--key", key.to_str().unwrap()]
                .iter()
                .chain(flags),
        )
    };
    serve(&["--tokens", token, "--memory", "0"]).fails(2, &["--memory"]);
    serve(&["--tokens", token, "--host", "no.such.host.invalid"]).fails(1, &["cannot serve"]);
    std::fs::write(folder.path().join("bad"), "x").unwrap();
    let bad = folder.path().join("bad");
    serve(&["--tokens", bad.to_str().unwrap()]).fails(1, &["bad"]);
}
