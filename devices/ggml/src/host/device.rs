//! A plugin's device.

use super::buffer::{Accepts, GgmlBuffer, GgmlBufferType, RawBuffer};
use super::event::GgmlEvent;
use super::library::{Plugin, string};
use super::optimize::Optimizer;
use super::stream::GgmlStream;
use crate::abi::{self, DevCaps, DevProps, Tensor, device_type};
use crate::convert::UnsupportedConversion;
use crate::convert::export::{Exported, TensorLocation, with_views};
use samite_core::{
    Buffer, BufferType, Capabilities, Device, DeviceKind, Error, Event, Graph, HostMemory,
    KeepAlive, MemoryInfo, Node, Op, Parameters, Result, Stream, Support, TensorId, Usage,
    host_buffer,
};
use samite_wire::gaps;
use std::any::Any;
use std::ffi::{CStr, CString};
use std::fmt;
use std::ptr::{NonNull, null, null_mut};
use std::sync::{Arc, OnceLock};

/// Unit of mapped memory. The system's page size may be a multiple of it.
const PAGE: usize = 4096;

/// A plugin's device, called `ggml:` followed by its name in the plugin.
pub struct GgmlDevice {
    name: String,
    core: Arc<DeviceCore>,
    buffer_type: Arc<GgmlBufferType>,
    /// Host memory type with fast copies to and from the device.
    host_type: Option<Arc<GgmlBufferType>>,
    extra_types: Vec<Arc<GgmlBufferType>>,
    threads: Option<usize>,
    /// Parameters that the plugin interprets, passed when a stream is opened.
    parameters: Option<CString>,
    /// Opened when the first graph is planned. `None` if the plugin does not optimize graphs.
    optimizer: OnceLock<Option<Optimizer>>,
}

/// State of a device that its buffer types also need.
pub struct DeviceCore {
    pub plugin: Arc<Plugin>,
    pub raw: *mut abi::Device,
    is_cpu: bool,
    caps: DevCaps,
}

// SAFETY: ggml's devices may be queried from any thread.
unsafe impl Send for DeviceCore {}
// SAFETY: the value never changes, and ggml's devices may be queried from several threads at once.
unsafe impl Sync for DeviceCore {}

impl fmt::Debug for GgmlDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgmlDevice")
            .field("name", &self.name)
            .field("plugin", &self.core.plugin.path)
            .finish()
    }
}

impl DeviceCore {
    pub fn table(&self) -> abi::DeviceI {
        // SAFETY: devices live as long as their plugin.
        unsafe { (*self.raw).iface }
    }

    fn props(&self) -> DevProps {
        let mut props = DevProps::zeroed();
        if let Some(get_props) = self.table().get_props {
            // SAFETY: the function belongs to this device.
            unsafe { get_props(self.raw, &raw mut props) };
        }
        props
    }

    /// Asks the plugin if it supports a node. Sources in a plugin's buffer refer to it; `weights`
    /// is the buffer of source 0 if that is not allocated yet.
    fn supports(
        &self,
        node: Node<'_>,
        weights: *mut abi::Buffer,
        ask: impl FnOnce(*const Tensor) -> Support,
    ) -> Support {
        if self.is_cpu
            && let Support::No(reason) = gaps::check(node)
        {
            return Support::No(reason);
        }
        let first = node.source(0).map(|source| source.id());
        let place = |id: TensorId| -> std::result::Result<TensorLocation, UnsupportedConversion> {
            let tensor = node.graph().node(id);
            let buffer = match tensor.stored() {
                Some(stored) => {
                    let buffer = stored.tensor().buffer.as_any();
                    let buffer = buffer.downcast_ref::<GgmlBuffer>();
                    buffer.map_or(null_mut(), GgmlBuffer::raw)
                }
                None if Some(id) == first => weights,
                None => null_mut(),
            };
            Ok(TensorLocation::At(buffer, null_mut()))
        };
        // Some plugins look at the views through which an operation sees its sources.
        let sequence = if node.layout().is_empty() {
            vec![node.id()]
        } else {
            with_views(node.graph(), &[node.id()])
        };
        let exported = Exported::new(self.plugin.version, node.graph(), &sequence, place);
        let exported = match exported {
            Ok(exported) => exported,
            Err(reason) => return Support::No(reason),
        };
        let Some(&tensor) = exported.nodes().last() else {
            return Support::no("it has no form in ggml");
        };
        let (Some(supports), true) = (self.table().supports_op, !tensor.is_null()) else {
            return Support::no("the plugin cannot be asked");
        };
        // SAFETY: the function belongs to this device, and the tensor lives until the end of this
        // function.
        if !unsafe { supports(self.raw, tensor) } {
            return Support::no("the plugin says that it does not support it");
        }
        ask(tensor)
    }
}

