//! Simulated devices: the reference device's kernels on simulated time and memory.

use crate::fault::Fault;
use crate::memory::SimMemory;
use crate::stream::{SimEvent, SimStream};
use crate::world::World;
use samite_core::memory::HOST_ALIGNMENT;
use samite_core::{
    Buffer, BufferType, CancelToken, Capabilities, Compiled, DType, Device, DeviceKind, Error,
    Event, Graph, HostMemory, MemoryInfo, Node, Op, Result, Stream, Support, TensorId, Usage,
    host_buffer_type, same_buffer_type,
};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// Properties and capabilities of a simulated device.
#[derive(Clone, Debug)]
pub(crate) struct SimOptions {
    pub name: String,
    pub kind: DeviceKind,
    /// Streams run asynchronously.
    pub asynchronous: bool,
    pub events: bool,
    /// Streams copy between the device's memory and the host's.
    pub copies: bool,
    /// Streams copy between the device's memory and that of other devices.
    pub copies_to_peers: bool,
    /// Several streams run concurrently.
    pub streams: bool,
    pub compiles: bool,
    pub wants_offload: bool,
    pub import_host: bool,
    /// Works on host memory.
    pub host_memory: bool,
    pub alignment: usize,
    pub max_buffer_size: usize,
    pub memory_limit: usize,
    pub workspace: usize,
    /// Names of operations that the device rejects.
    pub without_ops: Vec<String>,
    /// Names of operations that the device claims to support but fails to run.
    pub lies_about: Vec<String>,
}

impl SimOptions {
    /// Returns a synchronous device that supports every operation and no optional feature.
    pub fn named(name: &str) -> Self {
        SimOptions {
            name: name.to_owned(),
            kind: DeviceKind::Gpu,
            asynchronous: false,
            events: false,
            copies: false,
            copies_to_peers: false,
            streams: false,
            compiles: false,
            wants_offload: false,
            import_host: false,
            host_memory: false,
            alignment: HOST_ALIGNMENT,
            max_buffer_size: isize::MAX as usize,
            memory_limit: usize::MAX,
            workspace: 0,
            without_ops: Vec::new(),
            lies_about: Vec::new(),
        }
    }
}

/// A simulated device.
#[derive(Debug)]
pub(crate) struct SimDevice {
    pub options: SimOptions,
    pub world: Arc<World>,
    /// Device number in the world.
    pub number: usize,
    /// Device that computes the results.
    pub kernels: Arc<dyn Device>,
    own_memory: Arc<SimMemory>,
    buffer_type: Arc<dyn BufferType>,
    /// Memory of other devices that this one can copy to and from.
    peers: Mutex<Vec<Arc<dyn BufferType>>>,
}

impl SimDevice {
    pub fn new(world: &Arc<World>, options: SimOptions) -> Arc<Self> {
        let can_be_lost = options.kind != DeviceKind::Cpu;
        let number = world.with(|state| state.add_device(&options.name, can_be_lost));
        let own_memory = SimMemory::new(world, number, &options);
        Arc::new(SimDevice {
            kernels: ReferenceDevice::new(ReferenceOptions {
                host_memory: true,
                ..ReferenceOptions::named(options.name.as_str())
            }),
            buffer_type: Arc::clone(&own_memory) as Arc<dyn BufferType>,
            own_memory,
            options,
            world: Arc::clone(world),
            number,
            peers: Mutex::new(Vec::new()),
        })
    }

    /// Allows copies to and from another device's memory.
    pub fn add_peer(&self, memory: Arc<dyn BufferType>) {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.push(memory);
    }

    fn call(&self, what: &str, fault: Fault) -> Result<()> {
        self.world.call(self.number, what, Some(fault))
    }

    /// Fails for operations that the device falsely claims to support.
    pub fn check_truth(&self, node: Node<'_>) -> Result<()> {
        let op = node.op().name();
        if self.options.lies_about.iter().any(|name| name == op) {
            Err(Error::unsupported(
                &self.options.name,
                op,
                "injected: it said that it does",
            ))
        } else {
            Ok(())
        }
    }
}

/// Kinds of nodes that were compiled; binding any others is a bug.
#[derive(Debug, PartialEq)]
pub(crate) struct SimCompiled {
    device: usize,
    kinds: Vec<(Op, DType, Vec<Option<DType>>)>,
}

