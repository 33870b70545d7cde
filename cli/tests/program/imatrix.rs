//! Importance matrices, and quantization with them.

use crate::{samite, with_model};
use samite::gguf::{GgufFile, LoadMode};
use samite::llm::SyntheticModel;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Creates a folder with a model whose rows are whole blocks of all types, and a text of 200 words.
fn folder() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let model = SyntheticModel {
        n_embd: 256,
        n_ff: 256,
        head_dim: 64,
        ..SyntheticModel::tiny("llama")
    };
    model.write(&path).unwrap();
    let words: Vec<_> = (0..200).map(|i| format!("word {}", i * i % 97)).collect();
    std::fs::write(dir.path().join("text.txt"), words.join(" ")).unwrap();
    (dir, path)
}

fn file_type(path: &Path) -> u32 {
    let file = GgufFile::open(path, LoadMode::Read).unwrap();
    file.metadata().require("general.file_type").unwrap()
}

#[test]
fn importance_measured_on_a_text_guides_quantization() {
    let (dir, model) = folder();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (text, matrix) = (at("text.txt"), at("matrix.gguf"));
    let line = format!("imatrix -m M -f {text} -o {matrix} -c 64 --chunks 3");
    let said = with_model(&model, &line).ok();
    assert!(said.contains("21 weights over 3 chunks"), "{said}");
    let json = with_model(&model, &format!("{line} --json --process-output")).json();
    assert_eq!((&json["weights"], &json["chunks"]), (&22.into(), &3.into()));
    assert!(json["perplexity"].as_f64().unwrap() > 1.0);

    // Matrices of two halves of the text add up to that of the whole text.
    let (first, second, both) = (at("first.gguf"), at("second.gguf"), at("both.gguf"));
    with_model(
        &model,
        &format!("imatrix -m M -f {text} -o {first} -c 64 --chunks 1"),
    )
    .ok();
    with_model(
        &model,
        &format!(
            "imatrix -m M -f {text} -o {second} -c 64 --from-chunk 1 --chunks 2 --in-file {first}"
        ),
    )
    .ok();
    let said = samite(["imatrix", "--in-file", &second, "-o", &both]).ok();
    assert!(said.contains("3 chunks"), "{said}");
    let whole = with_model(&model, &line).ok();
    assert!(whole.contains("21 weights over 3 chunks"), "{whole}");
    let sums = |path: &str| {
        let file = GgufFile::open(path, LoadMode::Read).unwrap();
        let info = file
            .require_tensor("blk.1.ffn_down.weight.in_sum2")
            .unwrap()
            .clone();
        let mut bytes = vec![0; info.size];
        file.read_tensor_into(&info, &mut bytes).unwrap();
        let values = bytes
            .as_chunks()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes));
        values.collect::<Vec<_>>()
    };
    for (a, b) in sums(&matrix).into_iter().zip(sums(&both)) {
        assert!((a - b).abs() <= 1e-5 * a, "{a} {b}");
    }

    // Rewriting a matrix preserves it.
    let again = at("again.gguf");
    samite(["imatrix", "--in-file", &both, "-o", &again]).ok();
    assert_eq!(sums(&again), sums(&both));

    let small = at("small.gguf");
    with_model(&model, &format!("quantize M {small} IQ2_XXS"))
        .fails(1, &["blk.0.", "samite imatrix"]);
    let said = with_model(
        &model,
        &format!("quantize M {small} IQ2_XXS --imatrix {matrix}"),
    )
    .ok();
    assert!(
        said.contains("iq2_xxs") && said.contains("21 of 23 converted tensors"),
        "{said}"
    );
    assert_eq!(file_type(small.as_ref()), 19);
    let file = GgufFile::open(&small, LoadMode::Read).unwrap();
    assert_eq!(
        file.metadata()
            .require::<u32>("quantize.imatrix.chunks_count")
            .unwrap(),
        3
    );
    drop(file);
    samite(["run", "-m", &small, "-p", "word", "-n", "4", "--temp", "0"]).ok();

    // The matrix still exists.
    with_model(
        &model,
        &format!("quantize M {matrix} Q8_0 --imatrix {matrix}"),
    )
    .fails(2, &["same file", "matrix.gguf"]);

    // A part of the matrix.
    let line = format!("quantize M {small} Q4_K_M --imatrix {matrix} --dry-run");
    let said = with_model(&model, &format!("{line} --include-weights ffn_")).ok();
    assert!(said.contains("9 of 23 converted tensors"), "{said}");
    let said = with_model(&model, &format!("{line} --exclude-weights ffn_")).ok();
    assert!(said.contains("12 of 23 converted tensors"), "{said}");
    with_model(
        &model,
        &format!("{line} --include-weights a --exclude-weights b"),
    )
    .fails(2, &["--exclude-weights"]);
}