impl GgmlDevice {
    /// Wraps the device `raw`.
    ///
    /// # Errors
    /// Returns an error if its memory is invalid.
    pub fn new(
        plugin: Arc<Plugin>,
        raw: *mut abi::Device,
        threads: Option<usize>,
        is_taken: impl Fn(&str) -> bool,
    ) -> std::result::Result<Arc<Self>, String> {
        let mut core = DeviceCore {
            plugin: Arc::clone(&plugin),
            raw,
            is_cpu: false,
            caps: DevCaps::default(),
        };
        let props = core.props();
        (core.is_cpu, core.caps) = (props.kind == device_type::CPU, props.caps);
        let core = Arc::new(core);
        let table = core.table();
        // SAFETY: the functions belong to this device.
        let (own_name, buffer_type) = unsafe {
            (
                table.get_name.and_then(|get| string(get(raw))),
                table.get_buffer_type.map_or(null_mut(), |get| get(raw)),
            )
        };
        let plain = format!("ggml:{}", own_name.unwrap_or_default());
        let mut name = plain.clone();
        let mut number = 2;
        while is_taken(&name) {
            name = format!("{plain}#{number}");
            number += 1;
        }
        // SAFETY: the type is of this plugin.
        let buffer_type =
            unsafe { GgmlBufferType::new(Arc::clone(&plugin), buffer_type, &name, None) }?;
        if core.caps.async_ && core.caps.events && !buffer_type.is_host() {
            plugin.add_memory(&buffer_type);
        }
        // If the host memory type is the default type or invalid, use the device without it.
        let host_type = table
            .get_host_buffer_type
            // SAFETY: the function belongs to this device.
            .map(|get| unsafe { get(raw) })
            .filter(|&host| core.caps.host_buffer && host != buffer_type.raw)
            .and_then(|host| {
                // SAFETY: the type is of this plugin.
                unsafe { GgmlBufferType::new(Arc::clone(&plugin), host, &name, None) }.ok()
            })
            .filter(|host| host.is_host());
        let mut extra_types = Vec::new();
        for extra in plugin.extra_types(raw) {
            let core = Arc::clone(&core);
            let accepts: Accepts = Box::new(move |node, empty| {
                if !matches!(node.op(), Op::MulMat { .. } | Op::MulMatId { .. }) {
                    return Support::no("only products use such weights");
                }
                if node.source_layout(1).is_some_and(|x| !x.is_contiguous()) {
                    return Support::no(
                        "ggml's kernels for such weights do not see gaps between columns",
                    );
                }
                core.supports(node, empty, |_| Support::Yes)
            });
            // SAFETY: the type is one of those that this plugin names for its device.
            let extra =
                unsafe { GgmlBufferType::new(Arc::clone(&plugin), extra, &name, Some(accepts)) };
            extra_types.extend(extra);
        }
        Ok(Arc::new(GgmlDevice {
            name,
            core,
            buffer_type,
            host_type,
            extra_types,
            threads,
            parameters: None,
            optimizer: OnceLock::new(),
        }))
    }

    /// Returns the same device with parameters: `threads`, if the plugin has a function for it, and
    /// parameters of the plugin itself.
    ///
    /// # Errors
    /// Returns an error if the plugin cannot open a stream with them.
    pub fn configure(&self, mut parameters: Parameters) -> Result<Arc<Self>> {
        let threads = match self.core.plugin.set_threads() {
            Some(_) => parameters.take_number(&self.name, "threads", 1, 1 << 16)?,
            None => None,
        };
        let text = CString::new(parameters.to_string())
            .map_err(|_| Error::invalid("a parameter has a byte 0 in it"))?;
        let device = Arc::new(GgmlDevice {
            name: self.name.clone(),
            core: Arc::clone(&self.core),
            buffer_type: Arc::clone(&self.buffer_type),
            host_type: self.host_type.clone(),
            extra_types: self.extra_types.clone(),
            threads: threads.or(self.threads),
            parameters: (!parameters.is_empty()).then_some(text),
            optimizer: OnceLock::new(),
        });
        // Only the plugin knows its parameters.
        if device.parameters.is_some() && Arc::clone(&device).open_stream().is_err() {
            return Err(Error::invalid(format!(
                "device '{}': the plugin refuses the parameters '{parameters}'",
                self.name
            )));
        }
        Ok(device)
    }

