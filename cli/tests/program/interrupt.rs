//! Ctrl-C: exit code 130, a single line, and nothing left behind.

use crate::child::{child, handles, send};
use crate::limits::{Limits, limited};
use crate::{Run, command, listing, tiny};
use samite::gguf::{GgufFile, LoadMode};
use samite::llm::SyntheticModel;
use samite_testing::wait_until;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// Starts the program, interrupts it once it works, and checks how it ends.
fn interrupted(arguments: &[&str]) {
    signalled(arguments, "INT", 130);
}

/// Starts the program, sends it a signal once it works, and checks how it ends. A program that
/// continues has another exit code, or the hang guard kills it.
fn signalled(arguments: &[&str], signal: &str, code: i32) {
    let mut child = command(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_until("signals are handled, or the end", || {
        handles(child.id(), number(signal)) || child.try_wait().unwrap().is_some()
    });
    // Work has probably begun. An earlier signal must have the same result.
    sleep(Duration::from_millis(150));
    send(signal, child.id());
    let run = Run::new(child.wait_with_output().unwrap());
    assert_eq!(
        (run.code, run.stderr.as_str()),
        (Some(code), "interrupted\n"),
        "{arguments:?}"
    );
}

fn number(signal: &str) -> u32 {
    match signal {
        "HUP" => 1,
        "INT" => 2,
        "TERM" => 15,
        other => panic!("SIG{other}"),
    }
}

#[test]
fn an_interrupted_comparison_prints_partial_results() {
    use std::os::unix::fs::PermissionsExt;
    let (dir, model) = tiny();
    let peer = dir.path().join("llama-bench");
    let hanging = dir.path().join("hanging");
    // Prompts are fast; generation hangs.
    let lines = format!(
        r#"case "$*" in --version) ;; *"-n 0"*) echo '{{ "samples_ts": [ 5 ] }}';; *) touch {}; exec sleep 3600;; esac"#,
        hanging.display()
    );
    std::fs::write(&peer, format!("#!/bin/sh\n{lines}\n")).unwrap();
    std::fs::set_permissions(&peer, std::fs::Permissions::from_mode(0o755)).unwrap();
    let flags = ["--pairs", "1", "--no-peaks", "-p", "8", "-n", "8"];
    let mut child = command(["bench", "-m"])
        .arg(&model)
        .arg("--compare")
        .arg(&peer)
        .args(flags)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_until("the other program hangs, or the end", || {
        hanging.exists() || child.try_wait().unwrap().is_some()
    });
    send("INT", child.id());
    let run = Run::new(child.wait_with_output().unwrap());
    assert_eq!((run.code, &*run.stderr), (Some(130), "interrupted\n"));
    assert!(run.stdout.contains("| pp8 |"), "{}", run.stdout);
    assert!(!run.stdout.contains("tg8"), "{}", run.stdout);
}

#[test]
fn commands_can_be_interrupted_while_generating_or_measuring() {
    let (dir, model) = tiny();
    let model = model.to_str().unwrap();
    let text = dir.path().join("text");
    std::fs::write(&text, "a long text ".repeat(200_000)).unwrap();
    let trace = dir.path().join("trace").display().to_string();
    interrupted(&[
        "run",
        "-m",
        model,
        "-p",
        "ab",
        "-n",
        "1000000000",
        "--keep",
        "4",
        "--ignore-eos",
        "--trace",
        &trace,
    ]);
    interrupted(&[
        "bench",
        "-m",
        model,
        "-r",
        "1000",
        "-p",
        "200",
        "-n",
        "200",
        "--no-peaks",
    ]);
    interrupted(&["perplexity", "-m", model, "-f", text.to_str().unwrap()]);
    assert_eq!(listing(dir.path()), ["text", "tiny.gguf"]);
}

#[test]
fn quantize_can_be_interrupted() {
    let dir = tempfile::tempdir().unwrap();
    let large = dir.path().join("large.gguf");
    let model = SyntheticModel {
        n_embd: 512,
        n_ff: 2048,
        n_layer: 8,
        ..SyntheticModel::tiny("llama")
    };
    model.write(&large).unwrap();
    let output = dir.path().join("small.gguf").display().to_string();
    interrupted(&[
        "quantize",
        large.to_str().unwrap(),
        &output,
        "Q2_K",
        "-t",
        "1",
    ]);
    assert_eq!(listing(dir.path()), ["large.gguf"]);
}

#[test]
fn merge_can_be_interrupted() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).display().to_string();
    let (large, adapter) = (file("large.gguf"), file("adapter.gguf"));
    let model = SyntheticModel {
        n_embd: 512,
        n_head: 32,
        n_head_kv: 32,
        n_ff: 512,
        n_layer: 12,
        dtype: samite::DType::F16,
        ..SyntheticModel::tiny("llama")
    };
    model.write(&large).unwrap();
    crate::write_adapter(&model, Path::new(&adapter));
    let merged = file("merged.gguf");
    let line = ["merge-lora", &large, &merged, "--lora", &adapter];
    // Searching for the best blocks takes long.
    let flags = ["--dtype", "q2_K", "-t", "1"];
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        signalled(&[&line[..], &flags[..]].concat(), signal, code);
        assert_eq!(listing(dir.path()), ["adapter.gguf", "large.gguf"]);
    }
}

