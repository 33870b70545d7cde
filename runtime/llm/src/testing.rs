//! A fake device for tests of placement: it has a name, a kind and memory, but computes nothing.

use samite_core::{
    BufferType, Device, DeviceKind, Error, Node, Result, Stream, Support, host_buffer_type,
};
use std::any::Any;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct FakeDevice {
    name: &'static str,
    kind: DeviceKind,
    pub(crate) extra: Vec<Arc<dyn BufferType>>,
    /// True if it supports nodes.
    pub(crate) willing: bool,
}

impl FakeDevice {
    pub(crate) fn device(name: &'static str, kind: DeviceKind) -> Arc<dyn Device> {
        Arc::new(Self::with(name, kind, Vec::new(), true))
    }

    pub(crate) fn with(
        name: &'static str,
        kind: DeviceKind,
        extra: Vec<Arc<dyn BufferType>>,
        willing: bool,
    ) -> Self {
        FakeDevice {
            name,
            kind,
            extra,
            willing,
        }
    }
}

impl Device for FakeDevice {
    fn name(&self) -> &str {
        self.name
    }

    fn description(&self) -> String {
        "for tests".to_owned()
    }

    fn kind(&self) -> DeviceKind {
        self.kind
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        host_buffer_type()
    }

    fn extra_buffer_types(&self) -> Vec<Arc<dyn BufferType>> {
        self.extra.clone()
    }

    fn supports(&self, _node: Node<'_>) -> Support {
        Support::when(self.willing, "it is not willing")
    }

    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        buffer_type.is_host()
    }

    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>> {
        Err(Error::unsupported(self.name, "streams", "it is for tests"))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
