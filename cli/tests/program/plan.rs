//! Plans need nothing but the header of a file.

use crate::{limited, tiny, with_model};
use samite::DType;
use samite::gguf::{TensorSpec, Writer};
use samite::llm::SyntheticModel;
use samite::llm::arch::Spec;
use std::path::Path;

/// Writes the header of a model and a hole where its data would be. Returns the size of the data.
fn write_sparse(model: &SyntheticModel, path: &Path) -> u64 {
    let metadata = model.metadata().unwrap();
    let spec = Spec::from_metadata(&metadata, 10_000, &|_| false).unwrap();
    let specs = spec.tensors().into_iter().filter(|spec| spec.required);
    let specs = specs.map(|spec| {
        let (dtype, dims) = match spec.shape {
            [_, 1, ..] => (DType::F32, 1),
            _ => (DType::F16, 2),
        };
        TensorSpec::new(&spec.name, dtype, &spec.shape[..dims]).unwrap()
    });
    let specs: Vec<_> = specs.collect();
    let bytes = specs.iter().map(|spec| spec.size() as u64).sum();
    let mut file = std::fs::File::create(path).unwrap();
    Writer::new(&mut file, &metadata, specs).unwrap();
    // More than enough for the header and for gaps between tensors.
    file.set_len(bytes + (64 << 20)).unwrap();
    bytes
}

#[test]
fn a_huge_model_takes_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("huge.gguf");
    let huge = SyntheticModel {
        n_layer: 40,
        n_embd: 8192,
        n_head: 64,
        n_head_kv: 8,
        head_dim: 128,
        n_ff: 24_576,
        n_vocab: 2_000,
        ..SyntheticModel::tiny("llama")
    };
    let bytes = write_sparse(&huge, &path);
    assert!(bytes > 40_000_000_000, "{bytes}");
    for flags in [
        "",
        "--mmap",
        "--device reference,cpu --fit off --place layers=0-19:reference",
    ] {
        let line = format!("plan -m M -c 4096 --json {flags}");
        // A mapping takes addresses, but no memory.
        let kibibytes = if flags == "--mmap" { 60 << 20 } else { 1 << 20 };
        let plan = limited(&line, &path, b"", 0, kibibytes).json();
        let sum = |purpose: &str| {
            let rows = plan["memory"].as_array().unwrap().iter();
            rows.map(|row| row[purpose].as_u64().unwrap()).sum::<u64>()
        };
        assert!(sum("weights") >= bytes, "{flags}: {plan}");
        assert_eq!(sum("kv"), 40 * 4096 * 2 * 8 * 128 * 2, "{flags}");
        assert!(sum("compute") > 1 << 20, "{flags}: {plan}");
    }
}

#[test]
fn the_data_may_be_missing() {
    let (_dir, model) = tiny();
    let whole = std::fs::read(&model).unwrap();
    let plan = with_model(&model, "plan -m M").ok();
    // The vocabulary of the tiny model takes less than that.
    std::fs::write(&model, &whole[..40_000]).unwrap();
    assert_eq!(with_model(&model, "plan -m M").ok(), plan);
    with_model(&model, "run -m M -p ab").fails(1, &["tiny.gguf", "the file is truncated"]);
    std::fs::write(&model, &whole[..1_000]).unwrap();
    with_model(&model, "plan -m M").fails(1, &["tiny.gguf"]);
}

#[test]
fn a_plan_says_that_the_cpu_was_put_behind_a_gpu() {
    let (_dir, path) = tiny();
    let added = "the cpu is behind the devices that were named";
    for (flags, expected) in [
        ("--device reference", true),
        ("--device reference --only", false),
        ("--device reference,CPU", false),
        ("--device cpu", false),
        ("", false),
    ] {
        let text = with_model(&path, &format!("plan -m M --fit off {flags}")).ok();
        assert_eq!(text.contains(added), expected, "{flags}: {text}");
    }
    let json = with_model(&path, "plan -m M --fit off --json --device reference").json();
    assert_eq!(json["cpu_added"], true);
}
