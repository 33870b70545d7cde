//! `ggml_tensor` and the numbers in it.

use super::Buffer;
use std::ffi::{c_char, c_void};

/// Dimensions of a tensor.
pub const MAX_DIMS: usize = 4;
/// Sources of a tensor.
pub const MAX_SRC: usize = 10;
/// 32-bit words of parameters of an operation.
pub const MAX_OP_PARAMS: usize = 16;
/// Bytes of a name, with its terminating zero.
pub const MAX_NAME: usize = 64;

/// `ggml_tensor`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// Number of the element type, as in [`DType::id`](samite_core::DType::id).
    pub dtype: u32,
    /// The buffer that it lies in, or null.
    pub buffer: *mut Buffer,
    /// Extents, innermost first.
    pub ne: [i64; MAX_DIMS],
    /// Byte strides.
    pub nb: [usize; MAX_DIMS],
    /// Number of the operation, see [`op`].
    pub op: u32,
    /// Parameters of the operation: integers, or the bits of floats.
    pub op_params: [i32; MAX_OP_PARAMS],
    /// See [`flag`].
    pub flags: i32,
    /// Operands; null where there is none.
    pub src: [*mut Tensor; MAX_SRC],
    /// The tensor in whose memory this one lies, if it is a view; never a view itself.
    pub view_src: *mut Tensor,
    /// Byte offset in `view_src`.
    pub view_offs: usize,
    /// Address of the first element, or null before memory is there.
    pub data: *mut c_void,
    /// Name, terminated by zero.
    pub name: [c_char; MAX_NAME],
    /// For the backend that owns the buffer.
    pub extra: *mut c_void,
    /// To a multiple of 16 bytes.
    pub padding: [u8; 8],
}

impl Tensor {
    /// A tensor with everything zero: a leaf of type F32 without extents.
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

    /// The name, with characters that are not UTF-8 replaced.
    pub fn name(&self) -> String {
        let bytes: Vec<u8> = self
            .name
            .iter()
            .map(|&c| c as u8)
            .take_while(|&c| c != 0)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Sets the name, cut off where there is no more room.
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

/// Bits of [`Tensor::flags`].
#[allow(missing_docs)]
pub mod flag {
    pub const INPUT: i32 = 1;
    pub const OUTPUT: i32 = 2;
    pub const PARAM: i32 = 4;
    pub const LOSS: i32 = 8;
    /// Set on every node that has to be computed; others are skipped.
    pub const COMPUTE: i32 = 16;
}

/// `ggml_op`: the operations that samite has.
#[allow(missing_docs)]
pub mod op {
    pub const NONE: u32 = 0;
    pub const DUP: u32 = 1;
    pub const ADD: u32 = 2;
    pub const ADD_ID: u32 = 3;
    pub const SUB: u32 = 6;
    pub const MUL: u32 = 7;
    pub const DIV: u32 = 8;
    pub const SQR: u32 = 9;
    pub const SQRT: u32 = 10;
    pub const SUM: u32 = 14;
    pub const SUM_ROWS: u32 = 15;
    pub const CUMSUM: u32 = 16;
    pub const MEAN: u32 = 17;
    pub const ARGMAX: u32 = 18;
    pub const REPEAT: u32 = 20;
    pub const CONCAT: u32 = 22;
    pub const NORM: u32 = 24;
    pub const RMS_NORM: u32 = 25;
    pub const L2_NORM: u32 = 28;
    pub const MUL_MAT: u32 = 29;
    pub const MUL_MAT_ID: u32 = 30;
    pub const SCALE: u32 = 32;
    pub const CPY: u32 = 34;
    pub const CONT: u32 = 35;
    pub const RESHAPE: u32 = 36;
    pub const VIEW: u32 = 37;
    pub const PERMUTE: u32 = 38;
    pub const TRANSPOSE: u32 = 39;
    pub const GET_ROWS: u32 = 40;
    pub const SET_ROWS: u32 = 42;
    pub const DIAG_MASK_INF: u32 = 44;
    pub const SOFT_MAX: u32 = 46;
    pub const ROPE: u32 = 48;
    pub const CLAMP: u32 = 50;
    pub const PAD: u32 = 64;
    pub const ARANGE: u32 = 67;
    pub const ARGSORT: u32 = 69;
    pub const TOP_K: u32 = 70;
    pub const FILL: u32 = 73;
    pub const FLASH_ATTN_EXT: u32 = 74;
    pub const UNARY: u32 = 91;
    pub const GLU: u32 = 100;
    /// How many numbers are in use.
    pub const COUNT: u32 = 101;

    /// Whether the result only looks at a source's memory in another way.
    pub fn is_view(op: u32) -> bool {
        matches!(op, RESHAPE | VIEW | PERMUTE | TRANSPOSE)
    }
}

/// `ggml_glu_op`
#[allow(missing_docs)]
pub mod glu {
    pub const REGLU: i32 = 0;
    pub const GEGLU: i32 = 1;
    pub const SWIGLU: i32 = 2;
    pub const SWIGLU_OAI: i32 = 3;
    pub const GEGLU_ERF: i32 = 4;
    pub const GEGLU_QUICK: i32 = 5;
    pub const SWIGLU_CLAMP: i32 = 6;
}

/// `ggml_prec`
#[allow(missing_docs)]
pub mod precision {
    pub const DEFAULT: i32 = 0;
    pub const F32: i32 = 10;
    pub const BF16: i32 = 15;
    pub const F16: i32 = 20;
    pub const Q8: i32 = 30;
    pub const Q4: i32 = 40;
}

/// Modes of rotary position embedding that samite has.
#[allow(missing_docs)]
pub mod rope_mode {
    pub const NORMAL: i32 = 0;
    pub const NEOX: i32 = 2;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn layout_is_that_of_upstream() {
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
    fn names_are_cut_at_characters() {
        let mut tensor = Tensor::zeroed();
        tensor.set_name("blk.0.attn_q");
        assert_eq!(tensor.name(), "blk.0.attn_q");
        tensor.set_name(&"ä".repeat(40));
        assert_eq!(tensor.name(), "ä".repeat(31));
        tensor.set_name("");
        assert_eq!(tensor.name(), "");
    }
}
