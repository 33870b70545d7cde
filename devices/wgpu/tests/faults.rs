//! Drivers that fail or compute wrong results: errors, and the state afterwards.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_core::{
    Backend, BufferType, CancelToken, DType, Device, Error, Graph, Layout, PlacedGraph, Result,
    RunControl, StoredTensor, Stream, TensorGroup, TensorId, TensorRef, Usage,
};
use samite_sched::{Assignments, Options, Scheduler};
use samite_testing::random_graph;
use samite_wgpu::{WgpuBackend, WgpuDevice};
use std::sync::Arc;

/// Returns the first adapter, not yet opened.
fn device() -> Option<Arc<dyn Device>> {
    let backend = WgpuBackend::default();
    let device = backend.devices().first().cloned();
    if device.is_none() {
        samite_testing::skipped("wgpu finds no adapter, not even a software one");
    }
    device
}

fn own(device: &Arc<dyn Device>) -> &WgpuDevice {
    device.as_any().downcast_ref().unwrap()
}

fn store(
    memory: &Arc<dyn BufferType>,
    (name, layout, usage): (&str, Layout, Usage),
    bytes: &[u8],
) -> Result<Arc<StoredTensor>> {
    let group = TensorGroup::allocate(memory, usage, &[(name, layout)])?;
    group.tensors[0].tensor().write(0, bytes)?;
    Ok(Arc::clone(&group.tensors[0]))
}

/// Runs every stage of a graph, from allocating its weights to reading its outputs.
fn outputs(device: &Arc<dyn Device>, seed: u64) -> Result<Vec<Vec<u8>>> {
    let memory = device.buffer_type();
    let mut failed = None;
    let graph = random_graph(seed, &mut |name, layout, usage, bytes| {
        store(&memory, (name, layout, usage), bytes).inspect_err(|error| {
            failed = Some(error.clone());
        })
    });
    let graph = match (graph, failed) {
        (_, Some(error)) => return Err(error),
        (graph, None) => graph.unwrap(),
    };
    let mut scheduler = Scheduler::new(vec![Arc::clone(device)], Options::default())?;
    scheduler.load_with(&graph.graph, &Assignments::new(), &CancelToken::new())?;
    for (id, bytes) in &graph.inputs {
        scheduler.write(*id, 0, bytes)?;
    }
    scheduler.run(&CancelToken::new())?;
    let ids = graph.graph.ids();
    let ids = ids.filter(|&id| graph.graph.tensor(id).flags.output);
    ids.map(|id| {
        let mut bytes = vec![0; graph.graph.tensor(id).layout.bytes()];
        scheduler.read(id, 0, &mut bytes)?;
        Ok(bytes)
    })
    .collect()
}

/// Returns the number of driver calls that `outputs` makes.
fn calls(device: &Arc<dyn Device>, seed: u64) -> u64 {
    let many = 1 << 40;
    own(device).fail_call(many);
    outputs(device, seed).unwrap();
    let made = many - own(device).calls_before_failure();
    own(device).fail_call(0);
    made
}

/// Every driver call fails once: those that open the device, on a new one each, and those that
/// compute.
#[test]
fn every_call_may_fail() {
    let Some(opened) = device() else { return };
    let seed = 3;
    let expected = outputs(&opened, seed).unwrap();
    let computing = calls(&opened, seed);
    let opening = calls(&device().unwrap(), seed) - computing;
    assert!(opening > 1 && computing > 20, "{opening}, {computing}");
    let fails = |device: &Arc<dyn Device>, call: u64| {
        own(device).fail_call(call);
        let outcome = outputs(device, seed);
        own(device).fail_call(0);
        let error = match outcome {
            Err(error) => error,
            // Dropping a scheduler waits for it but no longer reports errors.
            Ok(found) => {
                assert!(
                    call + 2 > computing,
                    "call {call} of {opening} and {computing}: nobody was told"
                );
                return assert_eq!(found, expected);
            }
        };
        assert!(
            matches!(error, Error::Device { .. }),
            "call {call}: {error:?}"
        );
        let text = error.to_string();
        let names = text.contains("wgpu0") && text.contains("a fault that a test asked for");
        assert!(names, "call {call}: {text}");
        // The device continues as if nothing had happened.
        assert_eq!(outputs(device, seed).unwrap(), expected, "call {call}");
    };
    for call in 1..=opening {
        fails(&device().unwrap(), call);
    }
    for call in 1..=computing {
        fails(&opened, call);
    }
}

