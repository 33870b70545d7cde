//! Buffer types and buffers.

use super::{Device, Status, Tensor, Version};
use std::ffi::{c_char, c_void};

/// `ggml_backend_buffer_type` of any version; see [`BufferTypeTable`].
#[repr(C)]
pub struct BufferType {
    _opaque: [u8; 0],
}

/// `ggml_backend_buffer_type_i` of interface version 2.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)] // upstream's names
pub struct BufferTypeI2 {
    pub get_name: Option<unsafe extern "C" fn(*mut BufferType) -> *const c_char>,
    pub alloc_buffer: Option<unsafe extern "C" fn(*mut BufferType, usize) -> *mut Buffer>,
    pub get_alignment: Option<unsafe extern "C" fn(*mut BufferType) -> usize>,
    pub get_max_size: Option<unsafe extern "C" fn(*mut BufferType) -> usize>,
    pub get_alloc_size: Option<unsafe extern "C" fn(*mut BufferType, *const Tensor) -> usize>,
    pub is_host: Option<unsafe extern "C" fn(*mut BufferType) -> bool>,
}

/// `ggml_backend_buffer_type_i` of interface version 3.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)] // upstream's names
pub struct BufferTypeI3 {
    pub get_name: Option<unsafe extern "C" fn(*mut BufferType) -> *const c_char>,
    pub alloc_buffer: Option<unsafe extern "C" fn(*mut BufferType, usize) -> *mut Buffer>,
    pub alloc_buffer_n:
        Option<unsafe extern "C" fn(*mut BufferType, *mut *mut Tensor, usize) -> *mut Buffer>,
    pub get_alignment: Option<unsafe extern "C" fn(*mut BufferType) -> usize>,
    pub get_max_size: Option<unsafe extern "C" fn(*mut BufferType) -> usize>,
    pub get_alloc_size: Option<unsafe extern "C" fn(*mut BufferType, *const Tensor) -> usize>,
    pub get_alloc_size_n:
        Option<unsafe extern "C" fn(*mut BufferType, *mut *mut Tensor, usize) -> usize>,
    pub is_host: Option<unsafe extern "C" fn(*mut BufferType) -> bool>,
}

/// `ggml_backend_buffer_type` of interface version 2.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BufferTypeV2 {
    /// Function table.
    pub iface: BufferTypeI2,
    /// The device, or null for plain host memory.
    pub device: *mut Device,
    /// Private data of the backend.
    pub context: *mut c_void,
}

/// `ggml_backend_buffer_type` of interface version 3.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BufferTypeV3 {
    /// Function table.
    pub iface: BufferTypeI3,
    /// The device, or null for plain host memory.
    pub device: *mut Device,
    /// Private data of the backend.
    pub context: *mut c_void,
}

/// Fields that both versions of buffer types have.
#[derive(Clone, Copy)]
pub struct BufferTypeTable {
    /// Function table.
    pub iface: BufferTypeI2,
    /// The device, or null for plain host memory.
    pub device: *mut Device,
    /// Private data of the backend.
    pub context: *mut c_void,
}

impl BufferTypeTable {
    /// Reads the table of a buffer type.
    ///
    /// # Safety
    /// `buffer_type` must be a valid one of this version.
    pub unsafe fn read(buffer_type: *const BufferType, version: Version) -> Self {
        match version {
            Version::V2 => {
                // SAFETY: it is a valid buffer type of version 2, which begins with these fields;
                // they are copied.
                let BufferTypeV2 {
                    iface,
                    device,
                    context,
                } = unsafe { *buffer_type.cast() };
                BufferTypeTable {
                    iface,
                    device,
                    context,
                }
            }
            Version::V3 => {
                // SAFETY: it is a valid buffer type of version 3, which begins with these fields;
                // they are copied.
                let BufferTypeV3 {
                    iface,
                    device,
                    context,
                } = unsafe { *buffer_type.cast() };
                BufferTypeTable {
                    iface: BufferTypeI2 {
                        get_name: iface.get_name,
                        alloc_buffer: iface.alloc_buffer,
                        get_alignment: iface.get_alignment,
                        get_max_size: iface.get_max_size,
                        get_alloc_size: iface.get_alloc_size,
                        is_host: iface.is_host,
                    },
                    device,
                    context,
                }
            }
        }
    }

    /// Creates a buffer type of `version` that lives until the process ends.
    pub fn leak(self, version: Version) -> *mut BufferType {
        let BufferTypeTable {
            iface,
            device,
            context,
        } = self;
        match version {
            Version::V2 => Box::into_raw(Box::new(BufferTypeV2 {
                iface,
                device,
                context,
            }))
            .cast(),
            Version::V3 => Box::into_raw(Box::new(BufferTypeV3 {
                iface: BufferTypeI3 {
                    get_name: iface.get_name,
                    alloc_buffer: iface.alloc_buffer,
                    alloc_buffer_n: None,
                    get_alignment: iface.get_alignment,
                    get_max_size: iface.get_max_size,
                    get_alloc_size: iface.get_alloc_size,
                    get_alloc_size_n: None,
                    is_host: iface.is_host,
                },
                device,
                context,
            }))
            .cast(),
        }
    }
}

