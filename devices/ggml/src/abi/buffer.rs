//! Buffer types and buffers.

use super::{Device, Status, Tensor, Version};
use std::ffi::{c_char, c_void};

/// `ggml_backend_buffer_type` of any version; see [`BufferTypeTable`].
#[repr(C)]
pub struct BufferType {
    _opaque: [u8; 0],
}

/// `ggml_backend_buffer_type_i` of ggml 0.25.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)] // upstream's names
pub struct BufferTypeI25 {
    pub get_name: Option<unsafe extern "C" fn(*mut BufferType) -> *const c_char>,
    pub alloc_buffer: Option<unsafe extern "C" fn(*mut BufferType, usize) -> *mut Buffer>,
    pub get_alignment: Option<unsafe extern "C" fn(*mut BufferType) -> usize>,
    pub get_max_size: Option<unsafe extern "C" fn(*mut BufferType) -> usize>,
    pub get_alloc_size: Option<unsafe extern "C" fn(*mut BufferType, *const Tensor) -> usize>,
    pub is_host: Option<unsafe extern "C" fn(*mut BufferType) -> bool>,
}

/// `ggml_backend_buffer_type_i` from ggml 0.26 on.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)] // upstream's names
pub struct BufferTypeI26 {
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

/// `ggml_backend_buffer_type` of ggml 0.25.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BufferTypeV25 {
    /// Function table.
    pub iface: BufferTypeI25,
    /// The device, or null for plain host memory.
    pub device: *mut Device,
    /// Private data of the backend.
    pub context: *mut c_void,
}

/// `ggml_backend_buffer_type` from ggml 0.26 on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BufferTypeV26 {
    /// Function table.
    pub iface: BufferTypeI26,
    /// The device, or null for plain host memory.
    pub device: *mut Device,
    /// Private data of the backend.
    pub context: *mut c_void,
}

