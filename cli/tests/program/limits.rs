//! Servers with little memory, few files and short timeouts.
//!
//! A test starts [`limited`] servers, does something hostile, and afterwards checks
//! [`Limited::health`] and a [`Limited::completion`]. [`Limited::end`] then checks that only an
//! error or SIGTERM ended the server.

use crate::child::{child, send};
use samite_testing::HANG_GUARD;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStderr, Stdio};
use std::thread::JoinHandle;

/// Limits of a process.
#[derive(Clone, Copy, Default)]
pub struct Limits {
    /// KiB of address space.
    pub memory: Option<usize>,
    /// Open files.
    pub files: Option<usize>,
}

/// A server that runs under limits. [`HANG_GUARD`] limits its lifetime.
pub struct Limited {
    pub process: Child,
    /// Address, once the server listens.
    address: Option<String>,
    /// Collects what the server writes to standard error.
    messages: Option<JoinHandle<String>>,
}

/// Starts `samite serve` with these flags, and waits until it listens or ends.
pub fn limited(limits: Limits, flags: &[&str]) -> Limited {
    let limit = |flag: &str, limit: Option<usize>| {
        limit.map_or(String::new(), |limit| format!("ulimit {flag} {limit} && "))
    };
    let (memory, files) = (limit("-v", limits.memory), limit("-n", limits.files));
    let script = format!("{memory}{files}exec \"$@\"");
    let mut process = child("sh")
        .args(["-c", &script, "sh", env!("CARGO_BIN_EXE_samite")])
        .args(["serve", "--port", "0", "-t", "2"])
        .args(flags)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut errors = BufReader::new(process.stderr.take().unwrap());
    let (mut text, mut address) = (String::new(), None);
    while address.is_none() {
        let mut line = String::new();
        if errors.read_line(&mut line).unwrap() == 0 {
            break;
        }
        let served = line.split_once(" served at http://");
        address = served.map(|(_, rest)| rest.trim().trim_end_matches('/').to_owned());
        text += &line;
    }
    Limited {
        process,
        address,
        messages: Some(std::thread::spawn(move || rest(text, errors))),
    }
}

/// Adds the rest of standard error to its first lines. Without a reader, a full pipe would stop the
/// server.
fn rest(mut text: String, mut errors: BufReader<ChildStderr>) -> String {
    let mut bytes = Vec::new();
    errors.read_to_end(&mut bytes).unwrap();
    text += &String::from_utf8_lossy(&bytes);
    text
}

impl Limited {
    /// Returns true if the server listens.
    pub fn is_serving(&self) -> bool {
        self.address.is_some()
    }

    /// Opens a connection.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address.as_ref().unwrap()).unwrap();
        stream.set_read_timeout(Some(HANG_GUARD)).unwrap();
        stream
    }

    /// Sends a request and returns the whole answer, which is empty if the server closes the
    /// connection.
    pub fn ask(&self, method: &str, path: &str, body: &str) -> String {
        let mut stream = self.connect();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
        let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        let mut answer = Vec::new();
        // A server that refuses a request may close the connection before it has read all of it.
        let _ = stream.write_all(request.as_bytes());
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// Checks that the server reports to be alive.
    #[track_caller]
    pub fn health(&self) {
        let answer = self.ask("GET", "/health", "");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
    }

    /// Returns a completion of four tokens.
    #[track_caller]
    pub fn completion(&self) -> String {
        let body = json!({"prompt": "Once", "n_predict": 4, "temperature": 0}).to_string();
        let answer = self.ask("POST", "/completion", &body);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
        let body: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
        body["content"].as_str().unwrap().to_owned()
    }

    /// Ends the server with SIGTERM if it still runs, and returns what it wrote to standard error.
    ///
    /// # Panics
    /// If the server was killed, panicked, hung, or failed without an error in its last line.
    #[track_caller]
    pub fn end(mut self) -> String {
        let was_running = self.process.try_wait().unwrap().is_none() && self.is_serving();
        if was_running {
            send("TERM", self.process.id());
        }
        let status = self.process.wait().unwrap();
        let messages = self.messages.take().unwrap().join().unwrap();
        for word in ["panicked", "memory allocation of", "backtrace"] {
            assert!(!messages.contains(word), "{messages}");
        }
        assert_eq!(status.signal(), None, "{messages}");
        if !was_running {
            let last = messages.lines().last().unwrap_or_default();
            assert!(last.starts_with("error: "), "{status}: {messages}");
            assert_eq!(status.code(), Some(1), "{messages}");
        }
        messages
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns true if the program can be loaded with this much memory and exits by itself.
fn is_loadable(kibibytes: usize) -> bool {
    let script = format!("ulimit -v {kibibytes} && exec \"$@\"");
    let mut command = child("sh");
    command.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_samite")]);
    let status = command.arg("--version").output().unwrap().status;
    matches!(status.code(), Some(0 | 1))
}

#[test]
fn a_server_reports_low_memory_as_an_error() {
    // The size of the program depends on its build. With less memory than that, it cannot start.
    let least = (20_000..500_000)
        .step_by(4_000)
        .find(|&size| is_loadable(size));
    let least = least.unwrap();
    let mut ends = [0, 0];
    for step in 0..24 {
        let memory = Some(least + step * step * 600);
        let server = limited(
            Limits {
                memory,
                ..Limits::default()
            },
            &[],
        );
        if server.is_serving() {
            server.health();
            let text = server.completion();
            assert!(!text.is_empty(), "{memory:?}");
            ends[0] += 1;
            server.end();
        } else {
            let messages = server.end();
            let words = ["memory", "thread"];
            assert!(
                words.iter().any(|word| messages.contains(word)),
                "{memory:?}: {messages}"
            );
            ends[1] += 1;
        }
    }
    // The smallest limits cause errors, the largest ones let the server run.
    assert!(ends.iter().all(|&count| count > 3), "{ends:?}");
}

#[test]
fn a_server_survives_running_out_of_file_descriptors() {
    let server = limited(
        Limits {
            files: Some(40),
            ..Limits::default()
        },
        &[],
    );
    let before = server.completion();
    let connections: Vec<TcpStream> = (0..100).map(|_| server.connect()).collect();
    server.health();
    drop(connections);
    assert_eq!(server.completion(), before);
    server.end();
}
