//! High-bandwidth memory, with a stand-in for the memkind library.

use crate::{Run, command, tiny};
use samite_testing::skipped;
use std::path::Path;
use std::process::Command;

/// Compiles the memkind stand-in into a separate folder.
fn stand_in(folder: &Path, flags: &[&str]) -> bool {
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../devices/cpu/tests/fixtures/memkind.c");
    let status = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-shared", "-fPIC", "-o"])
        .args([folder.join("libmemkind.so.0"), source])
        .args(flags)
        .status();
    match &status {
        Ok(status) => assert!(status.success(), "the fixture does not compile"),
        Err(error) => skipped(format_args!("no C compiler ({error})")),
    }
    status.is_ok()
}

/// Runs the program with the library in that folder.
fn run(folder: &Path, line: &str) -> Run {
    let output = command(line.split_whitespace())
        .env("LD_LIBRARY_PATH", folder)
        .env("MEMKIND_COUNTS", folder.join("counts"))
        .output();
    Run::new(output.unwrap())
}

/// Returns the library's counters: allocations, frees, failures, wrong kinds, bytes.
fn counts(folder: &Path) -> [usize; 5] {
    let text = std::fs::read_to_string(folder.join("counts")).unwrap();
    let counts: Vec<_> = text
        .split_whitespace()
        .map(|n| n.parse().unwrap())
        .collect();
    counts.try_into().unwrap()
}

#[test]
fn a_model_runs_in_high_bandwidth_memory() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (_dir, model) = tiny();
    if !stand_in(folder, &[]) {
        return;
    }
    let line = format!(
        "run -m {} -p abcdefghijklmnop -n 8 --temp 0 -q",
        model.display()
    );
    let text = run(folder, &format!("{line} --device cpu")).ok();
    assert!(!folder.join("counts").exists(), "nobody asked for it");
    for flags in ["", "--no-repack", "--load-mode mmap --no-repack"] {
        let usual = run(folder, &format!("{line} {flags} --device cpu")).ok();
        let there = run(folder, &format!("{line} {flags} --device cpu:memory=hbm"));
        assert_eq!(there.ok(), usual, "{flags}");
        let [taken, given_back, refused, wrong, bytes] = counts(folder);
        assert_eq!([given_back, refused, wrong], [taken, 0, 0], "{flags}");
        // Weights, cache and results.
        let weights = std::fs::metadata(&model).unwrap().len() as usize / 2;
        assert!(
            taken >= 3 && bytes > weights,
            "{flags}: {taken} pieces, {bytes} bytes"
        );
    }
    assert!(!text.is_empty());
    run(folder, "test-ops --device cpu:memory=hbm --contract").ok();
    let text = run(folder, "devices -v").ok();
    assert!(text.contains("high-bandwidth memory: available"), "{text}");
}

#[test]
fn too_little_high_bandwidth_memory_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (_dir, model) = tiny();
    if !stand_in(folder, &["-DLIMIT=1000"]) {
        return;
    }
    let line = format!(
        "run -m {} -p a -n 1 --device cpu:memory=hbm",
        model.display()
    );
    run(folder, &line).fails(1, &["high-bandwidth memory", "bytes"]);
    let [taken, given_back, refused, ..] = counts(folder);
    assert!(refused > 0 && taken == given_back);
}

#[test]
fn missing_high_bandwidth_memory_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    if !stand_in(folder, &["-DSTATUS=-1"]) {
        return;
    }
    let reason = "this machine has none (status -1)";
    let text = run(folder, "devices -v").ok();
    let line = text
        .lines()
        .find(|line| line.contains("high-bandwidth memory: "));
    assert!(
        line.is_some_and(|line| line.contains("none") && line.contains(reason)),
        "{text}"
    );
    let line = "test-ops --device cpu:memory=hbm";
    run(folder, line).fails(2, &["device 'cpu'", "memory=hbm", reason]);
    let line = "test-ops --device cpu:memory=fast";
    run(folder, line).fails(2, &["'memory' is 'fast'", "host or hbm"]);
}
