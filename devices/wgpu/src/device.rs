//! The device.

use crate::buffer::WgpuBufferType;
use crate::event::WgpuEvent;
use crate::fuse::{self, Memory};
use crate::gpu::{Gpu, Opened};
use crate::limits;
use crate::ops::{self, Known};
use crate::options::WgpuOptions;
use crate::packed::PackedBufferType;
use crate::plan::{Capacity, MOST_OPERANDS, Which};
use crate::self_test;
use crate::stream::WgpuStream;
use crate::tuning::{self, Tuning};
use crate::waiting::IN_BROWSER;
use samite_core::{
    BufferType, CancelToken, Capabilities, Compiled, Device, DeviceKind, DeviceLimits, Error,
    Event, Graph, MemoryInfo, Node, Op, Result, Selection, Stream, Support, TensorId,
    same_buffer_type,
};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Below so many columns, a product with weights in host memory is not worth moving here.
const OFFLOAD_COLUMNS: usize = 32;

/// An adapter as a device.
#[derive(Debug)]
pub struct WgpuDevice {
    gpu: Arc<Gpu>,
    physical_id: Option<String>,
    options: WgpuOptions,
    /// The sizes that are tried, in place of those that suit the adapter.
    tried: Option<Tuning>,
    buffer_type: Arc<WgpuBufferType>,
    packed_type: Arc<PackedBufferType>,
}

impl WgpuDevice {
    pub(crate) fn new(gpu: Arc<Gpu>, physical_id: Option<String>) -> Self {
        let buffer_type = WgpuBufferType::new(Arc::clone(&gpu));
        WgpuDevice {
            packed_type: PackedBufferType::new(&buffer_type),
            buffer_type,
            gpu,
            physical_id,
            options: WgpuOptions::default(),
            tried: None,
        }
    }

    /// The same adapter and memory, used as `options` say. Whether compiled kernels are kept on disk is a matter of the adapter: it must be said before it
    /// is first used.
    pub fn with_options(&self, options: WgpuOptions) -> Arc<dyn Device> {
        if options.without_cache {
            self.gpu.keep_pipelines_in(None);
        }
        Arc::new(self.with(options))
    }

    pub(crate) fn with(&self, options: WgpuOptions) -> WgpuDevice {
        WgpuDevice {
            gpu: Arc::clone(&self.gpu),
            physical_id: self.physical_id.clone(),
            options,
            tried: None,
            buffer_type: Arc::clone(&self.buffer_type),
            packed_type: Arc::clone(&self.packed_type),
        }
    }

    /// The same adapter and memory, used with these sizes and nothing else that was chosen.
    pub(crate) fn tuned(&self, tuning: Tuning) -> WgpuDevice {
        WgpuDevice {
            tried: Some(tuning),
            ..self.with(WgpuOptions::default())
        }
    }

