//! Embeddings of texts: independent of other texts and devices; pooling; rejected requests.

use crate::common::*;
use samite_core::{CancelToken, DType, Device};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_gguf::{GgufFile, LoadMode, Value};
use samite_llm::arch::Output;
use samite_llm::arch::spec::Pooling;
use samite_llm::quantize::{QuantizeOptions, plan};
use samite_llm::{
    Batch, Context, ContextOptions, ContextPlan, Model, Session, SyntheticModel, perplexity,
};
use std::sync::Arc;

/// Models with bidirectional attention, one for each kind of mask, and one with causal attention.
const MODELS: [&str; 5] = [
    "bert",
    "modern-bert",
    "gemma-embedding",
    "jina-bert-v2",
    "llama",
];

fn options(pooling: Pooling) -> ContextOptions {
    ContextOptions {
        n_ctx: Some(256),
        n_seq: 4,
        output: Output::Embeddings(pooling),
        ..precise()
    }
}

fn model(name: &'static str) -> Arc<Model> {
    TestModel::tiny(name).load(vec![cpu()], "")
}

/// Texts of different lengths, one longer than the window of tiny models.
fn texts() -> [Vec<u32>; 3] {
    [tokens(23), tokens(40)[7..].to_vec(), tokens(5)]
}

/// Creates one batch of texts, with one sequence for each.
fn batch_of(texts: &[&[u32]]) -> Batch {
    let mut batch = Batch::new();
    for (sequence, text) in texts.iter().enumerate() {
        for (position, &id) in text.iter().enumerate() {
            batch.add(id, position as i32, &[sequence as u32], true);
        }
    }
    batch
}

/// Returns the embeddings of the tokens of a text alone.
fn of_tokens(model: &Arc<Model>, text: &[u32]) -> Vec<Vec<f32>> {
    let mut context = context(model, options(Pooling::None));
    context.decode(&batch_of(&[text])).unwrap();
    let rows = (0..text.len()).map(|i| context.embedding(i).unwrap().to_vec());
    rows.collect()
}

fn pooled(model: &Arc<Model>, texts: &[&[u32]], options: ContextOptions) -> Vec<Vec<f32>> {
    let mut context = context(model, options);
    context.decode(&batch_of(texts)).unwrap();
    let rows = (0..texts.len() as u32).map(|i| context.pooled(i).unwrap().to_vec());
    rows.collect()
}

fn is_near(found: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
    let error = nmse(found, expected);
    assert!(error <= 1e-10, "{what}: {error:.1e}");
}

