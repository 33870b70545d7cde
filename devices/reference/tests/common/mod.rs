//! Test harness: a graph with its inputs, run on a device.
#![allow(dead_code)] // not every test file uses all of it

use samite_core::{
    CancelToken, DType, Device, Graph, PlacedGraph, Result, RunControl, Shape, Slot, TensorGroup,
    TensorId, TensorRef, Usage, shape,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use std::sync::Arc;

pub fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn i32s(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn as_f32s(bytes: &[u8]) -> Vec<f32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect()
}

pub fn as_i32s(bytes: &[u8]) -> Vec<i32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|b| i32::from_le_bytes(*b))
        .collect()
}

/// A graph under construction, with the bytes of its inputs.
#[derive(Default)]
pub struct Case {
    pub graph: Graph,
    pub inputs: Vec<(TensorId, Vec<u8>)>,
}

impl Case {
    pub fn raw(&mut self, name: &str, dtype: DType, extents: &[usize], bytes: Vec<u8>) -> TensorId {
        let id = self
            .graph
            .input(name, dtype, shape(extents).unwrap())
            .unwrap();
        assert_eq!(self.graph.tensor(id).layout.bytes(), bytes.len(), "{name}");
        self.inputs.push((id, bytes));
        id
    }

    pub fn f32(&mut self, extents: &[usize], values: &[f32]) -> TensorId {
        self.raw("x", DType::F32, extents, f32s(values))
    }

    pub fn i32(&mut self, extents: &[usize], values: &[i32]) -> TensorId {
        self.raw("ids", DType::I32, extents, i32s(values))
    }

    /// Adds an input with the values 0, 1, 2, …
    pub fn counting(&mut self, shape: Shape) -> TensorId {
        let count: usize = shape.iter().product();
        self.f32(&shape, &(0..count).map(|i| i as f32).collect::<Vec<_>>())
    }

    /// Allocates memory for all tensors, views included, and writes the inputs.
    pub fn place(&self, device: &Arc<ReferenceDevice>) -> Result<Vec<Option<TensorRef>>> {
        let owners: Vec<_> = self
            .graph
            .ids()
            .filter(|&id| self.graph.memory_of(id) == id)
            .collect();
        let layouts: Vec<_> = owners
            .iter()
            .map(|&id| ("", self.graph.tensor(id).layout))
            .collect();
        let group = TensorGroup::allocate(&device.buffer_type(), Usage::Compute, &layouts)?;
        let mut places: Vec<Option<TensorRef>> = vec![None; self.graph.len()];
        for (id, tensor) in owners.iter().zip(&group.tensors) {
            places[id.index()] = Some(tensor.tensor().clone());
        }
        for id in self.graph.ids() {
            let tensor = self.graph.tensor(id);
            if let Some(view) = tensor.view {
                let base = places[view.base.index()].clone().unwrap();
                places[id.index()] = Some(TensorRef {
                    slot: Slot {
                        offset: base.slot.offset + view.offset,
                        layout: tensor.layout,
                    },
                    buffer: base.buffer,
                });
            }
        }
        for (id, bytes) in &self.inputs {
            places[id.index()].as_ref().unwrap().write(0, bytes)?;
        }
        Ok(places)
    }

    pub fn run_on(&self, device: &Arc<ReferenceDevice>, output: TensorId) -> Result<Vec<u8>> {
        let places = self.place(device)?;
        let nodes: Vec<_> = self.graph.ids().collect();
        let mut stream = Arc::clone(device).open_stream()?;
        let placed = PlacedGraph {
            graph: &self.graph,
            nodes: &nodes,
            places: &places,
            workspace: None,
            compiled: None,
        };
        let mut prepared = stream.prepare(placed)?;
        let control = RunControl {
            cancel: &CancelToken::new(),
            observer: None,
        };
        stream.run(&mut *prepared, control)?;
        let place = places[output.index()].as_ref().unwrap();
        let mut out = vec![0; place.layout().bytes()];
        stream.read(place, 0, &mut out)?;
        Ok(out)
    }

    pub fn run(&self, output: TensorId) -> Vec<u8> {
        let device = ReferenceDevice::new(ReferenceOptions::default());
        self.run_on(&device, output).unwrap()
    }

    pub fn error(&self, output: TensorId) -> String {
        let device = ReferenceDevice::new(ReferenceOptions::default());
        self.run_on(&device, output).unwrap_err().to_string()
    }

    #[track_caller]
    pub fn expect(&self, output: TensorId, expected: &[f32]) {
        let values = as_f32s(&self.run(output));
        assert_eq!(values.len(), expected.len(), "{values:?}");
        for (value, expected) in values.iter().zip(expected) {
            let close = (value - expected).abs() <= 1e-5 * expected.abs().max(1.0);
            assert!(
                close || value == expected,
                "{values:?} instead of {expected:?}"
            );
        }
    }
}
