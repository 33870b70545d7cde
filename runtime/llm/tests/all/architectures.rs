//! Every architecture: a tiny random model has the same results in one batch, in pieces and token
//! by token, with other sequences and on other devices, and the reports about its memory are
//! correct.

use crate::common::*;
use samite_core::DType;
use samite_llm::arch::ARCHITECTURES;
use samite_llm::{Batch, Context, ContextOptions, Model, NodeNames, SyntheticModel, Watcher};
use samite_sched::Watch;
use std::sync::Arc;

const N_TOKENS: usize = 40;

fn tokens() -> Vec<u32> {
    (0..N_TOKENS as u32).map(|i| (i * 37 + 11) % 320).collect()
}

fn options(n_ubatch: usize, flash: bool) -> ContextOptions {
    ContextOptions {
        n_ctx: Some(192),
        n_ubatch,
        n_seq: 3,
        n_logits: Some(n_ubatch),
        flash,
        ..precise()
    }
}

/// Returns options for a model that may return only embeddings or have bidirectional attention.
fn options_for(model: &Model, n_ubatch: usize, flash: bool) -> ContextOptions {
    let n_ubatch = if model.spec().is_bidirectional() {
        192
    } else {
        n_ubatch
    };
    ContextOptions {
        output: output_of(model),
        ..options(n_ubatch, flash)
    }
}

/// Returns the logits after each token of sequence `sequence`, or the tokens' embeddings, decoded
/// `at_once` tokens at a time, or all at once with bidirectional attention.
fn decode_in(context: &mut Context, sequence: u32, at_once: usize) -> Vec<Vec<f32>> {
    let at_once = if context.model().spec().is_bidirectional() {
        N_TOKENS
    } else {
        at_once
    };
    let mut rows = Vec::new();
    for (number, part) in tokens().chunks(at_once).enumerate() {
        let mut batch = Batch::new();
        for (i, &id) in part.iter().enumerate() {
            batch.add(id, (number * at_once + i) as i32, &[sequence], true);
        }
        context.decode(&batch).unwrap();
        let row = |i| context.logits(i).or_else(|| context.embedding(i));
        rows.extend((0..part.len()).map(|i| row(i).unwrap().to_vec()));
    }
    rows
}

fn is_near(found: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
    let error = nmse(found, expected);
    assert!(error <= 1e-8, "{what}: {error:.1e}");
}

fn tiny(name: &'static str) -> TestModel {
    TestModel::tiny(name)
}

#[test]
fn every_architecture_decodes_independently_of_batching() {
    for arch in ARCHITECTURES {
        let name = arch.name;
        let model = tiny(name).load(vec![cpu()], "");
        let options = |n_ubatch, flash| options_for(&model, n_ubatch, flash);
        let mut whole = Context::new(Arc::clone(&model), options(64, true)).unwrap();
        let expected = decode_in(&mut whole, 0, N_TOKENS);
        assert!(expected.iter().flatten().all(|x| x.is_finite()), "{name}");
        // Another sequence, after the first one, in pieces.
        is_near(&decode_in(&mut whole, 2, 7), &expected, name);
        let mut steps = Context::new(Arc::clone(&model), options(3, false)).unwrap();
        is_near(&decode_in(&mut steps, 1, 1), &expected, name);
    }
}

#[test]
fn every_architecture_decodes_alike_on_every_layer_split() {
    for arch in ARCHITECTURES {
        let name = arch.name;
        let file = tiny(name);
        let decode = |devices, rules: &str| {
            let model = file.load(devices, rules);
            let options = options_for(&model, 16, true);
            let mut context = Context::new(model, options).unwrap();
            decode_in(&mut context, 0, 16)
        };
        let expected = decode(vec![cpu()], "");
        is_near(&decode(vec![reference("a")], ""), &expected, name);
        let devices = || vec![reference("a"), reference("b"), cpu()];
        is_near(
            &decode(devices(), "layers=0:a;layers=1:b;layers=2:cpu"),
            &expected,
            name,
        );
    }
}

fn load(name: &'static str) -> Arc<Model> {
    tiny(name).load(vec![cpu()], "")
}

/// Returns the models with a recurrent state, with their names.
fn with_state() -> Vec<(&'static str, Arc<Model>)> {
    let models = ARCHITECTURES
        .iter()
        .map(|arch| (arch.name, load(arch.name)));
    let models: Vec<_> = models.filter(|(_, m)| m.spec().has_state()).collect();
    for name in ["lfm2", "qwen3next", "mamba", "mamba2", "falcon-h1"] {
        assert!(models.iter().any(|(known, _)| *known == name), "{name}");
    }
    models
}

#[test]
fn every_architecture_supports_block_quantized_files() {
    for dtype in [DType::Q8_0, DType::Q4_K] {
        for arch in ARCHITECTURES {
            let name = arch.name;
            let file = TestModel::write(&SyntheticModel {
                dtype,
                ..SyntheticModel::tiny(name)
            });
            let model = file.load(vec![cpu()], "");
            let options = options_for(&model, 16, true);
            let mut context = Context::new(model, options).unwrap();
            let rows = decode_in(&mut context, 0, 16);
            assert!(
                rows.iter().flatten().all(|x| x.is_finite()),
                "{name} {dtype}"
            );
        }
    }
}

