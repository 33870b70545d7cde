//! The types that mixtures assign to tensors, compared with those of llama.cpp's tool, which
//! `tests/fixtures/quantize/make.py` recorded.

use crate::common::{TestModel, context, cpu, decode, output_of, precise};
use samite_core::{CancelToken, DType};
use samite_gguf::{GgufFile, LoadMode, Metadata, TensorSpec, Writer};
use samite_llm::arch::ARCHITECTURES;
use samite_llm::importance::ImportanceMatrix;
use samite_llm::quantize::{Mixture, QuantizeOptions, TensorPattern, TypeChoices, plan, quantize};
use samite_llm::{ContextOptions, Model, ModelOptions, SyntheticModel};
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Mutex;

fn number(model: &Map<String, Value>, key: &str) -> u32 {
    u32::try_from(model[key].as_u64().unwrap()).unwrap()
}

/// Writes a file with the tensors of a model of the fixture, all of them zeros.
fn write(model: &Map<String, Value>, path: &Path) {
    let mut metadata = Metadata::new();
    let arch = model["arch"].as_str().unwrap();
    let mut set = |key: &str, value: u32| {
        metadata.set(&format!("{arch}.{key}"), value).unwrap();
    };
    set("block_count", number(model, "layers"));
    set("embedding_length", number(model, "width"));
    let heads = model["heads"].as_array().unwrap();
    for (key, value) in ["head_count", "head_count_kv"].into_iter().zip(heads) {
        set(
            &format!("attention.{key}"),
            value.as_u64().unwrap().try_into().unwrap(),
        );
    }
    if let Some(experts) = model.get("experts") {
        set(
            "expert_count",
            experts.as_u64().unwrap().try_into().unwrap(),
        );
        set("expert_used_count", 2);
    }
    metadata.set("general.architecture", arch).unwrap();
    let tensors = model["tensors"].as_object().unwrap();
    let specs: Vec<_> = tensors
        .iter()
        .map(|(name, shape)| {
            let shape = shape.as_array().unwrap();
            let dims: Vec<_> = shape.iter().map(|n| n.as_u64().unwrap() as usize).collect();
            // Only converted tensors are larger than a few kilobytes.
            let converted = dims.len() > 1 && !name.contains("ffn_gate_inp");
            let dtype = if converted { DType::F16 } else { DType::F32 };
            TensorSpec::new(name, dtype, &dims).unwrap()
        })
        .collect();
    let zeros = vec![0; specs.iter().map(TensorSpec::size).max().unwrap()];
    let mut writer = Writer::create(path, &metadata, specs).unwrap();
    while let Some(size) = writer.next_tensor().map(TensorSpec::size) {
        writer.append(&zeros[..size]).unwrap();
    }
    writer.commit().unwrap();
}

/// Returns the type in the fixture, by layer if the tensor belongs to one. A missing tensor is not
/// converted.
fn expected(types: &Value, name: &str) -> Option<String> {
    let (part, layer) = match name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'))
    {
        Some((layer, part)) => (part, Some(layer.parse::<u64>().unwrap())),
        None => (name, None),
    };
    let by_type = types.get(part)?.as_object().unwrap();
    let has = |layers: &Value| match (layer, layers.as_array()) {
        (Some(layer), Some(layers)) => layers.iter().any(|x| x.as_u64() == Some(layer)),
        (layer, layers) => layer.is_none() && layers.is_none(),
    };
    let found = by_type.iter().find(|(_, layers)| has(layers));
    found.map(|(name, _)| name.clone())
}

fn options<'a>(mixture: &str, cancel: &'a CancelToken) -> QuantizeOptions<'a> {
    QuantizeOptions {
        mixture: mixture.parse::<Mixture>().unwrap(),
        types: TypeChoices::default(),
        importance: None,
        threads: 1,
        allow_requantize: false,
        pure: false,
        progress: &|_, _| (),
        cancel,
    }
}