#[test]
fn wrong_subgroup_sums_disable_subgroups() {
    let (Some(healthy), Some(device)) = (device(), device()) else {
        return;
    };
    if !own(&healthy).uses_subgroups() {
        samite_testing::skipped("the adapter has no operations over subgroups");
        return;
    }
    own(&device).replace_shader_text("subgroupAdd(x)", "x");
    for seed in 0..3 {
        let found = outputs(&device, seed).unwrap();
        let expected = outputs(&healthy, seed).unwrap();
        for (found, expected) in found.iter().zip(&expected) {
            let floats = |bytes: &[u8]| -> Vec<f32> {
                let values = bytes.as_chunks().0.iter();
                values.map(|value| f32::from_le_bytes(*value)).collect()
            };
            let error = samite_sched::nmse(&floats(found), &floats(expected));
            assert!(error <= 1e-6, "seed {seed}: {error:.1e}");
        }
    }
    assert!(!own(&device).uses_subgroups());
    assert!(own(&healthy).uses_subgroups());
}

#[test]
fn a_miscomputing_driver_is_refused() {
    let Some(device) = device() else { return };
    own(&device).replace_shader_text("1.0 / sqrt(squares", "1.25 / sqrt(squares");
    let error = Arc::clone(&device).open_stream().map(drop).unwrap_err();
    assert!(error.to_string().contains("computes wrong"), "{error}");
    let error = outputs(&device, 0).unwrap_err();
    assert!(error.to_string().contains("computes wrong"), "{error}");
}

/// An invalid row number in work that another stream prepared is reported by the stream that ran
/// it.
#[test]
fn errors_are_reported_by_the_stream_that_ran_the_work() {
    let Some(device) = device() else { return };
    let mut graph = Graph::new();
    let table = graph.leaf("table", DType::F32, [4, 3, 1, 1]).unwrap();
    let numbers = graph.input("numbers", DType::I32, [2, 1, 1, 1]).unwrap();
    let rows = graph.get_rows(table, numbers).unwrap();
    graph.set_name(rows, "looked up");
    let place = |id: TensorId| {
        let wanted = [("", graph.tensor(id).layout)];
        let group = TensorGroup::allocate(&device.buffer_type(), Usage::Compute, &wanted).unwrap();
        Some(group.tensors[0].tensor().clone())
    };
    let places: Vec<Option<TensorRef>> = graph.ids().map(place).collect();
    let open = || -> Box<dyn Stream> { Arc::clone(&device).open_stream().unwrap() };
    let (mut first, mut second) = (open(), open());
    let mut prepared = first
        .prepare(PlacedGraph {
            graph: &graph,
            nodes: &[rows],
            places: &places,
            workspace: None,
            compiled: None,
        })
        .unwrap();
    let numbers = places[numbers.index()].as_ref().unwrap();
    numbers.write(0, bytemuck::cast_slice(&[1i32, 3])).unwrap();
    let control = RunControl {
        cancel: &CancelToken::new(),
        observer: None,
    };
    second.run(&mut *prepared, control).unwrap();
    let error = second.synchronize().unwrap_err().to_string();
    assert!(error.contains("'looked up'"), "{error}");
    // It was reported once.
    second.synchronize().unwrap();
    first.synchronize().unwrap();
    // A failed check keeps the pending error.
    second
        .run(
            &mut *prepared,
            RunControl {
                cancel: &CancelToken::new(),
                observer: None,
            },
        )
        .unwrap();
    own(&device).fail_call(3);
    let error = second.synchronize().unwrap_err().to_string();
    assert!(error.contains("a fault"), "{error}");
    own(&device).fail_call(0);
    let error = second.synchronize().unwrap_err().to_string();
    assert!(error.contains("'looked up'"), "{error}");
}
