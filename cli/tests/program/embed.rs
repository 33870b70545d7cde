//! Text embeddings.

use crate::{Run, command, fed, samite, with_model};
use samite::gguf::StringArray;
use samite::llm::SyntheticModel;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn write(model: &SyntheticModel) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    model.write(&path).unwrap();
    (dir, path)
}

fn encoder() -> (TempDir, PathBuf) {
    write(&SyntheticModel {
        extra: vec![("pooling_type", 1u32.into())],
        ..SyntheticModel::tiny("bert")
    })
}

/// Runs `samite embed` with this on standard input.
fn piped(model: &Path, flags: &str, input: &str) -> Run {
    let words = flags.split_whitespace();
    let mut command = command(["embed", "-m"]);
    command.arg(model).args(words);
    fed(command, input.as_bytes())
}

fn rows(text: &str) -> Vec<Vec<f64>> {
    let row = |line: &str| line.split(' ').map(|x| x.parse().unwrap()).collect();
    text.lines().map(row).collect()
}

fn is_near(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 2e-6)
}

#[test]
fn embeddings_do_not_depend_on_input_source_or_batch() {
    let (dir, model) = encoder();
    let path = model.to_str().unwrap();
    let both = samite(["embed", "-m", path, "a cat", "a dog and more"]).ok();
    let both = rows(&both);
    assert_eq!((both.len(), both[0].len()), (2, 64));
    for row in &both {
        let length: f64 = row.iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5, "{length}");
    }
    let one = rows(&samite(["embed", "-m", path, "-p", "a dog and more"]).ok());
    assert!(is_near(&one[0], &both[1]));
    let lines = samite(["embed", "-m", path, "-p", "a cat\na dog and more"]).ok();
    assert_eq!(rows(&lines), both);
    let file = dir.path().join("texts.txt");
    std::fs::write(&file, "a cat\na dog and more\n").unwrap();
    let found = samite(["embed", "-m", path, "-f", file.to_str().unwrap()]).ok();
    assert_eq!(rows(&found), both);
    assert_eq!(rows(&piped(&model, "", "a cat\na dog and more").ok()), both);
    let flags = "--separator --\\n";
    assert_eq!(
        rows(&piped(&model, flags, "a cat--\na dog and more--\n").ok()),
        both
    );
    // More texts than fit into one batch.
    let many = "a cat\na dog and more\n".repeat(70);
    let many = rows(&piped(&model, "-ub 16", &many).ok());
    assert_eq!(many.len(), 140);
    let is_same = |(i, row): (usize, &Vec<f64>)| is_near(row, &both[i % 2]);
    assert!(many.iter().enumerate().all(is_same));
}

#[test]
fn flags_control_pooling_scaling_and_dimensions() {
    let (_dir, model) = encoder();
    let embed = |flags: &str| {
        let line = format!("embed -m M hello {flags}");
        rows(&with_model(&model, &line).ok())
    };
    let plain = embed("--embd-normalize -1").remove(0);
    let tokens = embed("--embd-normalize -1 --pooling none");
    assert!(tokens.len() > 2);
    let mean = |c: usize| tokens.iter().map(|row| row[c]).sum::<f64>() / tokens.len() as f64;
    let means: Vec<f64> = (0..64).map(mean).collect();
    assert!(is_near(&plain, &means));
    assert!(is_near(
        &embed("--embd-normalize -1 --pooling cls")[0],
        &tokens[0]
    ));
    let last = embed("--embd-normalize -1 --pooling last");
    assert!(is_near(&last[0], tokens.last().unwrap()));
    // Truncated first, then normalized.
    let short = embed("--dimensions 5").remove(0);
    let length = plain[..5].iter().map(|x| x * x).sum::<f64>().sqrt();
    let expected: Vec<f64> = plain[..5].iter().map(|x| x / length).collect();
    assert!(is_near(&short, &expected), "{short:?} {expected:?}");
    let whole = with_model(&model, "embed -m M hello --embd-normalize 0").ok();
    assert!(!whole.contains('.'), "{whole}");
    let largest = rows(&whole)[0].iter().fold(0f64, |a, b| a.max(b.abs()));
    assert_eq!(largest, 32760.0);
    let ones = embed("--embd-normalize 1").remove(0);
    let sum: f64 = ones.iter().map(|x| x.abs()).sum();
    assert!((sum - 1.0).abs() < 1e-5);
}

#[test]
fn output_formats_match_llama_cpp() {
    let (_dir, model) = encoder();
    let raw = rows(&with_model(&model, "embed -m M cat dog horse").ok());
    let form = |name: &str| {
        let line = format!("embed -m M cat dog horse --embd-output-format {name}");
        with_model(&model, &line).json()
    };
    let numbers = |value: &serde_json::Value| -> Vec<f64> {
        let values = value.as_array().unwrap().iter();
        values.map(|x| x.as_f64().unwrap()).collect()
    };
    let array = form("array");
    let array: Vec<_> = array.as_array().unwrap().iter().map(numbers).collect();
    assert_eq!(array, raw);
    let plain = form("json");
    assert_eq!(plain["object"], "list");
    assert_eq!(plain["data"][2]["index"], 2);
    assert_eq!(plain["data"][2]["object"], "embedding");
    assert_eq!(numbers(&plain["data"][2]["embedding"]), raw[2]);
    assert!(plain.get("cosineSimilarity").is_none());
    let cosines = form("json+");
    let cosines = &cosines["cosineSimilarity"];
    for (i, a) in raw.iter().enumerate() {
        for (j, b) in raw.iter().enumerate() {
            let product: f64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
            let found = cosines[i][j].as_f64().unwrap();
            assert!((found - product).abs() < 0.0051, "{found} {product}");
        }
    }
    // A single text has no similarities.
    let one = with_model(&model, "embed -m M cat --embd-output-format json+").json();
    assert!(one.get("cosineSimilarity").is_none());
}

