//! Importance matrices, compared with those of llama.cpp's tool:
//! `tests/fixtures/importance/make.sh`.

use crate::common::{TestModel, context, cpu, precise, reference};
use samite_core::{DType, Device};
use samite_gguf::{
    ErrorKind, GgufFile, LoadMode, Metadata, StringArray, TensorSpec, Value, Writer,
};
use samite_llm::ContextOptions;
use samite_llm::importance::{ImportanceMatrix, collect};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CHUNK: usize = 32;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/importance")
        .join(name)
}

/// Measures the importance matrix of a model with this architecture on the text of the fixtures.
fn measure(
    architecture: &'static str,
    devices: Vec<Arc<dyn Device>>,
    rules: &str,
    with_output: bool,
) -> (ImportanceMatrix, f64) {
    measure_by(CHUNK, architecture, devices, rules, with_output)
}

/// Measures the importance matrix in micro-batches of `n_ubatch` tokens.
fn measure_by(
    n_ubatch: usize,
    architecture: &'static str,
    devices: Vec<Arc<dyn Device>>,
    rules: &str,
    with_output: bool,
) -> (ImportanceMatrix, f64) {
    let model = TestModel::tiny(architecture).load(devices, rules);
    let text = std::fs::read_to_string(fixture("text.txt")).unwrap();
    let mut tokens = model
        .tokenizer()
        .unwrap()
        .tokenize(&text, true, false)
        .unwrap();
    tokens.truncate(8 * CHUNK);
    let options = ContextOptions {
        n_ctx: Some(CHUNK),
        n_ubatch,
        n_logits: Some(n_ubatch),
        // The tool's types.
        kv_types: [DType::F16; 2],
        ..ContextOptions::default()
    };
    let mut matrix = ImportanceMatrix::new(CHUNK as u32);
    matrix.add_dataset("text.txt");
    let mut perplexity = 0.0;
    let mut seen = Vec::new();
    let matrix = collect(
        &mut context(&model, options),
        &tokens,
        CHUNK,
        matrix,
        with_output,
        |so_far, matrix| {
            perplexity = so_far.value;
            seen.push(matrix.chunks());
            Ok(())
        },
    );
    assert_eq!(seen, (1..=8).collect::<Vec<_>>());
    (matrix.unwrap(), perplexity)
}

/// Checks that every weight's importance differs by at most `most` times the largest. llama.cpp's
/// attention rounds to F16 in other places.
#[track_caller]
fn agree(ours: &ImportanceMatrix, theirs: &ImportanceMatrix, most: f32) {
    let names: Vec<_> = ours.weights().collect();
    assert_eq!(names, theirs.weights().collect::<Vec<_>>());
    for name in names {
        let [a, b] = [ours, theirs].map(|matrix| matrix.importance(name).unwrap());
        assert_eq!(a.len(), b.len(), "{name}");
        let largest = b.iter().copied().fold(0.0, f32::max);
        for (column, (a, b)) in a.iter().zip(&b).enumerate() {
            assert!(
                (a - b).abs() <= most * largest,
                "{name}, column {column}: {a} and {b}"
            );
        }
    }
}

#[test]
fn dense_importance_matches_llama_cpp() {
    let theirs = ImportanceMatrix::read(&fixture("dense.gguf")).unwrap();
    assert_eq!(theirs.chunks(), 8);
    assert_eq!(theirs.datasets(), ["text.txt"]);
    let (ours, perplexity) = measure(
        "llama",
        vec![reference("a"), reference("b")],
        "layers=0:a",
        true,
    );
    agree(&ours, &theirs, 5e-4);
    assert_eq!(ours.weights().len(), 3 * 7 + 1);
    assert_eq!((ours.chunks(), ours.datasets()), (8, theirs.datasets()));
    // The value that the tool printed.
    assert!((perplexity / 464.7364 - 1.0).abs() < 1e-3, "{perplexity}");
    let (fast, _) = measure("llama", vec![cpu()], "", true);
    agree(&fast, &theirs, 1e-2);
    // The older format lacks the output matrix and has fewer digits.
    let mut theirs = ImportanceMatrix::read(&fixture("dense.dat")).unwrap();
    assert_eq!((theirs.chunks(), theirs.datasets()), (8, ours.datasets()));
    let (ours, _) = measure("llama", vec![reference("a")], "", false);
    assert_eq!(ours.weights().len(), 3 * 7);
    agree(&ours, &theirs, 5e-4);
    theirs.retain(|name| name.contains("attn_k"));
    assert_eq!(theirs.weights().len(), 3);
}