#[test]
fn sequence_states_are_copied_retained_and_removed() {
    for (name, model) in with_state() {
        let mut context = Context::new(model, options(64, true)).unwrap();
        let ids = tokens();
        let expected = decode_in(&mut context, 0, N_TOKENS);
        // Half of it in sequence 1; a copy of that continues in sequence 2, with others, one token
        // of each at a time.
        context.clear().unwrap();
        let half = N_TOKENS / 2;
        context
            .decode(&Batch::sequence(&ids[..half], 0, 1))
            .unwrap();
        context.kv_cache_mut().copy(1, 2, ..).unwrap();
        context.decode(&Batch::sequence(&ids[..3], 0, 0)).unwrap();
        let mut found = Vec::new();
        for at in half..N_TOKENS {
            let mut batch = Batch::new();
            batch.add(ids[at], at as i32, &[2], true);
            batch.add(7, 3 + (at - half) as i32, &[0], false);
            batch.add(ids[at], at as i32, &[1], true);
            context.decode(&batch).unwrap();
            found.push(context.logits(0).unwrap().to_vec());
            is_near(
                &[context.logits(2).unwrap().to_vec()],
                &expected[at..=at],
                name,
            );
        }
        is_near(&found, &expected[half..], name);
        // No part can be removed, copied or shifted.
        for error in [
            context.kv_cache_mut().remove(1, 5..).unwrap_err(),
            context.kv_cache_mut().copy(1, 0, ..5).unwrap_err(),
            context.kv_cache_mut().shift(1, 5.., 2).unwrap_err(),
        ] {
            assert!(error.to_string().contains("this model keeps"), "{error}");
        }
        // Removing positions after the end does nothing; then the whole sequence is removed.
        context.kv_cache_mut().remove(1, 1000..).unwrap();
        context.kv_cache_mut().remove(1, ..).unwrap();
        is_near(&decode_in(&mut context, 1, 13), &expected, name);
        context.kv_cache_mut().keep(2).unwrap();
        assert_eq!(context.kv_cache().cells().last_position(1), None);
        let at = N_TOKENS as i32;
        context.decode(&Batch::sequence(&[5], at, 2)).unwrap();
        let behind = context.logits(0).unwrap().to_vec();
        context.decode(&Batch::sequence(&ids, 0, 0)).unwrap();
        context.decode(&Batch::sequence(&[5], at, 0)).unwrap();
        is_near(&[context.logits(0).unwrap().to_vec()], &[behind], name);
    }
}

#[test]
fn memory_for_one_token_per_sequence_is_reserved() {
    for (name, model) in with_state() {
        let mut context = Context::new(model, options(3, true)).unwrap();
        let before = context.scheduler().counters().buffers;
        let mut batch = Batch::new();
        (0..3).for_each(|sequence| batch.add(7, 0, &[sequence], true));
        context.decode(&batch).unwrap();
        assert_eq!(context.scheduler().counters().buffers, before, "{name}");
    }
}

#[test]
fn a_failed_batch_leaves_states_unchanged() {
    for (name, model) in with_state() {
        let mut context = Context::new(model, options(8, true)).unwrap();
        let ids = tokens();
        let expected = decode_in(&mut context, 0, N_TOKENS);
        context.clear().unwrap();
        context.decode(&Batch::sequence(&ids[..10], 0, 0)).unwrap();
        let passes = 1;
        let mut seen = 0;
        let names = NodeNames::new(["l_out-0"]).unwrap();
        context.watch(Some(Watcher::of_names(names, move |_| {
            seen += 1;
            Ok(if seen > passes {
                Watch::Stop
            } else {
                Watch::Continue
            })
        })));
        // The first micro-batch runs, and the second one is stopped.
        context
            .decode(&Batch::sequence(&ids[10..30], 10, 0))
            .unwrap_err();
        context.watch(None);
        let mut batch = Batch::new();
        for (at, &id) in ids.iter().enumerate().skip(10) {
            batch.add(id, at as i32, &[0], true);
        }
        context.decode(&batch).unwrap();
        let rows = (0..batch.len()).map(|i| context.logits(i).unwrap().to_vec());
        is_near(&rows.collect::<Vec<_>>(), &expected[10..], name);
    }
}

#[test]
fn latent_attention_caches_one_short_row_per_token() {
    let SyntheticModel { head_dim, .. } = SyntheticModel::tiny("deepseek2");
    let model = load("deepseek2");
    let memory = model.spec().layers[0].memory();
    assert_eq!(memory.keys, Some([1, head_dim + head_dim / 2]));
    assert_eq!(memory.values, None);
}

#[test]
fn every_architecture_is_documented() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |file| std::fs::read_to_string(root.join(file)).unwrap();
    let text = read("docs/models.md");
    let (supported, _) = text.split_once("are refused by name").unwrap();
    for arch in ARCHITECTURES {
        let name = format!("`{}`", arch.name);
        assert!(supported.contains(&name), "{name}");
    }
    let number = format!("{} architectures", ARCHITECTURES.len());
    for file in ["README.md", "CHANGELOG.md", "docs/models.md", "docs/rpc.md"] {
        assert!(read(file).contains(&number), "{file}: {number}");
    }
}
