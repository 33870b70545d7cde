//! The program under the names of llama.cpp's programs, and the log that their callers read.

use crate::child::child;
use crate::{Run, samite, tiny};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Returns the program under another name, in a folder for the duration of the test.
fn named(name: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_samite"), &path).unwrap();
    (folder, path)
}

fn run(command: &mut Command) -> Run {
    Run::new(command.stdin(Stdio::null()).output().unwrap())
}

/// Returns the lines of a server's log until it listens.
fn log(command: &mut Command) -> Vec<String> {
    let command = command.stdin(Stdio::null()).stderr(Stdio::piped());
    let mut server = command.spawn().unwrap();
    let mut lines = Vec::new();
    for line in BufReader::new(server.stderr.take().unwrap()).lines() {
        lines.push(line.unwrap());
        if lines.last().unwrap().contains(" served at ") {
            break;
        }
    }
    server.kill().unwrap();
    server.wait().unwrap();
    lines
}

fn position(lines: &[String], part: &str) -> usize {
    let found = lines.iter().position(|line| line.contains(part));
    found.unwrap_or_else(|| panic!("no {part:?} in {lines:#?}"))
}

#[test]
fn list_devices_prints_gpus_only() {
    let (_folder, server) = named("llama-server");
    let listed = run(child(&server).args(["--list-devices", "--offline", "--device", "cpu"]));
    assert_eq!(listed.ok(), "Available devices:\n  (none)\n");
    // The reference device says that it is a GPU.
    let listed = samite(["serve", "--list-devices", "--device", "cpu,reference"]).ok();
    let lines: Vec<_> = listed.lines().collect();
    assert_eq!(lines[0], "Available devices:");
    assert!(lines[1].starts_with("  reference: "), "{listed}");
    assert!(lines[1].ends_with(" MiB free)"), "{listed}");
    assert_eq!(lines.len(), 2, "{listed}");
}

#[test]
fn the_log_of_llama_server_describes_gpus_before_the_system_and_memory_after_it() {
    let (_model_folder, model) = tiny();
    let (_folder, server) = named("llama-server");
    let flags = "--port 0 --device reference --log-verbosity 4 --no-log-prefix --load-mode none";
    let lines = log(child(&server)
        .args(flags.split(' '))
        .arg("--model")
        .arg(&model));
    let gpu = position(&lines, "using device reference (");
    assert!(lines[gpu].ends_with(" MiB free"), "{lines:#?}");
    let order = [
        position(&lines, "Device 0: "),
        gpu,
        position(&lines, "system_info: n_threads = "),
        position(&lines, " % of the weights are loaded"),
        position(&lines, "offloaded 4/4 layers to GPU"),
        position(&lines, "reference model buffer size = "),
        position(&lines, "reference KV buffer size = "),
        position(&lines, "reference compute buffer size = "),
    ];
    assert!(order.is_sorted(), "{lines:#?}");
    let flags = "--port 0 --device cpu -lv 4";
    let lines = log(child(&server)
        .args(flags.split(' '))
        .arg("--model")
        .arg(&model));
    position(&lines, "offloaded 0/4 layers to GPU");
    position(&lines, "CPU KV buffer size = ");
    let sizes = lines.iter().filter(|line| line.contains(" buffer size = "));
    assert!(
        sizes.clone().all(|line| line.starts_with("info: CPU")),
        "{lines:#?}"
    );
    // A model is served without images if its projector is not supported.
    let (_encoder_folder, encoder) = unsupported_encoder();
    let flags = "--port 0 --device cpu -lv 3 --no-mmproj-offload --image-min-tokens 1024";
    let lines = log(child(&server)
        .args(flags.split(' '))
        .arg("--model")
        .arg(&model)
        .arg("--mmproj")
        .arg(&encoder));
    assert!(!lines.iter().any(|line| line.starts_with("info: ")));
    assert!(lines[0].starts_with("warning: --mmproj: "), "{lines:#?}");
    assert!(lines[0].contains("\"other\""), "{lines:#?}");
}

/// Returns a GGUF file of an image encoder with an unknown projector.
fn unsupported_encoder() -> (TempDir, PathBuf) {
    const STRING: u32 = 8;
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    // No tensors, and two keys.
    file.extend([0u64, 2].iter().flat_map(|count| count.to_le_bytes()));
    let keys = [
        ("general.architecture", "clip"),
        ("clip.projector_type", "other"),
    ];
    for (key, value) in keys {
        let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        file.extend(text(key));
        file.extend(STRING.to_le_bytes());
        file.extend(text(value));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mmproj.gguf");
    std::fs::write(&path, file).unwrap();
    (folder, path)
}

#[test]
fn llama_quantize_copies_a_model() {
    let (folder, model) = tiny();
    let (_folder, quantize) = named("llama-quantize");
    let [first, second] = ["first.gguf", "second.gguf"].map(|name| folder.path().join(name));
    let copy = |from, to| run(child(&quantize).args([from, to]).arg("COPY")).ok();
    copy(&model, &first);
    // The program that made an empty file finds the result in it, although another replaces it.
    let mut held = File::options();
    let held = held.read(true).write(true).create_new(true).open(&second);
    copy(&first, &second);
    let mut text = Vec::new();
    held.unwrap().read_to_end(&mut text).unwrap();
    assert!(text == std::fs::read(&second).unwrap());
    let [first, second] = [first, second].map(|path| std::fs::read(path).unwrap());
    assert!(first == second && !first.is_empty());
}

#[test]
fn main_gpu_selects_the_device_that_has_everything() {
    let (_folder, model) = tiny();
    let plan = |flags: &str| {
        let line = format!("plan --device reference,cpu:threads=1 {flags} -m");
        let words = line.split(' ').map(PathBuf::from);
        samite(words.chain([model.clone()]))
    };
    let first = plan("--split-mode none --main-gpu 0").ok();
    assert!(first.contains("reference"), "{first}");
    plan("--split-mode none --main-gpu 1").fails(2, &["--main-gpu", "no GPU 1", "reference"]);
    plan("-mg 1").ok();
}
