//! A plugin's memory.

use super::library::{Plugin, string};
use super::stream::span;
use crate::abi::{self, Status, Tensor, usage};
use crate::convert::UnsupportedConversion;
use crate::convert::export::{Exported, TensorLocation, bare};
use samite_core::{
    BufferType, DType, Error, HostMemory, Layout, Location, MemoryId, Node, Result, Rows, Slot,
    Support, TensorInfo, TensorRef, Usage,
};
use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A buffer type of a plugin.
pub struct GgmlBufferType {
    this: Weak<GgmlBufferType>,
    pub plugin: Arc<Plugin>,
    pub raw: *mut abi::BufferType,
    table: abi::BufferTypeTable,
    name: String,
    device: String,
    alignment: usize,
    host: bool,
    /// For an extra type: asks if the device supports a node with weights of this type.
    accepts: Option<Accepts>,
}

/// Asks a device if a node is supported with weights in an empty buffer.
pub type Accepts = Box<dyn Fn(Node<'_>, *mut abi::Buffer) -> Support + Send + Sync>;

// SAFETY: the tables do not change, and ggml allows calls from any thread.
unsafe impl Send for GgmlBufferType {}
// SAFETY: the tables do not change, so threads only read them, and ggml allows calls of a type from
// several threads at once.
unsafe impl Sync for GgmlBufferType {}

impl fmt::Debug for GgmlBufferType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GgmlBufferType({})", self.name)
    }
}

impl GgmlBufferType {
    /// Wraps the buffer type `raw` for a device called `device`.
    ///
    /// # Errors
    /// Returns an error if functions are missing or return invalid values.
    ///
    /// # Safety
    /// `raw` must be a buffer type of the plugin, or null.
    pub unsafe fn new(
        plugin: Arc<Plugin>,
        raw: *mut abi::BufferType,
        device: &str,
        accepts: Option<Accepts>,
    ) -> Result<Arc<Self>, String> {
        if raw.is_null() {
            return Err("a buffer type is missing".into());
        }
        // SAFETY: the type is not null and belongs to the plugin, so it is valid and of its
        // version.
        let table = unsafe { abi::BufferTypeTable::read(raw, plugin.version) };
        let (Some(get_name), Some(get_alignment), Some(_)) = (
            table.iface.get_name,
            table.iface.get_alignment,
            table.iface.alloc_buffer,
        ) else {
            return Err("a buffer type lacks functions".into());
        };
        // SAFETY: the functions belong to this type.
        let (name, alignment, host) = unsafe {
            (
                string(get_name(raw)).unwrap_or_default(),
                get_alignment(raw),
                table.iface.is_host.is_some_and(|is_host| is_host(raw)),
            )
        };
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            return Err(format!(
                "the alignment of buffer type {name} is {alignment}"
            ));
        }
        Ok(Arc::new_cyclic(|this| GgmlBufferType {
            this: Weak::clone(this),
            plugin,
            raw,
            table,
            name: format!("ggml:{name}"),
            device: device.to_owned(),
            alignment,
            // Extra types have private layouts, whatever they report.
            host: host && accepts.is_none(),
            accepts,
        }))
    }

    /// Returns the bytes that `tensor` takes, if the plugin reports them.
    ///
    /// # Safety
    /// The tensor must be valid.
    pub unsafe fn size_of(&self, tensor: *const Tensor) -> Option<usize> {
        // SAFETY: the function belongs to this type. The tensor is valid, and ggml only reads it.
        Some(unsafe { self.table.iface.get_alloc_size?(self.raw, tensor) })
    }
}

impl GgmlBufferType {
    /// Returns the bytes that a tensor of this layout takes.
    ///
    /// # Errors
    /// Returns an error if ggml does not support such tensors.
    pub fn size_of_layout(&self, layout: &Layout) -> Result<usize> {
        let tensor = bare(layout, self.plugin.version)
            .map_err(|reason| Error::shape(reason.into_owned()))?;
        // SAFETY: a leaf without memory, which ggml itself also passes.
        let size = unsafe { self.size_of(&raw const tensor) };
        Ok(size.unwrap_or(0).max(layout.bytes()))
    }
}

