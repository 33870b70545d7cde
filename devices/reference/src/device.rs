//! The device and its backend.

use crate::buffer::ReferenceBufferType;
use crate::compiled::CompiledNodes;
use crate::event::ReferenceEvent;
use crate::fault::FaultPlan;
use crate::kernels::kernel;
use crate::options::ReferenceOptions;
use crate::stream::ReferenceStream;
use samite_core::{
    Backend, Buffer, BufferType, CancelToken, Capabilities, Compiled, Device, DeviceKind, Error,
    Event, Graph, HostMemory, MemoryInfo, Node, Op, Result, Selection, Stream, Support, TensorId,
    Usage, host_buffer_type, same_buffer_type,
};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A slow and exact device.
#[derive(Debug)]
pub struct ReferenceDevice {
    options: ReferenceOptions,
    name: Arc<str>,
    own_memory: Arc<ReferenceBufferType>,
    buffer_type: Arc<dyn BufferType>,
    compilations: AtomicUsize,
}

impl ReferenceDevice {
    /// Returns a device with its own memory and these options.
    pub fn new(options: ReferenceOptions) -> Arc<Self> {
        let own_memory = ReferenceBufferType::new(&options);
        let buffer_type = if options.host_memory {
            host_buffer_type()
        } else {
            Arc::clone(&own_memory) as Arc<dyn BufferType>
        };
        Arc::new(ReferenceDevice {
            name: options.name.as_str().into(),
            options,
            own_memory,
            buffer_type,
            compilations: AtomicUsize::new(0),
        })
    }

    /// Returns the options of the device.
    pub fn options(&self) -> &ReferenceOptions {
        &self.options
    }

    /// Returns how often nodes were compiled, by callers or by a stream without compiled work.
    pub fn compilations(&self) -> usize {
        self.compilations.load(Ordering::SeqCst)
    }

    pub(crate) fn count_compilation(&self) {
        self.compilations.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn shared_name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    /// Counts a call of `what`, which fault injection may make fail.
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        FaultPlan::check(self.options.faults.as_ref(), &self.name, what)
    }
}

impl Device for ReferenceDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        "executable specification, f64".into()
    }

    fn kind(&self) -> DeviceKind {
        self.options.kind
    }

    fn memory(&self) -> MemoryInfo {
        MemoryInfo {
            free: self.own_memory.free(),
            total: self.options.memory_limit,
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
            return Err(Error::unsupported(
                &self.name,
                "import of host memory",
                "it was made without",
            ));
        }
        let alignment = self.options.import_alignment;
        if !memory.location().offset.is_multiple_of(alignment) {
            return Err(Error::unsupported(
                &self.name,
                "import of host memory",
                format!("it does not begin at a multiple of {alignment} bytes"),
            ));
        }
        self.own_memory.import(memory, usage)
    }

    fn import_alignment(&self) -> usize {
        self.options.import_alignment
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
        self.check("compile")?;
        CompiledNodes::compile(self, graph, nodes, earlier, cancel).map(Some)
    }

    fn selection(&self) -> Selection {
        Selection::Exact
    }

    fn supports(&self, node: Node<'_>) -> Support {
        let op = node.op();
        if matches!(op, Op::Leaf) || op.is_view() {
            return Support::Yes;
        }
        if self
            .options
            .without_ops
            .iter()
            .any(|name| name == op.name())
        {
            return Support::no(format!("it was made without {}", op.name()));
        }
        match kernel(op) {
            Some(kernel) => kernel.accepts(node),
            None => Support::no("there is no kernel for it"),
        }
    }

    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        let own: Arc<dyn BufferType> = Arc::clone(&self.own_memory) as _;
        same_buffer_type(buffer_type, &self.buffer_type) || same_buffer_type(buffer_type, &own)
    }

    fn can_copy(&self, from: &Arc<dyn BufferType>, to: &Arc<dyn BufferType>) -> bool {
        let own = |memory| self.supports_buffer_type(memory);
        let known = |memory| own(memory) || memory.is_host();
        self.options.copies && known(from) && known(to) && (own(from) || own(to))
    }

    fn wants_offload(&self, node: Node<'_>) -> bool {
        self.options.wants_offload && matches!(node.op(), Op::MulMat { .. } | Op::MulMatId { .. })
    }

    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>> {
        self.check("open_stream")?;
        Ok(Box::new(ReferenceStream::open(self)?))
    }

    fn create_event(&self) -> Result<Arc<dyn Event>> {
        if !self.options.events {
            return Err(Error::unsupported(
                &self.name,
                "events",
                "it was made without",
            ));
        }
        self.check("create_event")?;
        Ok(Arc::new(ReferenceEvent::new(
            self.shared_name(),
            self.options.faults.clone(),
        )))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The backend `reference` with one device of the same name.
pub struct ReferenceBackend([Arc<dyn Device>; 1]);

impl ReferenceBackend {
    /// Returns the backend, with a device made with default options.
    pub fn new() -> Self {
        ReferenceBackend([ReferenceDevice::new(ReferenceOptions::default())])
    }
}

impl Default for ReferenceBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for ReferenceBackend {
    fn name(&self) -> &str {
        "reference"
    }

    fn devices(&self) -> &[Arc<dyn Device>] {
        &self.0
    }

    fn is_automatic(&self) -> bool {
        false
    }
}
