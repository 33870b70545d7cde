//! Random graphs, and their outputs on given devices.

use samite_core::{
    BufferType, CancelToken, DType, Device, Error, Graph, Layout, PlacedGraph, Result, RunControl,
    StoredTensor, TensorGroup, TensorId, TensorRef, Usage,
};
use samite_sched::{Assignments, Options, Scheduler};
use samite_testing::{Rng, random_graph};
use std::sync::Arc;

fn store(
    memory: &Arc<dyn BufferType>,
    (name, layout, usage): (&str, Layout, Usage),
    bytes: &[u8],
) -> Result<Arc<StoredTensor>> {
    let group = TensorGroup::allocate(memory, usage, &[(name, layout)])?;
    group.tensors[0].tensor().write(0, bytes)?;
    Ok(Arc::clone(&group.tensors[0]))
}

/// Runs every stage of random graph `seed`, from allocating its weights to reading its outputs.
/// Weights are on any of `devices`. Runs `runs` times. Returns `None` if no placement exists.
pub fn outputs(
    devices: &[Arc<dyn Device>],
    seed: u64,
    (copies, runs): (usize, usize),
) -> Result<Option<Vec<Vec<f32>>>> {
    let mut rng = Rng::new(seed ^ 0x51);
    let mut failed = None;
    let graph = random_graph(seed, &mut |name, layout, usage, bytes| {
        let memory = devices[rng.below(devices.len())].buffer_type();
        let stored = store(&memory, (name, layout, usage), bytes);
        stored.inspect_err(|error| failed = Some(error.clone()))
    });
    let graph = match (graph, failed) {
        (_, Some(error)) => return Err(error),
        (graph, None) => graph.unwrap(),
    };
    let options = Options {
        copies,
        ..Options::default()
    };
    let mut scheduler = Scheduler::new(devices.to_vec(), options)?;
    let cancel = CancelToken::new();
    match scheduler.load_with(&graph.graph, &Assignments::new(), &cancel) {
        Err(Error::Placement(_)) => return Ok(None),
        loaded => loaded?,
    }
    for _ in 0..runs {
        for (id, bytes) in &graph.inputs {
            scheduler.write(*id, 0, bytes)?;
        }
        scheduler.run(&cancel)?;
    }
    let ids = graph.graph.ids();
    let ids = ids.filter(|&id| graph.graph.tensor(id).flags.output);
    let read = |id: TensorId| {
        let layout = graph.graph.tensor(id).layout;
        assert_eq!(layout.dtype(), DType::F32);
        let mut bytes = vec![0; layout.bytes()];
        scheduler.read(id, 0, &mut bytes)?;
        let floats = bytes.as_chunks().0.iter();
        Ok(floats.map(|bytes| f32::from_le_bytes(*bytes)).collect())
    };
    ids.map(read).collect::<Result<_>>().map(Some)
}

/// Allocates memory for every tensor of `graph`.
pub fn places(device: &Arc<dyn Device>, graph: &Graph) -> Vec<Option<TensorRef>> {
    let place = |id: TensorId| {
        let wanted = [("", graph.tensor(id).layout)];
        let group = TensorGroup::allocate(&device.buffer_type(), Usage::Compute, &wanted).unwrap();
        Some(group.tensors[0].tensor().clone())
    };
    graph.ids().map(place).collect()
}

/// Describes nodes without scratch memory.
pub fn placed<'a>(
    graph: &'a Graph,
    nodes: &'a [TensorId],
    places: &'a [Option<TensorRef>],
) -> PlacedGraph<'a> {
    PlacedGraph {
        graph,
        nodes,
        places,
        workspace: None,
        compiled: None,
    }
}

pub fn control(cancel: &CancelToken) -> RunControl<'_> {
    RunControl {
        cancel,
        observer: None,
    }
}
