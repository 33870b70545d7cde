//! Changing files, endless text, names with terminal escapes, NaN weights, and little memory.

use crate::{Run, command, limited, listing, samite, tiny, with_model};
use samite::DType;
use samite::gguf::{GgufFile, LoadMode, Metadata, TensorSpec, Writer};
use samite::llm::SyntheticModel;
use samite_testing::wait_until;
use std::fs::OpenOptions;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::Duration;

fn started(line: &str, model: &Path) -> Child {
    let words = line.split_whitespace().map(|word| match word {
        "M" => model.as_os_str(),
        word => word.as_ref(),
    });
    command(words)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn a_model_file_that_shrinks_in_use_kills_no_command() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.gguf");
    let text = dir.path().join("text");
    std::fs::write(&text, "a long text ".repeat(5_000)).unwrap();
    let perplexity = format!("perplexity -m M -f {}", text.display());
    for line in [
        "run -m M -p ab -n 400 --ignore-eos --keep 4",
        "run -m M -p ab -n 400 --ignore-eos --keep 4 --no-repack",
        &perplexity,
        "bench -m M -p 64 -n 64 -r 3 --no-peaks",
    ] {
        SyntheticModel::tiny("llama").write(&model).unwrap();
        let mut child = started(line, &model);
        // The first words appear once everything is loaded.
        if line.starts_with("run") {
            let out = child.stdout.as_mut().unwrap();
            out.read_exact(&mut [0; 3]).unwrap();
        } else {
            sleep(Duration::from_millis(60));
        }
        let file = OpenOptions::new().write(true).open(&model).unwrap();
        file.set_len(100).unwrap();
        let run = Run::new(child.wait_with_output().unwrap());
        assert!(run.code.is_some(), "{line}: killed by a signal");
        if run.code != Some(0) {
            run.fails(1, &["model.gguf"]);
        }
    }
}

#[test]
fn a_model_file_that_shrinks_during_reading_is_reported() {
    let (_dir, model) = tiny();
    let file = GgufFile::open(&model, LoadMode::Read).unwrap();
    let last = file
        .tensors()
        .iter()
        .max_by_key(|info| info.offset)
        .unwrap();
    let shrunk = OpenOptions::new().write(true).open(&model).unwrap();
    shrunk.set_len(last.offset + 1).unwrap();
    let error = file.read_tensor_into(last, &mut vec![0; last.size]);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("became shorter"), "{error}");
}

#[test]
fn endless_input_is_read_only_as_far_as_needed() {
    let (dir, model) = tiny();
    // Reading everything would take gigabytes.
    let endless = |line: &str| limited(line, &model, &b"y\n".repeat(32 << 10), 1 << 16, 1 << 22);
    endless("run -m M").fails(1, &["more tokens than the context of 256", "--ctx-size"]);
    let zero = "run -m M -f /dev/zero";
    with_model(&model, zero).fails(1, &["more tokens than the context"]);
    with_model(&model, "perplexity -m M -f /dev/zero")
        .fails(1, &["/dev/zero: ", "without a place to cut it"]);
    let line = "perplexity -m M -f /dev/zero -c 32 --chunks 1 --json";
    assert_eq!(with_model(&model, line).json()["tokens"], 15);
    // Streamed text takes no memory.
    let words = "several words, one after the other\n".repeat(2000);
    let line = "tokenize -m M --ids";
    let run = limited(line, &model, words.as_bytes(), 80, 200 << 10);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(run.stdout.len() > 10_000_000);
    assert_eq!(listing(dir.path()), ["tiny.gguf"]);
}

/// Writes a file with long names that contain terminal escapes.
fn with_hostile_names(dir: &Path, architecture: &str) -> PathBuf {
    let path = dir.join("evil.gguf");
    let mut metadata = Metadata::new();
    metadata.set("general.architecture", architecture).unwrap();
    metadata
        .set("key\u{1b}[2J", "value\u{9b}31m\u{202e}")
        .unwrap();
    let names = ["a\u{1b}]0;title\u{7}", "b\r\n\u{7f}"];
    let specs = names.map(|name| TensorSpec::new(name, samite::DType::F32, &[4]).unwrap());
    let mut writer = Writer::create(&path, &metadata, specs.to_vec()).unwrap();
    writer.append(&[0; 16]).unwrap();
    writer.append(&[0; 16]).unwrap();
    writer.commit().unwrap();
    path
}

