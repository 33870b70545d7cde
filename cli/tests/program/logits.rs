//! Logits of a model after each token.

use crate::{samite, tiny, with_model};

/// Reads a NumPy file. Returns its two extents and its values.
fn read(path: &std::path::Path) -> ([usize; 2], Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let end = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = std::str::from_utf8(&bytes[10..end]).unwrap();
    assert!(header.contains("'descr': '<f4'"), "{header}");
    let shape = header.split(['(', ')']).nth(1).unwrap();
    let extents: Vec<usize> = shape.split(", ").map(|n| n.parse().unwrap()).collect();
    let values = bytes[end..].as_chunks::<4>().0.iter();
    let values: Vec<f32> = values.map(|&value| f32::from_le_bytes(value)).collect();
    assert_eq!(values.len(), extents[0] * extents[1]);
    (extents.try_into().unwrap(), values)
}

#[test]
fn logits_are_written_and_top_tokens_printed() {
    let (dir, model) = tiny();
    let file = dir.path().join("logits.npy");
    let line = format!(
        "logits -m M --ids 1,17,93,40,41,42,43 -ub 3 --top 2 --json -o {}",
        file.display()
    );
    let found = with_model(&model, &line).json();
    let ([tokens, vocabulary], values) = read(&file);
    let positions = found["positions"].as_array().unwrap();
    assert_eq!((tokens, positions.len()), (7, 7));
    for (row, position) in values.chunks(vocabulary).zip(positions) {
        let top = position["top"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        let max = row.iter().copied().fold(f32::MIN, f32::max);
        let best = row.iter().position(|&value| value == max).unwrap();
        assert_eq!(top[0]["id"], best);
        let sum: f64 = row.iter().map(|&v| f64::from(v - max).exp()).sum();
        let log_probability = top[0]["log_probability"].as_f64().unwrap();
        assert!((log_probability + sum.ln()).abs() < 1e-6);
        assert!(top[1]["logit"].as_f64() <= top[0]["logit"].as_f64());
    }
    // One batch and token-by-token decoding agree within rounding.
    let line = line.replace("-ub 3", "-ub 1");
    with_model(&model, &line).ok();
    let (_, again) = read(&file);
    let most = values.iter().zip(&again).map(|(a, b)| (a - b).abs());
    assert!(most.fold(0.0, f32::max) < 1e-3);
}

#[test]
fn embedded_model_logits_match_its_generated_text() {
    let text = samite(["run", "-p", "Once upon a", "-n", "1", "--temp", "0", "-q"]).ok();
    let next = text
        .trim_end()
        .strip_prefix("Once upon a")
        .unwrap()
        .to_owned();
    let found = samite(["logits", "-p", "Once upon a", "--top", "1", "--json"]).json();
    let last = found["positions"].as_array().unwrap().last().unwrap();
    assert_eq!(last["top"][0]["piece"], next);
    let table = samite(["logits", "-p", "Once upon a"]).ok();
    assert!(table.lines().all(|line| line.len() <= 80), "{table}");
    assert_eq!(
        table.lines().filter(|line| line.contains(" %  ")).count() % 5,
        0
    );
}

#[test]
fn unavailable_logits_leave_no_file() {
    let (dir, model) = tiny();
    let file = dir.path().join("logits.npy");
    for (flags, code, expected) in [
        ("", 2, "there are no tokens"),
        ("--ids 1,99999", 1, "99999"),
        ("--ids 1,2,3 -c 2", 1, "more than 2 tokens"),
        ("--ids 1,x", 2, "invalid value"),
        ("--ids 1 -p text", 2, "cannot be used with"),
    ] {
        let line = format!("logits -m M {flags} -o {}", file.display());
        with_model(&model, &line).fails(code, &[expected]);
        assert!(!file.exists(), "{flags}");
    }
}