#[test]
fn expert_importance_matches_llama_cpp() {
    let theirs = ImportanceMatrix::read(&fixture("experts.gguf")).unwrap();
    let (ours, _) = measure("qwen3moe", vec![reference("a")], "", false);
    agree(&ours, &theirs, 5e-4);
    let of_experts = ours.importance("blk.1.ffn_down_exps.weight").unwrap();
    assert_eq!(of_experts.len(), 6 * 96);
    assert_eq!(ours.unseen_experts().count(), 0);
    let (pieces, _) = measure_by(5, "qwen3moe", vec![reference("a")], "", false);
    agree(&pieces, &ours, 1e-4);
    let (split, _) = measure("qwen3moe", vec![cpu(), reference("b")], "layers=1:b", false);
    agree(&split, &theirs, 1e-2);
}

#[test]
fn each_head_has_its_own_importance() {
    let (matrix, _) = measure("deepseek2", vec![reference("a")], "", false);
    let importance = matrix.importance("blk.1.attn_k_b.weight").unwrap();
    let heads: Vec<_> = importance.chunks(8).collect();
    assert_eq!(heads.len(), 4);
    for (i, head) in heads.iter().enumerate() {
        assert!(head.iter().all(|&x| x > 0.0), "{head:?}");
        assert!(!heads[..i].contains(head), "{head:?}");
    }
}