#[test]
fn pairs_are_ranked() {
    let labels: StringArray = ["yes", "no"].map(str::to_owned).into_iter().collect();
    let mut model = SyntheticModel::tiny("qwen3");
    model.optional = vec!["cls.output.weight"];
    model.extra = vec![
        ("classifier.output_labels", labels.into()),
        ("pooling_type", 4u32.into()),
    ];
    let (_dir, model) = write(&model);
    let found = rows(&piped(&model, "", "what is it\ta cat\nwhat is it\ta dog\n").ok());
    assert_eq!(found.len(), 2);
    for row in &found {
        assert!(row.len() == 2 && (row[0] + row[1] - 1.0).abs() < 1e-6);
    }
    assert_ne!(found[0], found[1]);
    // Only the last token counts, so a long text is processed in pieces.
    let pieces = rows(&piped(&model, "-ub 3", "what is it\ta cat\n").ok());
    assert!(is_near(&pieces[0], &found[0]), "{pieces:?} {found:?}");
    let other = piped(&model, "--cls-separator |", "what is it|a cat\n");
    assert_eq!(rows(&other.ok())[0], found[0]);
    piped(&model, "--dimensions 1", "a\tb").fails(2, &["--dimensions"]);
}

#[test]
fn causal_models_embed_each_token_unless_pooling_is_set() {
    let tokens = rows(&samite(["embed", "-p", "Once upon a time"]).ok());
    assert!(tokens.len() > 2);
    let last = samite(["embed", "-p", "Once upon a time", "--pooling", "last"]).ok();
    let last = rows(&last);
    assert_eq!(last.len(), 1);
    assert!(is_near(&last[0], tokens.last().unwrap()));
    let pieces = [
        "embed",
        "-p",
        "Once upon a time",
        "--pooling",
        "last",
        "-ub",
        "2",
    ];
    assert!(is_near(&rows(&samite(pieces).ok())[0], &last[0]));
    // More texts than fit into one batch: each starts from an empty cache.
    let texts = ["Once upon a time"; 70];
    let arguments = ["embed", "--pooling", "last", "-ub", "9"]
        .iter()
        .chain(&texts);
    let many = rows(&samite(arguments).ok());
    assert!(many.len() == 70 && many.iter().all(|row| is_near(row, &last[0])));
}

#[test]
fn unavailable_embeddings_are_refused() {
    let (_dir, model) = encoder();
    for (flags, code, expected) in [
        ("x --pooling rank", 1, "cls.output.weight"),
        ("x --pooling all", 2, "--pooling"),
        ("x --dimensions 65", 2, "64 elements"),
        ("x --dimensions 0", 2, "--dimensions"),
        ("x --embd-normalize -2", 2, "--embd-normalize"),
        ("x --separator ''", 2, "--separator"),
        ("x --separator \\q", 2, "backslash"),
        ("x -f file", 2, "cannot be used with"),
        ("x --embd-output-format xml", 2, "--embd-output-format"),
        ("hello -c 3", 1, "--ctx-size 3"),
        ("-f /nonexistent", 1, "/nonexistent"),
    ] {
        with_model(&model, &format!("embed -m M {flags}")).fails(code, &[expected]);
    }
    piped(&model, "", "").fails(2, &["no text"]);
    let long = "word ".repeat(400);
    piped(&model, "", &long).fails(1, &["positions 0 to 255"]);
    for (line, expected) in [
        ("run -m M -p x", "samite embed"),
        ("logits -m M --ids 1,2", "--embeddings"),
        ("perplexity -m M -f Cargo.toml", "later"),
    ] {
        let run = with_model(&model, line);
        assert!(run.stderr.contains(expected), "{}", run.stderr);
        assert_ne!(run.code, Some(0));
    }
    with_model(&model, "plan -m M").ok();
    let speeds = with_model(&model, "bench -m M -p 8 -n 4 -r 1 --no-peaks --json").json();
    let tests = speeds["results"].as_array().unwrap();
    assert!(tests.len() == 1 && tests[0]["test"] == "pp8", "{tests:?}");
}

#[test]
fn token_embeddings_are_written_as_npy() {
    let (dir, model) = encoder();
    let file = dir.path().join("embeddings.npy");
    let line = format!(
        "logits -m M --ids 1,17,93 --embeddings -o {}",
        file.display()
    );
    with_model(&model, &line).ok();
    let bytes = std::fs::read(&file).unwrap();
    let header = String::from_utf8_lossy(&bytes[..128]).into_owned();
    assert!(header.contains("(3, 64)"), "{header}");
    let values = bytes[bytes.len() - 3 * 64 * 4..].as_chunks().0.iter();
    let values: Vec<f32> = values.map(|&value| f32::from_le_bytes(value)).collect();
    assert!(values.iter().all(|x| x.is_finite()) && values[0] != values[64]);
    with_model(&model, "logits -m M --ids 1,2 --embeddings").fails(2, &["--output"]);
}