impl BufferType for GgmlBufferType {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn max_size(&self) -> usize {
        // SAFETY: the function belongs to this type.
        let size = self
            .table
            .iface
            .get_max_size
            .map(|get| unsafe { get(self.raw) });
        size.unwrap_or(usize::MAX).min(isize::MAX as usize)
    }

    fn alloc_size(&self, tensor: &TensorInfo<'_>) -> Result<usize> {
        let size = self.size_of_layout(&tensor.layout)?;
        let Some(node) = tensor.node.filter(|node| node.tensor().view.is_none()) else {
            return Ok(size);
        };
        // Some kernels store auxiliary data after their result.
        let of_operation = with_operation(node, self.plugin.version, |tensor| {
            // SAFETY: the tensor is valid during this call.
            unsafe { self.size_of(tensor) }
        });
        Ok(size.max(of_operation.flatten().unwrap_or(0)))
    }

    fn is_host(&self) -> bool {
        self.host
    }

    fn row_group(&self) -> Option<usize> {
        // Extra types accept only whole tensors, so pieces are collected.
        self.accepts.is_none().then_some(1)
    }

    fn accepts(&self, node: Node<'_>) -> Support {
        match &self.accepts {
            None => Support::Yes,
            Some(accepts) => {
                let version = self.plugin.version;
                let empty = abi::Buffer::create_empty(self.raw, version);
                let answer = accepts(node, empty);
                // SAFETY: created above; the plugin only looks at it during the call.
                unsafe { abi::Buffer::free(empty, version) };
                answer
            }
        }
    }

    fn allocate(&self, size: usize, usage: Usage) -> Result<Arc<dyn samite_core::Buffer>> {
        let this = self
            .this
            .upgrade()
            .ok_or_else(|| Error::device(&self.device, "its memory is going away"))?;
        let out_of_memory = || Error::OutOfMemory {
            device: self.device.as_str().into(),
            what: "a buffer".into(),
            asked: size,
            free: None,
        };
        let allocate = self.table.iface.alloc_buffer.ok_or_else(out_of_memory)?;
        // SAFETY: the function belongs to this type. ggml never requests 0 bytes.
        let raw = unsafe { allocate(self.raw, size.max(1)) };
        let raw = NonNull::new(raw).ok_or_else(out_of_memory)?;
        // SAFETY: the buffer is new and of the plugin's version, and owned from here on.
        let buffer = unsafe { RawBuffer::own(Arc::clone(&self.plugin), raw) };
        buffer.set_usage(usage);
        let buffer = GgmlBuffer::new(this, Arc::new(buffer), size, usage)?;
        samite_core::Buffer::clear(&buffer, 0)?;
        Ok(Arc::new(buffer))
    }
}

fn number_of(usage: Usage) -> i32 {
    match usage {
        Usage::Any => usage::ANY,
        Usage::Weights => usage::WEIGHTS,
        Usage::Compute => usage::COMPUTE,
    }
}

/// Calls `f` with the structure of a node's result, which has sources and an operation but no
/// memory. Returns `None` if ggml does not have the operation.
fn with_operation<R>(
    node: Node<'_>,
    version: abi::Version,
    f: impl FnOnce(*const Tensor) -> R,
) -> Option<R> {
    let nowhere = |_| Ok::<_, UnsupportedConversion>(TensorLocation::At(null_mut(), null_mut()));
    let exported = Exported::new(version, node.graph(), &[node.id()], nowhere).ok()?;
    Some(f(*exported.nodes().last()?))
}

/// A buffer that this value owns.
pub struct RawBuffer {
    plugin: Arc<Plugin>,
    raw: NonNull<abi::Buffer>,
}

// SAFETY: ggml's buffers may be used from any thread. The contract of `Buffer` governs concurrent
// use of tensors.
unsafe impl Send for RawBuffer {}
// SAFETY: a shared reference only exposes the address. The contract of `Buffer` governs concurrent
// use of tensors.
unsafe impl Sync for RawBuffer {}

impl RawBuffer {
    /// Takes ownership of a buffer.
    ///
    /// # Safety
    /// The buffer must belong to the plugin, and no other code may free it.
    pub unsafe fn own(plugin: Arc<Plugin>, raw: NonNull<abi::Buffer>) -> Self {
        RawBuffer { plugin, raw }
    }

