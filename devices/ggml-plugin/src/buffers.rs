//! Memory types of the plugin: plain host memory and packed weights.

use crate::device::plugin;
use crate::host::{guard, log_error};
use samite_core::{HostMemory, Layout, Slot, TensorInfo, Usage};
use samite_ggml::abi::{
    Buffer, BufferFields, BufferI, BufferType, BufferTypeI25, BufferTypeTable, Device, Status,
    Tensor, Version,
};
use samite_ggml::convert::import::layout;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Base address of packed memory, which has no real addresses.
pub const PACKED_BASE: usize = 0x1000;

const PLAIN_NAME: &CStr = c"samite-cpu";
const PACKED_NAME: &CStr = c"samite-cpu-packed";

/// Incremented whenever a buffer is freed, because earlier prepared graphs may refer to it.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// Returns the current [`GENERATION`].
pub fn generation() -> u64 {
    GENERATION.load(Ordering::Acquire)
}

/// Creates the default buffer type.
pub fn plain_type(device: *mut Device, version: Version) -> *mut BufferType {
    let iface = BufferTypeI25 {
        get_name: Some(plain_name),
        alloc_buffer: Some(plain_alloc),
        get_alignment: Some(plain_alignment),
        get_max_size: None,
        get_alloc_size: None,
        is_host: Some(plain_is_host),
    };
    BufferTypeTable {
        iface,
        device,
        context: null_mut(),
    }
    .leak(version)
}

/// Creates the extra buffer type for packed weights.
pub fn packed_type(device: *mut Device, version: Version) -> *mut BufferType {
    let iface = BufferTypeI25 {
        get_name: Some(packed_name),
        alloc_buffer: Some(packed_alloc),
        get_alignment: Some(packed_alignment),
        get_max_size: None,
        get_alloc_size: Some(packed_alloc_size),
        is_host: None,
    };
    BufferTypeTable {
        iface,
        device,
        context: null_mut(),
    }
    .leak(version)
}

unsafe extern "C" fn plain_name(_: *mut BufferType) -> *const c_char {
    PLAIN_NAME.as_ptr()
}

unsafe extern "C" fn packed_name(_: *mut BufferType) -> *const c_char {
    PACKED_NAME.as_ptr()
}

unsafe extern "C" fn plain_alignment(_: *mut BufferType) -> usize {
    samite_core::memory::HOST_ALIGNMENT
}

unsafe extern "C" fn plain_is_host(_: *mut BufferType) -> bool {
    true
}

unsafe extern "C" fn packed_alignment(_: *mut BufferType) -> usize {
    guard(64, || {
        plugin().packed.as_ref().map_or(64, |p| p.alignment())
    })
}

/// Memory of a plain buffer.
enum Plain {
    Own(Arc<HostMemory>),
    /// Memory of the host program, such as a mapped file.
    Borrowed(*mut c_void),
}

const PLAIN: BufferI = BufferI {
    free_buffer: Some(plain_free),
    get_base: Some(plain_base),
    init_tensor: None,
    memset_tensor: Some(plain_fill),
    set_tensor: Some(plain_set),
    get_tensor: Some(plain_get),
    set_tensor_2d: None,
    get_tensor_2d: None,
    cpy_tensor: Some(plain_copy),
    clear: Some(plain_clear),
    reset: None,
};

/// Returns the fields of a buffer.
///
/// # Safety
/// `buffer` must be valid.
unsafe fn fields(buffer: *const Buffer) -> BufferFields {
    // SAFETY: the buffer is valid.
    unsafe { plugin().host.fields(buffer) }
}

unsafe extern "C" fn plain_alloc(buffer_type: *mut BufferType, size: usize) -> *mut Buffer {
    guard(null_mut(), || {
        let memory = match HostMemory::allocate(size, "samite-cpu", "a buffer") {
            Ok(memory) => memory,
            Err(error) => {
                log_error(&error.to_string());
                return null_mut();
            }
        };
        let context = Box::into_raw(Box::new(Plain::Own(memory)));
        // SAFETY: the functions of `PLAIN` expect this context.
        unsafe {
            plugin()
                .host
                .new_buffer(buffer_type, PLAIN, context.cast(), size)
        }
    })
}

/// Wraps memory of the host program in a buffer.
pub unsafe extern "C" fn buffer_from_host_ptr(
    _: *mut Device,
    pointer: *mut c_void,
    size: usize,
    _max_tensor_size: usize,
) -> *mut Buffer {
    guard(null_mut(), || {
        let plugin = plugin();
        let context = Box::into_raw(Box::new(Plain::Borrowed(pointer)));
        // SAFETY: the functions of `PLAIN` expect this context, and `plain_type` belongs to the
        // plugin and is never freed.
        unsafe {
            plugin
                .host
                .new_buffer(plugin.plain_type, PLAIN, context.cast(), size)
        }
    })
}

unsafe extern "C" fn plain_free(buffer: *mut Buffer) {
    guard((), || {
        GENERATION.fetch_add(1, Ordering::AcqRel);
        // SAFETY: the context was made by `Box::into_raw`, and a buffer is freed once.
        drop(unsafe { Box::from_raw(fields(buffer).context.cast::<Plain>()) });
    });
}

