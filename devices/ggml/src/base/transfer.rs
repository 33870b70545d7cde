//! Tensors in buffers: places, reads and writes.

use super::text::fail;
use super::{Symbol, buffers, exports};
use crate::abi::{Buffer, BufferFields, BufferI, Status, Tensor};
use std::ffi::c_void;
use std::ptr::null_mut;

pub fn symbols() -> Vec<Symbol> {
    exports![
        allocator_new as ggml_tallocr_new,
        allocate as ggml_tallocr_alloc,
        get as ggml_backend_tensor_get,
        get_2d as ggml_backend_tensor_get_2d,
        init_tensor as ggml_backend_buffer_init_tensor,
        join as ggml_backend_multi_buffer_alloc_buffer,
        set as ggml_backend_tensor_set,
        set_2d as ggml_backend_tensor_set_2d,
        view_init as ggml_backend_view_init,
    ]
}

/// `ggml_tallocr`: places tensors one after the other in a buffer.
#[repr(C)]
struct TensorAllocator {
    buffer: *mut Buffer,
    base: *mut c_void,
    alignment: usize,
    /// Bytes in use.
    offset: usize,
}

unsafe extern "C" fn allocator_new(buffer: *mut Buffer) -> TensorAllocator {
    // SAFETY: plugins pass valid buffers.
    unsafe {
        let base = buffers::buffer_base(buffer);
        let alignment = buffers::alignment(buffers::fields(buffer).buft).max(1);
        TensorAllocator {
            buffer,
            base,
            alignment,
            offset: (base as usize).next_multiple_of(alignment) - base as usize,
        }
    }
}

unsafe extern "C" fn allocate(allocator: *mut TensorAllocator, tensor: *mut Tensor) -> Status {
    // SAFETY: plugins pass an allocator of `allocator_new` and a valid tensor.
    unsafe {
        let allocator = &mut *allocator;
        let BufferFields { buft, size, .. } = buffers::fields(allocator.buffer);
        let bytes = buffers::alloc_size(buft, tensor);
        let end = bytes
            .checked_next_multiple_of(allocator.alignment)
            .and_then(|bytes| allocator.offset.checked_add(bytes))
            .filter(|&end| end <= size);
        let Some(end) = end else {
            return Status::ALLOC_FAILED;
        };
        (*tensor).buffer = allocator.buffer;
        (*tensor).data = allocator.base.wrapping_byte_add(allocator.offset);
        allocator.offset = end;
        init_tensor(allocator.buffer, tensor)
    }
}

unsafe extern "C" fn init_tensor(buffer: *mut Buffer, tensor: *mut Tensor) -> Status {
    // SAFETY: plugins pass valid buffers and tensors, and the function belongs to the buffer.
    unsafe {
        match (*buffer).iface.init_tensor {
            Some(init) => init(buffer, tensor),
            None => Status::SUCCESS,
        }
    }
}

/// Places a view in the memory of its tensor.
unsafe extern "C" fn view_init(view: *mut Tensor) -> Status {
    // SAFETY: plugins pass valid tensors, so what they view is valid or null.
    unsafe {
        let viewed = (*view).view_src;
        if viewed.is_null() || (*viewed).buffer.is_null() {
            fail("ggml_backend_view_init: the tensor views nothing in memory");
        }
        (*view).buffer = (*viewed).buffer;
        (*view).data = (*viewed).data.wrapping_byte_add((*view).view_offs);
        init_tensor((*view).buffer, view)
    }
}

/// Returns the buffer of a tensor or of what it views.
///
/// # Safety
/// The tensor must be valid.
unsafe fn buffer_of(tensor: *const Tensor) -> *mut Buffer {
    // SAFETY: the tensor is valid, so what it views is valid or null.
    let buffer = unsafe {
        let viewed = (*tensor).view_src;
        if viewed.is_null() {
            (*tensor).buffer
        } else {
            (*viewed).buffer
        }
    };
    if buffer.is_null() {
        fail("a plugin reads or writes a tensor without a buffer");
    }
    buffer
}

/// Defines a function that transfers bytes of a tensor, and one that transfers `count` pieces of
/// `size` bytes, whose distances in bytes are the strides. Each calls the buffer's function of the
/// given name.
macro_rules! transfers {
    ($($name:ident, $name_2d:ident($tensor:ty, $data:ty): $each:ident, $all:ident;)*) => {$(
        unsafe extern "C" fn $name(tensor: $tensor, data: $data, offset: usize, size: usize) {
            if size == 0 {
                return;
            }
            // SAFETY: plugins pass valid tensors and `size` bytes of data; the function belongs to
            // the buffer.
            unsafe {
                let buffer = buffer_of(tensor);
                match (*buffer).iface.$each {
                    Some(transfer) => transfer(buffer, tensor, data, offset, size),
                    None => fail(concat!("a buffer without ", stringify!($each))),
                }
            }
        }

        unsafe extern "C" fn $name_2d(
            tensor: $tensor,
            data: $data,
            offset: usize,
            size: usize,
            count: usize,
            stride: usize,
            data_stride: usize,
        ) {
            // SAFETY: plugins pass valid tensors and data of all pieces; the function belongs to
            // the buffer.
            unsafe {
                let buffer = buffer_of(tensor);
                if let Some(transfer) = (*buffer).iface.$all
                    && count > 1
                    && size > 0
                {
                    transfer(buffer, tensor, data, offset, size, count, stride, data_stride);
                    return;
                }
                for piece in 0..count {
                    let data = data.byte_add(piece * data_stride);
                    $name(tensor, data, offset + piece * stride, size);
                }
            }
        }
    )*};
}

