//! Devices that exist only in plans.

use crate::machines::AccessPath;
use samite_core::{
    Buffer, BufferType, Capabilities, Device, DeviceKind, DeviceWrapper, Error, Graph, HostMemory,
    KeepAlive, MemoryInfo, Node, Result, Stream, Support, TensorId, TensorInfo, Usage,
    WrappedDevice, same_buffer_type,
};
use std::sync::Arc;

/// Returns a device called `name` that plans like `like`, with `bytes` of memory that cannot be
/// used. A device that is reached `through` something has its own memory. Otherwise it works on
/// host memory.
pub fn plan_only(
    like: &Arc<dyn Device>,
    name: &str,
    bytes: usize,
    through: Option<AccessPath>,
) -> Arc<dyn Device> {
    let memory = |inner: Arc<dyn BufferType>, suffix: &str| -> Arc<dyn BufferType> {
        Arc::new(PlanOnlyMemory {
            name: format!("{name}{suffix}"),
            is_host: through.is_none() && inner.is_host(),
            inner,
        })
    };
    // All devices on host memory share it.
    let own = match through {
        Some(_) => memory(like.buffer_type(), ""),
        None => like.buffer_type(),
    };
    let extra = like.extra_buffer_types().into_iter();
    let extra = extra.map(|inner| memory(inner, "-packed"));
    WrappedDevice::device(PlanOnlyDevice {
        extra: extra.collect(),
        inner: Arc::clone(like),
        name: name.to_owned(),
        bytes,
        through,
        own,
    })
}

struct PlanOnlyDevice {
    inner: Arc<dyn Device>,
    name: String,
    bytes: usize,
    through: Option<AccessPath>,
    own: Arc<dyn BufferType>,
    extra: Vec<Arc<dyn BufferType>>,
}

impl DeviceWrapper for PlanOnlyDevice {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        "on paper".to_owned()
    }

    fn kind(&self) -> DeviceKind {
        match self.through {
            Some(_) => DeviceKind::Gpu,
            None => DeviceKind::Cpu,
        }
    }

    fn physical_id(&self) -> Option<String> {
        None
    }

    fn memory(&self) -> MemoryInfo {
        MemoryInfo {
            free: Some(self.bytes),
            total: Some(self.bytes),
        }
    }

    fn check_free(&self, bytes: usize, what: &str) -> Result<()> {
        if bytes <= self.bytes {
            Ok(())
        } else {
            Err(Error::OutOfMemory {
                device: self.name.as_str().into(),
                what: what.to_owned().into(),
                asked: bytes,
                free: Some(self.bytes),
            })
        }
    }

    fn capabilities(&self) -> Capabilities {
        let on_its_own = matches!(self.through, Some(AccessPath::Bus | AccessPath::Remote));
        Capabilities {
            asynchronous: on_its_own,
            events: on_its_own,
            ..Capabilities::default()
        }
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        Arc::clone(&self.own)
    }

    fn host_buffer_type(&self) -> Option<Arc<dyn BufferType>> {
        None
    }

    fn extra_buffer_types(&self) -> Vec<Arc<dyn BufferType>> {
        self.extra.clone()
    }

    fn import_alignment(&self) -> usize {
        match self.through {
            Some(_) => 0,
            None => self.inner.import_alignment(),
        }
    }

    fn import_host(&self, _memory: Arc<HostMemory>, _usage: Usage) -> Result<Arc<dyn Buffer>> {
        Err(self.no_data())
    }

    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        let mut mine = self.extra.iter().chain([&self.own]);
        mine.any(|mine| same_buffer_type(mine, buffer_type))
    }

    fn can_copy(&self, from: &Arc<dyn BufferType>, to: &Arc<dyn BufferType>) -> bool {
        let within = self.supports_buffer_type(from) && self.supports_buffer_type(to);
        let over_the_bus = (self.supports_buffer_type(from) && to.is_host())
            || (from.is_host() && self.supports_buffer_type(to));
        match self.through {
            Some(AccessPath::Bus) => within || over_the_bus,
            Some(AccessPath::Rpc | AccessPath::Remote) => within,
            None => self.inner.can_copy(from, to),
        }
    }

    fn wants_offload(&self, _node: Node<'_>) -> bool {
        false
    }

    fn optimize(&self, _graph: &Graph, _nodes: &mut [TensorId]) -> Vec<KeepAlive> {
        Vec::new()
    }

    fn open_stream(&self) -> Result<Box<dyn Stream>> {
        Err(self.no_data())
    }
}

impl PlanOnlyDevice {
    fn no_data(&self) -> Error {
        Error::invalid(format!("device '{}' is for plans only", self.name))
    }
}

/// Memory type with the sizes of another one, and no bytes.
#[derive(Debug)]
struct PlanOnlyMemory {
    name: String,
    inner: Arc<dyn BufferType>,
    is_host: bool,
}

impl BufferType for PlanOnlyMemory {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        self.inner.alignment()
    }

    fn max_size(&self) -> usize {
        self.inner.max_size()
    }

    fn alloc_size(&self, tensor: &TensorInfo<'_>) -> Result<usize> {
        self.inner.alloc_size(tensor)
    }

    fn is_host(&self) -> bool {
        self.is_host
    }

    fn accepts(&self, node: Node<'_>) -> Support {
        self.inner.accepts(node)
    }

    fn row_group(&self) -> Option<usize> {
        self.inner.row_group()
    }

    fn allocate(&self, _size: usize, _usage: Usage) -> Result<Arc<dyn Buffer>> {
        Err(Error::invalid(format!(
            "memory '{}' is for plans only",
            self.name
        )))
    }
}
