//! Watching nodes while a context decodes.

use crate::common::*;
use samite_core::{CancelToken, Device};
use samite_llm::{Batch, Context, ContextOptions, NodeNames, Watcher};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_sched::Watch;
use std::sync::{Arc, Mutex};

/// Observed results: step, name, device, and value as F32.
type Log = Arc<Mutex<Vec<(usize, String, String, Vec<f32>)>>>;

/// Records the results of nodes whose names match, up to `most`.
fn watch(context: &mut Context, patterns: &[&str], most: usize) -> Log {
    let log = Log::default();
    let notes = Arc::clone(&log);
    let names = NodeNames::new(patterns).unwrap();
    let watcher = Watcher::of_names(names, move |seen| {
        let mut notes = notes.lock().unwrap();
        if notes.len() == most {
            return Ok(Watch::Stop);
        }
        let mut bytes = vec![0; seen.value.layout().bytes()];
        seen.value.read(0, &mut bytes)?;
        notes.push((
            seen.step,
            seen.node.tensor().name.to_string(),
            seen.device.name().to_owned(),
            floats(&bytes),
        ));
        Ok(Watch::Continue)
    });
    assert!(context.watch(Some(watcher)).is_none());
    log
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let values = bytes.as_chunks().0.iter();
    values.map(|value| f32::from_le_bytes(*value)).collect()
}

#[test]
fn watching_nodes_by_name_changes_no_result() {
    let tokens = tokens(12);
    for architecture in ARCHITECTURES.into_iter().chain(["qwen3moe"]) {
        let file = TestModel::tiny(architecture);
        let model = file.load(vec![reference("a"), reference("b")], "layers=0:a;output:b");
        let options = ContextOptions {
            n_ubatch: 8,
            n_logits: Some(8),
            ..precise()
        };
        let mut context = context(&model, options);
        let expected = decode(&mut context, &tokens, 0, 0);
        context.clear().unwrap();
        let log = watch(&mut context, &["l_out-?", "result_*", "kqv_out-0"], 99);
        assert_eq!(decode(&mut context, &tokens, 0, 0), expected);
        let log = log.lock().unwrap();
        let last = model.spec().n_layer() - 1;
        for step in [0, 1] {
            let of_step: Vec<_> = log.iter().filter(|seen| seen.0 == step).collect();
            let names: Vec<_> = of_step.iter().map(|seen| &*seen.1).collect();
            assert_eq!(names[..2], ["kqv_out-0", "l_out-0"], "{architecture}");
            let end = [&*format!("l_out-{last}"), "result_norm", "result_output"];
            assert_eq!(names[names.len() - 3..], end);
            assert_eq!((&*of_step[1].2, &*of_step[names.len() - 1].2), ("a", "b"));
        }
        let logits: Vec<_> = log
            .iter()
            .filter(|seen| seen.1 == "result_output")
            .collect();
        assert_eq!(
            [&*logits[0].3, &*logits[1].3].concat(),
            expected.concat(),
            "{architecture}"
        );
        // The watcher is no longer set.
        let seen = log.len();
        drop(log);
        assert!(context.watch(None).is_some());
        context.clear().unwrap();
        assert_eq!(decode(&mut context, &tokens, 0, 0), expected);
        assert!(seen > 8);
    }
}

#[test]
fn a_stop_by_the_watcher_leaves_the_cache_unchanged() {
    let file = TestModel::tiny("llama");
    let model = file.load(vec![reference("a")], "");
    let mut context = context(&model, precise());
    let expected = decode(&mut context, &tokens(4), 0, 0);
    let more = Batch::sequence(&[7, 8], 4, 0);
    context.decode(&more).unwrap();
    let last = context.logits(1).unwrap().to_vec();
    context.kv_cache_mut().remove(0, 4..).unwrap();

    let log = watch(&mut context, &["l_out-*"], 1);
    let used = context.n_ctx() - context.kv_cache().cells().free();
    let error = context.decode(&more).unwrap_err();
    assert!(error.is_stopped() && !error.is_cancelled(), "{error}");
    assert_eq!(log.lock().unwrap().len(), 1);
    assert_eq!(context.n_ctx() - context.kv_cache().cells().free(), used);
    assert!(context.logits(1).is_none());
    context.watch(None);
    context.decode(&more).unwrap();
    assert_eq!(context.logits(1).unwrap(), last);
    assert_ne!(expected[3], last);

    // The watcher's own error is returned unchanged, and a cancellation as a cancellation.
    let names = || NodeNames::new(["*"]).unwrap();
    let full =
        |_: &samite_llm::WatchedResult<'_>| Err(samite_core::Error::invalid("the disk is full"));
    context.watch(Some(Watcher::of_names(names(), full)));
    context.kv_cache_mut().remove(0, 4..).unwrap();
    let error = context.decode(&more).unwrap_err();
    assert!(error.to_string().contains("the disk is full") && !error.is_stopped());
    let cancel: CancelToken = context.options().cancel.clone();
    let switch = cancel.clone();
    context.watch(Some(Watcher::of_names(names(), move |_| {
        switch.cancel();
        Ok(Watch::Continue)
    })));
    assert!(context.decode(&more).unwrap_err().is_cancelled());
    cancel.reset();
    context.watch(None);
    context.decode(&more).unwrap();
    assert_eq!(context.logits(1).unwrap(), last);
}

#[test]
fn watched_steps_are_compiled_once_and_leave_traces() {
    let device = ReferenceDevice::new(ReferenceOptions {
        compiles: true,
        ..ReferenceOptions::named("a")
    });
    let file = TestModel::tiny("llama");
    let model = file.load(vec![Arc::clone(&device) as Arc<dyn Device>], "");
    let mut context = context(&model, precise());
    let log = watch(&mut context, &["l_out-*"], 99);
    let mut step = |position| {
        let before = (context.scheduler().counters(), device.compilations());
        context.scheduler_mut().start_trace();
        context.decode(&Batch::sequence(&[7], position, 0)).unwrap();
        let events = context
            .scheduler_mut()
            .finish_trace()
            .unwrap()
            .take_events();
        let after = (context.scheduler().counters(), device.compilations());
        let count = |category: &str| events.iter().filter(|e| e["cat"] == category).count();
        (
            after.0.compiled - before.0.compiled,
            after.0.prepared - before.0.prepared,
            after.1 - before.1,
            (count("node"), count("split")),
        )
    };
    let (compiled, prepared, by_device, spans) = step(0);
    assert!(
        compiled > 0 && by_device == compiled,
        "{compiled} {by_device}"
    );
    let nodes = model.spec().n_layer();
    // The whole split once, and the pieces: up to each layer's end, and the rest.
    assert_eq!(prepared, 1 + nodes + 1);
    assert_eq!(spans.1, nodes + 1);
    assert!(spans.0 > 10 * nodes);
    assert_eq!(step(1), (0, 0, 0, spans));
    assert_eq!(log.lock().unwrap().len(), 2 * nodes);
}
