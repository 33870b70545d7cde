//! `ggml_tensor` and its constants.

use super::{Buffer, Version};
pub use samite_wire::numbers::{
    MAX_DIMS, MAX_NAME, MAX_OP_PARAMS, MAX_SRC, flag, glu, op, precision, rope_mode,
};
use samite_wire::{Description, UnsupportedConversion};
use std::ffi::{c_char, c_void};

/// `ggml_tensor`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// Number of the element type, as in [`DType::id`](samite_core::DType::id).
    pub dtype: u32,
    /// Buffer of the tensor, or null.
    pub buffer: *mut Buffer,
    /// Extents, innermost first.
    pub ne: [i64; MAX_DIMS],
    /// Byte strides.
    pub nb: [usize; MAX_DIMS],
    /// Number of the operation. Depends on the release, see [`Version::numbers`].
    pub op: u32,
    /// Parameters of the operation: integers, or the bits of floats.
    pub op_params: [i32; MAX_OP_PARAMS],
    /// See [`flag`].
    pub flags: i32,
    /// Operands; null for missing ones.
    pub src: [*mut Tensor; MAX_SRC],
    /// Tensor whose memory a view uses. It is never a view itself.
    pub view_src: *mut Tensor,
    /// Byte offset in `view_src`.
    pub view_offs: usize,
    /// Address of the first element, or null before memory is allocated.
    pub data: *mut c_void,
    /// Name, terminated by zero.
    pub name: [c_char; MAX_NAME],
    /// Private data of the backend that owns the buffer.
    pub extra: *mut c_void,
    /// Padding to a multiple of 16 bytes.
    pub padding: [u8; 8],
}

impl Tensor {
    /// Returns a zeroed tensor: a leaf of type F32 without extents.
    pub const fn zeroed() -> Self {
        Tensor {
            dtype: 0,
            buffer: std::ptr::null_mut(),
            ne: [0; MAX_DIMS],
            nb: [0; MAX_DIMS],
            op: op::NONE,
            op_params: [0; MAX_OP_PARAMS],
            flags: 0,
            src: [std::ptr::null_mut(); MAX_SRC],
            view_src: std::ptr::null_mut(),
            view_offs: 0,
            data: std::ptr::null_mut(),
            name: [0; MAX_NAME],
            extra: std::ptr::null_mut(),
            padding: [0; 8],
        }
    }

    /// Returns a tensor of `version` without memory, name and sources.
    ///
    /// # Errors
    /// Returns an error if the version lacks the operation or the element type.
    pub fn from_description(
        description: &Description,
        version: Version,
    ) -> Result<Self, UnsupportedConversion> {
        let description = version.numbers().lower(description)?;
        Ok(Tensor {
            dtype: description.dtype,
            ne: description.ne,
            nb: description.nb,
            op: description.op,
            op_params: description.op_params,
            flags: description.flags,
            ..Tensor::zeroed()
        })
    }

    /// Returns all fields that are not pointers. The tensor has the numbers of `version`.
    pub fn description(&self, version: Version) -> Description {
        version.numbers().lift(Description {
            dtype: self.dtype,
            ne: self.ne,
            nb: self.nb,
            op: self.op,
            op_params: self.op_params,
            flags: self.flags,
            is_view: !self.view_src.is_null(),
        })
    }

    /// Returns the name. Bytes that are not UTF-8 are replaced.
    pub fn name(&self) -> String {
        let bytes: Vec<u8> = self
            .name
            .iter()
            .map(|&c| c as u8)
            .take_while(|&c| c != 0)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Sets the name. A long name is truncated.
    pub fn set_name(&mut self, name: &str) {
        self.name = [0; MAX_NAME];
        let mut len = name.len().min(MAX_NAME - 1);
        while !name.is_char_boundary(len) {
            len -= 1;
        }
        for (to, from) in self.name.iter_mut().zip(&name.as_bytes()[..len]) {
            *to = *from as c_char;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn struct_layout_matches_upstream() {
        assert_eq!(size_of::<Tensor>(), 336);
        let offsets = [
            offset_of!(Tensor, dtype),
            offset_of!(Tensor, buffer),
            offset_of!(Tensor, ne),
            offset_of!(Tensor, nb),
            offset_of!(Tensor, op),
            offset_of!(Tensor, op_params),
            offset_of!(Tensor, flags),
            offset_of!(Tensor, src),
            offset_of!(Tensor, view_src),
            offset_of!(Tensor, view_offs),
            offset_of!(Tensor, data),
            offset_of!(Tensor, name),
            offset_of!(Tensor, extra),
            offset_of!(Tensor, padding),
        ];
        assert_eq!(
            offsets,
            [0, 8, 16, 48, 80, 84, 148, 152, 232, 240, 248, 256, 320, 328]
        );
    }

    #[test]
    fn names_are_truncated_at_character_boundaries() {
        let mut tensor = Tensor::zeroed();
        tensor.set_name("blk.0.attn_q");
        assert_eq!(tensor.name(), "blk.0.attn_q");
        tensor.set_name(&"ä".repeat(40));
        assert_eq!(tensor.name(), "ä".repeat(31));
        tensor.set_name("");
        assert_eq!(tensor.name(), "");
    }
}