    pub fn as_ptr(&self) -> *mut abi::Buffer {
        self.raw.as_ptr()
    }

    /// Returns the fields behind the functions.
    fn fields(&self) -> *mut abi::BufferFields {
        // SAFETY: the buffer is valid as long as this value, and of the plugin's version.
        unsafe { abi::Buffer::fields(self.as_ptr(), self.plugin.version) }
    }

    /// Tells the plugin what a new buffer is for.
    fn set_usage(&self, usage: Usage) {
        // SAFETY: the fields are valid, and no other code uses a new buffer.
        unsafe { (*self.fields()).usage = number_of(usage) };
    }

    fn iface(&self) -> abi::BufferI {
        // SAFETY: the buffer is valid as long as this value.
        unsafe { (*self.as_ptr()).iface }
    }
}

impl Drop for RawBuffer {
    fn drop(&mut self) {
        // SAFETY: this value owns the buffer, and it is not used again.
        unsafe { self.plugin.free_buffer(self.as_ptr()) };
    }
}

/// A buffer of a plugin.
pub struct GgmlBuffer {
    buffer_type: Arc<dyn BufferType>,
    owner: Arc<GgmlBufferType>,
    raw: Arc<RawBuffer>,
    base: *mut u8,
    size: usize,
    usage: Usage,
    /// Identity of its memory, unless it is host memory.
    id: MemoryId,
    /// Set if it is plain host memory. The device locks it, so that the device works while the host
    /// waits.
    host: Option<Arc<HostMemory>>,
    /// Read-only host memory, such as a mapped file. It needs no lock.
    mapped: Option<Arc<HostMemory>>,
    tensors: Mutex<InitialisedTensors>,
    /// Tensors of an extra type that have not been written completely.
    partial: Mutex<HashMap<(usize, Layout), Partial>>,
}

/// Structures of the tensors in a buffer. Plugins attach data to them, so each is created once.
#[derive(Default)]
struct InitialisedTensors {
    /// The structures, each with the number of resets before it was initialised.
    known: HashMap<(usize, Layout), (Box<Tensor>, u64)>,
    /// Number of prepared graphs that use the buffer.
    graphs: usize,
    /// Number of times that the plugin dropped what it had attached.
    resets: u64,
}

/// Use of memory by a prepared graph.
pub struct GraphUse(Arc<dyn samite_core::Buffer>);

impl GraphUse {
    /// Records that a graph uses `buffer`, until the value is dropped.
    pub fn new(buffer: Arc<dyn samite_core::Buffer>) -> Self {
        if let Some(buffer) = buffer.as_any().downcast_ref::<GgmlBuffer>() {
            buffer.tensors().graphs += 1;
        }
        GraphUse(buffer)
    }

    /// Returns the memory.
    pub fn buffer(&self) -> &Arc<dyn samite_core::Buffer> {
        &self.0
    }
}

impl Drop for GraphUse {
    fn drop(&mut self) {
        if let Some(buffer) = self.0.as_any().downcast_ref::<GgmlBuffer>() {
            buffer.end_use();
        }
    }
}

/// A tensor that is written in pieces.
struct Partial {
    bytes: Vec<u8>,
    missing: Vec<Range<usize>>,
}

impl Partial {
    fn new(len: usize) -> Self {
        Partial {
            bytes: vec![0; len],
            missing: vec![Range { start: 0, end: len }],
        }
    }

    /// Stores a piece, which must be inside. Returns whether the tensor is now complete.
    fn take(&mut self, offset: usize, data: &[u8]) -> bool {
        let end = offset + data.len();
        self.bytes[offset..end].copy_from_slice(data);
        let missing = std::mem::take(&mut self.missing).into_iter();
        self.missing = missing
            .flat_map(|hole| {
                [
                    hole.start..hole.end.min(offset),
                    hole.start.max(end)..hole.end,
                ]
            })
            .filter(|hole| !hole.is_empty())
            .collect();
        self.missing.is_empty()
    }
}

