//! Random graphs on machines that have the device, alone and beside others.
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests do

use samite_core::{
    Backend, BufferType, CancelToken, DType, Device, Error, Layout, Result, StoredTensor,
    TensorGroup, TensorId, Usage,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_sched::{Assignments, Options, Scheduler, nmse};
use samite_testing::{RandomGraph, Rng, random_graph};
use samite_wgpu::WgpuBackend;
use std::sync::Arc;

/// So many graphs; `SAMITE_RANDOM_GRAPHS` says another number, `SAMITE_RANDOM_FIRST` the first one.
const GRAPHS: u64 = 150;

fn store(
    memory: &Arc<dyn BufferType>,
    (name, layout, usage): (&str, Layout, Usage),
    bytes: &[u8],
) -> Result<Arc<StoredTensor>> {
    let group = TensorGroup::allocate(memory, usage, &[(name, layout)])?;
    group.tensors[0].tensor().write(0, bytes)?;
    Ok(Arc::clone(&group.tensors[0]))
}

/// A graph whose weights lie in some of `devices`.
fn graph(seed: u64, devices: &[Arc<dyn Device>]) -> RandomGraph {
    let mut rng = Rng::new(seed ^ 0x51);
    random_graph(seed, &mut |name, layout, usage, bytes| {
        let memory = devices[rng.below(devices.len())].buffer_type();
        store(&memory, (name, layout, usage), bytes)
    })
    .unwrap()
}

/// The outputs of several runs in a row. `None` if no placement exists.
fn outputs(
    seed: u64,
    devices: Vec<Arc<dyn Device>>,
    copies: usize,
) -> Option<Vec<(TensorId, Vec<f32>)>> {
    outputs_of(seed, graph(seed, &devices), devices, copies)
}

/// What the reference gives if each input of floats is the next one, up or down: how much a result may differ that is as good.
fn nudged(seed: u64, device: Arc<dyn Device>) -> Vec<(TensorId, Vec<f32>)> {
    let devices = vec![device];
    let mut graph = graph(seed, &devices);
    let mut rng = Rng::new(seed);
    for (id, bytes) in &mut graph.inputs {
        if graph.graph.tensor(*id).layout.dtype() == DType::F32 {
            for float in bytes.as_chunks_mut::<4>().0 {
                let value = f32::from_le_bytes(*float);
                let near = [value.next_up(), value.next_down()][rng.below(2)];
                *float = near.to_le_bytes();
            }
        }
    }
    outputs_of(seed, graph, devices, 1).unwrap()
}

fn outputs_of(
    seed: u64,
    graph: RandomGraph,
    devices: Vec<Arc<dyn Device>>,
    copies: usize,
) -> Option<Vec<(TensorId, Vec<f32>)>> {
    let options = Options {
        copies,
        ..Options::default()
    };
    let mut scheduler = Scheduler::new(devices, options).unwrap();
    match scheduler.load_with(&graph.graph, &Assignments::new(), &CancelToken::new()) {
        Ok(()) => {}
        Err(Error::Placement(_)) => return None,
        Err(error) => panic!("seed {seed}: {error}"),
    }
    for _ in 0..3 {
        for (id, bytes) in &graph.inputs {
            scheduler.write(*id, 0, bytes).unwrap();
        }
        scheduler.run(&CancelToken::new()).unwrap();
    }
    let ids = graph
        .graph
        .ids()
        .filter(|&id| graph.graph.tensor(id).flags.output);
    let read = |id: TensorId| {
        let layout = graph.graph.tensor(id).layout;
        assert_eq!(layout.dtype(), DType::F32);
        let mut bytes = vec![0; layout.bytes()];
        scheduler.read(id, 0, &mut bytes).unwrap();
        let floats = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
        (id, floats.collect())
    };
    Some(ids.map(read).collect())
}

#[test]
fn random_graphs_give_what_the_reference_gives() {
    let backend = WgpuBackend::default();
    let Some(gpu) = backend.devices().first() else {
        samite_testing::skipped("wgpu finds no adapter, not even a software one");
        return;
    };
    let apart = backend
        .configure(gpu, "overlaps=off".parse().unwrap())
        .unwrap();
    let variable = |name| std::env::var(name).ok()?.parse().ok();
    let reference = || -> Arc<dyn Device> { ReferenceDevice::new(ReferenceOptions::default()) };
    let (mut placed, mut noisy) = (0, 0);
    let graphs = variable("SAMITE_RANDOM_GRAPHS").unwrap_or(GRAPHS);
    let first: u64 = variable("SAMITE_RANDOM_FIRST").unwrap_or(0);
    for seed in first..first + graphs {
        let expected = outputs(seed, vec![reference()], 1).unwrap();
        // As in browsers, too.
        let gpu = Arc::clone([gpu, &apart][seed as usize % 2]);
        let devices = match seed % 3 {
            0 => vec![gpu],
            1 => vec![gpu, reference()],
            _ => vec![reference(), gpu],
        };
        let copies = [1, 2, 4][seed as usize / 3 % 3];
        let Some(found) = outputs(seed, devices.clone(), copies) else {
            continue;
        };
        placed += 1;
        for (number, ((id, found), (_, expected))) in found.iter().zip(&expected).enumerate() {
            let error = nmse(found, expected);
            if error > 1e-6 {
                // What is left of a number less the same number rounded, for example, is noise.
                noisy += 1;
                let noise = nmse(&nudged(seed, reference())[number].1, expected);
                assert!(
                    error <= 4.0 * noise,
                    "seed {seed}, {id}: {error:.1e}, noise {noise:.1e}"
                );
            }
        }
        // The same bits again.
        assert_eq!(
            outputs(seed, devices, copies).as_ref(),
            Some(&found),
            "seed {seed}"
        );
    }
    assert!(noisy * 1000 <= graphs, "{noisy} of {graphs} are noise");
    assert!(
        placed * 10 >= graphs * 9,
        "{placed} of {graphs} graphs could be placed"
    );
}
