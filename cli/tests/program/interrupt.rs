//! Ctrl-C: exit code 130, one line, and nothing left behind.

use crate::{Run, command, listing, tiny};
use samite::llm::SyntheticModel;
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
    let pid = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-INT", &pid])
            .status()
            .unwrap()
            .success()
    );
    let sent = Instant::now();
    let run = Run::new(child.wait_with_output().unwrap());
    assert_eq!(
        (run.code, run.stderr.as_str()),
        (Some(130), "interrupted\n"),
        "{arguments:?}"
    );
    assert!(
        sent.elapsed() < Duration::from_secs(5),
        "{:?}",
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
