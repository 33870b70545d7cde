//! Loads, uses and drops an upstream plugin a thousand times, in every order of destruction.

#![cfg(unix)]
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_core::{
    Backend, CancelToken, DType, Device, Graph, Layout, PlacedGraph, Prepared, RunControl, Slot,
    Stream, TensorRef, Usage,
};
use samite_ggml::{GgmlBackend, GgmlOptions};
use std::any::Any;
use std::path::Path;
use std::sync::Arc;

const CYCLES: usize = 1000;
const VALUES: usize = 64;

/// Returns all permutations of `0..count`.
fn orders(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let shorter = orders(count - 1).into_iter();
    shorter
        .flat_map(|order| {
            (0..count).map(move |at| {
                let mut order = order.clone();
                order.insert(at, count - 1);
                order
            })
        })
        .collect()
}

/// Uses the plugin once and returns every object created by that.
fn things(path: &Path) -> Vec<Box<dyn Any>> {
    let mut options = GgmlOptions::default();
    options.paths = vec![path.to_owned()];
    options.threads = Some(1);
    let backend = GgmlBackend::find(&options);
    assert_eq!(backend.rejected(), [], "the plugin is used");
    let device: Arc<dyn Device> = Arc::clone(&backend.devices()[0]);

    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [VALUES, 1, 1, 1]).unwrap();
    let y = graph.scale(x, 2.0).unwrap();
    let layout = Layout::contiguous(DType::F32, [VALUES, 1, 1, 1]).unwrap();
    let memory = device.buffer_type();
    let buffer = memory.allocate(2 * layout.bytes(), Usage::Compute).unwrap();
    let place = |offset: usize| TensorRef {
        buffer: Arc::clone(&buffer),
        slot: Slot { offset, layout },
    };
    let places = [Some(place(0)), Some(place(layout.bytes()))];
    // Opens a stream that only the device owns.
    assert_eq!(device.optimize(&graph, &mut [y]), []);
    let mut stream: Box<dyn Stream> = Arc::clone(&device).open_stream().unwrap();
    let work = PlacedGraph {
        graph: &graph,
        nodes: &[y],
        places: &places,
        workspace: None,
        compiled: None,
    };
    let mut prepared: Box<dyn Prepared> = stream.prepare(work).unwrap();
    let bytes: Vec<u8> = (0..VALUES).flat_map(|i| (i as f32).to_ne_bytes()).collect();
    stream.write(&place(0), 0, &bytes).unwrap();
    let control = RunControl {
        cancel: &CancelToken::new(),
        observer: None,
    };
    stream.run(&mut *prepared, control).unwrap();
    let mut out = vec![0; layout.bytes()];
    stream.read(&place(layout.bytes()), 0, &mut out).unwrap();
    let expected: Vec<u8> = (0..VALUES)
        .flat_map(|i| (2.0 * i as f32).to_ne_bytes())
        .collect();
    assert_eq!(out, expected);
    drop(places);
    vec![
        Box::new(backend),
        Box::new(device),
        Box::new(memory),
        Box::new(buffer),
        Box::new(stream),
        Box::new(prepared),
    ]
}

#[test]
fn a_thousand_plugin_cycles_survive_every_drop_order() {
    let Some(peers) = std::env::var_os("SAMITE_TEST_GGML_PLUGINS") else {
        samite_testing::skipped(
            "SAMITE_TEST_GGML_PLUGINS does not name a folder with libggml-cpu-*.so",
        );
        return;
    };
    // Copy it alone, so that samite's own libggml-base is tested as well, where it exists.
    let folder = tempfile::tempdir().unwrap();
    let name = "libggml-cpu-x64.so";
    let path = if cfg!(target_os = "linux") {
        folder.path().join(name)
    } else {
        Path::new(&peers).join(name)
    };
    if !path.exists() {
        std::fs::copy(Path::new(&peers).join(name), &path).unwrap();
    }
    let orders = orders(6);
    assert_eq!(orders.len(), 720);
    for order in orders.iter().cycle().take(CYCLES) {
        let mut things: Vec<_> = things(&path).into_iter().map(Some).collect();
        for &index in order {
            drop(things[index].take());
        }
    }
}