#[test]
fn pooled_embeddings_derive_from_tokens_in_any_batch() {
    for name in MODELS {
        let model = model(name);
        let texts = texts();
        let texts: Vec<&[u32]> = texts.iter().map(|text| &text[..]).collect();
        let alone: Vec<_> = texts.iter().map(|text| of_tokens(&model, text)).collect();
        let mean = |rows: &Vec<Vec<f32>>| {
            let column = |c: usize| rows.iter().map(|row| f64::from(row[c])).sum::<f64>();
            let columns = (0..rows[0].len()).map(|c| (column(c) / rows.len() as f64) as f32);
            columns.collect::<Vec<f32>>()
        };
        type Expected<'a> = &'a dyn Fn(&Vec<Vec<f32>>) -> Vec<f32>;
        let ways: [(Pooling, Expected<'_>); 3] = [
            (Pooling::Mean, &mean),
            (Pooling::Cls, &|rows| rows[0].clone()),
            (Pooling::Last, &|rows| rows[rows.len() - 1].clone()),
        ];
        for (pooling, expected) in ways {
            let expected: Vec<_> = alone.iter().map(expected).collect();
            for flash in [true, false] {
                let options = ContextOptions {
                    flash,
                    ..options(pooling)
                };
                let found = pooled(&model, &texts, options);
                is_near(&found, &expected, &format!("{name} {pooling:?} {flash}"));
            }
        }
    }
}

#[test]
fn tokens_attend_only_to_their_own_text_in_any_batch_order() {
    for name in MODELS {
        let model = model(name);
        let [first, second, _] = texts();
        let mut context = context(&model, options(Pooling::None));
        let mut batch = Batch::new();
        for position in 0..second.len() {
            for (sequence, text) in [(2, &second), (1, &first)] {
                if let Some(&id) = text.get(position) {
                    batch.add(id, position as i32, &[sequence], true);
                }
            }
        }
        context.decode(&batch).unwrap();
        let mut found = vec![Vec::new(); 3];
        for (i, token) in batch.tokens().iter().enumerate() {
            let sequence = batch.sequences(token)[0] as usize;
            found[sequence].push(context.embedding(i).unwrap().to_vec());
        }
        is_near(&found[1], &of_tokens(&model, &first), name);
        is_near(&found[2], &of_tokens(&model, &second), name);
    }
}

#[test]
fn later_tokens_change_earlier_embeddings_if_bidirectional() {
    for name in MODELS {
        let model = model(name);
        let text = tokens(20);
        let mut changed = text.clone();
        changed[19] += 1;
        let [before, after] = [&text, &changed].map(|text| of_tokens(&model, text));
        let is_changed = before[0] != after[0];
        assert_eq!(is_changed, name != "llama", "{name}");
    }
}

#[test]
fn embeddings_are_bit_identical_for_any_thread_count() {
    let device = |threads| -> Arc<dyn Device> {
        CpuDevice::new(CpuOptions::default().with_threads(threads))
    };
    for name in MODELS {
        let file = TestModel::tiny(name);
        let texts = texts();
        let texts: Vec<&[u32]> = texts.iter().map(|text| &text[..]).collect();
        let run = |threads| {
            let model = file.load(vec![device(threads)], "");
            pooled(&model, &texts, options(Pooling::Mean))
        };
        let one = run(1);
        assert_eq!(one, run(2), "{name}");
        assert_eq!(one, run(5), "{name}");
    }
}

#[test]
fn embeddings_do_not_depend_on_layer_splits() {
    for name in MODELS {
        let file = TestModel::tiny(name);
        let texts = texts();
        let texts: Vec<&[u32]> = texts.iter().map(|text| &text[..]).collect();
        for pooling in [Pooling::Mean, Pooling::Last] {
            let run = |rules: &str| {
                let devices = vec![reference("a"), reference("b"), cpu()];
                pooled(&file.load(devices, rules), &texts, options(pooling))
            };
            let expected = run("layers=0-2:cpu");
            for rules in [
                "layers=0:a;layers=1-2:b",
                "layers=0-1:b;layers=2:a",
                "layers=0:cpu;layers=1-2:a",
            ] {
                is_near(&run(rules), &expected, &format!("{name} {rules}"));
            }
        }
    }
}

#[test]
fn long_causal_texts_are_split_into_micro_batches() {
    let model = model("llama");
    let text = tokens(50);
    for pooling in [Pooling::Last, Pooling::Cls] {
        let whole = pooled(&model, &[&text], options(pooling));
        let options = ContextOptions {
            n_ubatch: 7,
            ..options(pooling)
        };
        is_near(&pooled(&model, &[&text], options), &whole, "in pieces");
    }
    // A mean needs all tokens.
    let options = ContextOptions {
        n_ubatch: 49,
        ..options(Pooling::Mean)
    };
    let mut context = context(&model, options);
    let error = context.decode(&batch_of(&[&text])).unwrap_err().to_string();
    assert!(error.contains("n_ubatch"), "{error}");
    // Nothing of it remains, and another batch can follow.
    assert!(context.kv_cache().cells().is_empty());
    context.decode(&batch_of(&[&text[..49]])).unwrap();
    assert!(context.pooled(0).is_some() && context.pooled(1).is_none());
}

#[test]
fn bidirectional_models_cache_nothing_and_use_one_batch() {
    for name in ["bert", "gemma-embedding", "dream"] {
        let model = model(name);
        let output = match name {
            "dream" => Output::Logits,
            _ => Output::Embeddings(Pooling::None),
        };
        let with = |n_batch, n_ubatch| ContextOptions {
            output,
            n_batch,
            n_ubatch,
            n_logits: Some(64),
            ..options(Pooling::None)
        };
        let plan = ContextPlan::new(Arc::clone(&model), with(64, 8)).unwrap();
        assert!(plan.memory().unwrap().iter().all(|used| used.kv == 0));
        let mut context = context(&model, with(64, 8));
        assert_eq!(plan.memory().unwrap(), context.memory());
        // The micro-batch has the size of the batch.
        assert_eq!(context.options().n_ubatch, 64);
        let text = tokens(60);
        let before = context.memory();
        for _ in 0..2 {
            // At the same positions again: nothing of the first time remains.
            context.decode(&batch_of(&[&text])).unwrap();
            assert!(context.kv_cache().cells().is_empty());
        }
        assert_eq!(context.memory(), before, "{name}");
        let error = context.decode(&batch_of(&[&tokens(65)])).unwrap_err();
        assert!(error.to_string().contains("n_batch"), "{error}");
        let error = context
            .kv_cache_mut()
            .shift(0, .., 1)
            .unwrap_err()
            .to_string();
        assert!(error.contains("nothing is kept"), "{error}");
        // Nothing is requested, so nothing is computed.
        let mut batch = Batch::new();
        batch.add(5, 0, &[0], false);
        context.decode(&batch).unwrap();
        assert!(context.logits(0).is_none() && context.embedding(0).is_none());
    }
}

#[test]
fn bidirectional_models_cannot_generate() {
    let dream = model("dream");
    let error = Session::new(context(&dream, precise())).unwrap_err();
    assert!(error.to_string().contains("token by token"), "{error}");
    let mut dream = context(&dream, precise());
    let error = perplexity(&mut dream, &tokens(40), 32, |_| {}).unwrap_err();
    assert!(error.to_string().contains("later"), "{error}");
    let error = Context::new(model("bert"), precise()).unwrap_err();
    assert!(error.to_string().contains("samite embed"), "{error}");
    let error = Context::new(model("bert"), options(Pooling::Rank)).unwrap_err();
    assert!(error.to_string().contains("cls.output.weight"), "{error}");
    // Requested rows that do not fit.
    let few = ContextOptions {
        n_logits: Some(3),
        ..precise()
    };
    let mut few = context(&model("dream"), few);
    let error = few.decode(&batch_of(&[&tokens(4)])).unwrap_err();
    assert!(error.to_string().contains("n_logits"), "{error}");
    few.decode(&batch_of(&[&tokens(3)])).unwrap();
}

#[test]
fn text_length_is_limited_by_learned_positions() {
    let short = SyntheticModel {
        n_ctx_train: 16,
        ..SyntheticModel::tiny("bert")
    };
    let model = TestModel::write(&short).load(vec![cpu()], "");
    let mut context = context(&model, options(Pooling::Mean));
    context
        .decode(&batch_of(&[&tokens(16), &tokens(9)]))
        .unwrap();
    let error = context.decode(&batch_of(&[&tokens(17)])).unwrap_err();
    assert!(error.to_string().contains("positions 0 to 15"), "{error}");
}

#[test]
fn bad_files_are_refused_by_key() {
    let with = |name, key, value: Value| SyntheticModel {
        extra: vec![(key, value)],
        ..SyntheticModel::tiny(name)
    };
    for (model, expected) in [
        (
            with("bert", "pooling_type", 9u32.into()),
            "bert.pooling_type\": is 9",
        ),
        (
            with("bert", "pooling_type", "mean".into()),
            "bert.pooling_type",
        ),
        (
            with("qwen3next", "attention.causal", false.into()),
            "qwen3next.attention.causal",
        ),
        (
            with("mamba2", "attention.causal", false.into()),
            "mamba2.attention.causal",
        ),
        (
            with("gemma4", "attention.causal", false.into()),
            "gemma4.attention.causal",
        ),
        (
            with("deepseek2", "attention.causal", false.into()),
            "deepseek2.attention.causal",
        ),
        (
            with("modern-bert", "hidden_activation", "tan".into()),
            "'tan'",
        ),
    ] {
        // Writing such a file parses its metadata first, like loading does.
        let folder = tempfile::tempdir().unwrap();
        let error = model.write(folder.path().join("model.gguf")).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

#[test]
fn causal_architectures_can_be_made_bidirectional() {
    let both = SyntheticModel {
        extra: vec![("attention.causal", false.into())],
        ..SyntheticModel::tiny("qwen2")
    };
    let model = TestModel::write(&both).load(vec![cpu()], "");
    assert!(model.spec().is_bidirectional());
    let text = tokens(20);
    let mut changed = text.clone();
    changed[19] += 1;
    assert_ne!(of_tokens(&model, &text)[0], of_tokens(&model, &changed)[0]);
}

#[test]
fn bidirectional_convolutions_stay_within_their_text() {
    let both = SyntheticModel {
        extra: vec![("attention.causal", false.into())],
        ..SyntheticModel::tiny("lfm2")
    };
    let model = TestModel::write(&both).load(vec![cpu()], "");
    let texts = texts();
    let texts: Vec<&[u32]> = texts.iter().map(|text| &text[..]).collect();
    let alone: Vec<_> = texts
        .iter()
        .flat_map(|text| pooled(&model, &[text], options(Pooling::Mean)))
        .collect();
    is_near(
        &pooled(&model, &texts, options(Pooling::Mean)),
        &alone,
        "beside others",
    );
    // Texts of one token each are computed in parallel.
    let short: Vec<&[u32]> = vec![&[5], &[6], &[7]];
    let found = pooled(&model, &short, options(Pooling::Last));
    for (text, found) in short.iter().zip(&found) {
        let expected = of_tokens(&model, text);
        is_near(std::slice::from_ref(found), &expected, "one token");
    }
    let mut mixed = Batch::new();
    for position in 0..2 {
        mixed.add(5, position, &[0], true);
        mixed.add(6, position, &[1], true);
    }
    let mut context = context(&model, options(Pooling::None));
    let error = context.decode(&mixed).unwrap_err().to_string();
    assert!(error.contains("one after the other"), "{error}");
}

#[test]
fn encoder_weights_quantize_except_per_token_additions() {
    for name in ["bert", "nomic-bert-moe", "modern-bert", "gemma-embedding"] {
        let plain = SyntheticModel::tiny(name);
        let quantized = SyntheticModel {
            dtype: DType::Q8_0,
            ..plain.clone()
        };
        let [plain, quantized] = [plain, quantized].map(|model| TestModel::write(&model));
        let text = tokens(30);
        let [expected, found] =
            [&plain, &quantized].map(|file| of_tokens(&file.load(vec![cpu()], ""), &text));
        let error = nmse(&found, &expected);
        assert!(error > 0.0 && error < 1e-2, "{name}: {error:.1e}");

        let source = GgufFile::open(&plain.path, LoadMode::Read).unwrap();
        let options = QuantizeOptions {
            mixture: "Q8_0".parse().unwrap(),
            types: Default::default(),
            importance: None,
            threads: 1,
            allow_requantize: false,
            pure: false,
            progress: &|_, _| (),
            cancel: &CancelToken::new(),
        };
        for conversion in plan(&source, &options).unwrap() {
            let is_added = ["position_embd", "token_types"]
                .iter()
                .any(|part| conversion.name.starts_with(part));
            let is_matrix = conversion.name == "token_embd.weight"
                || conversion.name.ends_with("ffn_down.weight");
            assert!(!is_added || conversion.to == DType::F32, "{conversion:?}");
            assert!(!is_matrix || conversion.to == DType::Q8_0, "{conversion:?}");
        }
    }
}

/// Replaces any byte of a file's metadata by any other one.
#[test]
fn mutated_metadata_bytes_never_panic() {
    use samite_llm::ModelOptions;
    let mut rng = samite_text::Rng::new(5);
    for name in [
        "bert",
        "jina-bert-v2",
        "modern-bert",
        "gemma-embedding",
        "nomic-bert-moe",
    ] {
        let mut model = SyntheticModel::tiny(name);
        model.extra = vec![("pooling_type", 1u32.into())];
        model
            .optional
            .extend(["cls.weight", "cls.output.weight", "dense_2.weight"]);
        let file = TestModel::write(&model);
        let bytes = std::fs::read(&file.path).unwrap();
        let header = bytes
            .windows(7)
            .position(|window| window == b"general")
            .unwrap();
        let names = bytes
            .windows(9)
            .rposition(|window| window == b"ffn_down.")
            .unwrap();
        let mut loaded = 0;
        for _ in 0..150 {
            let mut changed = bytes.clone();
            // Keys before the vocabulary, or names and extents of tensors.
            let at = if rng.uniform() < 0.5 {
                header + (rng.uniform() * 1500.0) as usize
            } else {
                names - (rng.uniform() * 3000.0) as usize
            };
            changed[at] = (rng.uniform() * 256.0) as u8;
            std::fs::write(&file.path, &changed).unwrap();
            let devices = ModelOptions::new(vec![cpu()]);
            let Ok(model) = Model::load(&file.path, &devices) else {
                continue;
            };
            loaded += 1;
            for pooling in [Pooling::Mean, Pooling::Rank] {
                let options = ContextOptions {
                    n_ctx: Some(32),
                    ..options(pooling)
                };
                if let Ok(mut context) = Context::new(Arc::clone(&model), options) {
                    let _ = context.decode(&batch_of(&[&tokens(20), &tokens(4)]));
                }
            }
        }
        assert!(loaded > 20, "{name}: {loaded}");
    }
}

#[test]
fn logits_accompany_embeddings_and_the_output_can_change() {
    let llama = model("llama");
    let text = tokens(23);
    let with = |output| ContextOptions {
        output,
        ..options(Pooling::None)
    };
    let rows = |context: &Context, logits: bool| -> Vec<Vec<f32>> {
        let row = |i| {
            if logits {
                context.logits(i)
            } else {
                context.embedding(i)
            }
        };
        (0..text.len()).map(|i| row(i).unwrap().to_vec()).collect()
    };
    let mut logits = context(&llama, with(Output::Logits));
    logits.decode(&batch_of(&[&text])).unwrap();
    let expected = [rows(&logits, true), of_tokens(&llama, &text)];
    let mut both = context(&llama, with(Output::Both));
    both.decode(&batch_of(&[&text])).unwrap();
    for (is_logits, expected) in [(true, &expected[0]), (false, &expected[1])] {
        let rows = rows(&both, is_logits);
        assert!(nmse(&rows, expected) < 1e-10, "{is_logits}");
    }
    // The contents of the cache stay.
    let next = decode(&mut both, &[5], text.len() as i32, 0);
    logits
        .set_output(Output::Embeddings(Pooling::Last), None)
        .unwrap();
    assert!(logits.logits(0).is_none());
    logits.decode(&Batch::sequence(&[5], 23, 0)).unwrap();
    assert!(logits.pooled(0).is_some() && logits.logits(0).is_none());
    assert_eq!(logits.kv_cache().positions(0), Some(0..=23));
    assert_eq!(logits.kv_cache().positions(1), None);
    logits.kv_cache_mut().remove(0, 23..).unwrap();
    logits.set_output(Output::Logits, Some(2)).unwrap();
    assert!(nmse(&decode(&mut logits, &[5], 23, 0), &next) < 1e-10);
    // An unsupported output changes nothing.
    let mut bert = context(&model("bert"), options(Pooling::None));
    let error = bert.set_output(Output::Both, None).unwrap_err().to_string();
    assert!(error.contains("no logits"), "{error}");
    bert.decode(&batch_of(&[&text])).unwrap();
    assert!(bert.embedding(0).is_some());
    bert.set_output(Output::Embeddings(Pooling::Mean), None)
        .unwrap();
    bert.decode(&batch_of(&[&text])).unwrap();
    let mean = pooled(&model("bert"), &[&text], options(Pooling::Mean));
    is_near(&[bert.pooled(0).unwrap().to_vec()], &mean, "changed");
}

#[test]
fn each_batch_can_use_the_whole_context() {
    let model = model("llama");
    let mut context = context(&model, options(Pooling::Last));
    let mut count = |texts: &[Vec<u32>]| {
        let mut found = 0;
        samite_llm::embed::<samite_llm::Error>(&mut context, texts, |_, _| {
            found += 1;
            Ok(())
        })
        .unwrap();
        found
    };
    assert_eq!(count(&texts()), 3);
    assert_eq!(count(&[tokens(256)]), 1);
}