/// Whatever a command is doing when a signal arrives, even before it starts work, it ends and
/// leaves only complete files.
#[test]
fn commands_can_be_interrupted_at_any_time() {
    let (dir, model) = tiny();
    let file = |name: &str| dir.path().join(name);
    let (text, adapter) = (file("text"), file("adapter.gguf"));
    std::fs::write(&text, "a few words, one after the other\n".repeat(700)).unwrap();
    crate::write_adapter(&SyntheticModel::tiny("llama"), &adapter);
    let config = crate::train::write_project(dir.path());
    let config = crate::train::changed(&config, &[("steps = 8", "steps = 60")]);
    let before = listing(dir.path());
    let out = file("out");
    let mut random = samite::text::Rng::new(u64::from(std::process::id()));
    for line in [
        "run -m M -p ab -n 100000000 --ignore-eos --keep 4 -q --trace OUT",
        "perplexity -m M -f TEXT -c 32 -t 1",
        "perplexity -m M -f TEXT -c 32 -t 1 --kl-divergence-base OUT",
        "tokenize -m M words",
        "plan -m M --svg OUT",
        "inspect M",
        "devices -v",
        "quantize M OUT Q2_K -t 1",
        "merge-lora M OUT --lora ADAPTER --dtype q4_0 -t 1",
        "synth OUT",
        "bench -m M -p 64 -n 128 -r 1000 --no-peaks -t 1",
        "test-ops --filter mul_mat -t 1",
        "train CONFIG -o OUT -t 1 --sample=",
        // One file after another, so that the signal often arrives while one is being written.
        "man OUT",
        "man OUT",
        "man OUT",
        "man OUT",
        "completions bash",
    ] {
        let words = line.split(' ').map(|word| match word {
            "M" => model.as_os_str(),
            "OUT" => out.as_os_str(),
            "TEXT" => text.as_os_str(),
            "ADAPTER" => adapter.as_os_str(),
            "CONFIG" => config.as_os_str(),
            word => word.as_ref(),
        });
        let words: Vec<_> = words.collect();
        // These run for minutes without a signal.
        let is_endless = line.starts_with("run ") || line.starts_with("bench ");
        for (signal, number) in [("INT", 2), ("TERM", 15), ("HUP", 1)] {
            let mut child = command(&words)
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let moment = random.below(120);
            sleep(Duration::from_millis(moment as u64));
            // A command that has already exited cannot receive a signal.
            if child.try_wait().unwrap().is_none() {
                send(signal, child.id());
            }
            let output = child.wait_with_output().unwrap();
            let what = format!("{line}: SIG{signal} after {moment} ms");
            // In the first milliseconds, the handler is not installed yet.
            let by_default = output.status.signal() == Some(number);
            let code = output.status.code();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(
                by_default || code == Some(128 + number) || code == Some(0) && !is_endless,
                "{what}: {:?}: {stderr}",
                output.status
            );
            assert!(
                !stderr.contains("error:") && !stderr.contains("panicked"),
                "{what}: {stderr}"
            );
            let mut left = listing(dir.path());
            left.retain(|name| name != "out");
            assert_eq!(left, before, "{what}");
            if out.is_dir() {
                let left = listing(&out);
                assert!(
                    !left.iter().any(|name| name.starts_with('.')),
                    "{what}: {left:?}"
                );
                std::fs::remove_dir_all(&out).unwrap();
            } else if out.exists() {
                let bytes = std::fs::read(&out).unwrap();
                if bytes.starts_with(b"GGUF") {
                    drop(GgufFile::open(&out, LoadMode::Read).unwrap())
                } else {
                    assert!(
                        bytes.ends_with(b"]}\n") || bytes.ends_with(b"</svg>\n"),
                        "{what}"
                    )
                }
                std::fs::remove_file(&out).unwrap();
            }
        }
    }
}

#[test]
fn every_termination_signal_ends_the_command() {
    let dir = tempfile::tempdir().unwrap();
    let large = dir.path().join("large.gguf").display().to_string();
    let synth = [
        "synth",
        &large,
        "--shape",
        "tinyllama-1.1b",
        "--type",
        "q4_K",
    ];
    for (signal, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        signalled(&synth, signal, code);
        assert_eq!(listing(dir.path()), [""; 0], "{signal}");
    }
    signalled(&["test-ops", "--device", "reference"], "TERM", 143);
    let (_dir, model) = tiny();
    signalled(&["bench", "-m", model.to_str().unwrap()], "INT", 130);
}

