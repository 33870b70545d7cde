//! Files that are missing, damaged, or cannot be written.

use crate::{listing, samite, tiny, with_model};
use samite::gguf::{GgufFile, LoadMode};
use std::fs::OpenOptions;
use std::path::Path;

/// Returns the offset of the first tensor's data, which is the size of the header.
fn header_bytes(model: &Path) -> u64 {
    let file = GgufFile::open(model, LoadMode::Read).unwrap();
    file.tensors()
        .iter()
        .map(|tensor| tensor.offset)
        .min()
        .unwrap()
}

#[test]
fn files_that_are_not_models_are_refused() {
    let (dir, model) = tiny();
    let missing = dir.path().join("missing");
    let folder = dir.path().join("folder");
    let empty = dir.path().join("empty.gguf");
    let text = dir.path().join("text.gguf");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(&empty, "").unwrap();
    std::fs::write(&text, "Dear reader, this is no model at all.\n").unwrap();
    for (path, part) in [
        (&missing, "missing: cannot open"),
        (&folder, "folder: is a directory"),
        (&empty, "empty.gguf: the file is empty"),
        (&text, "text.gguf: magic at byte 0"),
    ] {
        for line in [
            "run -m M -p x",
            "plan -m M",
            "bench -m M",
            "tokenize -m M x",
            "inspect M",
            "quantize M out Q8_0",
        ] {
            with_model(path, line).fails(1, &[part]);
        }
    }
    let prompt = format!("run -m M -f {}", missing.display());
    with_model(&model, &prompt).fails(1, &["missing: "]);
    let prompt = format!("run -m M -f {}", folder.display());
    with_model(&model, &prompt).fails(1, &["folder: "]);
    let binary = dir.path().join("binary");
    std::fs::write(&binary, b"a\xff\xfe").unwrap();
    let prompt = format!("run -m M -f {}", binary.display());
    with_model(&model, &prompt).fails(1, &["binary: is not UTF-8 text (byte 1)"]);
}

#[test]
fn a_file_truncated_anywhere_is_refused() {
    let (_dir, model) = tiny();
    let header = header_bytes(&model);
    let file = OpenOptions::new().write(true).open(&model).unwrap();
    // Shorten the file step by step, so that nothing has to be rewritten. A file without its data
    // is incomplete as well.
    for length in (0..=header).rev() {
        file.set_len(length).unwrap();
        let error = GgufFile::open(&model, LoadMode::Mmap)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("tiny.gguf: ") && error.lines().count() == 1,
            "{length}: {error}"
        );
        if length % 1500 == 4 {
            with_model(&model, "run -m M -p x").fails(1, &["tiny.gguf: "]);
        }
    }
}

#[test]
fn damaged_headers_are_refused() {
    let (_dir, model) = tiny();
    let whole = std::fs::read(&model).unwrap();
    let after = |text: &str| {
        let at = whole
            .windows(text.len())
            .position(|window| window == text.as_bytes());
        at.unwrap() + text.len()
    };
    let damaged = |at: usize, bytes: &[u8]| {
        let mut copy = whole.clone();
        copy[at..at + bytes.len()].copy_from_slice(bytes);
        std::fs::write(&model, copy).unwrap();
        with_model(&model, "run -m M -p x")
    };
    // A value follows its key, with four bytes of type and eight of length.
    let architecture = after("general.architecture") + 12;
    assert_eq!(&whole[architecture..architecture + 5], b"llama");
    damaged(architecture, b"abaco").fails(1, &["abaco", "docs/models.md"]);
    // After a name: the number of dimensions, each of them, the type, the offset.
    let norm = after("output_norm.weight");
    damaged(norm + 12, &999u32.to_le_bytes()).fails(1, &["output_norm.weight", "999"]);
    damaged(norm, &77u32.to_le_bytes()).fails(1, &["output_norm.weight", "77"]);
    damaged(norm + 4, &u64::MAX.to_le_bytes()).fails(1, &["output_norm.weight"]);
    damaged(norm + 16, &(1u64 << 60).to_le_bytes()).fails(1, &["output_norm.weight"]);
    damaged(4, &77u32.to_le_bytes()).fails(1, &["77"]);
    damaged(8, &u64::MAX.to_le_bytes()).fails(1, &["number of tensors"]);
    damaged(16, &u64::MAX.to_le_bytes()).fails(1, &["tiny.gguf"]);
    let layers = after("llama.block_count") + 4;
    damaged(layers, &4_000_000_000u32.to_le_bytes()).fails(1, &["block_count"]);
    let heads = after("llama.attention.head_count") + 4;
    damaged(heads, &0u32.to_le_bytes()).fails(1, &["head_count"]);
}

