//! Counted runs: a number in a device's memory shows if each run was done exactly once.

use samite_core::{
    CancelToken, DType, Device, Graph, Layout, PlacedGraph, Prepared, Result, RunControl, Stream,
    TensorGroup, TensorRef, Usage,
};
use std::sync::Arc;

/// A number in a device's memory, and a graph that adds to it.
pub struct Counter {
    /// Stream that runs the graph.
    pub stream: Box<dyn Stream>,
    prepared: Box<dyn Prepared>,
    count: TensorRef,
    step: TensorRef,
}

impl Counter {
    /// Operations that the device must have.
    pub const OPS: [&'static str; 2] = ["add", "cpy"];

    /// Creates a counter, which is 0 if new memory is zeroed.
    ///
    /// # Errors
    /// The device's error.
    pub fn new(device: &Arc<dyn Device>) -> Result<Self> {
        let floats = Layout::contiguous(DType::F32, [4, 1, 1, 1])?;
        let names = [("count", floats), ("step", floats), ("sum", floats)];
        let group = TensorGroup::allocate(&device.buffer_type(), Usage::Any, &names)?;
        let [count, step, sum] = [0, 1, 2].map(|i| group.tensors[i].tensor().clone());
        let mut g = Graph::new();
        let c = g.stored(&group.tensors[0])?;
        let s = g.input("step", DType::F32, [4, 1, 1, 1])?;
        let added = g.add(c, s)?;
        let written = g.cpy(added, c)?;
        let places = [
            Some(count.clone()),
            Some(step.clone()),
            Some(sum),
            Some(count.clone()),
        ];
        let mut stream = Arc::clone(device).open_stream()?;
        let prepared = stream.prepare(PlacedGraph {
            graph: &g,
            nodes: &[added, written],
            places: &places,
            workspace: None,
            compiled: None,
        })?;
        Ok(Counter {
            stream,
            prepared,
            count,
            step,
        })
    }

    /// Adds a number, without waiting.
    ///
    /// # Errors
    /// The device's error.
    pub fn run(&mut self, value: f32, cancel: &CancelToken) -> Result<()> {
        self.stream
            .write(&self.step, 0, &value.to_le_bytes().repeat(4))?;
        let control = RunControl {
            cancel,
            observer: None,
        };
        self.stream.run(&mut *self.prepared, control)
    }

    /// Reads the number. The bytes are valid once the stream is synchronised.
    ///
    /// # Errors
    /// The device's error.
    pub fn read(&mut self, out: &mut [u8; 4]) -> Result<()> {
        self.stream.read(&self.count, 0, out)
    }

    /// Adds a number and returns the new sum.
    ///
    /// # Errors
    /// The device's error.
    pub fn add(&mut self, value: f32) -> Result<f32> {
        self.run(value, &CancelToken::new())?;
        let mut out = [0; 4];
        self.read(&mut out)?;
        Ok(f32::from_le_bytes(out))
    }
}
