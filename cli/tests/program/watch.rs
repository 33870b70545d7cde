//! Inspecting nodes: `run --watch` and `compare`.

use crate::{Run, listing, samite, tiny, with_model};
use serde_json::Value;
use std::path::Path;

/// Generates two tokens, with more flags.
fn run(model: &Path, more: &[&str]) -> Run {
    let mut arguments = vec!["run", "-p", "abc", "-n", "2", "--temp", "0", "-q"];
    arguments.extend([
        "-m",
        model.to_str().unwrap(),
        "--device",
        "reference",
        "--only",
    ]);
    samite(arguments.into_iter().chain(more.iter().copied()))
}

#[test]
fn watched_nodes_are_printed_alongside_the_text() {
    let (_dir, model) = tiny();
    let text = run(&model, &[]).ok();
    let watched = run(&model, &["--watch", "l_out-*", "--watch", "inp_embd"]);
    let shown = watched.stderr.clone();
    assert_eq!(watched.ok(), text);
    let lines: Vec<_> = shown.lines().collect();
    assert!(
        lines.iter().all(|line| line.chars().count() <= 80),
        "{shown}"
    );
    let heads: Vec<_> = lines.iter().filter(|line| !line.starts_with(' ')).collect();
    // Four nodes of the prompt, and four of the single token computed after it.
    assert_eq!((heads.len(), lines.len()), (8, 16), "{shown}");
    let start = "inp_embd, step 0: get_rows on reference, f32 [64, ";
    assert!(heads[0].starts_with(start), "{shown}");
    assert!(heads[0].contains("], sum "), "{shown}");
    assert!(heads[7].starts_with("l_out-2, step 1: add on reference, f32 [64], sum "));
    for values in lines.iter().filter(|line| line.starts_with(' ')) {
        let numbers: Vec<_> = values.split_whitespace().collect();
        let is_number = |text: &&str| text.parse::<f64>().is_ok();
        assert!(
            numbers[..6].iter().all(is_number) && numbers[6..] == ["…"],
            "{values}"
        );
    }
}

#[test]
fn watched_nodes_are_written_as_files() {
    let (dir, model) = tiny();
    let folder = dir.path().join("seen/by me");
    let flags = [
        "--watch",
        "l_out-?",
        "--watch-dir",
        folder.to_str().unwrap(),
    ];
    let text = run(&model, &[]).ok();
    let watched = run(&model, &flags);
    assert_eq!(watched.stderr, "");
    assert_eq!(watched.ok(), text);
    let index = std::fs::read_to_string(folder.join("index.jsonl")).unwrap();
    let entries: Vec<Value> = index
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(entries.len(), 6);
    assert_eq!(listing(&folder).len(), 7);
    for (number, entry) in entries.iter().enumerate() {
        assert_eq!(
            entry["file"],
            format!("{number:06}-l_out-{}.npy", number % 3)
        );
        assert_eq!(
            (&entry["step"], &entry["operation"]),
            (&(number / 3).into(), &"add".into())
        );
        let file = std::fs::read(folder.join(entry["file"].as_str().unwrap())).unwrap();
        let (header, data) = file.split_at(128);
        let shape: Vec<_> = entry["shape"].as_array().unwrap().iter().rev().collect();
        let shape = match &*shape {
            [only] => format!("({only},)"),
            shape => format!("({}, {})", shape[0], shape[1]),
        };
        let header = String::from_utf8_lossy(header);
        assert!(
            header.contains("'<f4'") && header.contains(&shape),
            "{header}"
        );
        let values = data
            .as_chunks()
            .0
            .iter()
            .map(|bytes| f64::from(f32::from_le_bytes(*bytes)));
        let sum: f64 = values.sum();
        assert!((sum - entry["sum"].as_f64().unwrap()).abs() < 1e-9);
    }
    // A folder cannot be used twice.
    run(&model, &flags).fails(2, &["--watch-dir", "is not empty"]);
}

#[test]
fn invalid_watches_are_reported_and_leave_no_files() {
    let (dir, model) = tiny();
    let folder = dir.path().join("seen");
    let into = ["--watch-dir", folder.to_str().unwrap()];
    let unknown = run(
        &model,
        &[&["--watch", "l_out-*", "--watch", "layer*"], &into[..]].concat(),
    );
    unknown.fails(2, &["--watch", "'layer*'", "inp_embd, norm-0"]);
    assert!(!folder.exists());
    with_model(&model, "run -m M --watch-dir x -p a").fails(2, &["--watch"]);
    let file = model.to_str().unwrap();
    run(&model, &["--watch", "*", "--watch-dir", file])
        .fails(2, &["--watch-dir", file, "is not a folder"]);
    let long = run(&model, &["--watch", &"x".repeat(9000)]);
    assert!(long.stderr.len() < 400, "{}", long.stderr);
    let full = run(
        &model,
        &[&["--watch", "*", "--watch-limit", "0"], &into[..]].concat(),
    );
    assert_eq!(full.code, Some(1));
    let said =
        "error: --watch-dir: 'inp_embd' of step 0 would be more than the 0 MiB of --watch-limit";
    assert!(full.stderr.starts_with(said), "{}", full.stderr);
    assert!(!folder.exists());
}

