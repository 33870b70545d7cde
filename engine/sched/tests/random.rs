//! Random graphs on random machines: plans are valid, live memory does not overlap, there are no
//! races, and the results equal those of a single device.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{Special, device, roomy};
use samite_core::reorder::{check_order, memories};
use samite_core::{
    BufferType, CancelToken, Device, DeviceKind, Error, Graph, KeepAlive, Layout, Result,
    StoredTensor, TensorGroup, TensorId, Usage,
};
use samite_sched::{Assignments, Options, Reason, Scheduler, race_check};
use samite_testing::{RANDOM_GRAPH_OPS, RandomGraph, Rng, random_graph};
use std::sync::Arc;

/// Number of graphs in a test run. `SAMITE_RANDOM_GRAPHS` overrides it.
const GRAPHS: u64 = 10_000;

fn store_in(
    memory: &Arc<dyn BufferType>,
    name: &str,
    layout: Layout,
    usage: Usage,
    bytes: &[u8],
) -> Result<Arc<StoredTensor>> {
    let group = TensorGroup::allocate(memory, usage, &[(name, layout)])?;
    group.tensors[0].tensor().write(0, bytes)?;
    Ok(Arc::clone(&group.tensors[0]))
}

/// Swaps adjacent nodes where this does not change the results, and requests to keep memory for
/// longer.
fn optimize(seed: u64, graph: &Graph, nodes: &mut [TensorId]) -> Vec<KeepAlive> {
    let mut rng = Rng::new(seed ^ nodes.len() as u64);
    let before = nodes.to_vec();
    let memories = memories(graph);
    for i in 1..nodes.len() {
        nodes.swap(i - 1, i);
        if rng.one_in(3) || check_order(graph, &memories, &before, nodes).is_err() {
            nodes.swap(i - 1, i);
        }
    }
    (0..rng.below(4))
        .map(|_| KeepAlive {
            tensor: TensorId::from_index(rng.below(graph.len())),
            until: nodes[rng.below(nodes.len())],
        })
        .collect()
}

/// Returns one to four devices. The last one supports everything.
fn random_devices(rng: &mut Rng) -> Vec<Arc<dyn Device>> {
    let count = rng.below(4);
    let mut devices: Vec<_> = (0..count)
        .map(|i| {
            let plain = device(&format!("d{i}"), |o| {
                // Threads cost more than these small graphs, so only few devices have one.
                o.asynchronous = rng.one_in(4);
                o.events = rng.one_in(2);
                o.copies = rng.one_in(2);
                o.streams = rng.one_in(2);
                o.compiles = rng.one_in(2);
                o.workspace = rng.pick(&[0, 0, 512]);
                o.wants_offload = rng.one_in(3);
                o.host_memory = rng.one_in(4);
                if rng.one_in(3) {
                    o.max_buffer_size = 16 << 10;
                }
                o.alignment = rng.pick(&[1, 32, 256]);
                o.without_ops = RANDOM_GRAPH_OPS
                    .iter()
                    .filter(|_| rng.one_in(5))
                    .map(|&op| op.to_owned())
                    .collect();
            });
            let plain = if rng.one_in(4) {
                roomy(plain, |op| if op.is_view() { 0 } else { 40 })
            } else {
                plain
            };
            if rng.one_in(3) {
                let seed = rng.below(1 << 20) as u64;
                Special::optimizing(plain, move |graph, nodes| optimize(seed, graph, nodes))
            } else {
                plain
            }
        })
        .collect();
    devices.push(device("last", |o| {
        o.kind = DeviceKind::Cpu;
        o.host_memory = rng.one_in(2);
    }));
    devices
}

fn outputs(scheduler: &mut Scheduler, graph: &RandomGraph) -> Result<Vec<Vec<u8>>> {
    let ids: Vec<TensorId> = graph
        .graph
        .ids()
        .filter(|&id| graph.graph.tensor(id).flags.output)
        .collect();
    ids.into_iter()
        .map(|id| {
            let mut bytes = vec![0; graph.graph.tensor(id).layout.bytes()];
            scheduler.read(id, 0, &mut bytes)?;
            Ok(bytes)
        })
        .collect()
}

fn run(scheduler: &mut Scheduler, graph: &RandomGraph, runs: usize) -> Result<Vec<Vec<u8>>> {
    for _ in 0..runs {
        for (id, bytes) in &graph.inputs {
            scheduler.write(*id, 0, bytes)?;
        }
        scheduler.run(&CancelToken::new())?;
    }
    outputs(scheduler, graph)
}

