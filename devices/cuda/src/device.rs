//! The device.

use crate::buffer::CudaBufferType;
use crate::event::CudaEvent;
use crate::gpu::{DriverEvent, Gpu};
use crate::ops;
use crate::options::CudaOptions;
use crate::plan::{Card, OperandSource};
use crate::stream::CudaStream;
use samite_core::{
    BufferType, CancelToken, Capabilities, Compiled, Device, DeviceKind, Error, Event, Graph,
    MemoryInfo, Node, Op, Result, Selection, Stream, Support, TensorId, same_buffer_type,
};
use samite_fusion::{LaunchList, LaunchLists, Memory, OperandFacts};
use samite_quant::PackedBufferType;
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// Minimum number of columns for which a product with weights in host memory is offloaded to the
/// card.
const OFFLOAD_COLUMNS: usize = 32;

/// Bytes of free memory that are left for modules, local memory and graphs.
const RESERVED: usize = 512 << 20;

/// A card as a device.
#[derive(Debug)]
pub struct CudaDevice {
    gpu: Arc<Gpu>,
    options: CudaOptions,
    buffer_type: Arc<CudaBufferType>,
    packed_type: Arc<PackedBufferType<CudaBufferType>>,
    launch_lists: Mutex<LaunchLists<Card>>,
}

impl CudaDevice {
    pub(crate) fn new(gpu: Arc<Gpu>) -> Self {
        let buffer_type = CudaBufferType::new(Arc::clone(&gpu));
        CudaDevice {
            packed_type: PackedBufferType::new(&buffer_type),
            buffer_type,
            gpu,
            options: CudaOptions::default(),
            launch_lists: Mutex::default(),
        }
    }

    /// Returns a device on the same card and memory with other options.
    pub fn with_options(&self, options: CudaOptions) -> Arc<dyn Device> {
        Arc::new(CudaDevice {
            gpu: Arc::clone(&self.gpu),
            options,
            buffer_type: Arc::clone(&self.buffer_type),
            packed_type: Arc::clone(&self.packed_type),
            launch_lists: Mutex::default(),
        })
    }

    /// Returns the options of the device.
    pub fn options(&self) -> CudaOptions {
        self.options
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub(crate) fn records_graphs(&self) -> bool {
        !self.options.without_graphs
    }

    /// Returns the number of launches for `nodes` with packed weights, estimated before tensors are
    /// placed. Returns `None` if the device does not support one of the nodes.
    pub fn launch_count(&self, graph: &Graph, nodes: &[TensorId]) -> Option<usize> {
        let list = self.launches(graph, nodes, Memory::AllPacked);
        Some(list.ok()?.launches.len())
    }

    /// Returns the launches of `nodes`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device does not support one of the nodes.
    pub(crate) fn launches(
        &self,
        graph: &Graph,
        nodes: &[TensorId],
        memory: Memory<'_>,
    ) -> Result<Arc<LaunchList<Card>>> {
        let lists = self.launch_lists.lock();
        let mut lists = lists.unwrap_or_else(PoisonError::into_inner);
        let list = lists.get(graph, nodes, self.gpu.card(), memory);
        list.map_err(|(id, reason)| {
            Error::unsupported(self.gpu.name(), graph.tensor(id).op.name(), reason)
        })
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        self.gpu.name()
    }

    fn description(&self) -> String {
        let info = &self.gpu.info;
        let (major, minor) = (info.capability / 10, info.capability % 10);
        format!(
            "{} (compute capability {major}.{minor}, {})",
            info.name,
            self.gpu.driver().description()
        )
    }

    fn kind(&self) -> DeviceKind {
        if self.gpu.info.is_integrated {
            DeviceKind::IntegratedGpu
        } else {
            DeviceKind::Gpu
        }
    }

    fn physical_id(&self) -> Option<String> {
        let address = &self.gpu.info.bus_address;
        (!address.is_empty()).then(|| address.to_ascii_lowercase())
    }

    fn memory(&self) -> MemoryInfo {
        let opened = self.gpu.open().ok();
        let free = opened.and_then(|opened| opened.context.memory().ok());
        MemoryInfo {
            free: free.map(|(free, _)| free.saturating_sub(RESERVED)),
            total: Some(self.gpu.info.memory),
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            asynchronous: true,
            host_buffer: false,
            import_host: false,
            events: true,
            streams: true,
        }
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        Arc::clone(&self.buffer_type) as _
    }

    fn extra_buffer_types(&self) -> Vec<Arc<dyn BufferType>> {
        vec![Arc::clone(&self.packed_type) as _]
    }

    fn supports(&self, node: Node<'_>) -> Support {
        let facts = match self.packed_type.check_sources(node) {
            Ok(packed) => OperandFacts {
                packed,
                aligned: false,
            },
            Err(refusal) => return refusal,
        };
        match ops::launches_of(node, &self.gpu.card(), facts) {
            Ok(_) => Support::Yes,
            Err(reason) => Support::No(reason),
        }
    }

    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        same_buffer_type(buffer_type, &self.buffer_type()) || self.packed_type.is(buffer_type)
    }

    fn can_copy(&self, from: &Arc<dyn BufferType>, to: &Arc<dyn BufferType>) -> bool {
        let own = self.buffer_type();
        (same_buffer_type(from, &own) || from.is_host()) && same_buffer_type(to, &own)
    }

    fn wants_offload(&self, node: Node<'_>) -> bool {
        let columns = node
            .source_layout(1)
            .map_or(0, |x| x.shape()[1] * x.shape()[2]);
        matches!(node.op(), Op::MulMat { .. } | Op::MulMatId { .. }) && columns >= OFFLOAD_COLUMNS
    }

    fn selection(&self) -> Selection {
        Selection::Wanted
    }

    fn workspace(&self, graph: &Graph, nodes: &[TensorId]) -> Result<usize> {
        // Launches run one after the other and share one workspace. Where the weights will lie may
        // be unknown here.
        let needed = |memory| {
            let list = self.launches(graph, nodes, memory)?;
            let operands = list.launches.iter().flat_map(|step| &step.launch.operands);
            let scratch = operands.filter(|operand| operand.which == OperandSource::Workspace);
            let ends = scratch.map(|operand| operand.first + operand.bytes());
            Ok::<_, Error>(ends.max().unwrap_or(0))
        };
        Ok(needed(Memory::Stored)?.max(needed(Memory::AllPacked)?))
    }

    fn compile(
        &self,
        graph: &Graph,
        nodes: &[TensorId],
        _earlier: Option<&Arc<dyn Compiled>>,
        cancel: &CancelToken,
    ) -> Result<Option<Arc<dyn Compiled>>> {
        let opened = self.gpu.open()?;
        for step in &self.launches(graph, nodes, Memory::Stored)?.launches {
            cancel.check()?;
            opened.kernel(&step.launch)?;
        }
        // The card holds its modules, so there is nothing to return.
        Ok(None)
    }

    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>> {
        Ok(Box::new(CudaStream::open(self)?))
    }

    fn create_event(&self) -> Result<Arc<dyn Event>> {
        let opened = self.gpu.open()?;
        Ok(Arc::new(CudaEvent::new(DriverEvent::new(opened)?)))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
