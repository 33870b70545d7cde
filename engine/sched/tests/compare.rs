//! Two devices in lockstep.
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests do

mod common;

use common::*;
use samite_core::{DType, Error, Graph, Layout, TensorGroup, Usage};
use samite_sched::Watch;
use samite_sched::compare::{Difference, compare_devices, copy_graph, difference};
use std::sync::Arc;

fn difference_of(values: &[f32], reference: &[f32]) -> Difference {
    let layout = f32s(&[values.len()]);
    difference([(&layout, &bytes(values)), (&layout, &bytes(reference))]).unwrap()
}

#[test]
fn devices_are_compared_node_by_node() {
    let (a, b) = (fast(), device("b", |_| {}));
    let (graph, x, _) = layers(&[&a, &a]);
    let mut nodes = Vec::new();
    let inputs = [(x, bytes(&[0.3; 16]))];
    compare_devices(&graph, [&[a], &[b]], &inputs, |pair| {
        assert_eq!(pair.number, nodes.len());
        assert_eq!((pair.difference.nmse, pair.difference.largest), (0.0, 0.0));
        assert_eq!(pair.devices.map(|device| device.name()), ["fast", "b"]);
        assert_eq!(pair.nodes[0].id(), pair.nodes[1].id());
        nodes.push(pair.nodes[0].id().index());
        Ok(Watch::Continue)
    })
    .unwrap();
    assert_eq!(nodes, [2, 3, 4, 5, 7, 8, 9, 10]);
}

#[test]
fn asynchronous_and_reordering_devices_stay_in_lockstep() {
    let turning = Special::optimizing(fast(), |_, nodes| {
        nodes.swap(0, 1);
        Vec::new()
    });
    let slow = device("slow", |o| (o.asynchronous, o.events) = (true, true));
    let mut graph = Graph::new();
    let x = graph.input("x", DType::F32, [8, 1, 1, 1]).unwrap();
    let (a, b) = (graph.sqr(x).unwrap(), graph.scale(x, 3.0).unwrap());
    let sum = graph.add(a, b).unwrap();
    graph.set_output(sum);
    let mut seen = Vec::new();
    let inputs = [(x, bytes(&[2.0; 8]))];
    compare_devices(&graph, [&[turning], &[slow]], &inputs, |pair| {
        assert_eq!(pair.difference.nmse, 0.0);
        seen.push(pair.nodes[1].id());
        Ok(Watch::Continue)
    })
    .unwrap();
    assert_eq!(seen, [a, b, sum]);
}

/// Checks that a watcher may stop at the first difference, and that otherwise later nodes are
/// compared on the same operands.
#[test]
fn one_wrong_node_does_not_affect_later_comparisons() {
    for stops in [false, true] {
        let (a, b) = (fast(), device("b", |_| {}));
        let wrong = samite_testing::wrong_device(&b, |node| node.op().name() == "mul_mat");
        let (graph, x, _) = layers(&[&a, &a]);
        let mut wrong_nodes = Vec::new();
        let inputs = [(x, bytes(&[0.3; 16]))];
        compare_devices(&graph, [&[wrong], &[a]], &inputs, |pair| {
            if pair.difference.exceeds(5e-4) {
                wrong_nodes.push(pair.nodes[0].id().index());
                if stops {
                    return Ok(Watch::Stop);
                }
            }
            Ok(Watch::Continue)
        })
        .unwrap();
        let expected: &[usize] = if stops { &[3] } else { &[3, 8] };
        assert_eq!(wrong_nodes, expected);
    }
}

#[test]
fn unsupported_nodes_fall_back_during_comparison() {
    let picky = device("picky", |o| {
        o.without_ops = ["add", "rms_norm", "silu"].map(str::to_owned).to_vec()
    });
    let (host, whole) = (host(), fast());
    let (graph, x, _) = layers(&[&whole, &whole]);
    let mut devices = Vec::new();
    let inputs = [(x, bytes(&[0.3; 16]))];
    compare_devices(&graph, [&[picky, host], &[whole]], &inputs, |pair| {
        assert_eq!(pair.difference.nmse, 0.0);
        devices.push(pair.devices[0].name().to_owned());
        Ok(Watch::Continue)
    })
    .unwrap();
    let layer = ["host", "picky", "host", "host"];
    assert_eq!(devices, [layer, layer].concat());
}