/// Files are limited to 4 KiB: the list of files exceeds that, but a token's result files do not.
#[cfg(unix)]
#[test]
fn an_unwritable_file_list_keeps_the_results() {
    let (dir, model) = tiny();
    let folder = dir.path().join("seen");
    let run = crate::child("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 8; exec \"$@\"", "sh"])
        .args([env!("CARGO_BIN_EXE_samite"), "run", "-p", "a", "-n", "40"])
        .args([
            "--ignore-eos",
            "-q",
            "--device",
            "cpu",
            "--watch",
            "l_out-*",
        ])
        .args(["-m".as_ref(), model.as_os_str()])
        .args(["--watch-dir".as_ref(), folder.as_os_str()])
        .output();
    let run = Run::new(run.unwrap());
    let index = folder.join("index.jsonl");
    let said = format!("error: --watch-dir: {}: ", index.display());
    assert!(run.stderr.contains(&said), "{}", run.stderr);
    assert_eq!(run.code, Some(1));
    let whole = std::fs::read_to_string(index).unwrap();
    let files = listing(&folder)
        .iter()
        .filter(|name| name.ends_with(".npy"))
        .count();
    assert_eq!(files, whole.matches('\n').count() + 1);
}

#[test]
fn all_nan_results_are_equal_but_reported() {
    let dir = tempfile::tempdir().unwrap();
    let model = crate::hostile::with_nan(dir.path(), "blk.1.attn_norm.weight");
    let line = "compare -m M --device cpu,reference";
    let run = with_model(&model, line);
    let warning = "warning: ";
    assert!(run.stderr.starts_with(warning), "{}", run.stderr);
    assert!(
        run.stderr
            .contains(" operations are nothing but NaN on both devices, first Qcur-1"),
        "{}",
        run.stderr
    );
    run.ok();
    let report = with_model(&model, &format!("{line} --json")).json();
    assert!(report["all_nan"].as_u64().unwrap() > 10, "{report}");
    assert_eq!(report["first_all_nan"], "Qcur-1");
    // A NaN sum is also written as text.
    let folder = dir.path().join("seen");
    let flags = "--watch Qcur-1 --watch-dir";
    with_model(
        &model,
        &format!("run -m M -p a -n 1 {flags} {}", folder.display()),
    );
    let index = std::fs::read_to_string(folder.join("index.jsonl")).unwrap();
    let entry: Value = serde_json::from_str(index.lines().next().unwrap()).unwrap();
    assert_eq!(entry["sum"], "NaN");
    let (_dir, right) = tiny();
    let report = with_model(&right, &format!("{line} --json")).json();
    assert_eq!(
        (&report["all_nan"], &report["first_all_nan"]),
        (&0.into(), &Value::Null)
    );
}

#[test]
fn overlong_text_is_truncated_with_a_warning() {
    let (dir, model) = tiny();
    let line = "compare -m M --device cpu,reference -c 1";
    let run = with_model(&model, &format!("{line} -p abc"));
    let warning = "warning: the context has room for 1 token: 3 tokens of the text left out; see --ctx-size\n";
    assert_eq!(run.stderr, warning);
    assert!(run.ok().contains(" in 1 step,"));
    let text = dir.path().join("text");
    std::fs::write(&text, "abc").unwrap();
    let run = with_model(&model, &format!("{line} -f {}", text.display()));
    assert!(run.stderr.contains("at least 3 tokens"), "{}", run.stderr);
}

#[test]
fn two_devices_are_compared() {
    let (_dir, model) = tiny();
    let same = with_model(&model, "compare -m M --device cpu,reference").ok();
    assert!(same.contains(" in 2 steps, 0 beyond 1e-3"), "{same}");
    // The built-in model has 8-bit weights, for which the CPU device rounds activations.
    let own = samite(["compare", "--device", "cpu,reference"]).ok();
    assert!(own.contains(" in 2 steps, 0 beyond 1e-3"), "{own}");
    // Rounding is the only difference.
    let found = with_model(
        &model,
        "compare -m M --device cpu,reference --limit 0 --all",
    );
    assert_eq!(found.code, Some(1));
    assert!(
        found.stderr.ends_with(" operations differ\n"),
        "{}",
        found.stderr
    );
    let lines: Vec<_> = found.stdout.lines().collect();
    assert!(
        lines.iter().all(|line| line.chars().count() <= 80),
        "{}",
        found.stdout
    );
    let of = lines
        .iter()
        .filter(|line| line.starts_with("    of "))
        .count();
    assert!(of > 20, "{}", found.stdout);
    let first = with_model(
        &model,
        "compare -m M --device cpu,reference --limit 0 --json -p abc",
    );
    assert_eq!(first.code, Some(1));
    assert!(first.stderr.contains("error: an operation differs; --all"));
    let report: Value = serde_json::from_str(&first.stdout).unwrap();
    let [node] = report["differing"].as_array().unwrap().as_slice() else {
        panic!("{report}");
    };
    assert_eq!(node["devices"], serde_json::json!(["cpu", "reference"]));
    assert!(node["nmse"].as_f64().unwrap() > 0.0 && node["step"] == 0);
    assert_eq!(
        node["shape"].as_array().unwrap().len(),
        node["at"].as_array().unwrap().len()
    );
    assert!(!node["operands"].as_array().unwrap().is_empty(), "{node}");
    // Without packed weights, on token ids, with quantized caches, in several steps.
    let line = "compare -m M --device reference,cpu --no-repack --kv q8_0 -ub 3 --json";
    let report = with_model(&model, line).json();
    assert!(report["steps"].as_u64().unwrap() > 3, "{report}");
    assert_eq!(report["differing"].as_array().unwrap().len(), 0, "{report}");
    for line in [
        "compare -m M",
        "compare -m M --device cpu",
        "compare -m M --device cpu,reference,cpu",
    ] {
        let run = with_model(&model, line);
        assert_eq!(
            (run.code, run.stdout.as_str()),
            (Some(2), ""),
            "{line}: {}",
            run.stderr
        );
        assert!(
            run.stderr.contains("--device") || run.stderr.contains("twice"),
            "{}",
            run.stderr
        );
    }
    with_model(&model, "compare -m M --device cpu,reference --limit -1").fails(2, &["--limit"]);
}