/// Runs the graph of `seed` on one device and on a random machine. Returns `None` if it cannot be
/// placed there, which must be reported with a reason.
fn check(seed: u64) -> Option<usize> {
    let alone = device("alone", |_| {});
    let memory = alone.buffer_type();
    let graph = random_graph(seed, &mut |name, layout, usage, bytes| {
        store_in(&memory, name, layout, usage, bytes)
    })
    .unwrap();
    let mut scheduler = Scheduler::new(vec![alone], Options::default()).unwrap();
    scheduler.load(&graph.graph).unwrap();
    let times = 1 + usize::from(seed.is_multiple_of(4)) * 5;
    let expected = run(&mut scheduler, &graph, times).unwrap();

    let mut rng = Rng::new(seed ^ 0xd1ce);
    let devices = random_devices(&mut rng);
    let memories: Vec<_> = devices.iter().map(|device| device.buffer_type()).collect();
    let graph = random_graph(seed, &mut |name, layout, usage, bytes| {
        store_in(
            &memories[rng.below(memories.len())],
            name,
            layout,
            usage,
            bytes,
        )
    })
    .unwrap();
    let mut assignments = Assignments::new();
    if rng.one_in(3) {
        let id = TensorId::from_index(rng.below(graph.graph.len()));
        let device = rng.below(devices.len());
        if rng.one_in(2) {
            assignments.set(id, device)
        } else {
            assignments.set_unless_offloaded(id, device)
        }
    }
    let options = Options {
        copies: rng.pick(&[1, 1, 2, 4]),
        offload: rng.one_in(2),
        ..Default::default()
    };
    let mut scheduler = Scheduler::new(devices, options).unwrap();
    match scheduler.load_with(&graph.graph, &assignments, &CancelToken::new()) {
        Ok(()) => {}
        // For example a cache on a device without set_rows, an assignment to a device that refuses,
        // or a tensor above the limit.
        Err(Error::Placement(_) | Error::OutOfMemory { .. }) => return None,
        Err(error) => panic!("seed {seed}: {error}"),
    }

    let plan = scheduler.current_plan().unwrap();
    let live = graph.graph.live();
    for id in graph.graph.ids().filter(|id| live[id.index()]) {
        let device = plan.placement().devices[id.index()]
            .unwrap_or_else(|| panic!("seed {seed}: {id} has no device"));
        let node = graph.graph.node(id);
        if node.tensor().is_computed() {
            assert!(
                plan.devices().get(device).supports(node).is_yes(),
                "seed {seed}: {id} is where it cannot run"
            );
            assert!(
                plan.placement().reasons[id.index()].is_some(),
                "seed {seed}: {id} has no reason"
            );
        }
    }
    for assignment in assignments.iter() {
        let at = assignment.tensor.index();
        if plan.placement().reasons[at] == Some(Reason::Assigned) {
            assert_eq!(plan.placement().devices[at], Some(assignment.device));
        }
    }
    let ran: usize = plan.splits().iter().map(|split| split.nodes.len()).sum();
    let wanted = graph
        .graph
        .ids()
        .filter(|id| live[id.index()] && graph.graph.tensor(*id).is_computed())
        .count();
    assert_eq!(ran, wanted, "seed {seed}: not every node runs once");
    assert_eq!(
        race_check::check_memory(plan),
        Vec::<String>::new(),
        "seed {seed}\n{plan}"
    );
    assert_eq!(
        race_check::check(plan, 2 * options_copies(&scheduler) + 2),
        [],
        "seed {seed}"
    );

    let result = run(&mut scheduler, &graph, times).unwrap();
    let wrong: Vec<_> = (0..expected.len())
        .filter(|&i| result[i] != expected[i])
        .collect();
    assert!(
        wrong.is_empty(),
        "seed {seed}: outputs {wrong:?} differ\n{}\n{}",
        graph.graph,
        scheduler.current_plan().unwrap()
    );
    Some(scheduler.current_plan().unwrap().splits().len())
}

fn options_copies(scheduler: &Scheduler) -> usize {
    scheduler.options().copies
}

#[test]
fn random_graphs_on_random_devices_match_one_device() {
    let graphs = std::env::var("SAMITE_RANDOM_GRAPHS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(GRAPHS);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()) as u64;
    let (mut placed, mut divided) = (0, 0);
    std::thread::scope(|scope| {
        let work = |first: u64| {
            (first..graphs)
                .step_by(threads as usize)
                .filter_map(check)
                .collect::<Vec<_>>()
        };
        let handles: Vec<_> = (0..threads)
            .map(|first| scope.spawn(move || work(first)))
            .collect();
        for handle in handles {
            let counts = handle.join().unwrap();
            placed += counts.len();
            divided += counts.iter().filter(|&&splits| splits > 1).count();
        }
    });
    // The test would prove little if most graphs could not be placed, or used only one device.
    assert!(
        placed as u64 >= graphs / 2,
        "{placed} of {graphs} graphs could be placed"
    );
    assert!(
        divided * 4 >= placed,
        "only {divided} of {placed} plans have several splits"
    );
    println!("{placed} of {graphs} graphs placed, {divided} of them in several splits");
}