#[test]
fn failed_output_leaves_no_files() {
    let (dir, model) = tiny();
    for line in ["run -m M -p x --trace", "plan -m M --svg"] {
        with_model(&model, &format!("{line} /no/such/folder/file"))
            .fails(1, &["/no/such/folder/file"]);
    }
    with_model(&model, "quantize M /no/such/folder/file Q8_0").fails(1, &["/no/such/folder/file"]);
    with_model(&model, "quantize M M Q8_0").fails(2, &["same file"]);
    let folder = dir.path().display().to_string();
    with_model(&model, &format!("quantize M {folder} Q8_0")).fails(1, &[&folder]);

    // The trace is prepared before the run fails.
    let trace = dir.path().join("trace").display().to_string();
    with_model(&model, &format!("run -m M -p xyz -c 1 --trace {trace}")).fails(1, &["context"]);

    let quantized = dir.path().join("q8.gguf");
    let line = format!("quantize M {} Q8_0", quantized.display());
    with_model(&model, &format!("{line} --dry-run")).ok();
    assert_eq!(listing(dir.path()), ["tiny.gguf"]);
    with_model(&model, &line).ok();
    let again = format!("quantize M {folder}/q4.gguf Q4_0");
    with_model(&quantized, &again).fails(1, &["is q8_0 already"]);
    assert_eq!(listing(dir.path()), ["q8.gguf", "tiny.gguf"]);
    with_model(&quantized, &format!("{again} --allow-requantize")).ok();
    samite(["inspect".as_ref(), dir.path().join("q4.gguf").as_os_str()]).ok();
}

/// A superuser may lock any amount of memory, so the capability is dropped.
#[cfg(target_os = "linux")]
#[test]
fn a_refused_memory_lock_is_a_warning_with_advice() {
    let (_dir, model) = tiny();
    let run = |limit: &str, flag: &str| {
        let script = format!("ulimit -l {limit}; exec \"$@\"");
        let limited = ["sh", "-c", &script, "sh", env!("CARGO_BIN_EXE_samite")];
        let mut command = crate::child("setpriv");
        command.args(["--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]);
        let arguments = "run -p ab -n 1 -m".split(' ');
        command.args(limited).args(arguments).arg(&model);
        crate::Run::new(command.args(flag.split(' ')).output().unwrap())
    };
    let works = crate::child("setpriv")
        .args(["--bounding-set", "-ipc_lock", "true"])
        .status();
    if !works.is_ok_and(|status| status.success()) {
        println!("skipped: setpriv is not there, or may not take a right away");
        return;
    }
    for flag in ["--mlock", "--load-mode mlock", "--mlock --no-mmap"] {
        let refused = run("16", flag);
        for part in [
            "warning: cannot lock",
            "RLIMIT_MEMLOCK",
            " 16384 bytes",
            "ulimit -l ",
        ] {
            assert!(refused.stderr.contains(part), "{flag}: {}", refused.stderr);
        }
        refused.ok();
    }
    for flag in [
        "--no-repack",
        "--load-mode mmap",
        "--load-mode mlock --no-mmap",
    ] {
        let unasked = run("16", flag);
        assert!(!unasked.stderr.contains("lock"), "{}", unasked.stderr);
        unasked.ok();
    }
}
