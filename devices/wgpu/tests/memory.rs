//! Memory use over many plan changes, in a separate program so that other tests do not affect it.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_core::{
    Backend, CancelToken, DType, Device, Graph, PlacedGraph, RunControl, TensorGroup, TensorId,
    TensorRef, Usage,
};
use samite_wgpu::{WgpuBackend, WgpuDevice};
use std::sync::Arc;

/// Opens the first adapter anew, with `parameters`.
fn device(parameters: &str) -> Option<Arc<dyn Device>> {
    let backend = WgpuBackend::default();
    let Some(device) = backend.devices().first() else {
        samite_testing::skipped("wgpu finds no adapter, not even a software one");
        return None;
    };
    let device = backend.configure(device, parameters.parse().unwrap());
    Some(device.unwrap())
}

/// Allocates memory for every tensor of `graph`.
fn places(device: &Arc<dyn Device>, graph: &Graph) -> Vec<Option<TensorRef>> {
    let place = |id: TensorId| {
        let wanted = [("", graph.tensor(id).layout)];
        let group = TensorGroup::allocate(&device.buffer_type(), Usage::Compute, &wanted).unwrap();
        Some(group.tensors[0].tensor().clone())
    };
    graph.ids().map(place).collect()
}

fn control(cancel: &CancelToken) -> RunControl<'_> {
    RunControl {
        cancel,
        observer: None,
    }
}

/// Returns the resident memory of the process in kilobytes.
#[cfg(target_os = "linux")]
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn many_plan_changes_leak_no_memory() {
    let Some(device) = device("") else { return };
    let own = device.as_any().downcast_ref::<WgpuDevice>().unwrap();
    let mut stream = Arc::clone(&device).open_stream().unwrap();
    let cancel = CancelToken::new();
    let mut change = |number: usize| {
        let mut graph = Graph::new();
        let n = 1 + number % 50;
        let x = graph.input("x", DType::F32, [64, n, 1, 1]).unwrap();
        let w = graph.leaf("w", DType::F32, [64, 32, 1, 1]).unwrap();
        let y = graph.mul_mat(w, x).unwrap();
        let z = graph.rms_norm(y, 1e-5).unwrap();
        let places = places(&device, &graph);
        let work = PlacedGraph {
            graph: &graph,
            nodes: &[y, z],
            places: &places,
            workspace: None,
            compiled: None,
        };
        let mut prepared = stream.prepare(work).unwrap();
        stream.run(&mut *prepared, control(&cancel)).unwrap();
        stream.synchronize().unwrap();
    };
    (0..200).for_each(&mut change);
    let allocated = own.allocated();
    #[cfg(target_os = "linux")]
    let before = resident();
    (0..2000).for_each(&mut change);
    assert_eq!(own.allocated(), allocated);
    #[cfg(target_os = "linux")]
    {
        let after = resident();
        assert!(
            after <= before + (16 << 10),
            "{before} KiB became {after} KiB"
        );
    }
}