#[test]
fn a_cache_with_several_leaves_is_copied_once() {
    let (a, b) = (fast(), device("b", |_| {}));
    let cache = TensorGroup::allocate(&a.buffer_type(), Usage::Any, &[("cache", f32s(&[4, 2]))]);
    let cache = Arc::clone(&cache.unwrap().tensors[0]);
    let mut graph = Graph::new();
    let row = graph.input("row", DType::F32, [4, 1, 1, 1]).unwrap();
    let at = graph.input("at", DType::I32, [1, 1, 1, 1]).unwrap();
    let [written, read] = [0, 1].map(|_| graph.stored(&cache).unwrap());
    graph.set_rows(row, at, written).unwrap();
    let sum = graph.sum_rows(read).unwrap();
    graph.set_output(sum);
    let copy = copy_graph(&graph, &*b).unwrap();
    assert_eq!(copy.stored.tensors.len(), 1);
    let inputs = [
        (row, bytes(&[1.0, 2.0, 3.0, 4.0])),
        (at, 1i32.to_le_bytes().to_vec()),
    ];
    let mut last = None;
    let host = host();
    // The second device has no row to read if its leaves are separate: then both sums are 0, or
    // differ.
    compare_devices(&graph, [&[a], &[b]], &inputs, |pair| {
        assert_eq!(pair.difference.nmse, 0.0, "{:?}", pair.nodes[0]);
        last = Some(pair.nodes[0].id());
        Ok(Watch::Continue)
    })
    .unwrap();
    assert_eq!(last, Some(sum));
    // The watched values of the run show it.
    let mut scheduler = samite_sched::Scheduler::new(vec![host], Default::default()).unwrap();
    let copy = copy_graph(&graph, &**scheduler.devices().get(0)).unwrap();
    scheduler.load(&copy.graph).unwrap();
    for (id, bytes) in &inputs {
        scheduler.write(*id, 0, bytes).unwrap();
    }
    scheduler.run(&samite_core::CancelToken::new()).unwrap();
    assert_eq!(common::read(&mut scheduler, sum, 2).unwrap(), [0.0, 10.0]);
}

#[test]
fn partially_shared_memory_is_refused() {
    let host = host();
    let buffer = host.buffer_type().allocate(64, Usage::Any).unwrap();
    let mut graph = Graph::new();
    let [x, y] = [("x", 0), ("y", 16)].map(|(name, offset)| {
        let buffer = Arc::clone(&buffer);
        let stored = samite_core::StoredTensor::new(name, buffer, offset, f32s(&[8]));
        graph.stored(&stored.unwrap()).unwrap()
    });
    graph.add(x, y).unwrap();
    let error = copy_graph(&graph, &*host).unwrap_err().to_string();
    assert!(error.contains("'x' and 'y' share a part"), "{error}");
}

#[test]
fn differences_report_size_and_position() {
    let same = difference_of(
        &[1.0, f32::NAN, f32::INFINITY],
        &[1.0, f32::NAN, f32::INFINITY],
    );
    assert_eq!((same.nmse, same.largest), (0.0, 0.0));
    assert!(!same.exceeds(0.0));
    let one = difference_of(&[1.0, 2.0, 3.0], &[1.0, 2.5, 3.0]);
    assert_eq!(
        (one.largest, one.at, one.values),
        (0.5, [1, 0, 0, 0], [2.0, 2.5])
    );
    assert!((one.nmse - 0.25 / 16.25).abs() < 1e-12);
    assert!(one.exceeds(0.01) && !one.exceeds(0.016));
    for (a, b) in [
        (f32::NAN, 1.0),
        (1.0, f32::NAN),
        (f32::INFINITY, f32::NEG_INFINITY),
    ] {
        let broken = difference_of(&[5.0, a], &[5.0, b]);
        assert!(
            broken.exceeds(1e9) && broken.at == [1, 0, 0, 0],
            "{broken:?}"
        );
    }
    // NaN is meaningless if there is nothing else.
    assert!(difference_of(&[f32::NAN; 3], &[f32::NAN; 3]).all_nan);
    assert!(!same.all_nan && !difference_of(&[f32::NAN; 2], &[f32::NAN, 1.0]).all_nan);
    // Squares beyond float64 do not hide it.
    let layout = Layout::contiguous(DType::F64, [2, 1, 1, 1]).unwrap();
    let [a, b] = [[f64::NAN, 1e200], [1.0, 1e200]].map(|v| v.map(f64::to_le_bytes).concat());
    let huge = difference([(&layout, &a), (&layout, &b)]).unwrap();
    assert!(huge.exceeds(1e9) && huge.nmse == f64::INFINITY, "{huge:?}");
    // There is nothing to compare with.
    assert!(difference_of(&[1e-30], &[0.0]).exceeds(1.0));
    // One element of many, at a position in three dimensions.
    let layout = Layout::contiguous(DType::F32, [64, 8, 4, 1]).unwrap();
    let reference = vec![1.0f32; 2048];
    let mut values = reference.clone();
    values[64 * (8 * 2 + 5) + 63] = 0.5;
    let [values, reference] = [values, reference].map(|values| bytes(&values));
    let found = difference([(&layout, &values), (&layout, &reference)]).unwrap();
    assert_eq!(found.at, [63, 5, 2, 0]);
    assert!(found.nmse < 5e-4 && found.exceeds(5e-4), "{found:?}");
    let other = f32s(&[2048]);
    let error = difference([(&layout, &values), (&other, &reference)]).unwrap_err();
    assert!(matches!(error, Error::Shape(_)), "{error}");
}