// SAFETY: the pointers refer to memory that this value owns or keeps alive; a lock protects
// `tensors`.
unsafe impl Send for GgmlBuffer {}
// SAFETY: mutable state is behind locks, and ggml's buffers may be used from several threads at
// once.
unsafe impl Sync for GgmlBuffer {}

impl fmt::Debug for GgmlBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "GgmlBuffer({}, {} bytes)",
            self.buffer_type.name(),
            self.size
        )
    }
}

impl GgmlBuffer {
    fn new(
        owner: Arc<GgmlBufferType>,
        raw: Arc<RawBuffer>,
        size: usize,
        usage: Usage,
    ) -> Result<Self> {
        let no_address = || Error::device(&owner.device, "its buffers have no addresses");
        let get_base = raw.iface().get_base.ok_or_else(no_address)?;
        // SAFETY: the function belongs to this buffer.
        let base = unsafe { get_base(raw.as_ptr()) }.cast::<u8>();
        let address = NonNull::new(base).ok_or_else(no_address)?;
        let host = owner.host.then(|| {
            // SAFETY: host memory of at least this many bytes, kept alive by its owner and accessed
            // only through this value.
            unsafe { HostMemory::borrow(address, size, true, Box::new(Arc::clone(&raw))) }
        });
        Ok(GgmlBuffer {
            buffer_type: Arc::clone(&owner) as Arc<dyn BufferType>,
            owner,
            raw,
            base,
            size,
            usage,
            id: MemoryId::unique(),
            host,
            mapped: None,
            tensors: Mutex::default(),
            partial: Mutex::new(HashMap::new()),
        })
    }

    /// Imports a buffer that the plugin made of host memory. It starts `before` bytes before the
    /// memory.
    pub fn import(
        owner: Arc<GgmlBufferType>,
        raw: RawBuffer,
        before: usize,
        memory: Arc<HostMemory>,
        usage: Usage,
    ) -> Result<Self> {
        raw.set_usage(usage);
        let mut buffer = Self::new(owner, Arc::new(raw), memory.len(), usage)?;
        buffer.base = buffer.base.wrapping_add(before);
        if memory.is_writable() {
            buffer.host = Some(memory)
        } else {
            buffer.mapped = Some(memory)
        }
        Ok(buffer)
    }

    pub fn raw(&self) -> *mut abi::Buffer {
        self.raw.as_ptr()
    }

    /// Returns whether the plugin's structure names the type of this buffer where the layout of its
    /// version has it.
    pub fn has_type(&self) -> bool {
        // SAFETY: the fields are valid; if the layout is another one, they are other bytes of it.
        unsafe { (*self.raw.fields()).buft == self.owner.raw }
    }

    /// Returns whether a plugin knows the structures of this buffer. Other plugins can use it only
    /// as host memory, if it is.
    pub fn is_of(&self, plugin: &Arc<Plugin>) -> bool {
        Arc::ptr_eq(&self.owner.plugin, plugin)
    }

    /// Returns whether it is memory of this type that only the plugin accesses.
    pub fn is_private(&self, buffer_type: &Arc<GgmlBufferType>) -> bool {
        Arc::ptr_eq(&self.owner, buffer_type)
            && self.only_the_plugins()
            && self.owner.accepts.is_none()
    }

    /// Returns the plugin's device of this memory.
    pub fn device(&self) -> *mut abi::Device {
        self.owner.table.device
    }

    /// Returns whether only the plugin accesses its memory.
    pub fn only_the_plugins(&self) -> bool {
        self.host.is_none() && self.mapped.is_none()
    }

    pub fn address(&self, offset: usize) -> *mut u8 {
        self.base.wrapping_add(offset)
    }

    fn check(&self, tensor: Slot) -> Result<()> {
        let size = self.owner.size_of_layout(&tensor.layout)?;
        match tensor.offset.checked_add(size) {
            Some(end) if end <= self.size => Ok(()),
            _ => Err(Error::invalid(format!(
                "{} at byte {} do not fit into a buffer of {} bytes",
                tensor.layout, tensor.offset, self.size
            ))),
        }
    }

