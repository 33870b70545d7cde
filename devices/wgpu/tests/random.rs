//! Random graphs on machines with the device, alone and with others.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_core::{
    Backend, BufferType, CancelToken, DType, Device, Error, Graph, Layout, Result, StoredTensor,
    TensorGroup, TensorId, Usage,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_sched::{Assignments, Options, Scheduler, nmse};
use samite_testing::{RandomGraph, Rng, imprecise_device, random_graph};
use samite_wgpu::WgpuBackend;
use std::sync::Arc;

/// Default number of graphs; `SAMITE_RANDOM_GRAPHS` sets another one, `SAMITE_RANDOM_FIRST` the
/// first seed.
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

/// Creates a graph whose weights are on some of `devices`.
fn graph(seed: u64, devices: &[Arc<dyn Device>]) -> RandomGraph {
    let mut rng = Rng::new(seed ^ 0x51);
    random_graph(seed, &mut |name, layout, usage, bytes| {
        let memory = devices[rng.below(devices.len())].buffer_type();
        store(&memory, (name, layout, usage), bytes)
    })
    .unwrap()
}

/// Returns the outputs of several consecutive runs, or `None` if no placement exists.
fn outputs(
    seed: u64,
    devices: Vec<Arc<dyn Device>>,
    copies: usize,
) -> Option<Vec<(TensorId, Vec<f32>)>> {
    let graph = graph(seed, &devices);
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
fn random_graphs_match_the_reference() {
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
        // Also with the options used in browsers.
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
                // Cancellation leaves noise: a sum may be off by some units in the last place, here
                // 16.
                noisy += 1;
                let imprecise = imprecise_device(&reference());
                let near = outputs(seed, vec![imprecise], 1).unwrap();
                let noise = nmse(&near[number].1, expected);
                assert!(
                    error <= 16.0 * 16.0 * noise,
                    "seed {seed}, {id}: {error:.1e}, noise {noise:.1e}"
                );
            }
        }
        // Repeating gives identical bits.
        assert_eq!(
            outputs(seed, devices, copies).as_ref(),
            Some(&found),
            "seed {seed}"
        );
    }
    assert!(noisy <= 1 + graphs / 1000, "{noisy} of {graphs} are noise");
    assert!(
        placed * 10 >= graphs * 9,
        "{placed} of {graphs} graphs could be placed"
    );
}

/// Only numbers that cancel each other leave noise.
#[test]
fn cancellation_leaves_rounding_noise() {
    let reference: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions::default());
    let noise = |cancels: bool| {
        let mut graph = Graph::new();
        let x = graph.input("x", DType::F32, [64, 3, 1, 1]).unwrap();
        let mut y = graph.soft_max(x, None, None, 1.0, 0.0).unwrap();
        if cancels {
            let halves = graph.cast(y, DType::F16).unwrap();
            let rounded = graph.cast(halves, DType::F32).unwrap();
            y = graph.sub(rounded, y).unwrap();
        }
        graph.set_output(y);
        let values: Vec<u8> = (0..192u16)
            .flat_map(|i| (f32::from(i * 37 % 101) / 50.0).to_le_bytes())
            .collect();
        let run = |device| {
            let mut scheduler = Scheduler::new(vec![device], Options::default()).unwrap();
            scheduler
                .load_with(&graph, &Assignments::new(), &CancelToken::new())
                .unwrap();
            scheduler.write(x, 0, &values).unwrap();
            scheduler.run(&CancelToken::new()).unwrap();
            let mut bytes = vec![0; values.len()];
            scheduler.read(y, 0, &mut bytes).unwrap();
            let floats = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
            floats.collect::<Vec<_>>()
        };
        let expected = run(Arc::clone(&reference));
        nmse(&run(imprecise_device(&reference)), &expected)
    };
    assert!((1e-16..1e-12).contains(&noise(false)), "{:e}", noise(false));
    assert!(noise(true) > 1e-9, "{:e}", noise(true));
}
