//! ggml's constants: limits of a tensor, and its enumerations as far as samite supports them.

/// Number of dimensions of a tensor.
pub const MAX_DIMS: usize = 4;
/// Number of sources of a tensor.
pub const MAX_SRC: usize = 10;
/// Number of 32-bit parameter words of an operation.
pub const MAX_OP_PARAMS: usize = 16;
/// Bytes of a name, including its terminating zero.
pub const MAX_NAME: usize = 64;

/// Bits of a tensor's flags.
#[allow(missing_docs)]
pub mod flag {
    pub const INPUT: i32 = 1;
    pub const OUTPUT: i32 = 2;
    pub const PARAM: i32 = 4;
    pub const LOSS: i32 = 8;
    /// Set on every node that has to be computed. Others are skipped.
    pub const COMPUTE: i32 = 16;
}

/// `ggml_op` values of the operations that samite supports.
#[allow(missing_docs)]
pub mod op {
    pub const NONE: u32 = 0;
    pub const DUP: u32 = 1;
    pub const ADD: u32 = 2;
    pub const ADD_ID: u32 = 3;
    pub const ADD1: u32 = 4;
    pub const ACC: u32 = 5;
    pub const SUB: u32 = 6;
    pub const MUL: u32 = 7;
    pub const DIV: u32 = 8;
    pub const SQR: u32 = 9;
    pub const SQRT: u32 = 10;
    pub const LOG: u32 = 11;
    pub const SIN: u32 = 12;
    pub const COS: u32 = 13;
    pub const SUM: u32 = 14;
    pub const SUM_ROWS: u32 = 15;
    pub const CUMSUM: u32 = 16;
    pub const SSM_CONV: u32 = 76;
    pub const SSM_SCAN: u32 = 77;
    pub const GATED_DELTA_NET: u32 = 86;
    pub const MEAN: u32 = 17;
    pub const ARGMAX: u32 = 18;
    pub const COUNT_EQUAL: u32 = 19;
    pub const REPEAT: u32 = 20;
    pub const REPEAT_BACK: u32 = 21;
    pub const CONCAT: u32 = 22;
    pub const SILU_BACK: u32 = 23;
    pub const NORM: u32 = 24;
    pub const RMS_NORM: u32 = 25;
    pub const RMS_NORM_BACK: u32 = 26;
    pub const GROUP_NORM: u32 = 27;
    pub const L2_NORM: u32 = 28;
    pub const MUL_MAT: u32 = 29;
    pub const MUL_MAT_ID: u32 = 30;
    pub const OUT_PROD: u32 = 31;
    pub const SCALE: u32 = 32;
    pub const SET: u32 = 33;
    pub const CPY: u32 = 34;
    pub const CONT: u32 = 35;
    pub const RESHAPE: u32 = 36;
    pub const VIEW: u32 = 37;
    pub const PERMUTE: u32 = 38;
    pub const TRANSPOSE: u32 = 39;
    pub const GET_ROWS: u32 = 40;
    pub const GET_ROWS_BACK: u32 = 41;
    pub const SET_ROWS: u32 = 42;
    pub const DIAG: u32 = 43;
    pub const DIAG_MASK_INF: u32 = 44;
    pub const DIAG_MASK_ZERO: u32 = 45;
    pub const SOFT_MAX: u32 = 46;
    pub const SOFT_MAX_BACK: u32 = 47;
    pub const ROPE: u32 = 48;
    pub const ROPE_BACK: u32 = 49;
    pub const CLAMP: u32 = 50;
    pub const CONV_TRANSPOSE_1D: u32 = 51;
    pub const IM2COL: u32 = 52;
    pub const IM2COL_BACK: u32 = 53;
    pub const IM2COL_3D: u32 = 54;
    pub const COL2IM_1D: u32 = 55;
    pub const CONV_2D: u32 = 56;
    pub const CONV_3D: u32 = 57;
    pub const CONV_2D_DW: u32 = 58;
    pub const CONV_TRANSPOSE_2D: u32 = 59;
    pub const POOL_1D: u32 = 60;
    pub const POOL_2D: u32 = 61;
    pub const UPSCALE: u32 = 63;
    pub const PAD: u32 = 64;
    pub const PAD_REFLECT_1D: u32 = 65;
    pub const ROLL: u32 = 66;
    pub const ARANGE: u32 = 67;
    pub const TIMESTEP_EMBEDDING: u32 = 68;
    pub const ARGSORT: u32 = 69;
    pub const TOP_K: u32 = 70;
    pub const LEAKY_RELU: u32 = 71;
    pub const TRI: u32 = 72;
    pub const FILL: u32 = 73;
    pub const FLASH_ATTN_EXT: u32 = 74;
    pub const RWKV_WKV6: u32 = 82;
    pub const GATED_LINEAR_ATTN: u32 = 83;
    pub const RWKV_WKV7: u32 = 84;
    pub const SOLVE_TRI: u32 = 85;
    pub const LIGHTNING_INDEXER: u32 = 87;
    pub const DSV4_HC_COMB: u32 = 88;
    pub const DSV4_HC_PRE: u32 = 89;
    pub const DSV4_HC_POST: u32 = 90;
    pub const UNARY: u32 = 91;
    pub const CROSS_ENTROPY_LOSS: u32 = 96;
    pub const CROSS_ENTROPY_LOSS_BACK: u32 = 97;
    pub const OPT_STEP_ADAMW: u32 = 98;
    pub const OPT_STEP_SGD: u32 = 99;
    pub const GLU: u32 = 100;
    /// Number of values in use.
    pub const COUNT: u32 = 101;

    /// Returns whether the result is a view of a source's memory.
    pub fn is_view(op: u32) -> bool {
        matches!(op, RESHAPE | VIEW | PERMUTE | TRANSPOSE)
    }
}

/// `ggml_glu_op` values.
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

/// `ggml_prec` values.
#[allow(missing_docs)]
pub mod precision {
    pub const DEFAULT: i32 = 0;
    pub const F32: i32 = 10;
    pub const BF16: i32 = 15;
    pub const F16: i32 = 20;
    pub const Q8: i32 = 30;
    pub const Q4: i32 = 40;
}

/// Modes of rotary position embedding that samite supports.
#[allow(missing_docs)]
pub mod rope_mode {
    pub const NORMAL: i32 = 0;
    pub const NEOX: i32 = 2;
    pub const MULTI: i32 = 8;
    pub const VISION: i32 = 24;
    pub const INTERLEAVED: i32 = 40;
}
