//! Tests of the built program, with careless and hostile use.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

#[cfg(unix)]
mod chat;
mod child;
mod compare;
mod embed;
mod files;
#[cfg(feature = "wgpu")]
mod gpu;
#[cfg(target_os = "linux")]
mod high_bandwidth;
#[cfg(unix)]
mod hostile;
#[cfg(feature = "hub")]
mod hub;
#[cfg(feature = "vision")]
mod images;
mod imatrix;
#[cfg(target_os = "linux")]
mod interrupt;
#[cfg(all(target_os = "linux", feature = "serve"))]
mod limits;
#[cfg(all(unix, feature = "serve"))]
mod llama_programs;
mod log;
mod logits;
mod output;
mod perplexity;
#[cfg(unix)]
mod plan;
#[cfg(unix)]
mod plugins;
#[cfg(target_os = "linux")]
mod ranks;
mod readme;
#[cfg(feature = "remote")]
mod remote;
#[cfg(feature = "remote")]
mod remote_loading;
mod rpc;
#[cfg(feature = "serve")]
mod serve;
mod text;
mod threads;
mod train;
mod usage;
mod watch;

use child::{child, command};
use samite::llm::SyntheticModel;
use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use tempfile::TempDir;

/// Result of a program run.
struct Run {
    /// Exit code; `None` if it was killed by a signal.
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Run {
    fn new(output: Output) -> Self {
        Run {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Returns standard output after checking that the run succeeded.
    #[track_caller]
    fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self.stdout
    }

    /// Checks that the run failed with this code before it wrote any output. After optional
    /// warnings, a single error line must contain all of these parts.
    #[track_caller]
    fn fails(self, code: i32, parts: &[&str]) {
        let Run { stderr, stdout, .. } = &self;
        assert_eq!(self.code, Some(code), "{stderr}");
        assert_eq!(stdout, "", "{stderr}");
        let mut lines = stderr
            .lines()
            .skip_while(|line| line.starts_with("warning: "));
        let error = lines.next().unwrap_or_default();
        assert!(
            error.starts_with("error: ") && lines.next().is_none(),
            "{stderr}"
        );
        for part in parts {
            assert!(error.contains(part), "no {part:?} in: {error}");
        }
    }

    /// Returns standard output as JSON, after checking that it contains no NaN or infinity.
    #[track_caller]
    fn json(self) -> serde_json::Value {
        let text = self.ok();
        assert!(!text.contains("NaN") && !text.contains("inf,"), "{text}");
        serde_json::from_str(&text).unwrap()
    }
}

/// Runs the program with these arguments.
fn samite(arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Run {
    Run::new(command(arguments).output().unwrap())
}

/// Starts a command with a pipe for each of its streams.
fn piped(command: &mut Command) -> Child {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Runs a command with this on standard input.
fn fed(mut command: Command, input: &[u8]) -> Run {
    let mut child = piped(&mut command);
    let mut pipe = child.stdin.take().unwrap();
    // The program may exit before it has read everything.
    let _ = pipe.write_all(input);
    drop(pipe);
    Run::new(child.wait_with_output().unwrap())
}

/// Runs the program with a line of arguments, in which `M` stands for the model.
fn with_model(model: &Path, line: &str) -> Run {
    samite(line.split_whitespace().map(|word| match word {
        "M" => model.as_os_str(),
        "''" => OsStr::new(""),
        word => OsStr::new(word),
    }))
}

/// Runs the program with a line of arguments, `times` copies of `input` on standard input, and a
/// limit on its address space in KiB.
#[cfg(unix)]
fn limited(line: &str, model: &Path, input: &[u8], times: usize, kibibytes: usize) -> Run {
    let script = format!("ulimit -v {kibibytes}; exec \"$@\"");
    let words = line.split_whitespace().map(|word| match word {
        "M" => model.as_os_str(),
        word => word.as_ref(),
    });
    let mut command = child("sh");
    command
        .args(["-c", &script, "sh", env!("CARGO_BIN_EXE_samite")])
        .args(words)
        // glibc reserves 64 MiB of address space for another thread's arena only under contention,
        // so the total would vary.
        .env("MALLOC_ARENA_MAX", "1");
    let mut child = piped(&mut command);
    let mut pipe = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || {
        // The program may exit before it has read everything.
        (0..times).try_for_each(|_| pipe.write_all(&input)).is_ok()
    });
    let run = Run::new(child.wait_with_output().unwrap());
    writer.join().unwrap();
    run
}

/// Creates a folder with a tiny model.
fn tiny() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    SyntheticModel::tiny("llama").write(&path).unwrap();
    (dir, path)
}

/// Writes an adapter that changes every query matrix of a synthetic model of the llama
/// architecture.
#[cfg(unix)]
fn write_adapter(model: &SyntheticModel, path: &Path) {
    use samite::gguf::{Metadata, TensorSpec, Writer};
    const RANK: usize = 4;
    let mut metadata = Metadata::new();
    for (key, value) in [
        ("general.architecture", model.architecture),
        ("general.type", "adapter"),
        ("adapter.type", "lora"),
    ] {
        metadata.set(key, value).unwrap();
    }
    metadata.set("adapter.lora.alpha", 8.0f32).unwrap();
    let (inputs, outputs) = (model.n_embd, model.n_head * model.head_dim);
    let specs = (0..model.n_layer).flat_map(|layer| {
        let spec = |suffix: &str, shape: [usize; 2]| {
            let name = format!("blk.{layer}.attn_q.weight.{suffix}");
            TensorSpec::new(&name, samite::DType::F32, &shape).unwrap()
        };
        [
            spec("lora_a", [inputs, RANK]),
            spec("lora_b", [RANK, outputs]),
        ]
    });
    let mut writer = Writer::create(path, &metadata, specs.collect()).unwrap();
    while let Some(size) = writer.next_tensor().map(TensorSpec::size) {
        writer
            .append(&0.01f32.to_le_bytes().repeat(size / 4))
            .unwrap();
    }
    writer.commit().unwrap();
}

/// Returns the path of a small trained model, if available.
fn trained() -> Option<PathBuf> {
    let folder = std::env::var_os("SAMITE_TEST_MODELS").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/models"),
        PathBuf::from,
    );
    let path = folder.join("stories260K.gguf");
    if !path.exists() {
        println!("skipped: there is no {}", path.display());
        return None;
    }
    Some(path)
}

/// Checks that a speed report identifies its machine, version and model.
#[track_caller]
fn check_report_metadata(report: &serde_json::Value) {
    for name in ["date", "processor", "isa", "samite_version", "model"] {
        let text = report[name].as_str().unwrap_or_default();
        assert!(!text.is_empty(), "no {name}: {report}");
    }
    let date = report["date"].as_str().unwrap();
    assert!(
        date.len() == 20 && date.ends_with('Z') && &date[10..11] == "T",
        "{date}"
    );
    assert!(report["cores"].as_u64().unwrap() > 0);
}

/// Returns the names of the entries in a folder.
fn listing(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
