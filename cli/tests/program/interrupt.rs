//! Ctrl-C: exit code 130, one line, and nothing left behind.

use crate::{Run, command, listing, tiny};
use samite::gguf::{GgufFile, LoadMode};
use samite::llm::SyntheticModel;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Whether a process handles SIGINT, as its line of status says.
fn handles_interrupts(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    // Signal number 2 is bit 1.
    mask.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).unwrap() & 2 != 0)
}

/// Starts the program, interrupts it as soon as it works, and checks how it ends.
fn interrupted(arguments: &[&str]) {
    signalled(arguments, "INT", 130);
}

fn send(signal: &str, pid: u32) {
    let pid = pid.to_string();
    let mut kill = Command::new("kill");
    kill.args([&format!("-{signal}"), &pid]);
    assert!(kill.status().unwrap().success());
}

fn signalled(arguments: &[&str], signal: &str, code: i32) {
    let child = command(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while !handles_interrupts(child.id()) && start.elapsed() < Duration::from_secs(20) {
        sleep(Duration::from_millis(5));
    }
    // The work begins.
    sleep(Duration::from_millis(150));
    send(signal, child.id());
    let sent = Instant::now();
    let run = Run::new(child.wait_with_output().unwrap());
    assert_eq!(
        (run.code, run.stderr.as_str()),
        (Some(code), "interrupted\n"),
        "{arguments:?}"
    );
    assert!(
        sent.elapsed() < Duration::from_secs(1),
        "{arguments:?}: {:?}",
        sent.elapsed()
    );
}

#[test]
fn a_comparison_tells_what_it_has() {
    use std::os::unix::fs::PermissionsExt;
    let (dir, model) = tiny();
    let peer = dir.path().join("llama-bench");
    let hanging = dir.path().join("hanging");
    // Prompts are quick; generation hangs.
    let lines = format!(
        r#"case "$*" in --version) ;; *"-n 0"*) echo '{{ "samples_ts": [ 5 ] }}';; *) touch {}; exec sleep 30;; esac"#,
        hanging.display()
    );
    std::fs::write(&peer, format!("#!/bin/sh\n{lines}\n")).unwrap();
    std::fs::set_permissions(&peer, std::fs::Permissions::from_mode(0o755)).unwrap();
    let flags = ["--pairs", "1", "--no-peaks", "-p", "8", "-n", "8"];
    let child = command(["bench", "-m"])
        .arg(&model)
        .arg("--compare")
        .arg(&peer)
        .args(flags)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while !hanging.exists() && start.elapsed() < Duration::from_secs(20) {
        sleep(Duration::from_millis(5));
    }
    let pid = child.id().to_string();
    let sent = Instant::now();
    let kill = Command::new("kill").args(["-INT", &pid]).status().unwrap();
    assert!(kill.success());
    let run = Run::new(child.wait_with_output().unwrap());
    assert!(sent.elapsed() < Duration::from_secs(5));
    assert_eq!((run.code, &*run.stderr), (Some(130), "interrupted\n"));
    assert!(run.stdout.contains("| pp8 |"), "{}", run.stdout);
    assert!(!run.stdout.contains("tg8"), "{}", run.stdout);
}

#[test]
fn while_generating_and_measuring() {
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
fn while_quantizing() {
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
fn while_merging() {
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

/// Whatever a command does when a signal comes, and be it nothing yet, it ends, and leaves complete files only.
#[test]
fn at_any_time() {
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
        "run -m M -p ab -n 2000 --ignore-eos --keep 4 -q --trace OUT",
        "perplexity -m M -f TEXT -c 32 -t 1",
        "perplexity -m M -f TEXT -c 32 -t 1 --kl-divergence-base OUT",
        "tokenize -m M words",
        "plan -m M --svg OUT",
        "inspect M",
        "devices -v",
        "quantize M OUT Q2_K -t 1",
        "merge-lora M OUT --lora ADAPTER --dtype q4_0 -t 1",
        "synth OUT",
        "bench -m M -p 64 -n 64 -r 20 --no-peaks -t 1",
        "test-ops --filter mul_mat -t 1",
        "train CONFIG -o OUT -t 1 --sample=",
        // One file after the other: more often than others in the middle of making one.
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
        for (signal, number) in [("INT", 2), ("TERM", 15), ("HUP", 1)] {
            let mut child = command(&words)
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let moment = random.below(120);
            sleep(Duration::from_millis(moment as u64));
            // A command that has ended already is no process to be told.
            if child.try_wait().unwrap().is_none() {
                send(signal, child.id());
            }
            let sent = Instant::now();
            let output = child.wait_with_output().unwrap();
            let what = format!("{line}: SIG{signal} after {moment} ms");
            assert!(sent.elapsed() < Duration::from_secs(3), "{what}");
            // In the first milliseconds, there is no handler yet.
            let by_default = output.status.signal() == Some(number);
            let ends = [Some(0), Some(130), Some(128 + number)];
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(
                by_default || ends.contains(&output.status.code()),
                "{what}: {stderr}"
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
                match bytes.starts_with(b"GGUF") {
                    true => drop(GgufFile::open(&out, LoadMode::Read).unwrap()),
                    false => assert!(
                        bytes.ends_with(b"]}\n") || bytes.ends_with(b"</svg>\n"),
                        "{what}"
                    ),
                }
                std::fs::remove_file(&out).unwrap();
            }
        }
    }
}

#[test]
fn whatever_asks_for_an_end() {
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

/// `nohup` has signals ignored; so they are.
#[test]
fn what_is_ignored_stays_so() {
    let (_dir, model) = tiny();
    let line = "trap '' HUP; exec \"$@\"";
    let mut child = Command::new("sh")
        .args(["-c", line, "sh", env!("CARGO_BIN_EXE_samite"), "run", "-m"])
        .arg(&model)
        .args(["-p", "ab", "-n", "1000000", "--ignore-eos", "--keep", "4"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while !handles_interrupts(child.id()) && start.elapsed() < Duration::from_secs(20) {
        sleep(Duration::from_millis(5));
    }
    send("HUP", child.id());
    sleep(Duration::from_millis(200));
    assert_eq!(child.try_wait().unwrap(), None);
    send("INT", child.id());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn while_waiting_for_text() {
    let (dir, model) = tiny();
    let model = model.to_str().unwrap();
    let fifo = dir.path().join("fifo");
    let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let trace = dir.path().join("trace").display().to_string();
    // Nobody writes to it: opening it waits already.
    let fifo = fifo.to_str().unwrap();
    interrupted(&["run", "-m", model, "-f", fifo, "--trace", &trace]);
    interrupted(&["perplexity", "-m", model, "-f", fifo]);
    // Somebody may, but does not.
    let _writer = std::fs::File::options()
        .read(true)
        .write(true)
        .open(fifo)
        .unwrap();
    interrupted(&["run", "-m", model, "-f", fifo, "--trace", &trace]);
    interrupted(&["perplexity", "-m", model, "-f", fifo]);
    assert_eq!(listing(dir.path()), ["fifo", "tiny.gguf"]);
}

/// The first signal is looked at when the text is written, which nobody reads; the second does not wait for that.
#[test]
fn the_second_time_at_once() {
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
    let time = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let (_, fields) = stat.rsplit_once(')').unwrap();
        let fields: Vec<_> = fields.split_whitespace().collect();
        (fields[11].to_owned(), fields[12].to_owned())
    };
    // It is full when the program does nothing any more.
    let start = Instant::now();
    let mut before = time(child.id());
    loop {
        sleep(Duration::from_millis(400));
        let now = time(child.id());
        if now == before && now.0 != "0" {
            break;
        }
        before = now;
        assert!(start.elapsed() < Duration::from_secs(60));
    }
    send("INT", child.id());
    sleep(Duration::from_millis(300));
    assert_eq!(child.try_wait().unwrap(), None);
    let sent = Instant::now();
    send("INT", child.id());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(sent.elapsed() < Duration::from_secs(1));
    assert_eq!(listing(dir.path()), ["tiny.gguf"]);
}