    fn tensors(&self) -> MutexGuard<'_, InitialisedTensors> {
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a graph's use. Without graphs, nothing needs what the plugin attached to the tensors of
    /// a buffer for intermediate results, so it may drop that. Otherwise it would grow with every
    /// graph.
    fn end_use(&self) {
        let mut tensors = self.tensors();
        tensors.graphs -= 1;
        if tensors.graphs == 0
            && self.usage == Usage::Compute
            && let Some(reset) = self.raw.iface().reset
        {
            // SAFETY: the function belongs to this buffer. The structures that graphs made are
            // gone, and those of this table are initialised again before their next use.
            unsafe { reset(self.raw()) };
            tensors.resets += 1;
        }
    }

    /// Returns the initialised structure of a tensor in this buffer.
    pub fn tensor(&self, slot: Slot) -> Result<*mut Tensor> {
        self.named_tensor(slot, "")
    }

    /// Returns the initialised structure of a tensor in this buffer, which gets this name if it is
    /// new.
    fn named_tensor(&self, slot: Slot, name: &str) -> Result<*mut Tensor> {
        self.check(slot)?;
        let mut tensors = self.tensors();
        let InitialisedTensors { known, resets, .. } = &mut *tensors;
        if let Some((tensor, resets_before)) = known.get_mut(&(slot.offset, slot.layout)) {
            if *resets_before != *resets {
                tensor.extra = null_mut();
                // SAFETY: the tensor lies in this buffer.
                unsafe { self.init(&raw mut **tensor) }?;
                *resets_before = *resets;
            }
            return Ok(&raw mut **tensor);
        }
        let mut tensor = Box::new(
            bare(&slot.layout, self.owner.plugin.version)
                .map_err(|reason| Error::shape(reason.into_owned()))?,
        );
        tensor.set_name(name);
        tensor.buffer = self.raw();
        tensor.data = self.address(slot.offset).cast();
        // SAFETY: the tensor lies in this buffer.
        unsafe { self.init(&raw mut *tensor) }?;
        // Types with private layouts attach the conversion to the tensor, and write through that
        // pointer without a check.
        if self.owner.accepts.is_some() && self.host.is_none() && tensor.extra.is_null() {
            return Err(Error::unsupported(
                &self.owner.name,
                format!("a tensor of {}", slot.layout),
                "it has no special layout for it",
            ));
        }
        let entry = known.entry((slot.offset, slot.layout));
        Ok(&raw mut *entry.or_insert((tensor, *resets)).0)
    }

    /// Initialises a tensor in the buffer.
    ///
    /// # Safety
    /// The tensor must be valid and lie in this buffer.
    pub unsafe fn init(&self, tensor: *mut Tensor) -> Result<()> {
        let Some(init) = self.raw.iface().init_tensor else {
            return Ok(());
        };
        // SAFETY: the function belongs to this buffer, in which the tensor lies, and no other code
        // changes the tensor meanwhile.
        match unsafe { init(self.raw(), tensor) } {
            Status::SUCCESS => Ok(()),
            Status(status) => Err(Error::device(
                &self.owner.device,
                format!(
                    "a tensor cannot lie in {} (status {status})",
                    self.owner.name
                ),
            )),
        }
    }

    fn lacks(&self, what: &str) -> Error {
        Error::unsupported(&self.owner.name, what, "the plugin has no function for it")
    }

    /// Checks that `len` bytes at `offset` lie in a tensor.
    ///
    /// # Errors
    /// Returns an error if they do not.
    pub fn check_range(tensor: Slot, offset: usize, len: usize) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= tensor.layout.bytes() => Ok(()),
            _ => Err(Error::invalid(format!(
                "bytes {offset}..+{len} of a tensor of {} bytes",
                tensor.layout.bytes()
            ))),
        }
    }

    /// Passes bytes to the plugin.
    fn set(&self, slot: Slot, offset: usize, data: &[u8]) -> Result<()> {
        let set = self
            .raw
            .iface()
            .set_tensor
            .ok_or_else(|| self.lacks("writing"))?;
        let tensor = self.tensor(slot)?;
        let bytes = data.as_ptr().cast::<c_void>();
        // SAFETY: the tensor lies in this buffer, and the caller checked that the range lies in the
        // tensor.
        unsafe { set(self.raw(), tensor, bytes, offset, data.len()) };
        Ok(())
    }

    /// Collects the pieces of a tensor of an extra type, because these types convert only whole
    /// tensors.
    fn set_piece(&self, slot: Slot, offset: usize, data: &[u8]) -> Result<()> {
        let len = slot.layout.bytes();
        if data.len() == len {
            return self.set(slot, 0, data);
        }
        let mut partial = self.partial.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (slot.offset, slot.layout);
        let complete = partial
            .entry(key)
            .or_insert_with(|| Partial::new(len))
            .take(offset, data);
        let whole = if complete { partial.remove(&key) } else { None };
        drop(partial);
        match whole {
            Some(whole) => self.set(slot, 0, &whole.bytes),
            None => Ok(()),
        }
    }
}