    fn is_packed_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        let own = Arc::clone(&self.packed_type) as _;
        same_buffer_type(buffer_type, &own)
    }

    /// The opened adapter, which computes right.
    fn open(&self) -> Result<&Opened> {
        let opened = self.gpu.open()?;
        self.gpu.judged(|| self_test::verdict(self))?;
        // Sizes that suit the host's processors are of no use to anybody.
        let measures = !self.is_software() && !IN_BROWSER;
        if self.options.tuning.unwrap_or(measures) {
            self.gpu
                .tuned(|| tuning::of(&self.with(WgpuOptions::default())))?;
        }
        Ok(opened)
    }

    /// How the adapter is used.
    pub fn options(&self) -> WgpuOptions {
        self.options
    }

    /// Whether it is a program on the host's processors.
    pub fn is_software(&self) -> bool {
        self.gpu.info.device_type == wgpu::DeviceType::Cpu
    }

    /// Bytes in buffers that exist now.
    pub fn allocated(&self) -> u64 {
        let opened = self.gpu.opened();
        opened.map_or(0, |opened| opened.allocated.load(Ordering::Relaxed))
    }

    /// Gives the adapter up, as if it were unplugged: everything on it fails from then on with [`Error::DeviceLost`]. For tests.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn destroy(&self) -> Result<()> {
        self.gpu.open()?.destroy();
        Ok(())
    }

    /// Keeps compiled kernels in another folder: before the adapter is first used. For tests.
    pub fn keep_pipelines_in(&self, folder: std::path::PathBuf) {
        self.gpu.keep_pipelines_in(Some(folder));
    }

    /// Bytes of compiled kernels that were found on disk when the adapter was opened, and that its driver took; `None` if none are kept. For tests.
    pub fn found_pipelines(&self) -> Option<usize> {
        let opened = self.gpu.opened()?;
        Some(opened.pipelines.stored()?.found)
    }

    /// Puts a text in place of another one in all shaders, as if the driver misread them: before the adapter is first used. For tests.
    pub fn falsify(&self, text: &'static str, by: &'static str) {
        self.gpu.falsify([text, by]);
    }

    /// Has the device compute as one with cooperative matrices does, without these: before the adapter is first used. For tests.
    pub fn emulate_matrices(&self) {
        self.gpu.emulate_matrices();
    }

    /// Has call number `number` of the driver from now on fail, counted from 1; 0 for none. For tests.
    pub fn fail_call(&self, number: u64) {
        self.gpu.fail_call(number);
    }

    /// How many calls are made before that one; 0 if it was made. For tests.
    pub fn calls_before_failure(&self) -> u64 {
        self.gpu.calls_before_failure()
    }

    /// How many launches `nodes` are, as far as is known before tensors have places; `None` if some of them are not supported.
    pub fn launch_count(&self, graph: &Graph, nodes: &[TensorId]) -> Option<usize> {
        let steps = fuse::steps(graph, nodes, &self.capacity(), Memory::Stored);
        Some(steps.ok()?.len())
    }

    /// How many launches the work is that was prepared last. For tests.
    pub fn prepared_launches(&self) -> u64 {
        let opened = self.gpu.opened();
        opened.map_or(0, |opened| opened.prepared.load(Ordering::Relaxed))
    }

    /// Whether attention of many queries is computed by cooperative matrices.
    pub fn attends_by_matrices(&self) -> bool {
        self.capacity().attends_by_matrices
    }

    /// Whether sums are made by operations over subgroups.
    pub fn uses_subgroups(&self) -> bool {
        self.capacity().subgroups
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub(crate) fn capacity(&self) -> Capacity {
        let limits = &self.gpu.limits;
        let own = self.gpu.binding_limit();
        Capacity {
            binding: self.options.binding.unwrap_or(own).min(own),
            alignment: limits.min_storage_buffer_offset_alignment as usize,
            operands: (limits.max_storage_buffers_per_shader_stage as usize)
                .saturating_sub(1)
                .min(MOST_OPERANDS),
            subgroups: self.gpu.may_use_subgroups() && !self.options.without_subgroups,
            groups: limits.max_compute_workgroups_per_dimension,
            overlaps: !(IN_BROWSER || self.options.without_overlaps),
            matrices: self.gpu.may_use_matrices()
                && !self.options.without_matrices
                && !self.options.without_subgroups,
            attends_by_matrices: self.gpu.may_attend_by_matrices()
                && !self.options.without_matrices
                && !self.options.without_subgroups,
            memory: limits.max_compute_workgroup_storage_size as usize,
            lanes: self.options.lanes,
            height: self.options.rows,
            tuning: self.tried.unwrap_or_else(|| self.gpu.tuning()),
        }
    }
}

impl Device for WgpuDevice {
    fn name(&self) -> &str {
        self.gpu.name()
    }

    fn description(&self) -> String {
        let info = &self.gpu.info;
        let driver = [&*info.driver, &*info.driver_info].join(" ");
        match (info.name.is_empty(), driver.trim()) {
            // Browsers may tell neither.
            (true, "") => format!("a GPU ({})", info.backend),
            (_, driver) => format!("{} ({}, {driver})", info.name, info.backend),
        }
    }

    fn kind(&self) -> DeviceKind {
        match self.gpu.info.device_type {
            wgpu::DeviceType::IntegratedGpu | wgpu::DeviceType::Cpu => DeviceKind::IntegratedGpu,
            _ => DeviceKind::Gpu,
        }
    }

