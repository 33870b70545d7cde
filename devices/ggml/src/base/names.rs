//! ggml's names of operations, by the number that plugins use.

use super::version;
use crate::abi::{Tensor, op};
use std::ffi::CStr;

/// `ggml_unary_op`
#[rustfmt::skip]
const UNARY: [&CStr; 22] = [
    c"ABS", c"SGN", c"NEG", c"STEP", c"TANH", c"ELU", c"RELU", c"SIGMOID", c"GELU", c"GELU_QUICK",
    c"SILU", c"HARDSWISH", c"HARDSIGMOID", c"EXP", c"EXPM1", c"SOFTPLUS", c"GELU_ERF", c"XIELU",
    c"FLOOR", c"CEIL", c"ROUND", c"TRUNC",
];

/// `ggml_glu_op`
#[rustfmt::skip]
const GLU: [&CStr; 7] = [
    c"REGLU", c"GEGLU", c"SWIGLU", c"SWIGLU_OAI", c"GEGLU_ERF", c"GEGLU_QUICK", c"SWIGLU_CLAMP",
];

fn at(names: &[&'static CStr], number: usize) -> &'static CStr {
    names.get(number).copied().unwrap_or(c"UNKNOWN")
}

/// Returns the operation that a plugin gives this number.
pub fn op_of(number: u32) -> u32 {
    version().numbers().op_of(number)
}

/// Returns the name of the operation with a plugin's number.
pub fn of_op(number: u32) -> &'static CStr {
    at(op::NAMES, op_of(number) as usize)
}

/// Returns the name of a unary function.
pub fn of_unary(number: u32) -> &'static CStr {
    at(&UNARY, number as usize)
}

/// Returns the name of a gated unit.
pub fn of_glu(number: u32) -> &'static CStr {
    at(&GLU, number as usize)
}

/// Returns the name of a tensor's operation, or of its function if the operation has several.
pub fn of_tensor(tensor: &Tensor) -> &'static CStr {
    let variant = tensor.op_params[0].cast_unsigned();
    match op_of(tensor.op) {
        op::UNARY => of_unary(variant),
        op::GLU => of_glu(variant),
        _ => of_op(tensor.op),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::glu;

    #[test]
    fn operation_numbers_have_the_expected_names() {
        let numbers = version().numbers();
        for (number, name) in [
            (op::NONE, c"NONE"),
            (op::MUL_MAT_ID, c"MUL_MAT_ID"),
            (op::SET_ROWS, c"SET_ROWS"),
            (op::ROPE, c"ROPE"),
            (op::TOP_K, c"TOP_K"),
            (op::FLASH_ATTN_EXT, c"FLASH_ATTN_EXT"),
            (op::UNARY, c"UNARY"),
            (op::GLU, c"GLU"),
        ] {
            assert_eq!(of_op(numbers.number_of(number).unwrap()), name);
        }
        assert_eq!(of_op(numbers.operations()), c"UNKNOWN");
        let mut tensor = Tensor::zeroed();
        tensor.op = numbers.number_of(op::GLU).unwrap();
        tensor.op_params[0] = glu::SWIGLU_CLAMP;
        assert_eq!(of_tensor(&tensor), c"SWIGLU_CLAMP");
        tensor.op = numbers.number_of(op::UNARY).unwrap();
        tensor.op_params[0] = -1;
        assert_eq!(of_tensor(&tensor), c"UNKNOWN");
        tensor.op = op::MUL_MAT;
        assert_eq!(of_tensor(&tensor), c"MUL_MAT");
    }

    /// samite's names are ggml's, so this finds operations with a wrong number. A cast is one of
    /// ggml's copies.
    #[test]
    fn operations_map_to_the_number_of_their_name() {
        use samite_core::OpKind;
        for (number, kind) in crate::convert::params::TABLE {
            let expected = match kind {
                OpKind::Cast => "cpy",
                OpKind::PadCircular => "pad",
                kind => kind.name(),
            };
            let name = op::NAMES[*number as usize].to_str().unwrap();
            assert_eq!(name.to_lowercase(), expected);
        }
    }
}