#[test]
fn every_architecture_decodes_after_quantization() {
    for arch in ARCHITECTURES {
        let file = TestModel::tiny(arch.name);
        let source = GgufFile::open(&file.path, LoadMode::Mmap).unwrap();
        let path = file.path.with_file_name("quantized.gguf");
        let cancel = CancelToken::new();
        quantize(&source, &path, &options("Q4_K_M", &cancel)).unwrap();
        let model = Model::load(&path, &ModelOptions::new(vec![cpu()]));
        let model = model.unwrap_or_else(|error| panic!("{}: {error}", arch.name));
        let options = ContextOptions {
            output: output_of(&model),
            ..precise()
        };
        let rows = decode(&mut context(&model, options), &[5, 6, 7], 0, 0);
        let all = rows.iter().flatten();
        assert!(all.into_iter().all(|x| x.is_finite()), "{}", arch.name);
    }
}

#[test]
fn progress_counts_elements_up_to_their_number() {
    let file = TestModel::tiny("llama");
    let source = GgufFile::open(&file.path, LoadMode::Mmap).unwrap();
    let path = file.path.with_file_name("quantized.gguf");
    let (cancel, reports) = (CancelToken::new(), Mutex::new(Vec::new()));
    let options = QuantizeOptions {
        progress: &|done, total| reports.lock().unwrap().push((done, total)),
        ..options("Q8_0", &cancel)
    };
    quantize(&source, &path, &options).unwrap();
    let reports = reports.into_inner().unwrap();
    // Each tensor is one job, which reports its end, as the end of the tensor does.
    let mut expected = Vec::new();
    let all: usize = source
        .tensors()
        .iter()
        .map(|tensor| tensor.elements())
        .sum();
    let mut done = 0;
    for tensor in source.tensors().iter() {
        done += tensor.elements();
        expected.extend([(done as u64, all as u64); 2]);
    }
    assert_eq!(reports, expected);
}

#[test]
fn copy_keeps_all_types_and_the_type_of_the_file() {
    let file = wide();
    let source = GgufFile::open(&file.path, LoadMode::Mmap).unwrap();
    let cancel = CancelToken::new();
    let (quantized, copied) = ["quantized.gguf", "copied.gguf"]
        .map(|name| file.path.with_file_name(name))
        .into();
    quantize(&source, &quantized, &options("Q4_K_M", &cancel)).unwrap();
    let source = GgufFile::open(&quantized, LoadMode::Mmap).unwrap();
    let conversions = quantize(&source, &copied, &options("COPY", &cancel)).unwrap();
    assert!(conversions.iter().all(|c| c.from == c.to && !c.is_chosen));
    assert_eq!(
        std::fs::read(quantized).unwrap(),
        std::fs::read(copied).unwrap()
    );
}

/// Creates a model whose rows are whole blocks of all types.
fn wide() -> TestModel {
    TestModel::write(&SyntheticModel {
        n_embd: 256,
        n_ff: 256,
        head_dim: 64,
        ..SyntheticModel::tiny("llama")
    })
}

#[test]
fn types_that_need_importance_are_refused_without_it() {
    let file = TestModel::tiny("llama");
    let source = GgufFile::open(&file.path, LoadMode::Mmap).unwrap();
    let cancel = CancelToken::new();
    let mut options = options("IQ2_XXS", &cancel);
    options.allow_requantize = true;
    // Rows of 64 are not blocks of 256, so all tensors of this model fall back to other types.
    assert!(plan(&source, &options).is_ok());
    let file = wide();
    let source = GgufFile::open(&file.path, LoadMode::Mmap).unwrap();
    let error = plan(&source, &options).unwrap_err().to_string();
    assert!(
        error.contains("blk.0.") && error.contains("samite imatrix"),
        "{error}"
    );
    let of_other = ImportanceMatrix::of_importance([("blk.7.attn_q.weight".into(), vec![1.0])]);
    let of_other = of_other.unwrap();
    options.importance = Some(&of_other);
    let error = plan(&source, &options).unwrap_err().to_string();
    assert!(
        error.contains("blk.0.") && error.contains("says nothing"),
        "{error}"
    );
    let of_other = ImportanceMatrix::of_importance([("blk.0.attn_q.weight".into(), vec![1.0; 9])]);
    let of_other = of_other.unwrap();
    options.importance = Some(&of_other);
    let error = plan(&source, &options).unwrap_err().to_string();
    assert!(
        error.contains("'blk.0.attn_q.weight'") && error.contains("9"),
        "{error}"
    );
    assert!("IQ5".parse::<Mixture>().unwrap_err().contains("unknown"));
}

