//! Tools for all checks: a device, work for it, and data.

use samite_core::{
    BufferType, CancelToken, DType, Device, Error, Graph, Layout, PlacedGraph, Result, RunControl,
    Stream, TensorGroup, TensorId, TensorRef, Usage,
};
use std::fmt;
use std::sync::Arc;

/// Reason for the early end of a check.
pub(super) enum End {
    Skip(String),
    Fail(String),
}

impl From<Error> for End {
    fn from(error: Error) -> Self {
        End::Fail(error.to_string())
    }
}

pub(super) type Check = Result<(), End>;

/// A check with its name.
pub(super) type Named = (&'static str, fn(&Bench) -> Check);

pub(super) fn ensure(holds: bool, otherwise: impl fmt::Display) -> Check {
    if holds {
        Ok(())
    } else {
        Err(End::Fail(otherwise.to_string()))
    }
}

pub(super) fn skip<T>(why: &str) -> Result<T, End> {
    Err(End::Skip(why.into()))
}

/// Extent of the tensors of checks. Products of this extent are worthwhile for any device.
pub(super) const N: usize = 64;

pub(super) struct Bench {
    pub device: Arc<dyn Device>,
}

/// A graph of one node with memory on a device.
pub(super) struct SingleNodeGraph {
    pub graph: Graph,
    pub nodes: Vec<TensorId>,
    pub places: Vec<Option<TensorRef>>,
    pub workspace: Option<TensorRef>,
    pub x: TensorId,
    pub y: TensorId,
}

impl SingleNodeGraph {
    pub fn placed(&self) -> PlacedGraph<'_> {
        PlacedGraph {
            graph: &self.graph,
            nodes: &self.nodes,
            places: &self.places,
            workspace: self.workspace.as_ref(),
            compiled: None,
        }
    }

    pub fn place(&self, id: TensorId) -> &TensorRef {
        match &self.places[id.index()] {
            Some(place) => place,
            None => unreachable!("every tensor was given a place"),
        }
    }
}

pub(super) fn matrix() -> Result<Layout> {
    Layout::contiguous(DType::F32, [N, N, 1, 1])
}

pub(super) fn pattern(seed: u8) -> Vec<u8> {
    let value = |i: usize| ((i * 7 + usize::from(seed) * 13) % 19) as f32 - 9.0;
    (0..N * N).flat_map(|i| value(i).to_le_bytes()).collect()
}

pub(super) fn read(place: &TensorRef) -> Result<Vec<u8>> {
    let mut bytes = vec![0; place.layout().bytes()];
    place.read(0, &mut bytes)?;
    Ok(bytes)
}

/// Returns the control of a run without an observer.
pub(super) fn control(cancel: &CancelToken) -> RunControl<'_> {
    RunControl {
        cancel,
        observer: None,
    }
}

impl Bench {
    pub fn stream(&self) -> Result<Box<dyn Stream>> {
        Arc::clone(&self.device).open_stream()
    }

    pub fn tensor(&self, memory: &Arc<dyn BufferType>) -> Result<TensorRef> {
        let group = TensorGroup::allocate(memory, Usage::Any, &[("t", matrix()?)])?;
        Ok(group.tensors[0].tensor().clone())
    }

    /// Returns a product or a scaling, whichever the device supports: `y = x x^T` or `y = 2 x`.
    pub fn work(&self) -> Result<SingleNodeGraph, End> {
        for product in [false, true] {
            let mut graph = Graph::new();
            let x = graph.input("x", DType::F32, [N, N, 1, 1])?;
            let y = if product {
                graph.mul_mat(x, x)?
            } else {
                graph.scale(x, 2.0)?
            };
            graph.set_output(y);
            if !self.device.supports(graph.node(y)).is_yes() {
                continue;
            }
            let memory = self.device.buffer_type();
            let nodes = vec![y];
            let bytes = self.device.workspace(&graph, &nodes)?;
            let workspace = match bytes {
                0 => None,
                _ => {
                    let layout = Layout::contiguous(DType::I8, [bytes, 1, 1, 1])?;
                    let group =
                        TensorGroup::allocate(&memory, Usage::Compute, &[("workspace", layout)])?;
                    Some(group.tensors[0].tensor().clone())
                }
            };
            let places = vec![Some(self.tensor(&memory)?), Some(self.tensor(&memory)?)];
            return Ok(SingleNodeGraph {
                graph,
                nodes,
                places,
                workspace,
                x,
                y,
            });
        }
        skip("it supports neither scaling nor products of F32 matrices")
    }

    /// Returns the device's result for an input.
    pub fn result_of(&self, input: &[u8]) -> Result<Vec<u8>, End> {
        let work = self.work()?;
        let mut stream = self.stream()?;
        let mut prepared = stream.prepare(work.placed())?;
        stream.write(work.place(work.x), 0, input)?;
        stream.run(&mut *prepared, control(&CancelToken::new()))?;
        let mut out = vec![0; input.len()];
        stream.read(work.place(work.y), 0, &mut out)?;
        Ok(out)
    }
}
