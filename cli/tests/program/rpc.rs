//! Devices of another process: `samite rpc-server` and `--rpc`.

use crate::{command, samite, tiny};
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

/// A server on the loopback interface, for the duration of the test.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(flags: &[&str]) -> Self {
        let mut child = command(["rpc-server", "--port", "0", "-t", "1"])
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
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn rpc_servers_generate_the_same_text() {
    let server = Server::start(&["--device", "cpu"]);
    let text = |flags: &[&str]| {
        let story = [
            "run",
            "-p",
            "Once upon a time",
            "-n",
            "24",
            "--temp",
            "0",
            "-t",
            "1",
        ];
        samite(story.iter().chain(flags)).ok()
    };
    let here = text(&["--device", "cpu", "--no-repack"]);
    let address = server.address.as_str();
    assert!(here.len() > 20, "{here}");
    assert_eq!(text(&["--device", "RPC0", "--rpc", address]), here);
    // Two layers there, the rest here.
    let place = [
        "--device",
        "RPC0,cpu",
        "--place",
        "layers=0-1:RPC0",
        "--no-repack",
    ];
    assert_eq!(text(&[&place[..], &["--rpc", address]].concat()), here);
    let listed = samite(["devices", "--rpc", address]).ok();
    assert!(
        listed.contains("RPC0") && listed.contains(address),
        "{listed}"
    );
}

#[test]
fn missing_rpc_servers_are_reported() {
    let (_dir, model) = tiny();
    let model = model.to_str().unwrap();
    let run = [
        "run",
        "-m",
        model,
        "-p",
        "x",
        "-n",
        "1",
        "--rpc",
        "127.0.0.1:1",
    ];
    let on = |device| samite(run.into_iter().chain(["--device", device]));
    on("RPC0").fails(2, &["RPC0", "127.0.0.1:1"]);
    assert!(on("cpu").stderr.contains("127.0.0.1:1"), "a warning");
    samite(["rpc-server", "--port", "70000"]).fails(2, &["--port"]);
    samite(["rpc-server", "--protocol", "6"]).fails(2, &["--protocol", "7 and 8"]);
    samite(["rpc-server", "--memory", "0"]).fails(2, &["--memory"]);
    samite(["rpc-server", "--device", "abacus"]).fails(2, &["abacus"]);
    samite(["rpc-server", "--host", "no.such.host.invalid"]).fails(1, &["cannot listen"]);
}