    fn physical_id(&self) -> Option<String> {
        self.physical_id.clone()
    }

    fn memory(&self) -> MemoryInfo {
        // The interface does not say how much there is.
        MemoryInfo::default()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            asynchronous: true,
            host_buffer: false,
            import_host: false,
            events: true,
            streams: false,
        }
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        Arc::clone(&self.buffer_type) as _
    }

    fn extra_buffer_types(&self) -> Vec<Arc<dyn BufferType>> {
        vec![Arc::clone(&self.packed_type) as _]
    }

    fn supports(&self, node: Node<'_>) -> Support {
        let is_packed = |index: usize| {
            let stored = node.source(index).and_then(Node::stored);
            stored.is_some_and(|stored| self.is_packed_type(stored.tensor().buffer.buffer_type()))
        };
        let mut sources = 0..node.tensor().sources.len();
        if let Some(index) = sources.find(|&index| is_packed(index)) {
            let packed: &Arc<dyn BufferType> = &(Arc::clone(&self.packed_type) as _);
            if index > 0 || !packed.accepts(node).is_yes() {
                return Support::no("packed weights are for products and rows by number");
            }
        }
        let known = Known {
            packed: is_packed(0),
            aligned: false,
        };
        match ops::launches_of(node, &self.capacity(), known) {
            Ok(_) => Support::Yes,
            Err(reason) => Support::No(reason),
        }
    }

    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        same_buffer_type(buffer_type, &self.buffer_type()) || self.is_packed_type(buffer_type)
    }

    fn can_copy(&self, from: &Arc<dyn BufferType>, to: &Arc<dyn BufferType>) -> bool {
        let own = self.buffer_type();
        (same_buffer_type(from, &own) || from.is_host()) && same_buffer_type(to, &own)
    }

    fn limits(&self) -> Result<Option<DeviceLimits>> {
        limits::measure(&self.gpu, self.open()?).map(Some)
    }

    fn wants_offload(&self, node: Node<'_>) -> bool {
        let columns = node
            .source_layout(1)
            .map_or(0, |x| x.shape()[1] * x.shape()[2]);
        matches!(node.op(), Op::MulMat { .. } | Op::MulMatId { .. }) && columns >= OFFLOAD_COLUMNS
    }

    fn selection(&self) -> Selection {
        // What computes on the host's processors has its memory at hand.
        match self.options.selection.unwrap_or(!self.is_software()) {
            true => Selection::Wanted,
            false => Selection::Exact,
        }
    }

    fn workspace(&self, graph: &Graph, nodes: &[TensorId]) -> Result<usize> {
        // Launches run one after the other, so that all use the same. Whether weights will be packed may not be known yet.
        let capacity = self.capacity();
        let needed = |memory| {
            let steps = fuse::steps(graph, nodes, &capacity, memory).unwrap_or_default();
            let operands = steps.into_iter().flat_map(|step| step.launch.operands);
            let scratch = operands.filter(|operand| operand.which == Which::Workspace);
            scratch
                .map(|operand| operand.first + operand.bytes())
                .max()
                .unwrap_or(0)
        };
        Ok(needed(Memory::Stored).max(needed(Memory::AllPacked)))
    }

    fn compile(
        &self,
        graph: &Graph,
        nodes: &[TensorId],
        _earlier: Option<&Arc<dyn Compiled>>,
        cancel: &CancelToken,
    ) -> Result<Option<Arc<dyn Compiled>>> {
        let opened = self.open()?;
        let steps = fuse::steps(graph, nodes, &self.capacity(), Memory::Stored);
        let steps = steps.map_err(|(id, reason)| {
            Error::unsupported(self.name(), graph.tensor(id).op.name(), reason)
        })?;
        let shaders = steps.iter().map(|step| &step.launch.shader);
        opened.pipelines.get_all(opened, shaders, cancel)?;
        if let Some(stored) = opened.pipelines.stored() {
            stored.store(false);
        }
        // Pipelines are kept by the device: there is nothing to hand over.
        Ok(None)
    }

    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>> {
        self.open()?;
        Ok(Box::new(WgpuStream::open(self)?))
    }

    fn create_event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(WgpuEvent::new(Arc::clone(&self.gpu))))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
