//! Layers with a window keep the tokens that the window needs, and have the same results as if they
//! kept everything.

use crate::common::*;
use samite_core::DType;
use samite_llm::arch::ARCHITECTURES;
use samite_llm::{
    Batch, Context, ContextOptions, ContextPlan, Model, NodeNames, SyntheticModel, Watcher,
};
use samite_sched::Watch;
use std::sync::Arc;

/// Returns options for models with windows of 8 positions.
fn options(full_windows: bool) -> ContextOptions {
    ContextOptions {
        n_ctx: Some(1024),
        n_batch: 32,
        n_ubatch: 16,
        n_seq: 3,
        kv_types: [DType::F32; 2],
        full_windows,
        ..ContextOptions::default()
    }
}

fn model(architecture: &'static str) -> Arc<Model> {
    TestModel::tiny(architecture).load(vec![cpu()], "")
}

/// Creates two contexts; the first one keeps everything.
fn both(model: &Arc<Model>) -> [Context; 2] {
    [true, false].map(|full| context(model, options(full)))
}

fn kv_bytes(context: &Context) -> usize {
    context.memory().iter().map(|memory| memory.kv).sum()
}

/// Decodes `count` tokens starting at `position` in both, and fails if their logits differ.
fn agree(contexts: &mut [Context; 2], sequence: u32, position: i32, count: usize) {
    let mut at = position;
    for part in tokens(count).chunks(32) {
        let [all, some] = contexts
            .each_mut()
            .map(|context| decode(context, part, at, sequence));
        let error = nmse(&some, &all);
        assert!(error < 1e-10, "position {at}: {error:e}");
        at += part.len() as i32;
    }
}

#[test]
fn windowed_caches_are_smaller_with_equal_results() {
    let mut tried = Vec::new();
    for architecture in ARCHITECTURES {
        let model = model(architecture.name);
        let has_window = |layer: &samite_llm::arch::spec::Layer| {
            let span = layer.attention().map(|attention| attention.span);
            span.is_some_and(|span| span.size().is_some())
        };
        let spec = model.spec();
        if spec.is_bidirectional() || !spec.layers.iter().any(has_window) {
            continue;
        }
        tried.push(architecture.name);
        let mut contexts = both(&model);
        let [all, some] = contexts.each_ref().map(kv_bytes);
        // Their windows have a fixed length, which is longer than the context.
        let is_apart = !["llama4", "smallthinker"].contains(&architecture.name);
        assert_eq!(
            some < all,
            is_apart,
            "{}: {some} of {all}",
            architecture.name
        );
        let plan = ContextPlan::new(Arc::clone(&model), options(false)).unwrap();
        assert_eq!(plan.memory().unwrap(), contexts[1].memory());
        agree(&mut contexts, 0, 0, 300);
        agree(&mut contexts, 1, 0, 40);
        // Token by token.
        for position in 300..310 {
            agree(&mut contexts, 0, position, 1);
        }
        agree(&mut contexts, 1, 40, 200);
    }
    assert!(tried.len() > 12, "{tried:?}");
}

/// Every edit that succeeds with the smaller cells has the same results as with all of them. Other
/// edits are rejected and change nothing.
#[test]
fn edits_are_exact_or_refused() {
    for architecture in ["gemma2", "gemma3", "gpt-oss", "cohere2"] {
        let model = model(architecture);
        let mut contexts = both(&model);
        agree(&mut contexts, 0, 0, 350);
        // The last tokens are present.
        for context in &mut contexts {
            assert!(context.kv_cache().can_cut(0, 340));
            context.kv_cache_mut().remove(0, 340..).unwrap();
        }
        agree(&mut contexts, 0, 340, 12);
        // The tokens that one at 40 would see were removed.
        let [_, some] = &mut contexts;
        assert!(!some.kv_cache().can_cut(0, 40));
        let error = some.kv_cache_mut().remove(0, 40..).unwrap_err().to_string();
        assert!(error.contains("--swa-full"), "{error}");
        let error = some
            .kv_cache_mut()
            .copy(0, 1, ..40)
            .unwrap_err()
            .to_string();
        assert!(error.contains("sequence 1"), "{error}");
        assert_eq!(some.kv_cache().cells().sequence_len(0), 352);
        assert_eq!(some.kv_cache().cells().sequence_len(1), 0);
        agree(&mut contexts, 0, 352, 3);
        for context in &mut contexts {
            context.kv_cache_mut().cut_out(0, 20..120).unwrap();
        }
        agree(&mut contexts, 0, 255, 5);
        for context in &mut contexts {
            context.kv_cache_mut().copy(0, 1, ..).unwrap();
        }
        agree(&mut contexts, 0, 260, 40);
        agree(&mut contexts, 1, 260, 40);
        for context in &mut contexts {
            // Shared cells cannot be shifted.
            context.kv_cache_mut().cut_out(1, 0..10).unwrap_err();
            context.kv_cache_mut().keep(1).unwrap();
            context.kv_cache_mut().cut_out(1, 0..10).unwrap();
        }
        agree(&mut contexts, 1, 290, 40);
        for context in &mut contexts {
            context.kv_cache_mut().remove(1, ..).unwrap();
        }
        agree(&mut contexts, 2, 0, 40);
    }
}

/// A failed batch leaves the tokens that its sequences need.
#[test]
fn a_failed_batch_changes_nothing() {
    let model = model("gemma3");
    let mut contexts = both(&model);
    agree(&mut contexts, 0, 0, 400);
    let [_, some] = &mut contexts;
    let mut batch = Batch::sequence(&tokens(32), 400, 0);
    batch.add(1, 0, &[1], false);
    some.decode(&batch).unwrap_err();
    // The second micro-batch is stopped.
    let mut seen = 0;
    let names = NodeNames::new(["l_out-0"]).unwrap();
    some.watch(Some(Watcher::of_names(names, move |_| {
        seen += 1;
        Ok(if seen < 2 {
            Watch::Continue
        } else {
            Watch::Stop
        })
    })));
    some.decode(&Batch::sequence(&tokens(32), 400, 0))
        .unwrap_err();
    some.watch(None);
    agree(&mut contexts, 0, 400, 40);
}

#[test]
fn small_contexts_use_no_windowed_cache() {
    let file = TestModel::write(&SyntheticModel::tiny("gemma3"));
    let model = file.load(vec![cpu()], "");
    let small = |full_windows| ContextOptions {
        n_ctx: Some(64),
        ..options(full_windows)
    };
    let [all, some] = [true, false].map(|full| kv_bytes(&context(&model, small(full))));
    assert_eq!(all, some);
}
