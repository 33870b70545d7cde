//! Buffers of plugins, and plain host memory as a buffer type.

use super::process::{aligned_free, aligned_malloc};
use super::text::fail;
use super::{Symbol, exports, tensors, version};
use crate::abi::{
    Buffer, BufferFields, BufferI, BufferI28, BufferType, BufferTypeI25, BufferTypeTable, Tensor,
    Version, usage,
};
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

/// Alignment of tensors in plain host memory.
const ALIGNMENT: usize = 32;

pub fn symbols(version: Version) -> Vec<Symbol> {
    let mut all = exports![
        alignment as ggml_backend_buft_get_alignment,
        alloc_buffer as ggml_backend_buft_alloc_buffer,
        alloc_size as ggml_backend_buft_get_alloc_size,
        buffer_alloc_size as ggml_backend_buffer_get_alloc_size,
        buffer_base as ggml_backend_buffer_get_base,
        buffer_free as ggml_backend_buffer_free,
        buffer_is_host as ggml_backend_buffer_is_host,
        buffer_name as ggml_backend_buffer_name,
        buffer_size as ggml_backend_buffer_get_size,
        buffer_usage as ggml_backend_buffer_get_usage,
        clear as ggml_backend_buffer_clear,
        host_buffer as ggml_backend_cpu_buffer_from_ptr,
        host_buffer_type as ggml_backend_cpu_buffer_type,
        is_host as ggml_backend_buft_is_host,
        type_name as ggml_backend_buft_name,
    ];
    // The table of functions is passed by value.
    all.extend(match version {
        Version::V25 | Version::V26 | Version::V27 => {
            exports![buffer_init as ggml_backend_buffer_init]
        }
        Version::V28 => exports![buffer_init_28 as ggml_backend_buffer_init],
    });
    all
}

/// Returns the functions of a buffer type.
///
/// # Safety
/// It must belong to this library or to a plugin that uses it.
unsafe fn table(buffer_type: *mut BufferType) -> BufferTypeI25 {
    // SAFETY: the type belongs to a plugin or this library, so it is valid, and all users of this
    // library have the settled version.
    unsafe { BufferTypeTable::read(buffer_type, version()) }.iface
}

/// Creates a buffer with a plugin's functions, in the layout before ggml 0.28.
pub unsafe extern "C" fn buffer_init(
    buffer_type: *mut BufferType,
    iface: BufferI,
    context: *mut c_void,
    size: usize,
) -> *mut Buffer {
    // SAFETY: the functions match the context, which the caller passes on.
    unsafe { buffer_init_28(buffer_type, iface.into(), context, size) }
}

unsafe extern "C" fn buffer_init_28(
    buft: *mut BufferType,
    iface: BufferI28,
    context: *mut c_void,
    size: usize,
) -> *mut Buffer {
    let fields = BufferFields {
        buft,
        context,
        size,
        usage: usage::ANY,
    };
    Buffer::create(iface, fields, version())
}

/// Returns the fields of a buffer.
///
/// # Safety
/// It must belong to this library or to a plugin that uses it.
pub unsafe fn fields(buffer: *const Buffer) -> BufferFields {
    // SAFETY: all users of this library have the settled version.
    unsafe { *Buffer::fields(buffer, version()) }
}

pub unsafe extern "C" fn buffer_free(buffer: *mut Buffer) {
    if buffer.is_null() {
        return;
    }
    // SAFETY: the caller passes ownership of a buffer from `buffer_init`.
    unsafe {
        if let Some(free) = (*buffer).iface.free_buffer {
            free(buffer);
        }
        Buffer::free(buffer, version());
    }
}

pub unsafe extern "C" fn alloc_buffer(buffer_type: *mut BufferType, size: usize) -> *mut Buffer {
    // SAFETY: plugins pass valid buffer types.
    unsafe {
        if size == 0 {
            return buffer_init(buffer_type, BufferI::NONE, null_mut(), 0);
        }
        match table(buffer_type).alloc_buffer {
            Some(allocate) => allocate(buffer_type, size),
            None => fail("a buffer type without alloc_buffer"),
        }
    }
}

pub unsafe extern "C" fn alloc_size(buffer_type: *mut BufferType, tensor: *const Tensor) -> usize {
    // SAFETY: plugins pass valid buffer types and tensors.
    unsafe {
        match table(buffer_type).get_alloc_size {
            Some(size) => size(buffer_type, tensor),
            None => tensors::nbytes(tensor),
        }
    }
}

pub unsafe extern "C" fn alignment(buffer_type: *mut BufferType) -> usize {
    // SAFETY: plugins pass valid buffer types.
    unsafe {
        match table(buffer_type).get_alignment {
            Some(alignment) => alignment(buffer_type),
            None => fail("a buffer type without get_alignment"),
        }
    }
}