#[test]
fn names_from_files_are_escaped() {
    let dir = tempfile::tempdir().unwrap();
    let is_harmless = |text: &str| {
        let harmless = |c: char| c == '\n' || !c.is_control() && c != '\u{202e}';
        assert!(text.chars().all(harmless), "{text:?}");
        text.lines()
            .for_each(|line| assert!(line.len() < 1100, "{line}"));
    };
    let long = format!("\u{1b}[31m{}", "x".repeat(100_000));
    for architecture in ["llama\u{1b}[2J", "llama", &long] {
        let model = with_hostile_names(dir.path(), architecture);
        for line in [
            "inspect M",
            "inspect M --filter key",
            "quantize M OUT F16",
            "quantize M OUT Q8_0 --dry-run",
            "run -m M -p x",
            "plan -m M",
            "tokenize -m M x",
        ] {
            let out = dir.path().join("out").display().to_string();
            let run = with_model(&model, &line.replace("OUT", &out));
            assert!(run.code.is_some(), "{line}");
            is_harmless(&run.stdout);
            is_harmless(&run.stderr);
        }
    }
    let missing = dir.path().join("missing\u{1b}[2J\u{202e}.gguf");
    let run = with_model(&missing, "run -m M -p x");
    is_harmless(&run.stderr);
    run.fails(1, &["missing\\u{1b}[2J\\u{202e}.gguf"]);
}

/// Writes a model in which one element of a tensor is NaN.
pub fn with_nan(dir: &Path, tensor: &str) -> PathBuf {
    let model = dir.join("nan.gguf");
    SyntheticModel::tiny("llama").write(&model).unwrap();
    let file = GgufFile::open(&model, LoadMode::Read).unwrap();
    let at = file.tensor(tensor).unwrap().offset as usize + 8;
    drop(file);
    let mut bytes = std::fs::read(&model).unwrap();
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&model, bytes).unwrap();
    model
}

#[test]
fn nan_weights_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    for tensor in ["output_norm.weight", "blk.1.ffn_up.weight"] {
        let model = with_nan(dir.path(), tensor);
        let out = dir.path().join("out").display().to_string();
        for mixture in ["Q8_0", "F32"] {
            let line = format!("quantize M {out} {mixture}");
            with_model(&model, &line).fails(1, &[tensor, "NaN", "column 2", "damaged"]);
        }
        let text = dir.path().join("text");
        std::fs::write(&text, "a few words ".repeat(20)).unwrap();
        let line = format!("perplexity -m M -c 32 -f {}", text.display());
        with_model(&model, &line).fails(1, &["chunk 1", "NaN", "damaged"]);
        std::fs::remove_file(text).unwrap();
        assert_eq!(listing(dir.path()), ["nan.gguf"]);
    }
}

#[test]
fn traces_are_written_incrementally() {
    let (dir, model) = tiny();
    let trace = dir.path().join("trace.json");
    let line = format!(
        "run -m M -p ab -n 1000000 --ignore-eos --keep 4 --trace {}",
        trace.display()
    );
    let mut child = command(line.split(' ').map(|word| match word {
        "M" => model.to_str().unwrap(),
        word => word,
    }))
    .stdout(Stdio::null())
    .spawn()
    .unwrap();
    let written = || {
        let files = std::fs::read_dir(dir.path()).unwrap().flatten();
        let traces = files.filter(|file| file.file_name().to_string_lossy().starts_with(".trace"));
        traces
            .map(|file| file.metadata().map_or(0, |about| about.len()))
            .sum::<u64>()
    };
    wait_until("a part of the trace is written", || {
        written() > 1 << 20 || child.try_wait().unwrap().is_some()
    });
    assert_eq!(child.try_wait().unwrap(), None, "it goes on");
    child.kill().unwrap();
    child.wait().unwrap();
}