/// Fields that buffer types of all versions have.
#[derive(Clone, Copy)]
pub struct BufferTypeTable {
    /// Function table.
    pub iface: BufferTypeI25,
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
            Version::V25 => {
                // SAFETY: it is a valid buffer type of this version, which begins with these
                // fields; they are copied.
                let BufferTypeV25 {
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
            Version::V26 | Version::V27 | Version::V28 => {
                // SAFETY: it is a valid buffer type of these versions, which begins with these
                // fields; they are copied.
                let BufferTypeV26 {
                    iface,
                    device,
                    context,
                } = unsafe { *buffer_type.cast() };
                BufferTypeTable {
                    iface: BufferTypeI25 {
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
            Version::V25 => Box::into_raw(Box::new(BufferTypeV25 {
                iface,
                device,
                context,
            }))
            .cast(),
            Version::V26 | Version::V27 | Version::V28 => Box::into_raw(Box::new(BufferTypeV26 {
                iface: BufferTypeI26 {
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

/// `ggml_backend_buffer_i` of ggml 0.25, with which the tables of all later versions begin.
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

/// Functions for several tensors at once, which follow [`BufferI`] from ggml 0.28 on.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)] // upstream's names
pub struct BufferNI {
    pub set_tensor_n: Option<
        unsafe extern "C" fn(
            *mut Buffer,
            *const *mut Tensor,
            *const *const c_void,
            *const usize,
            *const usize,
            usize,
        ),
    >,
    pub get_tensor_n: Option<
        unsafe extern "C" fn(
            *mut Buffer,
            *const *const Tensor,
            *const *mut c_void,
            *const usize,
            *const usize,
            usize,
        ),
    >,
    pub cpy_tensor_n: Option<
        unsafe extern "C" fn(*mut Buffer, *const *const Tensor, *const *mut Tensor, usize) -> bool,
    >,
}

impl BufferNI {
    /// No functions.
    pub const NONE: BufferNI = BufferNI {
        set_tensor_n: None,
        get_tensor_n: None,
        cpy_tensor_n: None,
    };
}

/// `ggml_backend_buffer_i` of ggml 0.28.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BufferI28 {
    /// Functions that all versions have.
    pub each: BufferI,
    /// Functions for several tensors.
    pub several: BufferNI,
}

impl From<BufferI> for BufferI28 {
    /// Returns a table without functions for several tensors.
    fn from(each: BufferI) -> Self {
        BufferI28 {
            each,
            several: BufferNI::NONE,
        }
    }
}

/// `ggml_backend_buffer` of any version. It begins with the functions that all versions have. The
/// other fields depend on the version, see [`Buffer::fields`].
#[repr(C)]
pub struct Buffer {
    /// Function table.
    pub iface: BufferI,
}

/// Fields behind the function table of a buffer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BufferFields {
    /// Type of the buffer.
    pub buft: *mut BufferType,
    /// Private data of the backend.
    pub context: *mut c_void,
    /// Size in bytes.
    pub size: usize,
    /// See [`usage`].
    pub usage: i32,
}

/// `ggml_backend_buffer` of ggml 0.25 to 0.27.
#[repr(C)]
pub struct BufferV25 {
    iface: BufferI,
    fields: BufferFields,
}

/// `ggml_backend_buffer` of ggml 0.28.
#[repr(C)]
pub struct BufferV28 {
    iface: BufferI28,
    fields: BufferFields,
}

impl Buffer {
    /// Returns the fields behind the function table.
    ///
    /// # Safety
    /// `buffer` must be a valid buffer of this version.
    pub unsafe fn fields(buffer: *const Buffer, version: Version) -> *mut BufferFields {
        let buffer = buffer.cast_mut();
        match version {
            Version::V25 | Version::V26 | Version::V27 => {
                // SAFETY: the buffer is valid and has this layout.
                unsafe { &raw mut (*buffer.cast::<BufferV25>()).fields }
            }
            Version::V28 => {
                // SAFETY: the buffer is valid and has this layout.
                unsafe { &raw mut (*buffer.cast::<BufferV28>()).fields }
            }
        }
    }

    /// Creates a buffer of `version`. [`Buffer::free`] frees it.
    pub fn create(
        iface: impl Into<BufferI28>,
        fields: BufferFields,
        version: Version,
    ) -> *mut Buffer {
        let iface = iface.into();
        match version {
            Version::V25 | Version::V26 | Version::V27 => {
                let iface = iface.each;
                Box::into_raw(Box::new(BufferV25 { iface, fields })).cast()
            }
            Version::V28 => Box::into_raw(Box::new(BufferV28 { iface, fields })).cast(),
        }
    }

    /// Creates an empty buffer, which only represents its type. [`Buffer::free`] frees it.
    pub fn create_empty(buft: *mut BufferType, version: Version) -> *mut Buffer {
        let fields = BufferFields {
            buft,
            context: std::ptr::null_mut(),
            size: 0,
            usage: usage::ANY,
        };
        Buffer::create(BufferI::NONE, fields, version)
    }

    /// Frees the structure, not the memory that it describes.
    ///
    /// # Safety
    /// `buffer` must come from [`Buffer::create`] with this version, and not be used again.
    pub unsafe fn free(buffer: *mut Buffer, version: Version) {
        match version {
            // SAFETY: it is a box of this type.
            Version::V25 | Version::V26 | Version::V27 => unsafe {
                drop(Box::from_raw(buffer.cast::<BufferV25>()));
            },
            // SAFETY: it is a box of this type.
            Version::V28 => unsafe { drop(Box::from_raw(buffer.cast::<BufferV28>())) },
        }
    }
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
        assert_eq!(size_of::<BufferTypeV25>(), 64);
        assert_eq!(offset_of!(BufferTypeV25, device), 48);
        assert_eq!(offset_of!(BufferTypeI25, is_host), 40);
        assert_eq!(size_of::<BufferTypeV26>(), 80);
        assert_eq!(offset_of!(BufferTypeV26, device), 64);
        assert_eq!(offset_of!(BufferTypeI26, get_alignment), 24);
        assert_eq!(offset_of!(BufferTypeI26, get_alloc_size), 40);
        assert_eq!(offset_of!(BufferTypeI26, is_host), 56);
        assert_eq!(size_of::<BufferI>(), 88);
        assert_eq!(offset_of!(BufferI, cpy_tensor), 64);
        assert_eq!(size_of::<BufferV25>(), 120);
        assert_eq!(offset_of!(BufferV25, fields), 88);
        assert_eq!(size_of::<BufferI28>(), 112);
        assert_eq!(offset_of!(BufferNI, cpy_tensor_n), 16);
        assert_eq!(size_of::<BufferV28>(), 144);
        assert_eq!(offset_of!(BufferV28, fields), 112);
        assert_eq!(offset_of!(BufferFields, size), 16);
        assert_eq!(offset_of!(BufferFields, usage), 24);
    }

    #[test]
    fn function_tables_round_trip_in_all_versions() {
        unsafe extern "C" fn yes(_: *mut BufferType) -> bool {
            true
        }
        unsafe extern "C" fn alignment(_: *mut BufferType) -> usize {
            32
        }
        let table = BufferTypeTable {
            iface: BufferTypeI25 {
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
        for version in Version::ALL {
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