unsafe extern "C" fn is_host(buffer_type: *mut BufferType) -> bool {
    // SAFETY: plugins pass valid buffer types.
    unsafe {
        table(buffer_type)
            .is_host
            .is_some_and(|is_host| is_host(buffer_type))
    }
}

unsafe extern "C" fn type_name(buffer_type: *mut BufferType) -> *const c_char {
    // SAFETY: plugins pass valid buffer types.
    unsafe {
        table(buffer_type)
            .get_name
            .map_or(c"".as_ptr(), |name| name(buffer_type))
    }
}

/// Defines functions of a buffer. Plugins pass valid buffers.
macro_rules! of_buffer {
    ($(fn $name:ident($buffer:ident $(,
        $argument:ident: $kind:ty)?) -> $result:ty $body:block)*) => {
        $(pub unsafe extern "C" fn $name($buffer: *mut Buffer $(, $argument: $kind)?) -> $result {
            // SAFETY: see the macro.
            unsafe { $body }
        })*
    };
}

of_buffer! {
    fn buffer_size(buffer) -> usize { fields(buffer).size }
    fn buffer_usage(buffer) -> c_int { fields(buffer).usage }
    fn buffer_is_host(buffer) -> bool { is_host(fields(buffer).buft) }
    fn buffer_name(buffer) -> *const c_char { type_name(fields(buffer).buft) }
    fn buffer_alloc_size(buffer,
        tensor: *const Tensor) -> usize { alloc_size(fields(buffer).buft, tensor) }
    fn clear(buffer, value: u8) -> () {
        // An empty buffer has no functions.
        if let Some(clear) = (*buffer).iface.clear && fields(buffer).size > 0 {
            clear(buffer, value);
        }
    }
    fn buffer_base(buffer) -> *mut c_void {
        match (*buffer).iface.get_base {
            Some(base) if fields(buffer).size > 0 => base(buffer),
            _ => null_mut(),
        }
    }
}

// Plain host memory. The context of the buffer is its address.

/// Returns the functions of host memory that the buffer owns or borrows.
fn host_functions(owned: bool) -> BufferI {
    BufferI {
        free_buffer: owned.then_some(host_free as unsafe extern "C" fn(*mut Buffer)),
        get_base: Some(host_base),
        init_tensor: None,
        memset_tensor: Some(host_memset),
        set_tensor: Some(host_set),
        get_tensor: Some(host_get),
        set_tensor_2d: None,
        get_tensor_2d: None,
        cpy_tensor: Some(host_copy),
        clear: Some(host_clear),
        reset: None,
    }
}

/// A buffer type of host memory, created once the version is known.
struct HostType(*mut BufferType);

// SAFETY: it never changes.
unsafe impl Send for HostType {}
// SAFETY: it never changes, so threads only read it.
unsafe impl Sync for HostType {}

fn host_type(get_name: unsafe extern "C" fn(*mut BufferType) -> *const c_char) -> HostType {
    let table = BufferTypeTable {
        iface: BufferTypeI25 {
            get_name: Some(get_name),
            alloc_buffer: Some(host_alloc),
            get_alignment: Some(host_alignment),
            get_max_size: None,
            get_alloc_size: None,
            is_host: Some(host_is_host),
        },
        device: null_mut(),
        context: null_mut(),
    };
    HostType(table.leak(version()))
}

pub unsafe extern "C" fn host_buffer_type() -> *mut BufferType {
    static TYPE: OnceLock<HostType> = OnceLock::new();
    TYPE.get_or_init(|| host_type(host_name)).0
}

/// Wraps memory of the caller in a buffer.
unsafe extern "C" fn host_buffer(memory: *mut c_void, size: usize) -> *mut Buffer {
    static TYPE: OnceLock<HostType> = OnceLock::new();
    if !(memory as usize).is_multiple_of(ALIGNMENT) {
        fail("ggml_backend_cpu_buffer_from_ptr: the address is not a multiple of 32");
    }
    let buffer_type = TYPE.get_or_init(|| host_type(mapped_name)).0;
    // SAFETY: the caller provides valid memory.
    unsafe { buffer_init(buffer_type, host_functions(false), memory, size) }
}

unsafe extern "C" fn host_name(_: *mut BufferType) -> *const c_char {
    c"CPU".as_ptr()
}

unsafe extern "C" fn mapped_name(_: *mut BufferType) -> *const c_char {
    c"CPU_Mapped".as_ptr()
}

unsafe extern "C" fn host_alignment(_: *mut BufferType) -> usize {
    ALIGNMENT
}

unsafe extern "C" fn host_is_host(_: *mut BufferType) -> bool {
    true
}