unsafe extern "C" fn plain_base(buffer: *mut Buffer) -> *mut c_void {
    // SAFETY: the plugin's plain buffers have this context.
    match unsafe { &*fields(buffer).context.cast::<Plain>() } {
        Plain::Own(memory) => memory.base().as_ptr().cast(),
        Plain::Borrowed(pointer) => *pointer,
    }
}

unsafe extern "C" fn plain_fill(
    _: *mut Buffer,
    tensor: *mut Tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    // SAFETY: ggml checks before the call that the range is within the tensor, and orders its
    // calls.
    unsafe {
        (*tensor)
            .data
            .cast::<u8>()
            .add(offset)
            .write_bytes(value, size)
    };
}

unsafe extern "C" fn plain_set(
    _: *mut Buffer,
    tensor: *mut Tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: ggml checks before the call that the range is within the tensor, and orders its
    // calls; `data` has `size` bytes. The ranges may overlap, since `data` may be the tensor's own
    // memory.
    unsafe {
        (*tensor)
            .data
            .cast::<u8>()
            .add(offset)
            .copy_from(data.cast(), size)
    };
}

unsafe extern "C" fn plain_get(
    _: *mut Buffer,
    tensor: *const Tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: ggml checks before the call that the range is within the tensor, and orders its
    // calls; `data` has room for `size` bytes and may overlap the range.
    unsafe {
        (*tensor)
            .data
            .cast::<u8>()
            .add(offset)
            .copy_to(data.cast(), size)
    };
}

unsafe extern "C" fn plain_copy(_: *mut Buffer, from: *const Tensor, to: *mut Tensor) -> bool {
    guard(false, || {
        // SAFETY: ggml passes valid tensors of equal layout, with `to` in this buffer.
        unsafe {
            let source = (*from).buffer;
            if source.is_null() || !plugin().host.is_host(fields(source).buft) {
                return false;
            }
            let Ok(layout) = layout(&*from) else {
                return false;
            };
            (*to)
                .data
                .cast::<u8>()
                .copy_from((*from).data.cast(), layout.bytes());
        }
        true
    })
}

unsafe extern "C" fn plain_clear(buffer: *mut Buffer, value: u8) {
    // SAFETY: the memory has `size` bytes.
    unsafe {
        plain_base(buffer)
            .cast::<u8>()
            .write_bytes(value, fields(buffer).size)
    };
}

/// Memory of a packed buffer.
pub struct Packed(pub Arc<dyn samite_core::Buffer>);

const PACKED: BufferI = BufferI {
    free_buffer: Some(packed_free),
    get_base: Some(packed_base),
    init_tensor: Some(packed_init),
    memset_tensor: Some(packed_fill),
    set_tensor: Some(packed_set),
    get_tensor: Some(packed_get),
    set_tensor_2d: None,
    get_tensor_2d: None,
    cpy_tensor: None,
    clear: Some(packed_clear),
    reset: None,
};

unsafe extern "C" fn packed_alloc(buffer_type: *mut BufferType, size: usize) -> *mut Buffer {
    guard(null_mut(), || {
        let Some(packed) = &plugin().packed else {
            return null_mut();
        };
        let memory = match packed.allocate(size, Usage::Weights) {
            Ok(memory) => memory,
            Err(error) => {
                log_error(&error.to_string());
                return null_mut();
            }
        };
        let context = Box::into_raw(Box::new(Packed(memory)));
        // SAFETY: the functions of `PACKED` expect this context.
        unsafe {
            plugin()
                .host
                .new_buffer(buffer_type, PACKED, context.cast(), size)
        }
    })
}

unsafe extern "C" fn packed_alloc_size(_: *mut BufferType, tensor: *const Tensor) -> usize {
    guard(usize::MAX / 2, || {
        // SAFETY: ggml passes a valid tensor.
        let Ok(layout) = layout(unsafe { &*tensor }) else {
            return usize::MAX / 2;
        };
        let packed = plugin().packed.as_ref();
        // A tensor that cannot be packed is rejected when it is initialized.
        packed
            .and_then(|packed| packed.alloc_size(&info(layout)).ok())
            .unwrap_or_else(|| layout.bytes())
    })
}

/// Returns the information about a tensor in packed memory, for which only the layout matters.
fn info(layout: Layout) -> TensorInfo<'static> {
    TensorInfo::new("", layout, Usage::Weights)
}

/// Returns the memory of a packed buffer.
///
/// # Safety
/// `buffer` must be a packed buffer.
pub unsafe fn packed_of<'a>(buffer: *const Buffer) -> &'a Packed {
    // SAFETY: a packed buffer has this context.
    unsafe { &*fields(buffer).context.cast::<Packed>() }
}

/// Returns a tensor's slot in packed memory.
pub fn packed_slot(tensor: &Tensor, layout: Layout) -> Option<Slot> {
    let offset = (tensor.data as usize).checked_sub(PACKED_BASE)?;
    Some(Slot { offset, layout })
}

