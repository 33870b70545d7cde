//! Divergence of models from files of log-probabilities.

use crate::{listing, samite, tiny, with_model};
use samite::llm::SyntheticModel;
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

    /// Flags that compare with the file of this name.
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
    // A code is 16 / 65535 wide, so that rounding changes a log-probability by at most half of that.
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
fn flags_that_make_no_comparison() {
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
    let line = format!("perplexity -m M -f {text} -c 32 --kl-divergence-base");
    with_model(&base.model, &format!("{line} /no/such/base")).fails(1, &["/no/such/base"]);
    with_model(&base.model, &format!("{line} /dev/null")).fails(1, &["/dev/null"]);
    // A failure leaves the earlier file alone, and nothing else behind.
    with_model(&base.model, &format!("{line} {file} -c 100000"))
        .fails(1, &["text: has", "--ctx-size"]);
    assert_eq!(std::fs::read(&file).unwrap(), before);
    assert_eq!(listing(base.dir.path()), ["base", "text", "tiny.gguf"]);
}

#[test]
fn hostile_files_are_refused() {
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
    // A minimum that makes probabilities of nearly 0.
    refused(
        &with(first_row + 4, (-99f32).to_bits()),
        &["row 0 of chunk 1", "sum to"],
    );
    // A file that is complete, of another vocabulary.
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

/// A sparse file that is as long as its header says, with more tokens than the machine can hold.
#[cfg(target_os = "linux")]
#[test]
fn a_context_that_does_not_fit_names_the_file() {
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

/// Log-probabilities of the built-in model that llama.cpp's tool wrote.
fn fixture(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/kl_divergence/");
    format!("{folder}{name}")
}