unsafe extern "C" fn host_alloc(buffer_type: *mut BufferType, size: usize) -> *mut Buffer {
    // SAFETY: new memory of this size, which `host_free` frees.
    unsafe {
        let memory = aligned_malloc(size);
        if memory.is_null() {
            null_mut()
        } else {
            buffer_init(buffer_type, host_functions(true), memory, size)
        }
    }
}

unsafe extern "C" fn host_free(buffer: *mut Buffer) {
    // SAFETY: a buffer of `host_alloc`.
    unsafe { aligned_free(fields(buffer).context, fields(buffer).size) };
}

unsafe extern "C" fn host_base(buffer: *mut Buffer) -> *mut c_void {
    // SAFETY: a buffer of host memory.
    unsafe { fields(buffer).context }
}

/// Returns the address of the byte at `offset` of a tensor's data.
///
/// # Safety
/// The tensor must be valid.
unsafe fn at(tensor: *const Tensor, offset: usize) -> *mut u8 {
    // SAFETY: the tensor is valid, so its address may be read. The address of the data is computed,
    // not dereferenced.
    unsafe { (*tensor).data.cast::<u8>().wrapping_add(offset) }
}

unsafe extern "C" fn host_memset(
    _: *mut Buffer,
    tensor: *mut Tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    // SAFETY: the range lies in the tensor.
    unsafe { at(tensor, offset).write_bytes(value, size) };
}

unsafe extern "C" fn host_set(
    _: *mut Buffer,
    tensor: *mut Tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: the range lies in the tensor, and the data elsewhere.
    unsafe { at(tensor, offset).copy_from_nonoverlapping(data.cast(), size) };
}

unsafe extern "C" fn host_get(
    _: *mut Buffer,
    tensor: *const Tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: the range lies in the tensor, and the data elsewhere.
    unsafe { at(tensor, offset).copy_to_nonoverlapping(data.cast(), size) };
}

unsafe extern "C" fn host_copy(_: *mut Buffer, from: *const Tensor, to: *mut Tensor) -> bool {
    // SAFETY: the tensors are valid and have equal layouts. A tensor without a buffer has memory of
    // its own.
    unsafe {
        if (*from).buffer.is_null() || !buffer_is_host((*from).buffer) {
            return false;
        }
        at(from, 0).copy_to(at(to, 0), tensors::nbytes(from));
    }
    true
}

unsafe extern "C" fn host_clear(buffer: *mut Buffer, value: u8) {
    // SAFETY: all of the buffer's memory.
    unsafe {
        let BufferFields { context, size, .. } = fields(buffer);
        context.cast::<u8>().write_bytes(value, size)
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_is_written_read_copied_and_freed() {
        // SAFETY: a buffer of 64 bytes with tensors in it, freed at the end.
        unsafe {
            let buffer_type = host_buffer_type();
            assert!(is_host(buffer_type));
            assert_eq!(std::ffi::CStr::from_ptr(type_name(buffer_type)), c"CPU");
            let buffer = alloc_buffer(buffer_type, 64);
            let base = buffer_base(buffer);
            assert_eq!(base as usize % ALIGNMENT, 0);
            assert_eq!(
                (buffer_size(buffer), buffer_usage(buffer)),
                (64, usage::ANY)
            );

            let mut tensor = Tensor::zeroed();
            tensor.ne = [4, 1, 1, 1];
            tensor.nb = [4, 16, 16, 16];
            (tensor.buffer, tensor.data) = (buffer, base);
            let mut other = tensor;
            other.data = base.byte_add(32);
            assert_eq!(buffer_alloc_size(buffer, &tensor), 16);
            let iface = (*buffer).iface;
            iface.clear.unwrap()(buffer, 9);
            let (data, mut back) = ([1u8, 2, 3, 4], [0u8; 16]);
            iface.set_tensor.unwrap()(buffer, &mut tensor, data.as_ptr().cast(), 4, 4);
            iface.memset_tensor.unwrap()(buffer, &mut tensor, 7, 12, 2);
            assert!(iface.cpy_tensor.unwrap()(buffer, &tensor, &mut other));
            iface.get_tensor.unwrap()(buffer, &other, back.as_mut_ptr().cast(), 0, 16);
            assert_eq!(back, [9, 9, 9, 9, 1, 2, 3, 4, 9, 9, 9, 9, 7, 7, 9, 9]);

            let view = host_buffer(base, 32);
            assert!(buffer_is_host(view));
            assert_eq!(std::ffi::CStr::from_ptr(buffer_name(view)), c"CPU_Mapped");
            assert_eq!(buffer_base(view), base);
            buffer_free(view);
            buffer_free(buffer);
            let nothing = alloc_buffer(buffer_type, 0);
            assert!(buffer_base(nothing).is_null());
            buffer_free(nothing);
            buffer_free(null_mut());
        }
    }
}
