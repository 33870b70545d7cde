//! Nodes that are computed together or separately, for tests of fused kernels.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

use crate::{Recipe, Rng, nmse};
use samite_core::{
    CancelToken, DType, Device, Graph, Layout, PlacedGraph, RunControl, TensorGroup, TensorId,
    TensorRef, Usage,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use std::sync::Arc;

/// Nodes that are computed together or separately.
#[derive(Default)]
pub struct FusionCase {
    /// The graph.
    pub graph: Graph,
    /// Inputs and their contents.
    pub inputs: Vec<(TensorId, Contents)>,
    /// Nodes in order.
    pub nodes: Vec<TensorId>,
    /// Nodes that may share the memory of their first source.
    pub in_place: Vec<TensorId>,
    /// Weights, which lie in the device's special memory if it has one.
    pub weights: Vec<TensorId>,
    /// Results that are compared.
    pub results: Vec<TensorId>,
}

/// Contents of an input.
pub enum Contents {
    /// Random contents.
    Recipe(Recipe),
    /// These bytes.
    Bytes(Vec<u8>),
}

impl FusionCase {
    /// Adds an input.
    ///
    /// # Panics
    /// If the graph refuses its layout.
    pub fn input(&mut self, dtype: DType, shape: [usize; 4], recipe: Recipe) -> TensorId {
        let input = self.graph.input("", dtype, shape).unwrap();
        self.inputs.push((input, Contents::Recipe(recipe)));
        input
    }

    /// Adds a node to the list of nodes.
    pub fn node(&mut self, id: TensorId) -> TensorId {
        self.nodes.push(id);
        id
    }

    /// Returns the largest error of the results `found`, relative to the reference.
    ///
    /// # Panics
    /// If the reference fails.
    pub fn error(&self, seed: u64, found: &[Vec<u8>]) -> f64 {
        let reference: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions::default());
        let expected = self.run(&reference, seed, false, &[&self.nodes]);
        self.difference(found, &expected)
    }

    /// Returns the largest difference between two sets of results, an NMSE.
    ///
    /// # Panics
    /// If results cannot be decoded.
    pub fn difference(&self, found: &[Vec<u8>], expected: &[Vec<u8>]) -> f64 {
        let errors = self.results.iter().zip(found).zip(expected);
        let errors = errors.map(|((&id, found), expected)| {
            let layout = self.graph.tensor(id).layout;
            nmse(&floats(&layout, found), &floats(&layout, expected))
        });
        // NaN must not count as a small error.
        errors.fold(0.0, |most, error| if error <= most { most } else { error })
    }

    /// Allocates memory for every tensor; nodes that `in_place` allows share that of their source.
    fn places(&self, device: &Arc<dyn Device>, in_place: bool) -> Vec<Option<TensorRef>> {
        let mut places: Vec<Option<TensorRef>> = Vec::new();
        for id in self.graph.ids() {
            let tensor = self.graph.tensor(id);
            let base = tensor.view.map(|view| (view.base, view.offset));
            let shared = match base {
                Some(shared) => Some(shared),
                None if in_place && self.in_place.contains(&id) => {
                    tensor.sources[0].map(|source| (source, 0))
                }
                None => None,
            };
            let place = match shared {
                Some((base, offset)) => {
                    let mut place = places[base.index()].clone().unwrap();
                    place.slot.offset += offset;
                    place.slot.layout = tensor.layout;
                    place
                }
                None => {
                    let wanted = [("", tensor.layout)];
                    let special = device.extra_buffer_types().into_iter().next();
                    let special = special.filter(|_| self.weights.contains(&id));
                    let memory = special.unwrap_or_else(|| device.buffer_type());
                    let group = TensorGroup::allocate(&memory, Usage::Compute, &wanted).unwrap();
                    group.tensors[0].tensor().clone()
                }
            };
            places.push(Some(place));
        }
        places
    }

    /// Returns the bytes of all results, with these groups of nodes prepared together.
    ///
    /// # Panics
    /// If the device fails.
    pub fn run(
        &self,
        device: &Arc<dyn Device>,
        seed: u64,
        in_place: bool,
        parts: &[&[TensorId]],
    ) -> Vec<Vec<u8>> {
        let places = self.places(device, in_place);
        let place = |id: TensorId| places[id.index()].as_ref().unwrap();
        let mut rng = Rng::new(seed);
        let mut stream = Arc::clone(device).open_stream().unwrap();
        for (id, fill) in &self.inputs {
            let layout = self.graph.tensor(*id).layout;
            let bytes = match fill {
                Contents::Recipe(recipe) => recipe.bytes(&layout, &mut rng).unwrap(),
                Contents::Bytes(bytes) => bytes.clone(),
            };
            place(*id).write(0, &bytes).unwrap();
        }
        for nodes in parts {
            let bytes = device.workspace(&self.graph, nodes).unwrap().max(4);
            let layout = Layout::contiguous(DType::I8, [bytes, 1, 1, 1]).unwrap();
            let memory = device.buffer_type();
            let scratch = TensorGroup::allocate(&memory, Usage::Compute, &[("", layout)]).unwrap();
            let work = PlacedGraph {
                graph: &self.graph,
                nodes,
                places: &places,
                workspace: Some(scratch.tensors[0].tensor()),
                compiled: None,
            };
            let mut prepared = stream.prepare(work).unwrap();
            let cancel = CancelToken::new();
            let control = RunControl {
                cancel: &cancel,
                observer: None,
            };
            stream.run(&mut *prepared, control).unwrap();
            stream.synchronize().unwrap();
        }
        let read = |&id: &TensorId| {
            let mut bytes = vec![0; self.graph.tensor(id).layout.bytes()];
            stream.read(place(id), 0, &mut bytes).unwrap();
            bytes
        };
        self.results.iter().map(read).collect()
    }
}

fn floats(layout: &Layout, bytes: &[u8]) -> Vec<f64> {
    let mut floats = vec![0.0f32; layout.shape().iter().product()];
    samite_quant::decode_row(layout.dtype(), bytes, &mut floats).unwrap();
    floats.into_iter().map(f64::from).collect()
}