/// Managers of jobs signal a process and its group, so that it gets the same signal twice.
#[test]
fn a_second_sigterm_does_not_end_a_server_that_finishes_its_requests() {
    let mut server = limited(Limits::default(), &["-c", "16384"]);
    let mut stream = server.connect();
    let body = r#"{"prompt": "Once", "n_predict": 4000, "ignore_eos": true, "stream": true}"#;
    let head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n";
    let length = body.len();
    write!(stream, "{head}Content-Length: {length}\r\n\r\n{body}").unwrap();
    stream.read_exact(&mut [0; 200]).unwrap();
    for _ in 0..2 {
        send("TERM", server.process.id());
        sleep(Duration::from_millis(50));
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains(r#""tokens_predicted":4000"#), "{answer:?}");
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
}

/// `nohup` starts programs with SIGHUP ignored; shells start background jobs of scripts with SIGINT
/// ignored. Both stay ignored, and the program handles the others.
#[test]
fn ignored_signals_stay_ignored() {
    let (_dir, model) = tiny();
    for (ignored, handled, code) in [
        ("HUP", "INT", 130),
        ("INT", "HUP", 129),
        ("HUP INT", "TERM", 143),
    ] {
        let script = format!("trap '' {ignored}; exec \"$@\"");
        let mut running = child("sh")
            .args(["-c", &script, "sh", env!("CARGO_BIN_EXE_samite"), "run"])
            .args(["-p", "ab", "-n", "100000000", "--ignore-eos", "--keep", "4"])
            .arg("-m")
            .arg(&model)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Its handlers are installed before it writes.
        let mut out = running.stdout.take().unwrap();
        out.read_exact(&mut [0; 4]).unwrap();
        std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
        let process = running.id();
        for signal in ignored.split(' ') {
            assert!(!handles(process, number(signal)), "{signal}");
            send(signal, process);
        }
        sleep(Duration::from_millis(100));
        assert_eq!(running.try_wait().unwrap(), None, "{ignored}");
        send(handled, process);
        assert_eq!(running.wait().unwrap().code(), Some(code), "{ignored}");
    }
}

#[test]
fn commands_can_be_interrupted_while_waiting_for_input() {
    let (dir, model) = tiny();
    let model = model.to_str().unwrap();
    let fifo = dir.path().join("fifo");
    let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let trace = dir.path().join("trace").display().to_string();
    // The FIFO has no writer, so opening it already blocks.
    let fifo = fifo.to_str().unwrap();
    interrupted(&["run", "-m", model, "-f", fifo, "--trace", &trace]);
    interrupted(&["perplexity", "-m", model, "-f", fifo]);
    // A writer has it open, but does not write.
    let _writer = std::fs::File::options()
        .read(true)
        .write(true)
        .open(fifo)
        .unwrap();
    interrupted(&["run", "-m", model, "-f", fifo, "--trace", &trace]);
    interrupted(&["perplexity", "-m", model, "-f", fifo]);
    assert_eq!(listing(dir.path()), ["fifo", "tiny.gguf"]);
}

/// The program checks the first signal after it has written its text, but its standard output is
/// full. The second signal does not wait for that.
#[test]
fn a_second_signal_exits_immediately() {
    let (dir, model) = tiny();
    let trace = dir.path().join("trace").display().to_string();
    // A pipe that is almost full.
    let (_reader, mut pipe) = std::io::pipe().unwrap();
    pipe.write_all(&[b'x'; (64 << 10) - 300]).unwrap();
    let mut child = command(["run", "-p", "ab", "-n", "100000000", "--ignore-eos"])
        .args(["--keep", "4", "--trace", &trace, "-m"])
        .arg(&model)
        .stdout(pipe)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let process = child.id();
    // All threads sleep and have used no processor time meanwhile: a thread that waits for a
    // processor has another state.
    let mut before = None;
    wait_until("the program waits for its reader", || {
        assert_eq!(child.try_wait().unwrap(), None);
        sleep(Duration::from_millis(100));
        let now = sleeping_threads(process).filter(|_| handles(process, number("INT")));
        let is_same = now.is_some() && now == before;
        before = now;
        is_same
    });
    send("INT", process);
    sleep(Duration::from_millis(300));
    assert_eq!(child.try_wait().unwrap(), None);
    // The system merges a signal with an identical pending one.
    let mut status = None;
    wait_until("the end", || {
        send("INT", process);
        status = child.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().code(), Some(130));
    assert_eq!(listing(dir.path()), ["tiny.gguf"]);
}

/// Returns the processor time that each thread has used, in ticks, or `None` if not all sleep.
fn sleeping_threads(process: u32) -> Option<Vec<(String, String)>> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).ok()?;
    let time = |task: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
        let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        (fields[0] == "S").then(|| (fields[11].to_owned(), fields[12].to_owned()))
    };
    tasks.map(time).collect()
}