#[test]
fn tensor_types_can_be_set_by_name() {
    let (dir, model) = folder();
    let small = dir.path().join("small.gguf").display().to_string();
    let line = format!("quantize M {small} Q4_0 --dry-run");
    let said = with_model(&model,
        &format!("{line} --tensor-type attn_[kv]=Q8_0 --output-tensor-type F16 --token-embedding-type Q5_1")).ok();
    let to = |name: &str| {
        let line = said.lines().find(|line| line.starts_with(name)).unwrap();
        line.split("-> ")
            .nth(1)
            .unwrap()
            .split(' ')
            .next()
            .unwrap()
            .to_owned()
    };
    assert_eq!(to("output.weight"), "f16");
    assert_eq!(to("token_embd.weight"), "q5_1");
    assert_eq!(to("blk.0.attn_k.weight"), "q8_0");
    assert_eq!(to("blk.0.attn_q.weight"), "q4_0");
    let said = with_model(&model, &format!("{line} --leave-output-tensor")).ok();
    assert!(
        said.lines()
            .any(|line| line.starts_with("output.weight") && line.contains("f32    -> f32")),
        "{said}"
    );
    let said = with_model(&model, &format!("{line} --tensor-type nothing=Q8_0"));
    assert!(
        said.stderr.contains("--tensor-type nothing"),
        "{}",
        said.stderr
    );
    said.ok();
    with_model(&model, &format!("{line} --json")).fails(2, &["--bench"]);
    with_model(&model, &format!("{line} --tensor-type attn_k")).fails(2, &["NAME=TYPE"]);
    with_model(&model, &format!("{line} --tensor-type attn_k=Q9")).fails(2, &["Q9", "q4_K"]);
    with_model(&model, &format!("{line} --tensor-type (=Q8_0")).fails(2, &["regular expression"]);
    with_model(&model, &format!("{line} --token-embedding-type IQ1_S"))
        .fails(1, &["token_embd.weight", "importance matrix"]);
}

#[test]
fn invalid_imatrix_inputs_are_named() {
    let (dir, model) = folder();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (text, matrix) = (at("text.txt"), at("matrix.gguf"));
    with_model(&model, "imatrix -m M").fails(2, &["--file"]);
    with_model(&model, &format!("imatrix -m M -f {}", at("nowhere"))).fails(1, &["nowhere"]);
    with_model(&model, &format!("imatrix -m M -f {text} -o {matrix} -c 8"))
        .fails(2, &["--ctx-size 8"]);
    with_model(
        &model,
        &format!("imatrix -m M -f {text} -o {matrix} -c 64 --from-chunk 900"),
    )
    .fails(1, &["text.txt", "left out"]);
    with_model(
        &model,
        &format!(
            "imatrix -m M -f {text} -o {matrix} --in-file {}",
            model.display()
        ),
    )
    .fails(1, &["model.gguf", "imatrix.chunk_count"]);
    with_model(
        &model,
        &format!("imatrix -m M -f {text} -o {text} --in-file {text}"),
    )
    .fails(2, &["same file"]);
    with_model(
        &model,
        &format!("imatrix -m M -f {text} -o {matrix} --in-file {text}"),
    )
    .fails(1, &["text.txt", "neither GGUF"]);
    assert!(!Path::new(&matrix).exists());
    for output in [model.to_str().unwrap(), &text] {
        with_model(&model, &format!("imatrix -m M -f {text} -o {output}")).fails(2, &["same file"]);
    }
    with_model(
        &model,
        &format!("imatrix -m M -f {text} -o /no/such/folder/m.gguf"),
    )
    .fails(1, &["/no/such/folder"]);
    // A matrix in the older format, with a terminal escape in a weight's name and without further
    // information.
    let name = b"blk.0.\x1b[31mred";
    let old = [
        &1i32.to_le_bytes()[..],
        &(name.len() as i32).to_le_bytes(),
        name,
        &0i32.to_le_bytes(),
        &1i32.to_le_bytes(),
        &0f32.to_le_bytes(),
    ];
    std::fs::write(dir.path().join("old.dat"), old.concat()).unwrap();
    let said = samite([
        "imatrix",
        "--in-file",
        &at("old.dat"),
        "-o",
        &at("new.gguf"),
    ]);
    assert!(!said.stderr.contains('\x1b') && !said.stdout.contains('\x1b'));
    said.ok();
    with_model(
        &model,
        &format!("quantize M {matrix} Q4_0 --imatrix {text}"),
    )
    .fails(1, &["text.txt"]);
    with_model(
        &model,
        &format!("quantize M {matrix} Q4_0 --include-weights x"),
    )
    .fails(2, &["--imatrix"]);
    // Of a text that ends within a chunk, only the whole chunks are measured.
    let encoder = at("encoder.gguf");
    SyntheticModel::tiny("bert")
        .write(Path::new(&encoder))
        .unwrap();
    with_model(
        encoder.as_ref(),
        &format!("imatrix -m M -f {text} -o {matrix} -c 32"),
    )
    .fails(1, &["look at later ones"]);
}
