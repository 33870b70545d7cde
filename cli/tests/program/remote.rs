//! Devices of another process, over gRPC and TLS: `samite remote-server` and `--remote`.

use crate::{command, samite, tiny};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// A server on the loopback, until the end of the test.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(folder: &Path, port: &str, flags: &[&str]) -> Self {
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

    fn port(&self) -> &str {
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
fn a_model_writes_the_same_text_on_servers() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let servers = folders
        .each_ref()
        .map(|folder| Server::start(folder.path(), "0", &["--device", "cpu"]));
    // Both have the same token: the file of one is a copy of the other's.
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

#[test]
fn a_server_that_is_killed_is_an_error_and_never_a_hang() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(folder.path(), "0", &["--device", "cpu"]);
    let (address, port) = (server.address.clone(), server.port().to_owned());
    let token = folder.path().join("tokens");
    let token = token.to_str().unwrap();
    let flags = [
        "-n",
        "300",
        "--device",
        "remote0",
        "--remote",
        &address,
        "--remote-token",
        token,
    ];
    let whole = samite(STORY.iter().chain(&flags)).ok();
    let mut failures = 0;
    for round in 0..8 {
        let child = command(STORY.iter().chain(&flags))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(20 + 23 * round));
        drop(server);
        server = Server::start(folder.path(), &port, &["--device", "cpu"]);
        assert_eq!(server.address, address, "the key is kept");
        let start = Instant::now();
        let output = child.wait_with_output().unwrap();
        assert!(start.elapsed() < Duration::from_secs(20), "round {round}");
        let text = String::from_utf8_lossy(&output.stdout);
        if output.status.success() {
            assert_eq!(text, whole);
            continue;
        }
        failures += 1;
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            output
                .status
                .code()
                .is_some_and(|code| code == 1 || code == 2),
            "round {round}: {:?}: {error}",
            output.status
        );
        assert!(whole.starts_with(text.trim_end()), "{text}");
        assert!(
            error.contains(&port) || error.contains("remote0"),
            "{error}"
        );
    }
    assert!(failures > 0, "all were quicker than the end of the server");
    // The server that is there now serves.
    assert_eq!(samite(STORY.iter().chain(&flags)).ok(), whole);
}

#[test]
fn servers_that_cannot_be_used_are_told() {
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
