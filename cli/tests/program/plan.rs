//! Plans require only the header of a file.

use crate::{limited, samite, tiny, with_model};
use samite::DType;
use samite::gguf::{TensorSpec, Writer};
use samite::llm::SyntheticModel;
use samite::llm::arch::Spec;
use std::path::Path;

/// Writes a model's header and a hole for its data. Returns the size of the data.
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
fn the_documented_machines_are_simulated() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let document = std::fs::read_to_string(root.join("docs/forecast.md")).unwrap();
    let (_, file) = document.split_once("```toml\n").unwrap();
    let (file, _) = file.split_once("```").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (machines, model) = (dir.path().join("m.toml"), dir.path().join("m.gguf"));
    std::fs::write(&machines, file).unwrap();
    let (machines, model) = (machines.to_str().unwrap(), model.to_str().unwrap());
    samite([
        "synth",
        model,
        "--shape",
        "llama3-70b",
        "--type",
        "q4_0",
        "--header",
    ])
    .ok();
    for flags in [
        "-p 512 -n 128",
        "-ts 1,1,1,1,1,1,1,1 --copies 4 -ub 128",
        "-sm tensor",
    ] {
        let line = format!("plan {model} -c 4096 --simulate {machines} {flags}");
        samite(line.split(' ')).ok();
    }
}

#[test]
fn plans_report_devices_with_too_little_memory() {
    let (_dir, model) = tiny();
    let plan = with_model(&model, "plan -m M -c 2000000000").ok();
    assert!(plan.contains("does not fit: cpu needs "), "{plan}");
    let plan = with_model(&model, "plan M -c 64").ok();
    assert!(!plan.contains("does not fit"), "{plan}");
}

#[test]
fn planning_a_huge_model_takes_no_memory() {
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
        // A mapping uses address space, but no memory.
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
fn plans_need_no_tensor_data() {
    let (_dir, model) = tiny();
    let whole = std::fs::read(&model).unwrap();
    let plan = with_model(&model, "plan -m M").ok();
    // The tiny model's vocabulary needs less than that.
    std::fs::write(&model, &whole[..40_000]).unwrap();
    assert_eq!(with_model(&model, "plan -m M").ok(), plan);
    with_model(&model, "run -m M -p ab").fails(1, &["tiny.gguf", "the file is truncated"]);
    std::fs::write(&model, &whole[..1_000]).unwrap();
    with_model(&model, "plan -m M").fails(1, &["tiny.gguf"]);
}

#[test]
fn a_plan_reports_the_added_cpu_fallback() {
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

/// Four machines whose devices read 1e9 bytes per second, for any type that a test uses.
const MACHINES: &str = r#"
[devices.slow]
memory = 1e9
results = 1e12
attention = 1e12
operation = 0
[devices.slow.types.f32]
read = 1e9
products = 1e12
[devices.slow.types.f16]
read = 1e9
products = 1e12
[devices.slow.types.q8_0]
read = 1e9
products = 1e12

[links.lan]
latency = 1e-3
bandwidth = 1e9

[host]
device = "slow"

[[machines]]
name = "node"
device = "slow"
count = 4
through = "remote"
link = "lan"

[exchange]
link = "lan"
algorithm = "doubling"
"#;

#[test]
fn simulated_machines_produce_a_forecast() {
    let (dir, model) = tiny();
    let file = dir.path().join("machines.toml");
    std::fs::write(&file, MACHINES).unwrap();
    let run = |flags: &str| {
        let line = format!(
            "plan -m M --simulate {} --json -p 8 -n 4 {flags}",
            file.display()
        );
        with_model(&model, &line).json()
    };
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    // Three layers on three machines: three steps, with a message to each and back.
    let layers = run("-ts 1,1,1,1 -ngl 4");
    let generation = &layers["generation"];
    let each = number(&generation["seconds"]) / 4.0;
    assert!((8e-3..9e-3).contains(&each), "{layers:#}");
    assert_eq!(generation["tokens"], 4);
    let rows = generation["machines"].as_array().unwrap();
    let names: Vec<_> = rows
        .iter()
        .map(|row| row["machine"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["program", "node0", "node1", "node2", "node3"]);
    for row in rows {
        let sum: f64 = ["compute", "link", "waiting"]
            .iter()
            .map(|part| number(&row[part]))
            .sum();
        let whole = number(&generation["seconds"]);
        assert!((sum / whole - 1.0).abs() < 1e-6, "{row}");
    }
    assert_eq!(layers["short_of_memory"], serde_json::json!([]));
    // Two sums of two rounds per layer; the tiny model has enough heads for two shards.
    let divided = run("-sm tensor -ts 1,1,0,0");
    let each = number(&divided["generation"]["seconds"]) / 4.0;
    assert!(each > 12e-3, "{divided:#}");
    let text = format!("plan -m M --simulate {} -p 8 -n 0", file.display());
    let text = with_model(&model, &text).ok();
    assert!(
        text.contains("not measured") && text.contains("prompt: 8 tokens"),
        "{text}"
    );
    assert!(!text.contains("generation"), "{text}");
}

#[test]
fn machine_file_errors_name_the_line() {
    let (dir, model) = tiny();
    let file = dir.path().join("machines.toml");
    let run = |text: &str, flags: &str| {
        std::fs::write(&file, text).unwrap();
        with_model(
            &model,
            &format!("plan -m M --simulate {} {flags}", file.display()),
        )
    };
    let wrong = MACHINES.replace("latency = 1e-3", "latency = 'much'");
    run(&wrong, "").fails(1, &["machines.toml, line 18", "latency"]);
    let without = MACHINES.replace(
        "[devices.slow.types.f16]\nread = 1e9\nproducts = 1e12\n",
        "",
    );
    run(&without, "").fails(1, &["[devices.slow.types.f16]", "read and products"]);
    let without = MACHINES.split("[exchange]").next().unwrap();
    run(without, "-sm tensor").fails(1, &["add [exchange]"]);
    run(MACHINES, "-p 0 -n 0").fails(2, &["nothing to simulate"]);
    run(MACHINES, "--tokens 2").fails(2, &["--tokens"]);
    with_model(&model, "plan -m M --simulate /nowhere/m.toml").fails(1, &["/nowhere/m.toml"]);
    with_model(&model, "plan -m M -n 3").fails(2, &["--simulate"]);
}

#[test]
fn plans_need_only_the_header() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("header.gguf");
    let line = format!("synth --shape tiny --header {}", path.display());
    with_model(&path, &line).ok();
    assert!(std::fs::metadata(&path).unwrap().len() < 100_000);
    let header = with_model(&path, "plan -m M").ok();
    let whole = dir.path().join("whole.gguf");
    with_model(&whole, "synth --shape tiny M").ok();
    assert_eq!(with_model(&whole, "plan -m M").ok(), header);
    with_model(&path, "run -m M -p ab").fails(1, &["header.gguf", "truncated"]);
}
