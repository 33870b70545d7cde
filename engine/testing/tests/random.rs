//! Random graphs run, stay finite, and depend on their seed alone.
#![allow(clippy::unwrap_used)]

use samite_core::{
    CancelToken, DType, Device, PlacedGraph, RunControl, Slot, StoredTensor, Stream, TensorGroup,
    TensorId, TensorRef, Usage,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_testing::{RandomGraph, random_graph};
use std::collections::BTreeSet;
use std::sync::Arc;

fn make(device: &Arc<ReferenceDevice>, seed: u64) -> RandomGraph {
    random_graph(seed, &mut |name, layout, usage, bytes| {
        let group = TensorGroup::allocate(&device.buffer_type(), usage, &[(name, layout)])?;
        group.tensors[0].tensor().write(0, bytes)?;
        Ok::<Arc<StoredTensor>, _>(Arc::clone(&group.tensors[0]))
    })
    .unwrap()
}

/// Returns the f32 outputs of a run.
fn run(device: &Arc<ReferenceDevice>, random: &RandomGraph) -> Vec<(TensorId, Vec<f32>)> {
    let graph = &random.graph;
    let mut places: Vec<Option<TensorRef>> = Vec::new();
    for tensor in graph.tensors() {
        let place = match (&tensor.stored, tensor.view) {
            (Some(stored), _) => stored.tensor().clone(),
            (None, Some(view)) => {
                let base = places[view.base.index()].clone().unwrap();
                let slot = Slot {
                    offset: base.slot.offset + view.offset,
                    layout: tensor.layout,
                };
                TensorRef { slot, ..base }
            }
            (None, None) => {
                let wanted = [("", tensor.layout)];
                let group =
                    TensorGroup::allocate(&device.buffer_type(), Usage::Compute, &wanted).unwrap();
                group.tensors[0].tensor().clone()
            }
        };
        places.push(Some(place));
    }
    for (id, bytes) in &random.inputs {
        places[id.index()]
            .as_ref()
            .unwrap()
            .write(0, bytes)
            .unwrap();
    }
    let nodes: Vec<_> = graph.ids().collect();
    let mut stream: Box<dyn Stream> = Arc::clone(device).open_stream().unwrap();
    let mut prepared = stream
        .prepare(PlacedGraph {
            graph,
            nodes: &nodes,
            places: &places,
            workspace: None,
            compiled: None,
        })
        .unwrap();
    let control = RunControl {
        cancel: &CancelToken::new(),
        observer: None,
    };
    stream.run(&mut *prepared, control).unwrap();
    let outputs = graph.ids().filter(|&id| graph.tensor(id).flags.output);
    outputs
        .map(|id| {
            let place = places[id.index()].as_ref().unwrap();
            assert_eq!(place.layout().dtype(), DType::F32);
            let mut bytes = vec![0; place.layout().bytes()];
            place.read(0, &mut bytes).unwrap();
            (
                id,
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|b| f32::from_le_bytes(*b))
                    .collect(),
            )
        })
        .collect()
}

#[test]
fn random_graphs_run_and_stay_finite() {
    let device = ReferenceDevice::new(ReferenceOptions::default());
    let mut ops = BTreeSet::new();
    let (mut several, mut largest) = (0, 0);
    for seed in 0..300 {
        let random = make(&device, seed);
        let computed = random
            .graph
            .tensors()
            .iter()
            .filter(|tensor| tensor.is_computed());
        largest = largest.max(computed.count());
        ops.extend(random.graph.tensors().iter().map(|tensor| tensor.op.name()));
        let outputs = run(&device, &random);
        assert!(!outputs.is_empty(), "seed {seed}");
        several += usize::from(outputs.len() > 1);
        for (id, values) in outputs {
            assert!(
                values.iter().all(|x| x.is_finite()),
                "seed {seed}, {id}: {values:?}\n{}",
                random.graph
            );
        }
    }
    assert!(ops.len() > 25, "{ops:?}");
    assert!(
        several > 50 && (35..50).contains(&largest),
        "{several} {largest}"
    );
}

#[test]
fn the_same_seed_gives_the_same_graph() {
    let device = ReferenceDevice::new(ReferenceOptions::default());
    for seed in [0, 7, 99] {
        let (a, b) = (make(&device, seed), make(&device, seed));
        assert_eq!(a.graph.to_string(), b.graph.to_string());
        assert_eq!(a.inputs, b.inputs);
        assert_eq!(run(&device, &a), run(&device, &b));
        assert_ne!(
            a.graph.to_string(),
            make(&device, seed + 1).graph.to_string()
        );
    }
}