impl samite_core::Buffer for GgmlBuffer {
    fn buffer_type(&self) -> &Arc<dyn BufferType> {
        &self.buffer_type
    }

    fn size(&self) -> usize {
        self.size
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn location(&self) -> Location {
        match self.host.as_ref().or(self.mapped.as_ref()) {
            Some(host) => host.location(),
            None => Location {
                memory: self.id,
                offset: 0,
            },
        }
    }

    fn host(&self) -> Option<&Arc<HostMemory>> {
        self.host.as_ref()
    }

    fn is_writable(&self) -> bool {
        self.mapped.is_none()
    }

    fn init_tensor(&self, offset: usize, tensor: &TensorInfo<'_>) -> Result<()> {
        let layout = tensor.layout;
        let slot = Slot { offset, layout };
        if self.usage == Usage::Compute || layout.is_empty() {
            return self.check(slot); // graphs initialise the tensors that they compute
        }
        // Some plugins choose kernels by the names of weights, or keep data under them.
        self.named_tensor(slot, tensor.name).map(|_| ())
    }

    fn write(&self, tensor: Slot, offset: usize, data: &[u8]) -> Result<()> {
        if let Some(host) = self.host.as_ref().or(self.mapped.as_ref()) {
            return host.write(tensor.offset.saturating_add(offset), data);
        }
        if data.is_empty() {
            return Ok(());
        }
        Self::check_range(tensor, offset, data.len())?;
        match self.owner.accepts {
            Some(_) => self.set_piece(tensor, offset, data),
            None => self.set(tensor, offset, data),
        }
    }

    fn read(&self, tensor: Slot, offset: usize, out: &mut [u8]) -> Result<()> {
        if let Some(host) = self.host.as_ref().or(self.mapped.as_ref()) {
            return host.read(tensor.offset.saturating_add(offset), out);
        }
        if out.is_empty() {
            return Ok(());
        }
        Self::check_range(tensor, offset, out.len())?;
        let get = self
            .raw
            .iface()
            .get_tensor
            .ok_or_else(|| self.lacks("reading"))?;
        let tensor = self.tensor(tensor)?;
        // SAFETY: `tensor` is in this buffer, whose function this is. The range was checked to be
        // inside the tensor, and `out` has as many bytes.
        unsafe {
            get(
                self.raw(),
                tensor,
                out.as_mut_ptr().cast::<c_void>(),
                offset,
                out.len(),
            )
        };
        Ok(())
    }

    fn write_rows(&self, tensor: Slot, rows: Rows, data: &[u8]) -> Result<()> {
        let set = self.raw.iface().set_tensor_2d;
        let inside = span(rows, tensor.layout.bytes(), data.len()).is_some();
        let only_plugins = self.only_the_plugins();
        let (Some(set), true, None) = (set.filter(|_| only_plugins), inside, &self.owner.accepts)
        else {
            return rows.each(tensor.layout.bytes(), data.len(), |offset, piece| {
                self.write(tensor, offset, &data[piece])
            });
        };
        let tensor = self.tensor(tensor)?;
        let bytes = data.as_ptr().cast::<c_void>();
        // SAFETY: the pieces lie in the tensor and in the bytes.
        unsafe {
            set(
                self.raw(),
                tensor,
                bytes,
                rows.offset,
                rows.len,
                rows.count,
                rows.stride,
                rows.host_stride,
            );
        }
        Ok(())
    }

    fn read_rows(&self, tensor: Slot, rows: Rows, out: &mut [u8]) -> Result<()> {
        let get = self.raw.iface().get_tensor_2d;
        let inside = span(rows, tensor.layout.bytes(), out.len()).is_some();
        let get = get.filter(|_| self.only_the_plugins());
        let (Some(get), true) = (get, inside) else {
            return rows.each(tensor.layout.bytes(), out.len(), |offset, piece| {
                self.read(tensor, offset, &mut out[piece])
            });
        };
        let tensor = self.tensor(tensor)?;
        let bytes = out.as_mut_ptr().cast::<c_void>();
        // SAFETY: the pieces lie in the tensor and in the bytes.
        unsafe {
            get(
                self.raw(),
                tensor,
                bytes,
                rows.offset,
                rows.len,
                rows.count,
                rows.stride,
                rows.host_stride,
            );
        }
        Ok(())
    }

    fn fill(&self, tensor: Slot, offset: usize, len: usize, value: u8) -> Result<()> {
        if let Some(host) = self.host.as_ref().or(self.mapped.as_ref()) {
            return host.fill(tensor.offset.saturating_add(offset), len, value);
        }
        if len == 0 {
            return Ok(());
        }
        Self::check_range(tensor, offset, len)?;
        // GPU queues fill whole words. The result of Vulkan's fill is undefined for other sizes.
        let whole = offset.is_multiple_of(4) && len.is_multiple_of(4);
        let set = self.raw.iface().memset_tensor.filter(|_| whole);
        let (Some(set), None) = (set, &self.owner.accepts) else {
            return self.write(tensor, offset, &vec![value; len]);
        };
        let tensor = self.tensor(tensor)?;
        // SAFETY: `tensor` is in this buffer, whose function this is. The range was checked to be
        // inside the tensor.
        unsafe { set(self.raw(), tensor, value, offset, len) };
        Ok(())
    }

    fn clear(&self, value: u8) -> Result<()> {
        if let Some(host) = self.host.as_ref().or(self.mapped.as_ref()) {
            return host.fill(0, host.len(), value);
        }
        // Vulkan's function clears with words that hold the value in one byte only.
        if value != 0 && self.owner.accepts.is_none() {
            let layout = Layout::contiguous(DType::I8, [self.size, 1, 1, 1])?;
            let (all, words) = (Slot { offset: 0, layout }, self.size / 4 * 4);
            self.fill(all, 0, words, value)?;
            return self.fill(all, words, self.size - words, value);
        }
        let clear = self
            .raw
            .iface()
            .clear
            .ok_or_else(|| self.lacks("clearing"))?;
        // SAFETY: the function belongs to this buffer.
        unsafe { clear(self.raw(), value) };
        Ok(())
    }

    fn copy_from(&self, to: Slot, from: &TensorRef) -> Result<bool> {
        let source = from.buffer.as_any().downcast_ref::<GgmlBuffer>();
        let copy = self
            .raw
            .iface()
            .cpy_tensor
            .filter(|_| self.only_the_plugins());
        let (Some(copy), Some(source)) = (copy, source) else {
            return Ok(false);
        };
        if source.owner.plugin.version != self.owner.plugin.version
            || source.owner.accepts.is_some()
        {
            return Ok(false);
        }
        let (target, source) = (self.tensor(to)?, source.tensor(from.slot)?);
        // SAFETY: both are valid and have equal layouts.
        Ok(unsafe { copy(self.raw(), source, target) })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_writes_assemble_in_any_order() {
        let mut partial = Partial::new(10);
        assert!(!partial.take(4, &[4, 5, 6]));
        assert!(
            !partial.take(4, &[4, 5]),
            "the same piece again counts once"
        );
        assert!(!partial.take(9, &[9]));
        assert!(!partial.take(0, &[0, 1, 2]));
        assert_eq!(partial.missing, [3..4, 7..9]);
        assert!(!partial.take(2, &[2, 3, 4]));
        assert!(partial.take(6, &[6, 7, 8, 9]));
        assert_eq!(partial.bytes, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    }
}
