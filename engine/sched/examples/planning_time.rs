//! Measures the time of each planning step and of a steady run:
//! `cargo run --release -p samite-sched --example planning_time`.
//!
//! The graph has the shape of a language model: layers with weights on three devices in turn,
//! written caches, and experts in host memory that a faster device takes over.

use samite_core::environment::NoBuggify;
use samite_core::{
    CancelToken, DType, Device, DeviceKind, Graph, Layout, Result, TensorGroup, Unary, Usage,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_sched::{
    Assignments, DeviceSet, Fallback, Options, Plan, Scheduler, memory_plan, order, placement,
    split,
};
use std::sync::Arc;
use std::time::Instant;

fn device(name: &str, change: impl FnOnce(&mut ReferenceOptions)) -> Arc<dyn Device> {
    let mut options = ReferenceOptions::named(name);
    change(&mut options);
    ReferenceDevice::new(options)
}

/// Layers of 16 tensors each, in runs of eight on one device.
fn model(layers: usize, devices: &[Arc<dyn Device>]) -> Result<Graph> {
    let mut graph = Graph::new();
    let mut hidden = graph.input("x", DType::F32, [8, 2, 1, 1])?;
    let rows = graph.input("rows", DType::I32, [2, 1, 1, 1])?;
    let ids = graph.input("experts-used", DType::I32, [1, 2, 1, 1])?;
    for layer in 0..layers {
        let stored = |name: &str, extents, usage, on: usize| -> Result<_> {
            let layout = Layout::contiguous(DType::F32, extents)?;
            let group =
                TensorGroup::allocate(&devices[on].buffer_type(), usage, &[(name, layout)])?;
            Ok(Arc::clone(&group.tensors[0]))
        };
        let on = layer / 8 % devices.len();
        let wq = graph.stored(&stored("wq", [8, 8, 1, 1], Usage::Weights, on)?)?;
        let cache = graph.stored(&stored("cache", [8, 4, 1, 1], Usage::Any, on)?)?;
        let experts = stored("experts", [8, 8, 2, 1], Usage::Weights, devices.len() - 1)?;
        let experts = graph.stored(&experts)?;
        let normed = graph.rms_norm(hidden, 1e-5)?;
        let q = graph.mul_mat(wq, normed)?;
        let written = graph.set_rows(q, rows, cache)?;
        let scores = graph.mul_mat(written, q)?;
        let scores = graph.soft_max(scores, None, None, 1.0, 0.0)?;
        let turned = graph.transpose(cache)?;
        let values = graph.cont(turned)?;
        let mixed = graph.mul_mat(values, scores)?;
        let added = graph.add(mixed, hidden)?;
        let spread = graph.reshape(added, [8, 1, 2, 1])?;
        let product = graph.mul_mat_id(experts, spread, ids)?;
        let active = graph.unary(product, Unary::Silu)?;
        let active = graph.reshape(active, [8, 2, 1, 1])?;
        hidden = graph.add(active, added)?;
    }
    graph.set_output(hidden);
    Ok(graph)
}

fn main() -> Result<()> {
    for asynchronous in [false, true] {
        let fast = |name: &str| {
            device(name, |o| {
                (o.asynchronous, o.events, o.copies) = (asynchronous, asynchronous, asynchronous);
                o.wants_offload = true;
            })
        };
        let host = device("host", |o| {
            (o.kind, o.host_memory) = (DeviceKind::Cpu, true);
        });
        let devices = vec![fast("first"), fast("second"), host];
        let set = DeviceSet::new(devices.clone())?;
        for copies in if asynchronous { vec![1, 4] } else { vec![1] } {
            let options = Options {
                copies,
                fallback: Fallback::Allow,
                ..Options::default()
            };
            for layers in [80, 313] {
                let graph = model(layers, &devices)?;
                let start = Instant::now();
                let live = graph.live();
                let placed = placement::place(&graph, &live, &set, Assignments::NONE, &options)?;
                let after_place = Instant::now();
                let lowered = split::cut(&graph, &live, &set, &placed, &NoBuggify)?;
                let after_cut = Instant::now();
                let memory = memory_plan::plan(&lowered, &live, &set, copies)?;
                let after_memory = Instant::now();
                let actions = order::order(&lowered, &memory, &set, copies)?;
                let end = Instant::now();
                println!(
                    "{} tensors, {} splits, {} copies, {} actions, {copies} pipeline copies, asynchronous: {asynchronous}",
                    graph.len(),
                    lowered.splits.len(),
                    lowered.copies.len(),
                    actions.len()
                );
                println!(
                    "    place {:?}, cut {:?}, memory {:?}, order {:?}",
                    after_place - start,
                    after_cut - after_place,
                    after_memory - after_cut,
                    end - after_memory
                );
                let plan = Plan::new(&graph, &set, Assignments::NONE, &options)?;
                let start = Instant::now();
                assert!(plan.fits(&graph, Assignments::NONE));
                println!("    recognised in {:?}", start.elapsed());
                let mut scheduler = Scheduler::new(devices.clone(), options.clone())?;
                scheduler.load(&graph)?;
                let start = Instant::now();
                for _ in 0..10 {
                    scheduler.load(&graph)?;
                    scheduler.run(&CancelToken::new())?;
                }
                scheduler.synchronize()?;
                println!(
                    "    one run with reference kernels {:?}",
                    start.elapsed() / 10
                );
            }
        }
    }
    Ok(())
}
