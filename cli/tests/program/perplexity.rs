//! Divergence of models from files of log-probabilities.

use crate::{listing, tiny, with_model};
use samite::llm::SyntheticModel;
use samite::llm::log_probs::LogProbsReader;
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A folder with a tiny model, a text, and the model's log-probabilities on 3 chunks of it.
struct Base {
    dir: TempDir,
    model: PathBuf,
}

impl Base {
    fn new() -> Self {
        let (dir, model) = tiny();
        let words: Vec<_> = (0..200).map(|i| format!("word {}", i * i % 97)).collect();
        std::fs::write(dir.path().join("text"), words.join(" ")).unwrap();
        let base = Base { dir, model };
        let line = format!(
            "perplexity -m M -f {} -c 32 --chunks 3 --kl-divergence-base {}",
            base.at("text"),
            base.at("base")
        );
        let said = with_model(&base.model, &line).ok();
        assert!(said.contains("over 45 tokens in 3 chunks of 32"), "{said}");
        assert!(said.contains("log-probabilities written to"), "{said}");
        base
    }

    fn at(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// Returns the command line that compares with the file of this name.
    fn compare(&self, name: &str) -> String {
        let file = self.at(name);
        format!("perplexity -m M --kl-divergence --kl-divergence-base {file}")
    }
}

fn number(value: &Value, pointer: &str) -> f64 {
    let number = value.pointer(pointer).and_then(Value::as_f64);
    number.unwrap_or_else(|| panic!("{pointer}: {value}"))
}

#[test]
fn a_model_does_not_diverge_from_itself() {
    let base = Base::new();
    let plain = format!(
        "perplexity -m M -f {} -c 32 --chunks 3 --json",
        base.at("text")
    );
    let plain = with_model(&base.model, &plain).json();
    let value = with_model(&base.model, &format!("{} --json", base.compare("base"))).json();
    for pointer in ["/perplexity", "/error", "/tokens", "/chunk_size", "/chunks"] {
        assert_eq!(value.pointer(pointer), plain.pointer(pointer));
    }
    // Codes are 16 / 65535 apart, so rounding changes a log-probability by at most half of that.
    let half = 8.0 / 65535.0 + 1e-5;
    let ratio = number(&value, "/base/perplexity") / number(&value, "/perplexity");
    assert!(ratio.ln().abs() <= half, "{ratio}");
    assert!(number(&value, "/log_ratio/mean").abs() <= half);
    for of in [
        "min",
        "mean",
        "median",
        "max",
        "percentiles/99.9",
        "percentiles/1",
    ] {
        let divergence = number(&value, &format!("/kl_divergence/{of}"));
        assert!(divergence.abs() <= half, "{of}: {divergence}");
    }
    for of in ["mean", "rms", "min", "max"] {
        assert!(number(&value, &format!("/delta_p/{of}")).abs() <= half);
    }
    assert_eq!(number(&value, "/same_top/share"), 1.0);
    assert_eq!(number(&value, "/same_top/error"), 0.0);

    let line = format!("{} --chunks 2 -c 64", base.compare("base"));
    let said = with_model(&base.model, &line).ok();
    assert!(said.contains("over 30 tokens in 2 chunks of 32"), "{said}");
    for part in ["same top token", "RMS Δp", "99.9 %", "median", "minimum"] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    assert_eq!(said.lines().find(|line| line.chars().count() > 80), None);
}

#[test]
fn a_quantized_model_diverges() {
    let base = Base::new();
    let small = base.at("small.gguf");
    with_model(&base.model, &format!("quantize M {small} Q4_0")).ok();
    let line = format!("{} --json -f text", base.compare("base"));
    let run = with_model(small.as_ref(), &line);
    let warning = "warning: --file text: is not read";
    assert!(run.stderr.contains(warning), "{}", run.stderr);
    let value = run.json();
    let of = |name: &str| number(&value, &format!("/kl_divergence/{name}"));
    assert!(of("mean") > 1e-3, "{value}");
    let ascending = [
        "min",
        "percentiles/1",
        "percentiles/5",
        "percentiles/10",
        "median",
        "percentiles/90",
        "percentiles/95",
        "percentiles/99",
        "percentiles/99.9",
        "max",
    ];
    assert!(ascending.map(of).is_sorted(), "{value}");
    assert!(of("error") > 0.0 && number(&value, "/log_ratio/error") > 0.0);
    assert!(number(&value, "/delta_p/min") < number(&value, "/delta_p/max"));
    assert!(number(&value, "/delta_p/rms") > 0.0);
    assert!(number(&value, "/same_top/share") < 1.0, "{value}");
}

#[test]
fn flags_without_a_valid_comparison_are_refused() {
    let base = Base::new();
    let (text, file) = (base.at("text"), base.at("base"));
    let before = std::fs::read(&file).unwrap();
    let model = base.model.display();
    for (line, part) in [
        ("perplexity -m M".to_owned(), "--file"),
        (
            format!("perplexity -m M -f {text} --kl-divergence"),
            "--kl-divergence-base",
        ),
        (
            "perplexity -m M --kl-divergence".to_owned(),
            "--kl-divergence-base",
        ),
        (
            format!("perplexity -m M -f {text} --kl-divergence-base {text}"),
            "same file",
        ),
        (
            format!("perplexity -m M -f {text} --save-all-logits {model}"),
            "same file",
        ),
        (format!("{} -c 16", base.compare("base")), "--ctx-size 16"),
    ] {
        with_model(&base.model, &line).fails(2, &[part]);
    }
    let line = format!("perplexity -m M -f {text} --kl-divergence-base");
    with_model(&base.model, &format!("{line} /no/such/base")).fails(1, &["/no/such/base"]);
    with_model(&base.model, &format!("{line} /dev/null")).fails(1, &["/dev/null"]);
    // A failure leaves the earlier file unchanged, and no other file.
    with_model(&base.model, &format!("{line} {file} -c 100000"))
        .fails(1, &["text: has", "--ctx-size"]);
    assert_eq!(std::fs::read(&file).unwrap(), before);
    assert_eq!(listing(base.dir.path()), ["base", "text", "tiny.gguf"]);
}

#[test]
fn hostile_log_probability_files_are_refused() {
    let base = Base::new();
    let bytes = std::fs::read(base.at("base")).unwrap();
    let refused = |content: &[u8], parts: &[&str]| {
        std::fs::write(base.at("evil"), content).unwrap();
        let run = with_model(&base.model, &base.compare("evil"));
        run.fails(1, &[&["evil: "], parts].concat());
    };
    let with = |at: usize, number: u32| {
        let mut bytes = bytes.clone();
        bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        bytes
    };
    refused(b"", &["magic", "no file of log-probabilities"]);
    refused(&std::fs::read(&base.model).unwrap(), &["magic"]);
    refused(&bytes[..bytes.len() - 1], &["truncated"]);
    refused(&with(8, 0), &["n_ctx: is 0"]);
    refused(
        &with(8, i32::MAX as u32),
        &["n_ctx 2147483647", "truncated"],
    );
    refused(&with(12, i32::MAX as u32), &["n_vocab 2147483647"]);
    refused(&with(16, 0), &["n_chunk: is 0"]);
    refused(&with(20 + 40 * 4, 320), &["token 8 of chunk 2: is 320"]);
    let first_row = 20 + 3 * 32 * 4;
    refused(&with(first_row, u32::MAX), &["row 0 of chunk 1: scale NaN"]);
    // A minimum that makes all probabilities nearly 0.
    refused(
        &with(first_row + 4, (-99f32).to_bits()),
        &["row 0 of chunk 1", "sum to"],
    );
    // A complete file of another vocabulary.
    let other = SyntheticModel {
        n_vocab: 300,
        ..SyntheticModel::tiny("llama")
    };
    let other_model = base.at("other.gguf");
    other.write(Path::new(&other_model)).unwrap();
    with_model(other_model.as_ref(), &base.compare("base"))
        .fails(1, &["base: n_vocab: is 320", "300"]);
    with_model(&base.model, &base.compare("nowhere")).fails(1, &["nowhere: cannot read"]);
    let folder = base.dir.path().display();
    let line = format!("perplexity -m M --kl-divergence --kl-divergence-base {folder}");
    with_model(&base.model, &line).fails(1, &["is not a regular file"]);
    #[cfg(unix)]
    {
        let line = "perplexity -m M --kl-divergence --kl-divergence-base /dev/zero";
        with_model(&base.model, line).fails(1, &["/dev/zero: is not a regular file"]);
    }
}

/// A sparse file of the length in its header, with more tokens than fit into memory.
#[cfg(target_os = "linux")]
#[test]
fn an_oversized_context_error_names_the_file() {
    let base = Base::new();
    let path = base.at("huge");
    let mut header = b"_logits_".to_vec();
    let n_ctx = 1u32 << 26;
    for number in [n_ctx, 320, 1] {
        header.extend(number.to_le_bytes());
    }
    std::fs::write(&path, &header).unwrap();
    let rows = u64::from(n_ctx - 1 - n_ctx / 2);
    let length = 20 + 4 * u64::from(n_ctx) + rows * (8 + 2 * 320);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    if file.set_len(length).is_err() {
        samite_testing::skipped("the file system has no sparse files");
        return;
    }
    let run = crate::limited(&base.compare("huge"), &base.model, b"", 0, 2 << 20);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    let last = run.stderr.lines().last().unwrap_or_default();
    assert!(
        last.starts_with("error: ") && last.contains("huge: n_ctx is 67108864"),
        "{last}"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_no_file() {
    let base = Base::new();
    // The signal for exceeding the limit would kill the program.
    let script = "trap '' XFSZ; ulimit -f 8; exec \"$@\"";
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", script, "sh", env!("CARGO_BIN_EXE_samite")])
        .args(["perplexity", "-c", "32", "-m"])
        .arg(&base.model)
        .args(["-f", &base.at("text")])
        .args(["--kl-divergence-base", &base.at("full")]);
    let run = crate::Run::new(command.output().unwrap());
    run.fails(1, &["full: cannot", "File too large"]);
    assert_eq!(listing(base.dir.path()), ["base", "text", "tiny.gguf"]);
}

/// Writes the built-in model in F32, so that programs differ only by their summation order, and
/// another one rounded to Q4_0. `make.sh` generated the log-probabilities of the first one.
fn built_in(dir: &Path) -> [PathBuf; 2] {
    let built_in = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/stories/stories.gguf"
    );
    let [whole, small, rounded] =
        ["f32.gguf", "q4_0.gguf", "q4_0-f32.gguf"].map(|name| dir.join(name));
    for (from, to, mixture) in [
        (Path::new(built_in), &whole, "F32"),
        (&whole, &small, "Q4_0"),
        (&small, &rounded, "F32"),
    ] {
        let line = format!("quantize --allow-requantize M {} {mixture}", to.display());
        with_model(from, &line).ok();
    }
    [whole, rounded]
}

/// Returns the path of a file that llama.cpp's tool wrote.
fn fixture(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/kl_divergence/");
    format!("{folder}{name}")
}

/// Returns the codes of all rows of a file, with each row's scale and minimum.
fn rows_of(path: &str) -> Vec<([f32; 2], Vec<u16>)> {
    let bytes = std::fs::read(path).unwrap();
    let mut reader = LogProbsReader::new(&bytes[..], bytes.len() as u64).unwrap();
    let rows = reader.n_chunk() * (reader.n_ctx() - 1 - reader.n_ctx() / 2);
    let mut next = || {
        let row = reader.next_row().unwrap();
        ([row.scale, row.minimum], row.codes.to_vec())
    };
    (0..rows).map(|_| next()).collect()
}

#[test]
fn log_probability_files_match_llama_cpp() {
    let dir = tempfile::tempdir().unwrap();
    let [model, _] = built_in(dir.path());
    let (theirs, ours) = (fixture("llama.kld"), dir.path().join("ours"));
    let ours = ours.display().to_string();
    let line = format!(
        "perplexity -m M --kv f32 -f {} -c 64 --chunks 5 --kl-divergence-base {ours}",
        fixture("text.txt")
    );
    with_model(&model, &line).ok();
    let head = 20 + 5 * 64 * 4;
    let [a, b] = [&ours, &theirs].map(|path| std::fs::read(path).unwrap());
    assert_eq!((a.len(), &a[..head]), (b.len(), &b[..head]));
    let mut different = 0;
    let (ours, theirs) = (rows_of(&ours), rows_of(&theirs));
    for (at, ((a, our_codes), (b, their_codes))) in ours.iter().zip(&theirs).enumerate() {
        // Logits are F32 sums in another order.
        for (a, b) in a.iter().zip(b) {
            assert!((a / b - 1.0).abs() < 1e-5, "{at}: {a} {b}");
        }
        for (a, b) in our_codes.iter().zip(their_codes) {
            assert!(a.abs_diff(*b) <= 1, "{at}: {a} {b}");
            different += usize::from(a != b);
        }
    }
    assert!(different * 50 < ours.len() * 512, "{different}");
}

#[test]
fn divergences_match_llama_cpp() {
    let dir = tempfile::tempdir().unwrap();
    let compared = |model: &Path| {
        let line = format!(
            "perplexity -m M --kv f32 --kl-divergence --kl-divergence-base {} --json",
            fixture("llama.kld")
        );
        with_model(model, &line).json()
    };
    let [model, rounded] = built_in(dir.path());
    let value = compared(&model);
    // Codes are 16 / 65535 apart, so rounding changes a log-probability by at most half of that. A
    // divergence is a mean of such differences; logits are F32 sums in another order.
    let most = 8.0 / 65535.0 + 1e-5;
    for of in ["mean", "min", "max"] {
        let divergence = number(&value, &format!("/kl_divergence/{of}"));
        assert!(divergence.abs() <= most, "{of}: {divergence}");
    }
    assert_eq!(number(&value, "/same_top/share"), 1.0);
    // Value that the tool printed when it wrote the file.
    assert!((number(&value, "/perplexity") - 2.3326).abs() < 1e-4);

    // Values that the tool printed for the rounded model.
    let value = compared(&rounded);
    for (pointer, expected) in [
        ("/tokens", 155.0),
        ("/perplexity", 2.562308),
        ("/error", 0.646893),
        ("/base/perplexity", 2.264751),
        ("/base/error", 0.518220),
        ("/log_ratio/mean", 0.123444),
        ("/log_ratio/error", 0.049756),
        ("/kl_divergence/mean", 0.056783),
        ("/kl_divergence/error", 0.016869),
        ("/kl_divergence/max", 2.180034),
        ("/kl_divergence/percentiles/99.9", 1.946262),
        ("/kl_divergence/percentiles/99", 0.623424),
        ("/kl_divergence/percentiles/95", 0.342463),
        ("/kl_divergence/percentiles/90", 0.196566),
        ("/kl_divergence/median", 0.000068),
        ("/kl_divergence/percentiles/10", 0.000002),
        ("/kl_divergence/percentiles/5", 0.0),
        ("/kl_divergence/percentiles/1", 0.0),
        ("/kl_divergence/min", 0.0),
        ("/delta_p/mean", -0.01740),
        ("/delta_p/error", 0.00896),
        ("/delta_p/rms", 0.11255),
        ("/delta_p/rms_error", 0.02322),
        ("/delta_p/min", -0.82306),
        ("/delta_p/max", 0.37453),
        ("/same_top/share", 0.93548),
        ("/same_top/error", 0.01980),
    ] {
        let found = number(&value, pointer);
        // The tool prints five or six digits and computes in F32.
        assert!((found - expected).abs() < 3e-5, "{pointer}: {found}");
    }
    assert_eq!(number(&value, "/base/clipped_tokens"), 2.0);
}
