//! Embeddings instead of tokens: those from the model's own table have the same results as the
//! tokens.

use crate::common::*;
use samite_core::DType;
use samite_gguf::{GgufFile, LoadMode};
use samite_llm::arch::ARCHITECTURES;
use samite_llm::{Batch, Context, ContextOptions, Error, Model, SyntheticModel};
use std::sync::Arc;

/// Returns the rows of a model's embedding table for `tokens`, as the layers get them.
fn rows_of(path: &std::path::Path, model: &Model, tokens: &[u32]) -> Vec<Vec<f32>> {
    let file = GgufFile::open(path, LoadMode::Read).unwrap();
    let info = file.tensor("token_embd.weight").unwrap();
    let mut table = vec![0f32; info.size / 4];
    file.read_tensor_into(info, bytemuck::cast_slice_mut(&mut table))
        .unwrap();
    let spec = model.spec();
    let scale = spec.embedding.scale.unwrap_or(1.0);
    let scale = if spec.embedding.scales_table_alone {
        scale
    } else {
        1.0
    };
    let row = |&token: &u32| {
        let row = table.chunks_exact(spec.n_embd).nth(token as usize).unwrap();
        row.iter().map(|x| x * scale).collect()
    };
    tokens.iter().map(row).collect()
}

fn options(model: &Model) -> ContextOptions {
    ContextOptions {
        output: output_of(model),
        n_logits: Some(32),
        ..precise()
    }
}

/// Decodes the rows, `at_once` at a time. Returns all results.
fn decode_given(context: &mut Context, rows: &[Vec<f32>], at_once: usize) -> Vec<Vec<f32>> {
    let mut results = Vec::new();
    for (number, part) in rows.chunks(at_once).enumerate() {
        let mut batch = Batch::new();
        for (i, row) in part.iter().enumerate() {
            batch.add_embedding(row, (number * at_once + i) as i32, &[0], true);
        }
        context.decode(&batch).unwrap();
        let result = |i| context.logits(i).or_else(|| context.embedding(i));
        results.extend((0..part.len()).map(|i| result(i).unwrap().to_vec()));
    }
    results
}

#[test]
fn embedding_table_rows_match_token_inputs() {
    for arch in ARCHITECTURES {
        let written = TestModel::write(&SyntheticModel {
            dtype: DType::F32,
            ..SyntheticModel::tiny(arch.name)
        });
        let model = written.load(vec![cpu()], "");
        // With embeddings as input, per-layer embeddings use the row of token 0.
        let ids = match model.spec().embedding.per_layer {
            Some(_) => vec![0; 20],
            None => tokens(20),
        };
        let rows = rows_of(&written.path, &model, &ids);
        let mut context = Context::new(Arc::clone(&model), options(&model)).unwrap();
        let expected = decode(&mut context, &ids, 0, 0);
        let is_bidirectional = model.spec().is_bidirectional();
        for at_once in [20, 7, 1]
            .into_iter()
            .take(if is_bidirectional { 1 } else { 3 })
        {
            let mut context = Context::new(Arc::clone(&model), options(&model)).unwrap();
            let found = decode_given(&mut context, &rows, at_once);
            let error = nmse(&found, &expected);
            assert!(error <= 1e-8, "{} {at_once}: {error:.1e}", arch.name);
        }
    }
}

#[test]
fn tokens_and_embeddings_can_alternate_in_a_sequence() {
    let written = TestModel::write(&SyntheticModel {
        dtype: DType::F32,
        ..SyntheticModel::tiny("llama")
    });
    let ids = tokens(12);
    for (devices, rules) in [
        (vec![cpu()], ""),
        (vec![reference("gpu"), cpu()], "layers=0-1:gpu"),
        (
            vec![reference("gpu"), cpu()],
            "embedding:gpu;layers=1-2:gpu",
        ),
    ] {
        let model = written.load(devices, rules);
        let rows = rows_of(&written.path, &model, &ids);
        let new = || {
            let options = ContextOptions {
                n_ubatch: 3,
                ..options(&model)
            };
            Context::new(Arc::clone(&model), options).unwrap()
        };
        let expected = decode(&mut new(), &ids, 0, 0);
        let mut context = new();
        let mut found = decode(&mut context, &ids[..4], 0, 0);
        let mut batch = Batch::new();
        for (i, row) in rows[4..9].iter().enumerate() {
            batch.add_embedding(row, 4 + i as i32, &[0], true);
        }
        context.decode(&batch).unwrap();
        found.extend((0..5).map(|i| context.logits(i).unwrap().to_vec()));
        found.extend(decode(&mut context, &ids[9..], 9, 0));
        assert!(nmse(&found, &expected) <= 1e-8, "{rules}");
        // In one batch.
        batch.clear();
        for (i, (row, &id)) in rows.iter().zip(&ids).enumerate() {
            match i {
                2 | 5..9 => batch.add_embedding(row, i as i32, &[0], true),
                _ => batch.add(id, i as i32, &[0], true),
            }
        }
        let mut context = new();
        context.decode(&batch).unwrap();
        let logits = |i| context.logits(i).unwrap().to_vec();
        let found: Vec<_> = (0..ids.len()).map(logits).collect();
        assert!(nmse(&found, &expected) <= 1e-8, "{rules}");
    }
}

#[test]
fn invalid_inputs_are_refused_without_side_effects() {
    let written = TestModel::tiny("llama");
    let model = written.load(vec![cpu()], "");
    let width = model.spec().n_embd;
    let mut context = Context::new(Arc::clone(&model), options(&model)).unwrap();
    let refuse = |context: &mut Context, batch: &Batch, what: &str| {
        let error = context.decode(batch).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        assert!(error.to_string().contains(what), "{error}");
        assert_eq!(context.kv_cache().cells().last_position(0), None);
    };
    let mut batch = Batch::new();
    for length in [0, width - 1, width + 1, 2 * width] {
        let mut wrong = Batch::new();
        wrong.add_embedding(&vec![0.5; length], 0, &[0], true);
        refuse(&mut context, &wrong, &format!("must have {width} each"));
    }
    batch.add(1, 0, &[0], true);
    context.decode(&batch).unwrap();
}