unsafe extern "C" fn packed_free(buffer: *mut Buffer) {
    guard((), || {
        GENERATION.fetch_add(1, Ordering::AcqRel);
        // SAFETY: the context was made by `Box::into_raw`, and a buffer is freed once.
        drop(unsafe { Box::from_raw(fields(buffer).context.cast::<Packed>()) });
    });
}

unsafe extern "C" fn packed_base(_: *mut Buffer) -> *mut c_void {
    std::ptr::without_provenance_mut(PACKED_BASE)
}

unsafe extern "C" fn packed_init(buffer: *mut Buffer, tensor: *mut Tensor) -> Status {
    guard(Status::FAILED, || {
        // SAFETY: ggml passes a valid tensor that it placed in this buffer.
        let result = unsafe {
            with_slot(buffer, tensor, |memory, slot| {
                memory.init_tensor(slot.offset, &info(slot.layout))
            })
        };
        if result {
            Status::SUCCESS
        } else {
            Status::FAILED
        }
    })
}

/// Calls `f` with the slot of `tensor` and logs errors, since ggml's calls cannot return them.
///
/// # Safety
/// Both must be valid, and `buffer` must be a packed buffer.
unsafe fn with_slot(
    buffer: *const Buffer,
    tensor: *const Tensor,
    f: impl FnOnce(&dyn samite_core::Buffer, Slot) -> samite_core::Result<()>,
) -> bool {
    // SAFETY: the tensor is valid, and `buffer` is a packed buffer.
    let (tensor, memory) = unsafe { (&*tensor, &packed_of(buffer).0) };
    let slot = layout(tensor).and_then(|layout| {
        packed_slot(tensor, layout).ok_or_else(|| "it does not lie in packed memory".into())
    });
    let result = slot
        .map_err(|reason| reason.into_owned())
        .and_then(|slot| f(&**memory, slot).map_err(|error| error.to_string()));
    match result {
        Ok(()) => true,
        Err(error) => {
            log_error(&format!("tensor '{}': {error}", tensor.name()));
            false
        }
    }
}

unsafe extern "C" fn packed_fill(
    buffer: *mut Buffer,
    tensor: *mut Tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    guard((), || {
        // SAFETY: ggml passes a valid tensor in this buffer.
        unsafe {
            with_slot(buffer, tensor, |memory, slot| {
                memory.fill(slot, offset, size, value)
            })
        };
    });
}

unsafe extern "C" fn packed_set(
    buffer: *mut Buffer,
    tensor: *mut Tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    guard((), || {
        if size == 0 {
            return;
        }
        // SAFETY: ggml passes a valid tensor in this buffer and `size` bytes.
        unsafe {
            let data = std::slice::from_raw_parts(data.cast::<u8>(), size);
            with_slot(buffer, tensor, |memory, slot| {
                memory.write(slot, offset, data)
            });
        }
    });
}

unsafe extern "C" fn packed_get(
    buffer: *mut Buffer,
    tensor: *const Tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    guard((), || {
        if size == 0 {
            return;
        }
        // SAFETY: ggml passes a valid tensor in this buffer and room for `size` bytes, which are
        // not accessed otherwise during the call.
        unsafe {
            let data = std::slice::from_raw_parts_mut(data.cast::<u8>(), size);
            with_slot(buffer, tensor, |memory, slot| {
                memory.read(slot, offset, data)
            });
        }
    });
}

unsafe extern "C" fn packed_clear(buffer: *mut Buffer, value: u8) {
    guard((), || {
        // SAFETY: this is a packed buffer.
        if let Err(error) = unsafe { packed_of(buffer) }.0.clear(value) {
            log_error(&error.to_string());
        }
    });
}

/// Returns the null-terminated list of extra buffer types.
pub unsafe extern "C" fn extra_types(_: *mut Device) -> *mut *mut BufferType {
    guard(null_mut(), || plugin().extra_types.as_ptr().cast_mut())
}

/// Memory that contains a tensor, or is considered for it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Plain host memory, or none yet.
    Host,
    /// Packed weights.
    Packed,
    /// Empty buffer of the default type: ggml asks whether to place weights there.
    Asked,
    /// Empty buffer of the packed type: ggml asks whether to place weights there.
    PackedAsked,
    /// Another device's memory.
    Foreign,
}

/// Returns the kind of a tensor's memory.
///
/// # Safety
/// The tensor's buffer must be valid or null.
pub unsafe fn kind(tensor: &Tensor) -> Kind {
    let plugin = plugin();
    if tensor.buffer.is_null() {
        return Kind::Host;
    }
    // SAFETY: the buffer is valid.
    let buffer = unsafe { fields(tensor.buffer) };
    let empty = buffer.context == null::<c_void>().cast_mut();
    if plugin.packed.is_some() && buffer.buft == plugin.packed_type {
        return if empty {
            Kind::PackedAsked
        } else {
            Kind::Packed
        };
    }
    if buffer.buft == plugin.plain_type {
        return if empty { Kind::Asked } else { Kind::Host };
    }
    // SAFETY: the buffer type is valid as long as the buffer.
    if unsafe { plugin.host.is_host(buffer.buft) } {
        Kind::Host
    } else {
        Kind::Foreign
    }
}
