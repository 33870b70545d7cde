//! A graph with known inputs, run on a device.

use samite_core::{
    CancelToken, DType, Device, Graph, Layout, PlacedGraph, RunControl, Shape, TensorGroup,
    TensorId, Usage,
};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_quant::RowReader;
use samite_reference::{ReferenceDevice, ReferenceOptions};
use serde_json::Value;
use std::sync::Arc;

/// Parses a list of numbers. Infinite ones are text: `"inf"` and `"-inf"`.
pub fn numbers(value: &Value) -> Vec<f64> {
    let parse = |x: &Value| match x.as_str() {
        Some(text) => text.parse::<f64>().unwrap(),
        None => x.as_f64().unwrap(),
    };
    value.as_array().unwrap().iter().map(parse).collect()
}

/// Returns the reference, and the CPU with one and with several threads.
pub fn devices() -> Vec<Arc<dyn Device>> {
    let mut devices: Vec<Arc<dyn Device>> =
        vec![ReferenceDevice::new(ReferenceOptions::named("reference"))];
    for threads in [1, 3] {
        devices.push(CpuDevice::new(CpuOptions::default().with_threads(threads)));
    }
    devices
}

/// A graph whose F32 inputs are cast to the types that its nodes need.
#[derive(Default)]
pub struct Subject {
    pub graph: Graph,
    inputs: Vec<(TensorId, Vec<f64>)>,
}

impl Subject {
    /// Adds an input. Returns `None` for a null.
    pub fn input(&mut self, dtype: DType, shape: Shape, values: &Value) -> Option<TensorId> {
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

    /// Runs the graph with each tensor in its own memory, and returns the values of the last node.
    pub fn run(&self, device: &Arc<dyn Device>) -> Vec<f64> {
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
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|&x| (x as f32).to_le_bytes())
                .collect();
            let place = places[id.index()].as_ref().unwrap();
            place.write(0, &bytes).unwrap();
        }
        let bytes = device.workspace(graph, &nodes).unwrap();
        let workspace = allocate(Layout::contiguous(DType::I8, [bytes, 1, 1, 1]).unwrap());
        let mut stream = Arc::clone(device).open_stream().unwrap();
        let work = PlacedGraph {
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
        let layout = last.layout();
        let mut out = vec![0; layout.bytes()];
        last.read(0, &mut out).unwrap();
        let mut reader = RowReader::default();
        (0..layout.rows())
            .flat_map(|row| reader.read(layout, &out, row).unwrap().to_vec())
            .collect()
    }
}