#[test]
fn explicit_types_override_the_mixture() {
    let file = wide();
    let source = GgufFile::open(&file.path, LoadMode::Mmap).unwrap();
    let cancel = CancelToken::new();
    let mut options = options("Q4_K_M", &cancel);
    options.types = TypeChoices {
        output: Some(DType::F16),
        embedding: Some(DType::Q8_0),
        of_tensors: vec![
            ("attn_[qk]\\.".parse().unwrap(), DType::Q5_0),
            ("attn_k".parse().unwrap(), DType::Q8_0),
        ],
        keep_output: false,
    };
    let types = |options: &QuantizeOptions<'_>| {
        let conversions = plan(&source, options).unwrap();
        move |name: &str| conversions.iter().find(|c| c.name == name).unwrap().to
    };
    let of = types(&options);
    assert_eq!(of("output.weight"), DType::F16);
    assert_eq!(of("token_embd.weight"), DType::Q8_0);
    // The first pattern applies.
    assert_eq!(of("blk.1.attn_k.weight"), DType::Q5_0);
    assert_eq!(of("blk.0.attn_output.weight"), DType::Q4_K);
    options.types.keep_output = true;
    assert_eq!(types(&options)("output.weight"), DType::F32);
    assert!("attn_(".parse::<TensorPattern>().is_err());
    // No whole blocks of a type that was requested by name.
    options.types.embedding = Some(DType::Q1_0);
    assert!(plan(&source, &options).is_ok());
}

#[test]
fn mixture_types_match_llama_cpp() {
    agrees(|model| !has_experts(model) && has_whole_blocks(model));
}

#[test]
fn mixture_expert_types_match_llama_cpp() {
    agrees(has_experts);
}

#[test]
fn mixture_fallback_types_match_llama_cpp() {
    agrees(|model| !has_whole_blocks(model));
}

fn has_experts(model: &Map<String, Value>) -> bool {
    model.contains_key("experts")
}

fn has_whole_blocks(model: &Map<String, Value>) -> bool {
    number(model, "width").is_multiple_of(256)
}

#[track_caller]
fn agrees(concerns: impl Fn(&Map<String, Value>) -> bool) {
    let models: Vec<Map<String, Value>> =
        serde_json::from_str(include_str!("../fixtures/quantize/types.json")).unwrap();
    assert!(models.len() >= 10);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut wrong = Vec::new();
    let mut compared = 0;
    for model in models.iter().filter(|model| concerns(model)) {
        write(model, &path);
        let source = GgufFile::open(&path, LoadMode::Mmap).unwrap();
        let weights = source.tensors().iter().filter(|t| t.n_dims > 1);
        let ones = weights.map(|t| (t.name.to_string(), vec![1.0; t.shape[0] * t.shape[2]]));
        let ones = ImportanceMatrix::of_importance(ones).unwrap();
        let (even, weighed) = (&model["types"], &model["weighed"]);
        let of = |all: &'_ Value, importance| {
            let all = all.as_object().unwrap().clone().into_iter();
            all.map(move |(mixture, types)| (mixture, types, importance))
        };
        for (mixture, types, importance) in of(even, None).chain(of(weighed, Some(&ones))) {
            let (types, mixture) = (&types, &*mixture);
            let cancel = CancelToken::new();
            let mut options = options(mixture, &cancel);
            options.importance = importance;
            for conversion in plan(&source, &options).unwrap() {
                let name = &conversion.name;
                let wanted = expected(types, name).unwrap_or_else(|| "F32".into());
                let got = conversion.to.to_string();
                compared += 1;
                if !got.eq_ignore_ascii_case(&wanted) {
                    let model = &model["name"];
                    let weighed = importance.is_some();
                    wrong.push(format!(
                        "{model}, {mixture}, weighed {weighed}: {name} is {got}, not {wanted}"
                    ));
                }
            }
        }
    }
    assert!(compared > 500, "{compared}");
    assert!(
        wrong.is_empty(),
        "{} wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