    /// Opens a backend in ggml's terms, which is a stream.
    pub fn open_backend(&self) -> Option<NonNull<abi::Backend>> {
        let init = self.core.table().init_backend?;
        let parameters = self.parameters.as_deref().map_or(null(), CStr::as_ptr);
        // SAFETY: the function belongs to the device; parameters are a string or null.
        NonNull::new(unsafe { init(self.core.raw, parameters) })
    }

    pub fn core(&self) -> &Arc<DeviceCore> {
        &self.core
    }

    /// Returns a line that distinguishes the device from others of its plugin.
    pub fn identity(&self) -> String {
        let own_name = self.core.table().get_name;
        // SAFETY: the function belongs to this device.
        let own_name = own_name.and_then(|get| unsafe { string(get(self.core.raw)) });
        let text = format!("{} {}", own_name.unwrap_or_default(), self.description());
        text.replace(['\n', '\r', '\t'], " ").trim().to_owned()
    }

    /// Returns the maximum number of threads, if the device computes on the host and the number was
    /// set.
    pub fn threads(&self) -> Option<usize> {
        self.threads
    }

    /// Returns whether streams return before the work is complete.
    pub fn is_asynchronous(&self) -> bool {
        self.core.caps.async_
    }

    /// Returns whether a buffer is memory of this device that only the plugin accesses.
    pub fn owns(&self, buffer: &GgmlBuffer) -> bool {
        buffer.is_private(&self.buffer_type)
    }

    /// Returns whether the device can wrap foreign host memory in buffers.
    fn wraps_host_memory(&self) -> bool {
        // Upstream's hosts call the function without a null check, but only if the device reports
        // the capability.
        self.core.caps.buffer_from_host_ptr && self.core.table().buffer_from_host_ptr.is_some()
    }

    /// Returns whether the device can compute on foreign host memory.
    pub fn takes_host_memory(&self) -> bool {
        self.buffer_type.is_host() && self.wraps_host_memory()
    }

    /// Returns the device's own memory types.
    pub fn memories(&self) -> impl Iterator<Item = &Arc<GgmlBufferType>> {
        [&self.buffer_type].into_iter().chain(&self.extra_types)
    }

    /// Wraps host memory in a buffer of the plugin. Returns the buffer, and the number of bytes by
    /// which it starts before the memory: it starts at a multiple of `alignment`, at most a page.
    ///
    /// # Errors
    /// Returns an error if the plugin does not create the buffer.
    pub fn wrap(&self, memory: &HostMemory, alignment: usize) -> Result<(RawBuffer, usize)> {
        let failed = || {
            Error::unsupported(
                &self.name,
                "host memory of others",
                "the plugin made no buffer of it",
            )
        };
        let from_pointer = self.core.table().buffer_from_host_ptr.ok_or_else(failed)?;
        let base = memory.base().as_ptr();
        let before = base as usize % alignment;
        let start = base.wrapping_sub(before);
        let size = memory.len().saturating_add(before).max(1);
        let size = size
            .checked_next_multiple_of(alignment)
            .ok_or_else(failed)?;
        if size > self.buffer_type.max_size() {
            return Err(failed());
        }
        // SAFETY: the memory outlives the result. Other bytes on the same page are only part of the
        // range, not of a tensor.
        let raw = unsafe { from_pointer(self.core.raw, start.cast(), size, size) };
        let raw = NonNull::new(raw).ok_or_else(failed)?;
        // SAFETY: the buffer is new and belongs to the plugin.
        let buffer = unsafe { RawBuffer::own(Arc::clone(&self.core.plugin), raw) };
        Ok((buffer, before))
    }
}

