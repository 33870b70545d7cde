//! A remote server that is lost while a model loads.

use crate::remote::{Server, on};
use crate::{Run, command, fed};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// Number of bytes from a client after which the server is killed: more than greetings and queries
/// need, and a part of the weights, which are 1 MB.
const IN_THE_MIDDLE: usize = 200_000;

/// A proxy's state, which kills the server while a client sends weights.
struct Struck {
    folder: PathBuf,
    server: Option<Server>,
    /// Number of remaining kills.
    strikes: usize,
    /// Number of bytes from a client before each kill.
    after: usize,
    /// True if the server restarts.
    comes_back: bool,
}

impl Struck {
    fn start(folder: &Path) -> Server {
        // Delete uploaded data, so that everything is sent again.
        let _ = std::fs::remove_dir_all(folder.join("store"));
        Server::start(folder, "0", &["--device", "cpu"])
    }

    fn strike(&mut self) {
        if self.strikes > 0 {
            self.strikes -= 1;
            self.server = None;
            if self.comes_back {
                self.server = Some(Self::start(&self.folder));
            }
        }
    }
}

/// A proxy in front of a server.
struct Proxy {
    folder: TempDir,
    address: String,
    struck: Arc<Mutex<Struck>>,
}

impl Proxy {
    fn start(strikes: usize, comes_back: bool) -> Self {
        Self::striking_after(IN_THE_MIDDLE, strikes, comes_back)
    }

    fn striking_after(after: usize, strikes: usize, comes_back: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let server = Struck::start(folder.path());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = listener.local_addr().unwrap();
        let key = server.address.split('#').nth(1).unwrap();
        let address = format!("samite://{place}#{key}");
        let struck = Arc::new(Mutex::new(Struck {
            folder: folder.path().to_owned(),
            server: Some(server),
            strikes,
            after,
            comes_back,
        }));
        let shared = Arc::downgrade(&struck);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Some(struck)) = (client, shared.upgrade()) else {
                    return;
                };
                if struck.lock().unwrap().server.is_none() {
                    return; // the listener is gone
                }
                std::thread::spawn(move || pass_on(client, &struck));
            }
        });
        Proxy {
            folder,
            address,
            struck,
        }
    }

    fn run(&self, arguments: &[&str], input: &str) -> Run {
        let token = self.folder.path().join("tokens");
        let flags = on(&self.address, token.to_str().unwrap());
        run(&[arguments, &flags].concat(), input)
    }
}

/// Forwards bytes in both directions and counts those of the client.
fn pass_on(mut client: TcpStream, struck: &Mutex<Struck>) {
    let place = match &struck.lock().unwrap().server {
        Some(server) => format!("127.0.0.1:{}", server.port()),
        None => return,
    };
    let Ok(mut server) = TcpStream::connect(place) else {
        return;
    };
    let (mut from, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
    let back = std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    });
    let (mut buffer, mut count) = (vec![0; 16 << 10], 0);
    while let Ok(n @ 1..) = client.read(&mut buffer) {
        let before = count;
        count += n;
        let mut struck = struck.lock().unwrap();
        if (before..count).contains(&struck.after) {
            struck.strike();
        }
        drop(struck);
        if server.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = server.shutdown(Shutdown::Both);
    back.join().unwrap();
}

fn run(arguments: &[&str], input: &str) -> Run {
    fed(command(arguments), input.as_bytes())
}

#[test]
fn the_model_is_reloaded_after_a_server_returns() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text");
    std::fs::write(
        &text,
        "Once upon a time there was a little girl. ".repeat(20),
    )
    .unwrap();
    let text = text.to_str().unwrap();
    let plain = ["-t", "1"];
    let commands: [(&[&str], &str); 6] = [
        (&["run", "-p", "Once upon", "-n", "9", "--temp", "0"], ""),
        (&["chat", "-n", "9", "-q", "--temp", "0"], "Once upon\n"),
        (&["perplexity", "-f", text, "-c", "64"], ""),
        (&["embed", "Once upon a time"], ""),
        (&["logits", "-p", "Once upon a time"], ""),
        (&["bench", "-p", "8", "-n", "4", "-r", "1"], ""),
    ];
    for (arguments, input) in commands {
        let arguments = &[arguments, &plain].concat();
        let here = run(&[&arguments[..], &["--device", "cpu"]].concat(), input).ok();
        let there = Proxy::start(1, true).run(arguments, input);
        let notes = there.stderr.clone();
        assert!(
            notes.contains("waiting up to 60 s") && notes.contains("the model is loaded again"),
            "{arguments:?}: {notes}"
        );
        let there = there.ok();
        if arguments[0] != "bench" {
            assert_eq!(there, here, "{arguments:?}");
        }
    }
}

/// The context is created after all weights have been sent, and then generation starts.
#[test]
fn a_server_lost_after_loading_weights_is_awaited() {
    let story = [&STORY[..], &["--temp", "0"]].concat();
    let here = run(&[&story[..], &["--device", "cpu"]].concat(), "").ok();
    for after in (1_050_000..1_400_000).step_by(50_000) {
        let proxy = Proxy::striking_after(after, 1, true);
        let run = proxy.run(&story, "");
        let notes = run.stderr.clone();
        assert_eq!(proxy.struck.lock().unwrap().strikes, 0, "{after}: {notes}");
        assert!(notes.contains("waiting up to 60 s"), "{after}: {notes}");
        assert_eq!(run.ok(), here, "{after}");
    }
}

const STORY: [&str; 7] = ["run", "-p", "Once upon", "-n", "9", "-t", "1"];

#[test]
fn a_server_that_does_not_return_is_an_error() {
    let story = [&STORY[..], &["--remote-wait", "1"]].concat();
    let run = Proxy::start(1, false).run(&story, "");
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert_eq!(run.stdout, "");
    let error = run.stderr.lines().last().unwrap();
    assert!(error.starts_with("error: "), "{}", run.stderr);
    assert!(error.contains("did not come back within 1 s"), "{error}");
}

#[test]
fn loading_fails_after_repeated_server_losses() {
    let proxy = Proxy::start(usize::MAX, true);
    let run = proxy.run(&STORY, "");
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert_eq!(run.stdout, "");
    let loads = run.stderr.matches("the model is loaded again").count();
    assert_eq!(loads, 2, "{}", run.stderr);
    let strikes = usize::MAX - proxy.struck.lock().unwrap().strikes;
    assert_eq!(strikes, 3);
    let error = run.stderr.lines().last().unwrap();
    assert!(error.starts_with("error: "), "{}", run.stderr);
}
