//! ggml's constants: limits of a tensor, and its enumerations as far as samite supports them.

use crate::{Description, UnsupportedConversion};
use samite_core::DType;

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

/// Defines a constant for the number of each operation, and the table of their names.
macro_rules! operations {
    ($($name:ident)*) => {
        /// Position in the list of operations.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        enum Position {
            $($name,)*
        }

        $(pub const $name: u32 = Position::$name as u32;)*

        /// Names by number.
        pub const NAMES: &[&std::ffi::CStr] = &[$(match
            std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            }),*];
    };
}

/// `ggml_op` values of the newest known release. [`Release`] converts those of older releases.
#[allow(missing_docs)]
pub mod op {
    operations! {
        NONE DUP ADD ADD_ID ADD1 ACC SUB MUL DIV SQR SQRT LOG SIN COS SUM SUM_ROWS CUMSUM MEAN
        ARGMAX COUNT_EQUAL REPEAT REPEAT_BACK CONCAT SILU_BACK NORM RMS_NORM RMS_NORM_BACK
        GROUP_NORM L2_NORM MUL_MAT MUL_MAT_ID OUT_PROD SCALE SET CPY CONT RESHAPE VIEW PERMUTE
        TRANSPOSE GET_ROWS GET_ROWS_BACK SET_ROWS DIAG DIAG_MASK_INF DIAG_MASK_ZERO SOFT_MAX
        SOFT_MAX_BACK ROPE ROPE_BACK CLAMP CONV_TRANSPOSE_1D IM2COL IM2COL_BACK IM2COL_3D COL2IM_1D
        CONV_2D CONV_3D CONV_2D_DW CONV_TRANSPOSE_2D POOL_1D POOL_2D POOL_2D_BACK UPSCALE PAD
        PAD_REFLECT_1D ROLL ARANGE TIMESTEP_EMBEDDING ARGSORT TOP_K LEAKY_RELU TRI FILL
        FLASH_ATTN_EXT FLASH_ATTN_BACK SSM_CONV SSM_SCAN WIN_PART WIN_UNPART GET_REL_POS ADD_REL_POS
        RWKV_WKV6 GATED_LINEAR_ATTN RWKV_WKV7 SOLVE_TRI GATED_DELTA_NET LIGHTNING_INDEXER
        DSV4_HC_COMB DSV4_HC_PRE DSV4_HC_POST TOP_K_MASK UNARY MAP_CUSTOM1 MAP_CUSTOM2 MAP_CUSTOM3
        CUSTOM CROSS_ENTROPY_LOSS CROSS_ENTROPY_LOSS_BACK OPT_STEP_ADAMW OPT_STEP_SGD GLU
    }

    /// Number of values in use.
    pub const COUNT: u32 = NAMES.len() as u32;

    /// Returns whether the result is a view of a source's memory.
    pub fn is_view(op: u32) -> bool {
        matches!(op, RESHAPE | VIEW | PERMUTE | TRANSPOSE)
    }
}

/// Differences of the numbers of some ggml releases from those of the newest.
#[derive(Debug, PartialEq, Eq)]
pub struct Release {
    /// First release, for messages.
    pub name: &'static str,
    /// Operations of the newest release that it lacks, in ascending order.
    lacks: &'static [u32],
    /// Number of element type numbers in use.
    pub types: u32,
}

/// Numbers of ggml 0.25 and 0.26.
pub const V25: Release = Release {
    name: "0.25",
    lacks: &[op::TOP_K_MASK],
    types: 43,
};

/// Numbers of ggml 0.27.
pub const V27: Release = Release {
    name: "0.27",
    lacks: &[],
    types: 43,
};

/// Numbers of ggml 0.28.
pub const V28: Release = Release {
    name: "0.28",
    lacks: &[],
    types: 44,
};

impl Release {
    /// Returns the release's number of an operation, or `None` if the release lacks it.
    pub fn number_of(&self, op: u32) -> Option<u32> {
        let before = self.lacks.iter().filter(|&&lacking| lacking < op).count();
        (!self.lacks.contains(&op)).then_some(op - before as u32)
    }

    /// Returns the operation with the release's `number`. An unknown number remains unknown.
    pub fn op_of(&self, number: u32) -> u32 {
        let mut op = number;
        for &lacking in self.lacks {
            if lacking <= op {
                op = op.saturating_add(1);
            }
        }
        op
    }

    /// Returns the number of operations.
    pub fn operations(&self) -> u32 {
        op::COUNT - self.lacks.len() as u32
    }

    /// Changes the operation of `tensor` to the release's number.
    ///
    /// # Errors
    /// If the release lacks the operation or the element type.
    pub fn lower(&self, tensor: &Description) -> Result<Description, UnsupportedConversion> {
        let lacks = |what: &str| format!("ggml {} has no {what}", self.name);
        if tensor.dtype >= self.types {
            let dtype = DType::from_id(tensor.dtype).map_or("such type", DType::name);
            return Err(lacks(dtype).into());
        }
        let name = op::NAMES.get(tensor.op as usize);
        let name = name.map_or("such operation".into(), |name| name.to_string_lossy());
        let op = self.number_of(tensor.op).ok_or_else(|| lacks(&name))?;
        Ok(Description { op, ..*tensor })
    }

    /// Changes the operation of `tensor` from the release's number.
    pub fn lift(&self, tensor: Description) -> Description {
        let op = self.op_of(tensor.op);
        Description { op, ..tensor }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_convert_numbers_both_ways() {
        for release in [&V25, &V27, &V28] {
            for number in 0..release.operations() {
                assert_eq!(release.number_of(release.op_of(number)), Some(number));
            }
            assert!(release.op_of(release.operations()) >= op::COUNT);
            assert_eq!(release.op_of(u32::MAX), u32::MAX);
        }
        // Numbers from upstream's headers of 0.26 and 0.27.
        let of = |op| [V25.number_of(op), V27.number_of(op)];
        assert_eq!(of(op::DSV4_HC_POST), [Some(90), Some(90)]);
        assert_eq!(of(op::TOP_K_MASK), [None, Some(91)]);
        assert_eq!(of(op::UNARY), [Some(91), Some(92)]);
        assert_eq!(of(op::GLU), [Some(100), Some(101)]);
        assert_eq!((V25.operations(), V27.operations()), (101, 102));
    }

    #[test]
    fn what_a_release_lacks_is_named() {
        let mut tensor = Description {
            op: op::TOP_K_MASK,
            ..Description::default()
        };
        let error = V25.lower(&tensor).unwrap_err();
        assert_eq!(error, "ggml 0.25 has no TOP_K_MASK");
        assert_eq!(V27.lower(&tensor), Ok(tensor));
        tensor.op = op::GLU;
        assert_eq!(V25.lift(V25.lower(&tensor).unwrap()), tensor);
        tensor.dtype = 43;
        assert!(
            V27.lower(&tensor)
                .unwrap_err()
                .starts_with("ggml 0.27 has no")
        );
        assert_eq!(V28.lower(&tensor), Ok(tensor));
    }
}