/// With little memory, commands end with an error or with success, and leave nothing behind. Below
/// this limit, which is about the program's own size, even small allocations of the standard
/// library fail.
#[test]
fn little_memory_is_an_error() {
    let (dir, model) = tiny();
    let file = |name: &str| dir.path().join(name);
    let (text, adapter) = (file("text"), file("adapter.gguf"));
    std::fs::write(&text, "a few words ".repeat(2000)).unwrap();
    let config = crate::train::write_project(dir.path());
    let larger = [
        ("width = 32", "width = 256"),
        ("feed_forward = 64", "feed_forward = 1024"),
        ("steps = 8", "steps = 2"),
        ("warmup = 2", "warmup = 1"),
    ];
    let config = crate::train::changed(&config, &larger);
    crate::write_adapter(&SyntheticModel::tiny("llama"), &adapter);
    let out = file("out");
    let before = listing(dir.path());
    for line in [
        "train CONFIG -o OUT -t 2 --sample=",
        "merge-lora M OUT --lora ADAPTER -t 2",
        "plan -m M",
        "tokenize -m M ab",
        "run -m M -p ab -n 4 -t 2",
        "quantize M OUT Q8_0 -t 2",
        "bench -m M -p 8 -n 2 -r 1 --no-peaks -t 2",
        "perplexity -m M -f TEXT -c 32 --chunks 2 -t 2",
        "perplexity -m M -f TEXT -c 32 --chunks 2 -t 2 --kl-divergence-base OUT",
        "test-ops --filter sqr -t 2",
        "synth OUT",
    ] {
        let line = line
            .replace("OUT", out.to_str().unwrap())
            .replace("TEXT", text.to_str().unwrap())
            .replace("CONFIG", config.to_str().unwrap())
            .replace("ADAPTER", adapter.to_str().unwrap());
        let mut ends = [0, 0];
        for kibibytes in [60_000, 70_000, 90_000, 120_000, 200_000, 400_000, 800_000] {
            let run = limited(&line, &model, b"", 0, kibibytes);
            match run.code {
                Some(0) => ends[0] += 1,
                // Exit codes of programs that cannot be loaded.
                Some(126 | 127) => {}
                Some(1) => {
                    // Training reports its steps before.
                    let last = run.stderr.lines().last().unwrap_or_default();
                    assert!(last.starts_with("error: "), "{line}: {}", run.stderr);
                    ends[1] += 1;
                }
                code => panic!("{line} with {kibibytes} KiB: {code:?}: {}", run.stderr),
            }
            if out.is_dir() {
                let left = listing(&out);
                assert!(!left.iter().any(|name| name.ends_with(".tmp")), "{left:?}");
                std::fs::remove_dir_all(&out).unwrap();
            }
            let _ = std::fs::remove_file(&out);
        }
        assert!(ends[0] > 0, "{line}: {ends:?}");
        // Training needs more than the smallest of these limits.
        assert!(
            ends[1] > 0 || !line.starts_with("train"),
            "{line}: {ends:?}"
        );
        assert_eq!(listing(dir.path()), before);
    }
    samite(["devices"]).ok();
}

/// The reference device computes on copies with eight bytes per element.
#[cfg(target_os = "linux")]
#[test]
fn reference_kernels_report_out_of_memory() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("wide.gguf");
    let wide = SyntheticModel {
        n_layer: 1,
        n_vocab: 200_000,
        dtype: DType::Q8_0,
        ..SyntheticModel::tiny("llama")
    };
    wide.write(&model).unwrap();
    let line = "run -m M --device reference -p ab -n 1 -t 1";
    let mut refused = 0;
    for kibibytes in (100_000..800_000).step_by(50_000) {
        let run = limited(line, &model, b"", 0, kibibytes);
        match run.code {
            Some(0) => assert!(refused > 0, "{kibibytes}"),
            Some(1) => {
                let last = run.stderr.lines().last().unwrap_or_default();
                assert!(last.starts_with("error: "), "{kibibytes}: {}", run.stderr);
                refused += usize::from(
                    run.stderr
                        .contains("for mul_mat 'result_output' in float64"),
                );
            }
            code => panic!("{kibibytes} KiB: {code:?}: {}", run.stderr),
        }
    }
    assert!(refused > 0);
    assert_eq!(limited(line, &model, b"", 0, 1_600_000).code, Some(0));
}
