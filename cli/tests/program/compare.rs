//! Comparisons with llama.cpp, for which scripts stand in.

use crate::{check_report_metadata, tiny, with_model};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

fn script(folder: &Path, name: &str, lines: &str) -> PathBuf {
    let path = folder.join(name);
    // Copy it in another process: a file that a child of another thread still has open for writing
    // cannot be executed.
    let draft = folder.join(format!("{name}.draft"));
    std::fs::write(&draft, format!("#!/bin/sh\n{lines}\n")).unwrap();
    let copied = std::process::Command::new("cp")
        .args([&draft, &path])
        .status();
    assert!(copied.unwrap().success());
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Reports 10 tokens per second without repacking and 20 with it.
const BENCH: &str = r#"
case "$*" in *"--repack 1"*) rate=20;; *) rate=10;; esac
echo "{ \"build_commit\": \"abc\", \"build_number\": 5, \"samples_ts\": [ $rate ] }""#;
const BATCHED: &str = r#"echo '{ "speed_pp": -nan, "speed_tg": 40.0, "speed": 1 }'"#;

#[test]
fn the_faster_peer_build_is_compared_in_pairs() {
    let (dir, model) = tiny();
    let bench = script(dir.path(), "llama-bench", BENCH);
    script(dir.path(), "llama-batched-bench", BATCHED);
    let line = format!(
        "bench -m M --compare {} --pairs 2 -p 8 -n 4 --sequences 1,3 -d 2 -t 1 --no-peaks --json -ctk q8_0",
        bench.display()
    );
    let found = with_model(&model, &line).json();
    assert_eq!(found["llama_cpp_version"], "abc (build 5)");
    check_report_metadata(&found);
    let rows = found["results"].as_array().unwrap();
    let tests: Vec<_> = rows
        .iter()
        .map(|row| row["test"].as_str().unwrap())
        .collect();
    assert_eq!(tests, ["pp8@2", "tg4@2", "tg4x3@2"]);
    for (row, rate) in rows.iter().zip([20.0, 20.0, 40.0]) {
        assert_eq!(row["repack"], true);
        let pairs = row["pairs"].as_array().unwrap();
        // On a noisy machine, it takes more pairs.
        assert!((2..=4).contains(&pairs.len()), "{row}");
        assert_ne!(pairs[0]["first"], pairs[1]["first"]);
        assert!(pairs.iter().all(|pair| pair["llama_cpp"] == rate), "{row}");
        assert!(row["ratio_of_all_pairs"].as_f64().unwrap() > 0.0);
    }
    let line = line
        .replace(" --json", "")
        .replace("--pairs 2 -p 8", "--pairs 1 -p 0");
    let line = line.replace("--sequences 1,3", "--sequences 3");
    let table = with_model(&model, &line).ok();
    assert!(table.contains("| tg4x3@2 | 1 |"), "{table}");
    // Without the machine's limits, the last column is empty.
    assert!(!table.contains(" % of "), "{table}");
}

#[test]
fn limits_are_measured_before_and_after() {
    let (dir, model) = tiny();
    let lines = format!("[ $1 = --version ] && echo 'version: 1.2 (b)' >&2 && exit; {BENCH}");
    let bench = script(dir.path(), "llama-bench", &lines);
    let line = format!(
        "bench -m M --compare {} --pairs 1 -p 8 -n 0 -t 2",
        bench.display()
    );
    let found = with_model(&model, &format!("{line} --json")).json();
    assert_eq!(found["llama_cpp_version"], "1.2 (b)");
    let row = &found["results"][0];
    // A prompt is limited by one of these, and the tiny model reaches a small part of it.
    let share = row["share_of_limit"].as_f64().unwrap();
    let limit = row["limit"].as_str().unwrap();
    assert!(share > 0.0 && share < 1.0, "{row}");
    assert!(
        ["8-bit products", "f32 arithmetic"].contains(&limit),
        "{row}"
    );
    let [before, after] = row["limits"].as_array().unwrap().as_slice() else {
        panic!("{row}");
    };
    let [one, two] = found["limits"].as_array().unwrap().as_slice() else {
        panic!("{found}");
    };
    assert!(one["threads"] == 1 && two["threads"] == 2, "{found}");
    for name in ["clock_hz", "read_bytes", "f32_operations"] {
        let [before, after, best] =
            [before, after, two].map(|limits| limits[name].as_f64().unwrap());
        assert!(before > 0.0 && best == before.max(after), "{found}");
    }
}

#[test]
fn peer_failures_are_reported() {
    let (dir, model) = tiny();
    let compare = |path: &Path| {
        let line = format!(
            "bench -m M --compare {} --no-peaks -p 4 -n 0 --pairs 1",
            path.display()
        );
        with_model(&model, &line)
    };
    compare(&dir.path().join("missing")).fails(2, &["--compare", "there is no file"]);
    let silent = script(dir.path(), "silent", "");
    compare(&silent).fails(1, &["its output has no speed in it"]);
    let failing = script(dir.path(), "failing", "echo 'bad model' >&2; exit 3");
    compare(&failing).fails(1, &["failing", "bad model", "3"]);
    let half = script(
        dir.path(),
        "half",
        &format!("case \"$*\" in *\"--repack 1\"*) kill -ILL $$;; esac\n{BENCH}"),
    );
    let run = compare(&half);
    assert!(
        run.stderr.contains("only one of --repack 0 and 1 works"),
        "{}",
        run.stderr
    );
    assert!(run.ok().contains("| 0 |"));
    with_model(&model, "bench -m M --pairs 3").fails(2, &["--compare"]);
}