#[test]
fn importance_files_round_trip() {
    let read = ImportanceMatrix::read(&fixture("experts.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("again.gguf");
    read.write(&path).unwrap();
    let again = ImportanceMatrix::read(&path).unwrap();
    agree(&again, &read, 0.0);
    assert_eq!(
        (again.chunks(), again.datasets()),
        (read.chunks(), read.datasets())
    );
    // The same tensors and keys as in the tool's file.
    let [a, b] =
        [&path, &fixture("experts.gguf")].map(|path| GgufFile::open(path, LoadMode::Read).unwrap());
    let keys = |file: &GgufFile| {
        file.metadata()
            .iter()
            .map(|(key, value)| format!("{key} {value:?}"))
            .collect::<Vec<_>>()
    };
    assert_eq!(keys(&a), keys(&b));
    for tensor in b.tensors().iter() {
        let bytes = |file: &GgufFile| {
            let info = file.require_tensor(&tensor.name).unwrap();
            let mut bytes = vec![0; info.size];
            file.read_tensor_into(info, &mut bytes).unwrap();
            (info.shape, bytes)
        };
        assert_eq!(bytes(&a), bytes(&b), "{}", tensor.name);
    }
    let nothing = ImportanceMatrix::new(8).write(&path).unwrap_err();
    assert_eq!(nothing.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn importance_matrices_can_be_merged() {
    let one = ImportanceMatrix::read(&fixture("dense.gguf")).unwrap();
    let mut two = ImportanceMatrix::new(CHUNK as u32);
    for _ in 0..2 {
        two.merge(&one).unwrap();
    }
    // Twice the sums of twice as many rows.
    agree(&two, &one, 1e-6);
    assert_eq!((two.chunks(), two.datasets().len()), (16, 2));
    let mut old = ImportanceMatrix::new(CHUNK as u32);
    old.merge(&ImportanceMatrix::read(&fixture("dense.dat")).unwrap())
        .unwrap();
    assert_eq!(old.chunk_size(), Some(CHUNK as u32));
    let mut new = one.clone();
    new.retain(|name| name != "output.weight");
    agree(&old, &new, 1e-5);
    old.merge(&new).unwrap();
    // Equal parts of both.
    let [a, b] = [&old, &new].map(|matrix| matrix.importance("blk.2.ffn_up.weight").unwrap());
    assert!(
        a.iter()
            .zip(&b)
            .all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs())
    );

    let folder = tempfile::tempdir().unwrap();
    let read = |sums: &[f32], counts: &[f32]| {
        let path = folder.path().join("one.gguf");
        write(&path, sums, counts);
        ImportanceMatrix::read(&path).unwrap()
    };
    let mut experts = read(&[4.0, 8.0, 6.0, 2.0], &[4.0, 2.0]);
    for other in [
        read(&[1.0, 2.0], &[1.0]),
        read(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[1.0, 2.0, 3.0]),
    ] {
        let error = experts.merge(&other).unwrap_err().to_string();
        assert!(
            error.contains("'w'") && error.contains("another model"),
            "{error}"
        );
    }
    // One count for all experts, as in older files.
    experts.merge(&read(&[2.0, 2.0, 2.0, 2.0], &[2.0])).unwrap();
    assert_eq!(
        experts.importance("w"),
        Some(vec![1.0, 10.0 / 6.0, 2.0, 1.0])
    );
}

/// Writes a file with the sums and counts of one weight.
fn write(path: &Path, sums: &[f32], counts: &[f32]) {
    let mut metadata = Metadata::new();
    metadata.set("imatrix.chunk_count", 1u32).unwrap();
    metadata.set("imatrix.chunk_size", 512u32).unwrap();
    metadata
        .set("imatrix.datasets", Value::from(StringArray::default()))
        .unwrap();
    let columns = sums.len() / counts.len();
    let specs = vec![
        TensorSpec::new("w.in_sum2", DType::F32, &[columns, counts.len()]).unwrap(),
        TensorSpec::new("w.counts", DType::F32, &[1, counts.len()]).unwrap(),
    ];
    let mut writer = Writer::create(path, &metadata, specs).unwrap();
    for values in [sums, counts] {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        writer.append(&bytes).unwrap();
    }
    writer.commit().unwrap();
}

#[test]
fn unseen_experts_get_uniform_importance() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("matrix.gguf");
    write(&path, &[4.0, 8.0, 0.0, 0.0], &[4.0, 0.0]);
    let matrix = ImportanceMatrix::read(&path).unwrap();
    assert_eq!(matrix.importance("w"), Some(vec![1.0, 2.0, 1.0, 1.0]));
    assert_eq!(matrix.unseen_experts().collect::<Vec<_>>(), [("w", 1, 2)]);
    assert_eq!(matrix.importance("v"), None);
}

#[test]
fn damaged_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged");
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let error = ImportanceMatrix::read(&path).unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
        error
    };
    for name in ["dense.dat", "experts.gguf"] {
        let whole = std::fs::read(fixture(name)).unwrap();
        for length in (0..whole.len()).step_by(97) {
            // In the older format, the number of chunks may be missing.
            let is_whole = name == "dense.dat" && length + 16 >= whole.len();
            if !is_whole {
                refused(&whole[..length]);
            }
        }
    }
    // Invalid numbers of entries, lengths of names and numbers of values.
    let number = |value: i32| value.to_le_bytes();
    for numbers in [&[-1][..], &[i32::MAX], &[1, -5], &[1, i32::MAX], &[0]] {
        refused(
            &numbers
                .iter()
                .flat_map(|&value| number(value))
                .collect::<Vec<_>>(),
        );
    }
    let entry = |sum: f32| {
        [
            &number(1)[..],
            &number(1),
            b"w",
            &number(2),
            &number(1),
            &sum.to_le_bytes(),
        ]
        .concat()
    };
    std::fs::write(&path, entry(3.0)).unwrap();
    assert_eq!(
        ImportanceMatrix::read(&path).unwrap().importance("w"),
        Some(vec![1.5])
    );
    for sum in [-1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(refused(&entry(sum)).kind(), ErrorKind::Corrupt);
        write(&path, &[1.0, sum], &[1.0]);
        assert_eq!(
            ImportanceMatrix::read(&path).unwrap_err().kind(),
            ErrorKind::Corrupt
        );
    }
    for count in [-1.0, f32::NAN, f32::INFINITY, 1e30] {
        write(&path, &[1.0, 2.0], &[count]);
        let error = ImportanceMatrix::read(&path).unwrap_err();
        assert!(error.to_string().contains("rows"), "{error}");
    }
    // Sums that exceed the range of a file.
    write(&path, &[3e38, 2.0], &[1.0]);
    let mut large = ImportanceMatrix::read(&path).unwrap();
    large.merge(&large.clone()).unwrap();
    assert!(
        large
            .write(&path)
            .unwrap_err()
            .to_string()
            .contains("too large")
    );
    let model = TestModel::tiny("llama");
    let error = ImportanceMatrix::read(&model.path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::MissingKey);
    assert!(ImportanceMatrix::read(&folder.path().join("nowhere")).is_err());
}

#[test]
fn non_finite_activations_are_an_error_that_names_the_weight() {
    // A norm that is NaN corrupts everything after it.
    let model = TestModel::tiny("llama");
    let file = GgufFile::open(&model.path, LoadMode::Read).unwrap();
    let norm = file.require_tensor("blk.1.attn_norm.weight").unwrap();
    let (start, mut bytes) = (norm.offset, std::fs::read(&model.path).unwrap());
    bytes[start as usize..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    drop(file);
    std::fs::write(&model.path, bytes).unwrap();
    let model = model.load(vec![reference("a")], "");
    let tokens: Vec<u32> = (3..3 + CHUNK as u32).collect();
    let options = ContextOptions {
        n_ctx: Some(CHUNK),
        n_ubatch: CHUNK,
        n_logits: Some(CHUNK),
        ..precise()
    };
    let result = collect(
        &mut context(&model, options),
        &tokens,
        CHUNK,
        ImportanceMatrix::new(32),
        false,
        |_, _| Ok(()),
    );
    let error = result.unwrap_err().to_string();
    assert!(
        error.contains("blk.1.attn_") && error.contains("finite"),
        "{error}"
    );
}
