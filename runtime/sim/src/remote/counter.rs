//! Runs that must be done exactly once: each adds one to numbers in the server's memory.

use samite_core::{
    CancelToken, DType, Device, Graph, Layout, Placed, Prepared, Result, RunControl, Stream,
    TensorGroup, TensorRef, Usage,
};
use std::sync::Arc;

pub(super) struct Counter {
    prepared: Box<dyn Prepared>,
    stream: Box<dyn Stream>,
    count: TensorRef,
    step: TensorRef,
    /// What has been counted.
    expected: f32,
    /// A run failed, so that nobody knows.
    is_unknown: bool,
}

impl Counter {
    /// Operations that it needs.
    pub const OPS: [&'static str; 2] = ["add", "cpy"];

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
        let prepared = stream.prepare(Placed {
            graph: &g,
            nodes: &[added, written],
            places: &places,
            workspace: None,
            compiled: None,
        })?;
        Ok(Counter {
            prepared,
            stream,
            count,
            step,
            expected: 0.0,
            is_unknown: false,
        })
    }

    /// Runs so many times, and reads what came of it.
    pub fn count(&mut self, times: usize) -> std::result::Result<(), String> {
        let counted = self.runs(times);
        if counted.is_err() {
            self.is_unknown = true;
        }
        self.expected += (0..times).map(|time| (time + 1) as f32).sum::<f32>();
        match counted.map_err(|error| error.to_string())? {
            _ if self.is_unknown => Ok(()),
            count if count == self.expected => Ok(()),
            count => Err(format!(
                "{count} was counted, and {} is right: not every run was done once",
                self.expected
            )),
        }
    }

    fn runs(&mut self, times: usize) -> Result<f32> {
        let cancel = CancelToken::new();
        for time in 0..times {
            let step = (time + 1) as f32;
            self.stream
                .write(&self.step, 0, &step.to_le_bytes().repeat(4))?;
            let control = RunControl {
                cancel: &cancel,
                observer: None,
            };
            self.stream.run(&mut *self.prepared, control)?;
        }
        let mut out = [0; 4];
        self.stream.read(&self.count, 0, &mut out)?;
        self.stream.synchronize()?;
        Ok(f32::from_le_bytes(out))
    }
}