/// `ggml_backend_buffer_i`
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)] // upstream's names
pub struct BufferI {
    pub free_buffer: Option<unsafe extern "C" fn(*mut Buffer)>,
    pub get_base: Option<unsafe extern "C" fn(*mut Buffer) -> *mut c_void>,
    pub init_tensor: Option<unsafe extern "C" fn(*mut Buffer, *mut Tensor) -> Status>,
    pub memset_tensor: Option<unsafe extern "C" fn(*mut Buffer, *mut Tensor, u8, usize, usize)>,
    pub set_tensor:
        Option<unsafe extern "C" fn(*mut Buffer, *mut Tensor, *const c_void, usize, usize)>,
    pub get_tensor:
        Option<unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut c_void, usize, usize)>,
    pub set_tensor_2d: Option<
        unsafe extern "C" fn(
            *mut Buffer,
            *mut Tensor,
            *const c_void,
            usize,
            usize,
            usize,
            usize,
            usize,
        ),
    >,
    pub get_tensor_2d: Option<
        unsafe extern "C" fn(
            *mut Buffer,
            *const Tensor,
            *mut c_void,
            usize,
            usize,
            usize,
            usize,
            usize,
        ),
    >,
    pub cpy_tensor: Option<unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut Tensor) -> bool>,
    pub clear: Option<unsafe extern "C" fn(*mut Buffer, u8)>,
    pub reset: Option<unsafe extern "C" fn(*mut Buffer)>,
}

impl BufferI {
    /// Functions of an empty buffer that only represents its type: none.
    pub const NONE: BufferI = BufferI {
        free_buffer: None,
        get_base: None,
        init_tensor: None,
        memset_tensor: None,
        set_tensor: None,
        get_tensor: None,
        set_tensor_2d: None,
        get_tensor_2d: None,
        cpy_tensor: None,
        clear: None,
        reset: None,
    };
}

/// `ggml_backend_buffer`
#[repr(C)]
pub struct Buffer {
    /// Function table.
    pub iface: BufferI,
    /// Type of the buffer.
    pub buft: *mut BufferType,
    /// Private data of the backend.
    pub context: *mut c_void,
    /// Size in bytes.
    pub size: usize,
    /// See [`usage`].
    pub usage: i32,
}

/// `ggml_backend_buffer_usage`
#[allow(missing_docs)]
pub mod usage {
    pub const ANY: i32 = 0;
    pub const WEIGHTS: i32 = 1;
    pub const COMPUTE: i32 = 2;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn struct_layouts_match_upstream() {
        assert_eq!(size_of::<BufferTypeV2>(), 64);
        assert_eq!(offset_of!(BufferTypeV2, device), 48);
        assert_eq!(offset_of!(BufferTypeI2, is_host), 40);
        assert_eq!(size_of::<BufferTypeV3>(), 80);
        assert_eq!(offset_of!(BufferTypeV3, device), 64);
        assert_eq!(offset_of!(BufferTypeI3, get_alignment), 24);
        assert_eq!(offset_of!(BufferTypeI3, get_alloc_size), 40);
        assert_eq!(offset_of!(BufferTypeI3, is_host), 56);
        assert_eq!(size_of::<BufferI>(), 88);
        assert_eq!(offset_of!(BufferI, cpy_tensor), 64);
        assert_eq!(size_of::<Buffer>(), 120);
        assert_eq!(offset_of!(Buffer, buft), 88);
        assert_eq!(offset_of!(Buffer, size), 104);
        assert_eq!(offset_of!(Buffer, usage), 112);
    }

    #[test]
    fn function_tables_round_trip_in_both_versions() {
        unsafe extern "C" fn yes(_: *mut BufferType) -> bool {
            true
        }
        unsafe extern "C" fn alignment(_: *mut BufferType) -> usize {
            32
        }
        let table = BufferTypeTable {
            iface: BufferTypeI2 {
                get_name: None,
                alloc_buffer: None,
                get_alignment: Some(alignment),
                get_max_size: None,
                get_alloc_size: None,
                is_host: Some(yes),
            },
            device: std::ptr::without_provenance_mut(8),
            context: std::ptr::without_provenance_mut(16),
        };
        for version in [Version::V2, Version::V3] {
            let leaked = table.leak(version);
            // SAFETY: made of this version.
            let back = unsafe { BufferTypeTable::read(leaked, version) };
            // SAFETY: the functions ignore their argument.
            unsafe {
                assert!(back.iface.is_host.unwrap()(leaked));
                assert_eq!(back.iface.get_alignment.unwrap()(leaked), 32);
            }
            assert!(back.iface.get_name.is_none() && back.iface.get_alloc_size.is_none());
            assert_eq!((back.device as usize, back.context as usize), (8, 16));
        }
    }
}