impl Device for GgmlDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        let get = self.core.table().get_description;
        // SAFETY: the function belongs to this device.
        let text = get.and_then(|get| unsafe { string(get(self.core.raw)) });
        text.unwrap_or_default()
    }

    fn kind(&self) -> DeviceKind {
        match self.core.props().kind {
            device_type::GPU => DeviceKind::Gpu,
            device_type::IGPU => DeviceKind::IntegratedGpu,
            device_type::ACCEL => DeviceKind::Accelerator,
            device_type::META => DeviceKind::Meta,
            _ => DeviceKind::Cpu,
        }
    }

    fn physical_id(&self) -> Option<String> {
        let props = self.core.props();
        // SAFETY: a string of the plugin's, or null.
        let id = unsafe { string(props.device_id) };
        // There is always one CPU, and samite's own device is another view of it.
        id.or_else(|| (props.kind == device_type::CPU).then(|| "cpu".into()))
    }

    fn memory(&self) -> MemoryInfo {
        let props = self.core.props();
        let known = |bytes: usize| (props.memory_total > 0).then_some(bytes);
        MemoryInfo {
            free: known(props.memory_free),
            total: known(props.memory_total),
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            asynchronous: self.is_asynchronous(),
            host_buffer: self.host_type.is_some(),
            import_host: self.wraps_host_memory(),
            streams: false,
            events: self.core.caps.events && self.core.table().event_new.is_some(),
        }
    }

    fn host_buffer_type(&self) -> Option<Arc<dyn BufferType>> {
        let host = self.host_type.clone()?;
        Some(host as Arc<dyn BufferType>)
    }

    fn import_host(&self, memory: Arc<HostMemory>, usage: Usage) -> Result<Arc<dyn Buffer>> {
        if self.takes_host_memory() {
            return Ok(host_buffer(memory, usage)); // each graph wraps it for the plugin
        }
        if !self.wraps_host_memory() {
            return Err(Error::unsupported(
                &self.name,
                "import of host memory",
                "the plugin says that the device cannot",
            ));
        }
        // A device with its own memory maps foreign memory by pages.
        let (buffer, before) = self.wrap(&memory, PAGE)?;
        let buffer =
            GgmlBuffer::import(Arc::clone(&self.buffer_type), buffer, before, memory, usage)?;
        Ok(Arc::new(buffer))
    }

    fn import_alignment(&self) -> usize {
        if self.takes_host_memory() {
            1
        } else {
            self.buffer_type.alignment()
        }
    }

    fn create_event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(GgmlEvent::new(
            Arc::clone(&self.core),
            &self.name,
        )?))
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        Arc::clone(&self.buffer_type) as Arc<dyn BufferType>
    }

    fn extra_buffer_types(&self) -> Vec<Arc<dyn BufferType>> {
        let types = self.extra_types.iter();
        types
            .map(|extra| Arc::clone(extra) as Arc<dyn BufferType>)
            .collect()
    }

    fn supports(&self, node: Node<'_>) -> Support {
        if !node.tensor().is_computed() {
            return Support::Yes;
        }
        self.core.supports(node, null_mut(), |_| Support::Yes)
    }

    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        let is = |known: &Arc<GgmlBufferType>| {
            std::ptr::addr_eq(Arc::as_ptr(known), Arc::as_ptr(buffer_type))
        };
        is(&self.buffer_type)
            || self.extra_types.iter().any(is)
            || (buffer_type.is_host() && self.takes_host_memory())
    }

    fn can_copy(&self, from: &Arc<dyn BufferType>, to: &Arc<dyn BufferType>) -> bool {
        let own = |buffer_type: &Arc<dyn BufferType>| {
            std::ptr::addr_eq(Arc::as_ptr(&self.buffer_type), Arc::as_ptr(buffer_type))
        };
        // For another device of the plugin, the receiving device copies.
        let is_peer = || self.core.plugin.joins_devices() && self.core.plugin.has_memory(from);
        let is_reachable = || own(from) || is_peer();
        (own(to) && is_reachable())
            || (from.is_host() && to.is_host() && self.supports_buffer_type(to))
    }

    fn wants_offload(&self, node: Node<'_>) -> bool {
        let Some(offload) = self.core.table().offload_op else {
            return false;
        };
        let mut wants = false;
        self.core.supports(node, null_mut(), |tensor| {
            // SAFETY: the function belongs to this device, and the tensor is valid during this
            // call.
            wants = unsafe { offload(self.core.raw, tensor) };
            Support::Yes
        });
        wants
    }

    fn optimize(&self, graph: &Graph, nodes: &mut [TensorId]) -> Vec<KeepAlive> {
        let optimizer = self.optimizer.get_or_init(|| Optimizer::open(self));
        match optimizer {
            Some(optimizer) => optimizer.optimize(&self.name, graph, nodes),
            None => Vec::new(),
        }
    }

    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>> {
        let threads = self.threads;
        Ok(Box::new(GgmlStream::open(self, threads)?))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