impl SimCompiled {
    pub fn of<'g>(device: usize, nodes: impl Iterator<Item = Node<'g>>) -> Self {
        let kinds = nodes.map(|node| {
            let sources = 0..node.tensor().sources.len();
            let sources = sources.map(|index| node.source(index).map(Node::dtype));
            (*node.op(), node.dtype(), sources.collect())
        });
        SimCompiled {
            device,
            kinds: kinds.collect(),
        }
    }
}

impl Compiled for SimCompiled {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Device for SimDevice {
    fn name(&self) -> &str {
        &self.options.name
    }

    fn description(&self) -> String {
        "simulated".into()
    }

    fn kind(&self) -> DeviceKind {
        self.options.kind
    }

    fn memory(&self) -> MemoryInfo {
        MemoryInfo {
            free: Some(self.own_memory.free()),
            total: Some(self.options.memory_limit),
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            asynchronous: self.options.asynchronous,
            host_buffer: false,
            import_host: self.options.import_host,
            events: self.options.events,
            streams: self.options.streams,
        }
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        Arc::clone(&self.buffer_type)
    }

    fn import_host(&self, memory: Arc<HostMemory>, usage: Usage) -> Result<Arc<dyn Buffer>> {
        if !self.options.import_host {
            let (what, why) = ("import of host memory", "it was made without");
            return Err(Error::unsupported(&self.options.name, what, why));
        }
        self.own_memory.import(memory, usage)
    }

    fn supports(&self, node: Node<'_>) -> Support {
        let op = node.op();
        let refuses = self.options.without_ops.iter();
        if refuses.into_iter().any(|name| name == op.name()) && node.tensor().is_computed() {
            Support::no(format!("it was made without {}", op.name()))
        } else {
            self.kernels.supports(node)
        }
    }

    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        same_buffer_type(buffer_type, &self.buffer_type)
            || self.options.host_memory && same_buffer_type(buffer_type, &host_buffer_type())
    }

    fn can_copy(&self, from: &Arc<dyn BufferType>, to: &Arc<dyn BufferType>) -> bool {
        let own = |memory: &Arc<dyn BufferType>| self.supports_buffer_type(memory);
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let is_peer =
            |memory: &Arc<dyn BufferType>| peers.iter().any(|peer| same_buffer_type(peer, memory));
        let known =
            |memory: &Arc<dyn BufferType>| own(memory) || memory.is_host() || is_peer(memory);
        self.options.copies && known(from) && known(to) && (own(from) || own(to))
    }

    fn wants_offload(&self, node: Node<'_>) -> bool {
        self.options.wants_offload && matches!(node.op(), Op::MulMat { .. } | Op::MulMatId { .. })
    }

    fn workspace(&self, _: &Graph, _: &[TensorId]) -> Result<usize> {
        Ok(self.options.workspace)
    }

    fn compile(
        &self,
        graph: &Graph,
        nodes: &[TensorId],
        earlier: Option<&Arc<dyn Compiled>>,
        cancel: &CancelToken,
    ) -> Result<Option<Arc<dyn Compiled>>> {
        if !self.options.compiles {
            return Ok(None);
        }
        self.call("compile", Fault::Compile)?;
        cancel.check()?;
        let nodes = nodes.iter().map(|&id| graph.node(id));
        let computed = nodes.filter(|node| node.tensor().is_computed());
        let compiled = SimCompiled::of(self.number, computed);
        let earlier = earlier.filter(|earlier| {
            let earlier = earlier.as_any().downcast_ref::<SimCompiled>();
            earlier.is_some_and(|earlier| *earlier == compiled)
        });
        Ok(Some(match earlier {
            Some(earlier) => Arc::clone(earlier),
            None => Arc::new(compiled),
        }))
    }

    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>> {
        self.call("open a stream", Fault::OpenStream)?;
        Ok(Box::new(SimStream::open(self)?))
    }

    fn create_event(&self) -> Result<Arc<dyn Event>> {
        if !self.options.events {
            return Err(Error::unsupported(
                &self.options.name,
                "events",
                "it was made without",
            ));
        }
        self.call("create an event", Fault::CreateEvent)?;
        Ok(Arc::new(SimEvent::new(&self.world, self.number)))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
