//! The device.

use crate::buffer::WgpuBufferType;
use crate::event::WgpuEvent;
use crate::gpu::{Gpu, Opened};
use crate::limits;
use crate::ops;
use crate::options::WgpuOptions;
use crate::plan::{Capacity, MAX_OPERANDS, OperandSource};
use crate::self_test;
use crate::stream::WgpuStream;
use crate::tuning::{self, Tuning};
use crate::waiting::IN_BROWSER;
use samite_core::{
    BufferType, CancelToken, Capabilities, Compiled, Device, DeviceKind, DeviceLimits, Error,
    Event, Graph, MemoryInfo, Node, Op, Result, Selection, Stream, Support, TensorId,
    same_buffer_type,
};
use samite_fusion::{LaunchList, LaunchLists, Memory, OperandFacts};
use samite_quant::PackedBufferType;
use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

/// Minimum number of columns for which a product with weights in host memory is offloaded to the
/// GPU.
const OFFLOAD_COLUMNS: usize = 32;

/// An adapter as a device.
#[derive(Debug)]
pub struct WgpuDevice {
    gpu: Arc<Gpu>,
    physical_id: Option<String>,
    options: WgpuOptions,
    /// Tuning under measurement. It replaces the tuning of the adapter.
    tried: Option<Tuning>,
    buffer_type: Arc<WgpuBufferType>,
    packed_type: Arc<PackedBufferType<WgpuBufferType>>,
    launch_lists: Mutex<LaunchLists<Capacity>>,
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
            launch_lists: Mutex::default(),
        }
    }

    /// Returns a device on the same adapter and memory with other options.
    ///
    /// The kernel cache on disk belongs to the adapter: turning it off works only before the
    /// adapter is first used.
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
            launch_lists: Mutex::default(),
        }
    }

    /// Returns a device on the same adapter and memory that uses `tuning` and default options.
    pub(crate) fn tuned(&self, tuning: Tuning) -> WgpuDevice {
        WgpuDevice {
            tried: Some(tuning),
            ..self.with(WgpuOptions::default())
        }
    }

    /// Opens the adapter. Fails if the self-test finds that it computes wrong results.
    fn open(&self) -> Result<&Opened> {
        let opened = self.gpu.open()?;
        self.gpu.judged(|| self_test::verdict(self))?;
        // Tuning a software adapter measures the host's processors, which is of no use.
        let measures = !self.is_software() && !IN_BROWSER;
        if self.options.tuning.unwrap_or(measures) {
            self.gpu
                .tuned(|| tuning::tune(&self.with(WgpuOptions::default())))?;
        }
        Ok(opened)
    }

    /// Returns the options of the device.
    pub fn options(&self) -> WgpuOptions {
        self.options
    }

    /// Returns whether the adapter is a software implementation that runs on the host's processors.
    pub fn is_software(&self) -> bool {
        self.gpu.info.device_type == wgpu::DeviceType::Cpu
    }

    /// Returns the number of bytes in buffers that exist now.
    pub fn allocated(&self) -> u64 {
        let opened = self.gpu.opened();
        opened.map_or(0, |opened| opened.allocated.load(Ordering::Relaxed))
    }

    /// Destroys the device, as if the adapter were unplugged. Every later operation fails with
    /// [`Error::DeviceLost`]. For tests.
    ///
    /// # Errors
    /// Returns an error if the adapter cannot be opened.
    pub fn destroy(&self) -> Result<()> {
        self.gpu.open()?.destroy();
        Ok(())
    }

    /// Sets the folder of the kernel cache. Works only before the adapter is first used. For tests.
    pub fn keep_pipelines_in(&self, folder: std::path::PathBuf) {
        self.gpu.keep_pipelines_in(Some(folder));
    }

    /// Returns the size in bytes of the cached kernels that were on disk when the adapter was
    /// opened and that its driver accepted. Returns `None` if caching is off. For tests.
    pub fn found_pipelines(&self) -> Option<usize> {
        let opened = self.gpu.opened()?;
        Some(opened.pipelines.stored()?.found)
    }

    /// Replaces a piece of text in all shaders, as if the driver misread them. Works only before
    /// the adapter is first used. For tests.
    pub fn replace_shader_text(&self, text: &'static str, by: &'static str) {
        self.gpu.replace_shader_text([text, by]);
    }

    /// Emulates cooperative matrices with ordinary arithmetic. Works only before the adapter is
    /// first used. For tests.
    pub fn emulate_matrices(&self) {
        self.gpu.emulate_matrices();
    }

    /// Makes the `number`th driver call from now on fail, counted from 1; 0 disables the fault. For
    /// tests.
    pub fn fail_call(&self, number: u64) {
        self.gpu.fail_call(number);
    }

    /// Returns the number of driver calls left before the injected fault, or 0 if it has fired. For
    /// tests.
    pub fn calls_before_failure(&self) -> u64 {
        self.gpu.calls_before_failure()
    }

    /// Returns the number of launches for `nodes`, estimated before tensors are placed. Returns
    /// `None` if the device does not support one of the nodes.
    pub fn launch_count(&self, graph: &Graph, nodes: &[TensorId]) -> Option<usize> {
        let list = self.launches(graph, nodes, Memory::Stored);
        Some(list.ok()?.launches.len())
    }

    /// Returns the number of launches of the work that was prepared last. For tests.
    pub fn prepared_launches(&self) -> u64 {
        let opened = self.gpu.opened();
        opened.map_or(0, |opened| opened.prepared.load(Ordering::Relaxed))
    }

    /// Returns whether cooperative matrices compute attention with many queries.
    pub fn attends_by_matrices(&self) -> bool {
        self.capacity().attends_by_matrices
    }

    /// Returns whether reductions use subgroup operations.
    pub fn uses_subgroups(&self) -> bool {
        self.capacity().subgroups
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Returns the launches of `nodes`.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the device does not support one of the nodes.
    pub(crate) fn launches(
        &self,
        graph: &Graph,
        nodes: &[TensorId],
        memory: Memory<'_>,
    ) -> Result<Arc<LaunchList<Capacity>>> {
        let lists = self.launch_lists.lock();
        let mut lists = lists.unwrap_or_else(PoisonError::into_inner);
        let list = lists.get(graph, nodes, self.capacity(), memory);
        list.map_err(|(id, reason)| {
            Error::unsupported(self.name(), graph.tensor(id).op.name(), reason)
        })
    }

    pub(crate) fn capacity(&self) -> Capacity {
        let limits = &self.gpu.limits;
        let own = self.gpu.binding_limit();
        Capacity {
            binding: self.options.binding.unwrap_or(own).min(own),
            alignment: limits.min_storage_buffer_offset_alignment as usize,
            operands: (limits.max_storage_buffers_per_shader_stage as usize)
                .saturating_sub(1)
                .min(MAX_OPERANDS),
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
            // Browsers may hide the name and the driver.
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
        // wgpu has no query for the amount of memory.
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
        let known = match self.packed_type.check_sources(node) {
            Ok(packed) => OperandFacts {
                packed,
                aligned: false,
            },
            Err(refusal) => return refusal,
        };
        match ops::launches_of(node, &self.capacity(), known) {
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
        // A software adapter shares the host's memory, so selecting on the device saves no
        // transfer.
        if self.options.selection.unwrap_or(!self.is_software()) {
            Selection::Wanted
        } else {
            Selection::Exact
        }
    }

    fn workspace(&self, graph: &Graph, nodes: &[TensorId]) -> Result<usize> {
        // Launches run one after the other and share one workspace. Where the weights will lie may
        // be unknown here, so cover packed and plain weights.
        let needed = |memory| {
            let list = self.launches(graph, nodes, memory).ok();
            let launches = list.iter().flat_map(|list| &list.launches);
            let operands = launches.flat_map(|step| &step.launch.operands);
            let scratch = operands.filter(|operand| operand.which == OperandSource::Workspace);
            let ends = scratch.map(|operand| operand.first + operand.bytes());
            ends.max().unwrap_or(0)
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
        let list = self.launches(graph, nodes, Memory::Stored)?;
        let shaders = list.launches.iter().map(|step| &step.launch.shader);
        opened.pipelines.get_all(opened, shaders, cancel)?;
        if let Some(stored) = opened.pipelines.stored() {
            stored.store(false);
        }
        // The device caches its pipelines, so there is nothing to return.
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
