//! ggml's names of operations, by number.

use crate::abi::{Tensor, op};
use std::ffi::CStr;

/// `ggml_op`
#[rustfmt::skip]
const OPS: [&CStr; 101] = [
    c"NONE", c"DUP", c"ADD", c"ADD_ID", c"ADD1", c"ACC", c"SUB", c"MUL", c"DIV", c"SQR", c"SQRT",
    c"LOG", c"SIN", c"COS", c"SUM", c"SUM_ROWS", c"CUMSUM", c"MEAN", c"ARGMAX", c"COUNT_EQUAL",
    c"REPEAT", c"REPEAT_BACK", c"CONCAT", c"SILU_BACK", c"NORM", c"RMS_NORM", c"RMS_NORM_BACK",
    c"GROUP_NORM", c"L2_NORM", c"MUL_MAT", c"MUL_MAT_ID", c"OUT_PROD", c"SCALE", c"SET", c"CPY",
    c"CONT", c"RESHAPE", c"VIEW", c"PERMUTE", c"TRANSPOSE", c"GET_ROWS", c"GET_ROWS_BACK",
    c"SET_ROWS", c"DIAG", c"DIAG_MASK_INF", c"DIAG_MASK_ZERO", c"SOFT_MAX", c"SOFT_MAX_BACK",
    c"ROPE", c"ROPE_BACK", c"CLAMP", c"CONV_TRANSPOSE_1D", c"IM2COL", c"IM2COL_BACK", c"IM2COL_3D",
    c"COL2IM_1D", c"CONV_2D", c"CONV_3D", c"CONV_2D_DW", c"CONV_TRANSPOSE_2D", c"POOL_1D",
    c"POOL_2D", c"POOL_2D_BACK", c"UPSCALE", c"PAD", c"PAD_REFLECT_1D", c"ROLL", c"ARANGE",
    c"TIMESTEP_EMBEDDING", c"ARGSORT", c"TOP_K", c"LEAKY_RELU", c"TRI", c"FILL", c"FLASH_ATTN_EXT",
    c"FLASH_ATTN_BACK", c"SSM_CONV", c"SSM_SCAN", c"WIN_PART", c"WIN_UNPART", c"GET_REL_POS",
    c"ADD_REL_POS", c"RWKV_WKV6", c"GATED_LINEAR_ATTN", c"RWKV_WKV7", c"SOLVE_TRI",
    c"GATED_DELTA_NET", c"LIGHTNING_INDEXER", c"DSV4_HC_COMB", c"DSV4_HC_PRE", c"DSV4_HC_POST",
    c"UNARY", c"MAP_CUSTOM1", c"MAP_CUSTOM2", c"MAP_CUSTOM3", c"CUSTOM", c"CROSS_ENTROPY_LOSS",
    c"CROSS_ENTROPY_LOSS_BACK", c"OPT_STEP_ADAMW", c"OPT_STEP_SGD", c"GLU",
];

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

/// Returns the name of an operation.
pub fn of_op(op: u32) -> &'static CStr {
    at(&OPS, op as usize)
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
    match tensor.op {
        op::UNARY => of_unary(variant),
        op::GLU => of_glu(variant),
        other => of_op(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::glu;

    #[test]
    fn operation_numbers_have_the_expected_names() {
        assert_eq!(OPS.len(), op::COUNT as usize);
        for (number, name) in [
            (op::NONE, c"NONE"),
            (op::MUL_MAT_ID, c"MUL_MAT_ID"),
            (op::SET_ROWS, c"SET_ROWS"),
            (op::ROPE, c"ROPE"),
            (op::TOP_K, c"TOP_K"),
            (op::FLASH_ATTN_EXT, c"FLASH_ATTN_EXT"),
            (op::UNARY, c"UNARY"),
            (op::GLU, c"GLU"),
            (op::COUNT, c"UNKNOWN"),
        ] {
            assert_eq!(of_op(number), name);
        }
        let mut tensor = Tensor::zeroed();
        tensor.op = op::GLU;
        tensor.op_params[0] = glu::SWIGLU_CLAMP;
        assert_eq!(of_tensor(&tensor), c"SWIGLU_CLAMP");
        tensor.op = op::UNARY;
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
            let name = of_op(*number).to_str().unwrap();
            assert_eq!(name.to_lowercase(), expected);
        }
    }
}