transfers! {
    set, set_2d(*mut Tensor, *const c_void): set_tensor, set_tensor_2d;
    get, get_2d(*const Tensor, *mut c_void): get_tensor, get_tensor_2d;
}

/// Creates a buffer that owns several buffers of one type. Tensors have addresses in these.
unsafe extern "C" fn join(parts: *mut *mut Buffer, count: usize) -> *mut Buffer {
    if count == 0 {
        return null_mut();
    }
    // SAFETY: plugins pass an array of `count` valid buffers.
    unsafe {
        let parts = std::slice::from_raw_parts(parts, count).to_vec();
        let size = parts.iter().map(|&part| buffers::fields(part).size).sum();
        let buft = buffers::fields(parts[0]).buft;
        let iface = BufferI {
            free_buffer: Some(free_parts),
            clear: Some(clear_parts),
            ..BufferI::NONE
        };
        let context = Box::into_raw(Box::new(parts));
        buffers::buffer_init(buft, iface, context.cast(), size)
    }
}

unsafe extern "C" fn free_parts(buffer: *mut Buffer) {
    // SAFETY: a buffer of `join`, which is not used again.
    unsafe {
        let parts = Box::from_raw(buffers::fields(buffer).context.cast::<Vec<*mut Buffer>>());
        for part in *parts {
            buffers::buffer_free(part);
        }
    }
}

unsafe extern "C" fn clear_parts(buffer: *mut Buffer, value: u8) {
    // SAFETY: a buffer of `join`, whose parts are valid.
    unsafe {
        let parts = &*buffers::fields(buffer).context.cast::<Vec<*mut Buffer>>();
        for &part in parts {
            buffers::clear(part, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::buffers::{alloc_buffer, buffer_free, fields, host_buffer_type};

    fn row(len: i64) -> Tensor {
        let mut tensor = Tensor::zeroed();
        tensor.ne = [len, 1, 1, 1];
        tensor.nb = [4, 4 * len as usize, 4 * len as usize, 4 * len as usize];
        tensor
    }

    #[test]
    fn tensors_are_placed_until_the_buffer_is_full() {
        // SAFETY: tensors in a buffer, which is freed at the end.
        unsafe {
            let buffer = alloc_buffer(host_buffer_type(), 96);
            let mut allocator = allocator_new(buffer);
            let mut tensors = [row(5), row(8), row(9)];
            let placed = tensors.each_mut().map(|t| allocate(&mut allocator, t));
            use Status as S;
            assert_eq!(placed, [S::SUCCESS, S::SUCCESS, S::ALLOC_FAILED]);
            let at = |t: &Tensor| t.data as usize - allocator.base as usize;
            assert_eq!((at(&tensors[0]), at(&tensors[1])), (0, 32));
            assert!(tensors[2].data.is_null() && tensors[2].buffer.is_null());

            let mut view = row(2);
            (view.view_src, view.view_offs) = (&raw mut tensors[1], 12);
            assert_eq!(view_init(&mut view), Status::SUCCESS);
            assert_eq!((at(&view), view.buffer), (44, buffer));
            buffer_free(buffer);
        }
    }

    #[test]
    fn pieces_are_written_and_read() {
        // SAFETY: a tensor in a buffer, which is freed at the end.
        unsafe {
            let buffer = alloc_buffer(host_buffer_type(), 64);
            let mut tensor = row(4);
            allocate(&mut allocator_new(buffer), &mut tensor);
            buffers::clear(buffer, 9);
            let data: [u8; 6] = [1, 2, 3, 4, 5, 6];
            set_2d(&mut tensor, data.as_ptr().cast(), 1, 2, 2, 5, 3);
            let mut all = [0u8; 16];
            get(&tensor, all.as_mut_ptr().cast(), 0, 16);
            assert_eq!(all[..9], [9, 1, 2, 9, 9, 9, 4, 5, 9]);
            let mut pieces = [0u8; 7];
            get_2d(&tensor, pieces.as_mut_ptr().cast(), 1, 2, 2, 5, 4);
            assert_eq!(pieces, [1, 2, 0, 0, 4, 5, 0]);
            let mut view = row(1);
            (view.view_src, view.data) = (&raw mut tensor, tensor.data);
            set(&mut view, data.as_ptr().cast(), 0, 1);
            get(&tensor, all.as_mut_ptr().cast(), 0, 2);
            assert_eq!(all[..2], [1, 1]);
            buffer_free(buffer);
        }
    }

    #[test]
    fn joined_buffers_are_cleared_and_freed_together() {
        // SAFETY: two buffers, which the joined one owns and frees.
        unsafe {
            let mut parts = [32, 64].map(|size| alloc_buffer(host_buffer_type(), size));
            let joined = join(parts.as_mut_ptr(), 2);
            assert_eq!(fields(joined).size, 96);
            buffers::clear(joined, 7);
            let last = buffers::buffer_base(parts[1]).cast::<u8>().add(63);
            assert_eq!(*last, 7);
            buffer_free(joined);
            assert!(join(parts.as_mut_ptr(), 0).is_null());
        }
    }
}
