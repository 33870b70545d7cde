//! Attention and softmax with sinks, soft caps and ALiBi against numbers that are made from the formulas, by `fixtures/attention.py`: the
//! suite alone would not notice what the reference has wrong.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use samite_core::{
    CancelToken, DType, Device, Graph, Op, Placed, Precision, RunControl, Shape, TensorGroup,
    TensorId, Usage,
};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_testing::nmse;
use serde_json::Value;
use std::sync::Arc;

/// All numbers of a list, of which some are minus infinity.
fn numbers(value: &Value) -> Vec<f32> {
    let list = value.as_array().unwrap().iter();
    list.map(|x| x.as_f64().map_or(f32::NEG_INFINITY, |x| x as f32))
        .collect()
}

fn size(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn float(value: &Value) -> f32 {
    value.as_f64().unwrap() as f32
}

/// A graph with F32 inputs, converted where another type is asked for.
#[derive(Default)]
struct Subject {
    graph: Graph,
    inputs: Vec<(TensorId, Vec<f32>)>,
}

impl Subject {
    fn input(&mut self, dtype: DType, shape: Shape, values: &Value) -> Option<TensorId> {
        if values.is_null() {
            return None;
        }
        let id = self.graph.input("x", DType::F32, shape).unwrap();
        self.inputs.push((id, numbers(values)));
        Some(match dtype {
            DType::F32 => id,
            other => self.graph.cast(id, other).unwrap(),
        })
    }

    /// Runs the graph, every tensor in memory of its own, and reads its last node.
    fn run(&self, device: &Arc<dyn Device>) -> Vec<f32> {
        let graph = &self.graph;
        let nodes: Vec<_> = graph.ids().collect();
        let allocate = |layout| {
            let memory = device.buffer_type();
            let group = TensorGroup::allocate(&memory, Usage::Compute, &[("", layout)]).unwrap();
            group.tensors[0].tensor().clone()
        };
        let places: Vec<_> = nodes
            .iter()
            .map(|&id| Some(allocate(graph.tensor(id).layout)))
            .collect();
        for (id, values) in &self.inputs {
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            let place = places[id.index()].as_ref().unwrap();
            place.write(0, &bytes).unwrap();
        }
        let bytes = device.workspace(graph, &nodes).unwrap();
        let workspace =
            allocate(samite_core::Layout::contiguous(DType::I8, [bytes, 1, 1, 1]).unwrap());
        let mut stream = Arc::clone(device).open_stream().unwrap();
        let work = Placed {
            graph,
            nodes: &nodes,
            places: &places,
            workspace: Some(&workspace),
            compiled: None,
        };
        let mut prepared = stream.prepare(work).unwrap();
        let control = RunControl {
            cancel: &CancelToken::new(),
            observer: None,
        };
        stream.run(&mut *prepared, control).unwrap();
        stream.synchronize().unwrap();
        let last = places.last().unwrap().as_ref().unwrap();
        let mut out = vec![0; last.layout().bytes()];
        last.read(0, &mut out).unwrap();
        let values = out.as_chunks().0;
        values.iter().map(|x| f32::from_le_bytes(*x)).collect()
    }
}

/// The reference in float64, the reference as it compares devices, and the CPU with one and several threads.
fn devices() -> Vec<Arc<dyn Device>> {
    let mut devices: Vec<Arc<dyn Device>> =
        vec![ReferenceDevice::new(ReferenceOptions::named("reference"))];
    for threads in [1, 3] {
        devices.push(CpuDevice::new(CpuOptions::default().with_threads(threads)));
    }
    devices
}

#[track_caller]
fn close(subject: &Subject, case: &Value, limit: f64, what: &str) {
    let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let expected = wide(&numbers(&case["result"]));
    for device in devices() {
        let got = wide(&subject.run(&device));
        let error = nmse(&got, &expected);
        let name = device.name();
        assert!(error <= limit, "{what} on {name}: NMSE {error:e}");
    }
}

fn fixture(name: &str) -> Vec<Value> {
    let all: Value = serde_json::from_str(include_str!("fixtures/attention.json")).unwrap();
    all[name].as_array().unwrap().clone()
}

#[test]
fn attention_with_sinks_soft_caps_and_alibi() {
    for (number, case) in fixture("attention").iter().enumerate() {
        // Keys and values are exact in all types; devices may round to these what they compute.
        for (dtype, limit) in [(DType::F32, 1e-9), (DType::F16, 1e-6), (DType::BF16, 5e-5)] {
            let mut subject = Subject::default();
            let [heads, kv_heads] = [0, 1].map(|i| size(&case["heads"][i]));
            let [tokens, keys, n] = ["tokens", "keys", "size"].map(|key| size(&case[key]));
            let q = subject.input(DType::F32, [n, tokens, heads, 1], &case["q"]);
            let k = subject.input(dtype, [n, keys, kv_heads, 1], &case["k"]);
            let v = subject.input(dtype, [n, keys, kv_heads, 1], &case["v"]);
            let mask = subject.input(DType::F16, [keys, tokens, 1, 1], &case["mask"]);
            let sinks = subject.input(DType::F32, [heads, 1, 1, 1], &case["sinks"]);
            let op = Op::FlashAttn {
                scale: float(&case["scale"]),
                max_bias: float(&case["max_bias"]),
                softcap: float(&case["softcap"]),
                precision: Precision::F32,
            };
            subject.graph.push(op, &[q, k, v, mask, sinks]).unwrap();
            close(&subject, case, limit, &format!("case {number}, {dtype}"));
        }
    }
}

#[test]
fn soft_max_with_sinks_and_alibi() {
    for (number, case) in fixture("soft_max").iter().enumerate() {
        for mask in [DType::F32, DType::F16] {
            let mut subject = Subject::default();
            let [heads, rows, keys] = ["heads", "rows", "keys"].map(|key| size(&case[key]));
            let x = subject.input(DType::F32, [keys, rows, heads, 1], &case["x"]);
            let mask = subject.input(mask, [keys, rows, 1, 1], &case["mask"]);
            let sinks = subject.input(DType::F32, [heads, 1, 1, 1], &case["sinks"]);
            let op = Op::SoftMax {
                scale: float(&case["scale"]),
                max_bias: float(&case["max_bias"]),
            };
            subject.graph.push(op, &[x, mask, sinks]).unwrap();
            close(&subject, case, 1e-11, &format!("case {number}"));
        }
    }
}
