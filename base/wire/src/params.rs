//! Conversion between operations and ggml's number and parameter words, with one table for both
//! directions.

use crate::field::{
    Bit, CircularPadding, Field, Flag, Float, Function, GluField, ResultRow, ResultRows,
    ResultShape, ResultStrides, ResultType, RopeFields, Scaling, Shifts, Size, Sizes, WideField,
    Windows, Words, order_at, pool_at, precision_at, triangle_at,
};
use crate::numbers::{MAX_OP_PARAMS, op};
use crate::{Description, UnsupportedConversion};
use samite_core::Op;

pub use crate::field::{dtype, shape};

/// An operation in ggml's form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// ggml's number.
    pub op: u32,
    /// Parameter words.
    pub params: Words,
}

/// Generates both directions of the table. An entry with a condition is decoded only if it holds.
macro_rules! conversions {
    ($(
        $number:ident $(if $condition:ident)? => $kind:ident
            $(($whole:ident: $whole_field:expr))? $({ $($name:ident: $field:expr),* })?;
    )*) => {
        fn write(operation: &Op, words: &mut Words) -> Result<u32, UnsupportedConversion> {
            Ok(match *operation {
                $(Op::$kind $(($whole))? $({ $($name),* })? => {
                    $($whole_field.write($whole, words)?;)?
                    $($($field.write($name, words)?;)*)?
                    op::$number
                })*
                ref other => return Err(format!("{other} has no form in ggml").into()),
            })
        }

        fn read(tensor: &Description) -> Result<Op, UnsupportedConversion> {
            Ok(match tensor.op {
                $(op::$number $(if $condition(tensor))? => {
                    Op::$kind $(($whole_field.read(tensor)?))? $({ $($name: $field.read(tensor)?),* })?
                })*
                other => return Err(format!("operation {other} is not known").into()),
            })
        }

        /// Contents of the table, in order.
        pub const TABLE: &[(u32, samite_core::OpKind)] = &[$((op::$number,
            samite_core::OpKind::$kind)),*];
    };
}

conversions! {
    NONE => Leaf;
    DUP => Dup;
    ADD => Add;
    ADD_ID => AddId;
    SUB => Sub;
    MUL => Mul;
    DIV => Div;
    SQR => Sqr;
    SQRT => Sqrt;
    LOG => Log;
    SUM => Sum;
    SUM_ROWS => SumRows;
    CUMSUM => CumSum;
    SSM_CONV => SsmConv;
    SSM_SCAN => SsmScan { snapshots: Size(0) };
    GATED_DELTA_NET => GatedDeltaNet { snapshots: Size(0) };
    MEAN => Mean;
    ARGMAX => ArgMax;
    REPEAT => Repeat { shape: ResultShape };
    REPEAT_BACK => RepeatBack { shape: ResultShape };
    CONCAT => Concat { dim: Size(0) };
    SILU_BACK => SiluBack;
    NORM => Norm { eps: Float(0) };
    RMS_NORM => RmsNorm { eps: Float(0) };
    RMS_NORM_BACK => RmsNormBack { eps: Float(0) };
    L2_NORM => L2Norm { eps: Float(0) };
    MUL_MAT => MulMat { precision: precision_at(0) };
    MUL_MAT_ID => MulMatId { precision: precision_at(0) };
    OUT_PROD => OutProd;
    SCALE => Scale { scale: Float(0), bias: Float(1) };
    CPY if has_target => Cpy;
    CPY => Cast { dtype: ResultType };
    CONT => Cont;
    RESHAPE => Reshape { shape: ResultShape };
    VIEW => View { shape: ResultShape, strides: ResultStrides, offset: WideField(0) };
    PERMUTE => Permute { axes: Sizes([0, 1, 2, 3]) };
    TRANSPOSE => Transpose;
    GET_ROWS => GetRows;
    GET_ROWS_BACK => GetRowsBack { rows: ResultRows };
    SET_ROWS => SetRows;
    DIAG_MASK_INF => DiagMaskInf { past: Size(0) };
    DIAG_MASK_ZERO => DiagMaskZero { past: Size(0) };
    SOFT_MAX => SoftMax { scale: Float(0), max_bias: Float(1) };
    SOFT_MAX_BACK => SoftMaxBack { scale: Float(0) };
    ROPE => Rope(rope: RopeFields);
    ROPE_BACK => RopeBack(rope: RopeFields);
    CLAMP => Clamp { min: Float(0), max: Float(1) };
    PAD if is_circular => PadCircular { before: Sizes([0, 2, 4, 6]), after: CircularPadding };
    PAD => Pad { before: Sizes([0, 2, 4, 6]), after: Sizes([1, 3, 5, 7]) };
    ARANGE => Arange { start: Float(0), stop: Float(1), step: Float(2) };
    ARGSORT => ArgSort { order: order_at(0) };
    TOP_K => TopK { k: ResultRow };
    FILL => Fill { value: Float(0) };
    FLASH_ATTN_EXT => FlashAttn {
        scale: Float(0), max_bias: Float(1), softcap: Float(2), precision: precision_at(3)
    };
    UNARY => Unary(function: Function);
    GLU => Glu { kind: GluField, swapped: Flag(1) };
    ACC => Acc { strides: Sizes([0, 1, 2]), offset: Size(3) };
    SET => Set { strides: Sizes([0, 1, 2]), offset: Size(3) };
    SIN => Sin;
    COS => Cos;
    LEAKY_RELU => LeakyRelu { slope: Float(0) };
    COUNT_EQUAL => CountEqual;
    GROUP_NORM => GroupNorm { groups: Size(0), eps: Float(1) };
    DIAG => Diag;
    TRI => Tri { part: triangle_at(0) };
    CONV_TRANSPOSE_1D => ConvTranspose1d { stride: Size(0) };
    CONV_TRANSPOSE_2D => ConvTranspose2d { stride: Size(0) };
    IM2COL => Im2Col { window: Windows(2), planar: Flag(6), dtype: ResultType };
    IM2COL_BACK => Im2ColBack { window: Windows(2), planar: Flag(6), shape: ResultShape };
    IM2COL_3D => Im2Col3d { window: Windows(3), channels: Size(9), dtype: ResultType };
    COL2IM_1D => Col2Im1d { stride: Size(0), channels: Size(1), crop: Size(2) };
    CONV_2D => Conv2d { window: Windows(2) };
    CONV_2D_DW => Conv2dDepthwise { window: Windows(2) };
    CONV_3D => Conv3d { window: Windows(3), channels: Size(9) };
    POOL_1D => Pool1d { pool: pool_at(0), kernel: Size(1), stride: Size(2), padding: Size(3) };
    POOL_2D => Pool2d {
        pool: pool_at(0), kernel: Sizes([1, 2]), stride: Sizes([3, 4]), padding: Sizes([5, 6])
    };
    POOL_2D_BACK => Pool2dBack {
        pool: pool_at(0), kernel: Sizes([1, 2]), stride: Sizes([3, 4]), padding: Sizes([5, 6])
    };
    WIN_PART => WinPart { windows: Sizes([0, 1]), size: Size(2) };
    WIN_UNPART => WinUnpart { size: Size(0), shape: ResultShape };
    GET_REL_POS => GetRelPos;
    ADD_REL_POS => AddRelPos;
    UPSCALE => Upscale {
        interpolation: Scaling, align_corners: Bit(0, 8), antialias: Bit(0, 9), shape: ResultShape
    };
    PAD_REFLECT_1D => PadReflect1d { before: Size(0), after: Size(1) };
    ROLL => Roll { shift: Shifts };
    TIMESTEP_EMBEDDING => TimestepEmbedding { dim: Size(0), max_period: Size(1) };
    RWKV_WKV6 => RwkvWkv6;
    RWKV_WKV7 => RwkvWkv7;
    GATED_LINEAR_ATTN => GatedLinearAttn { scale: Float(0) };
    SOLVE_TRI => SolveTri;
    LIGHTNING_INDEXER => LightningIndexer;
    DSV4_HC_COMB => HyperComb { eps: Float(0), iterations: Size(1) };
    DSV4_HC_PRE => HyperPre { scale: Float(0), gated: Flag(1) };
    DSV4_HC_POST => HyperPost;
    TOP_K_MASK => TopKMask;
    CROSS_ENTROPY_LOSS => CrossEntropyLoss;
    CROSS_ENTROPY_LOSS_BACK => CrossEntropyLossBack;
    OPT_STEP_ADAMW => OptStepAdamW;
    OPT_STEP_SGD => OptStepSgd;
}

/// Returns whether a copy goes into another tensor's memory. Otherwise it is a cast.
fn has_target(tensor: &Description) -> bool {
    tensor.is_view
}

/// Returns whether the padding is circular instead of zeros.
fn is_circular(tensor: &Description) -> bool {
    tensor.op_params[8] != 0
}

/// Returns `operation` in ggml's form.
///
/// # Errors
/// If ggml does not have the operation or a parameter does not fit.
pub fn encode(operation: &Op) -> Result<Encoded, UnsupportedConversion> {
    let mut params = [0; MAX_OP_PARAMS];
    let op = write(operation, &mut params)?;
    Ok(Encoded { op, params })
}

/// Returns the operation of a tensor.
///
/// Two of ggml's operations have two meanings: `CPY` is a copy into another tensor's memory or a
/// cast, and `CONT` may also change the shape. `ADD1` is an addition. [`import`](super::import)
/// handles the effect on shapes.
///
/// # Errors
/// The reason, if samite does not have the operation.
pub fn decode(tensor: &Description) -> Result<Op, UnsupportedConversion> {
    if tensor.op == op::SOFT_MAX_BACK && tensor.op_params[1] != 0 {
        return Err("the gradient of a softmax with ALiBi is not known".into());
    }
    if tensor.op == op::ADD1 {
        return Ok(Op::Add); // one element, which repeats
    }
    match tensor.op {
        op::MAP_CUSTOM1..=op::CUSTOM => {
            Err("the operation calls a function of its program, which samite cannot receive".into())
        }
        // Its result differs from samite's operation of that name.
        op::FLASH_ATTN_BACK => Err("ggml's gradient of attention is not known".into()),
        _ => read(tensor),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_core::op::{
        Glu, Interpolation, Pool, Precision, Rope, RopeMode, SortOrder, Triangle, Unary, Window,
    };
    use samite_core::{DType, OpKind};
    use std::collections::BTreeSet;

    /// Returns every operation, with parameters that differ from each other and from zero.
    fn all() -> Vec<(Op, Description)> {
        let tensor = Description {
            dtype: DType::F16.id(),
            ne: [6, 5, 4, 3],
            nb: [2, 20, 200, 2000],
            ..Description::default()
        };
        let precision = Precision::BF16;
        let rope = Rope {
            dims: 64,
            offset: 32,
            mode: RopeMode::Neox,
            original_context: 4096,
            freq_base: 10000.0,
            freq_scale: 0.5,
            ext_factor: 1.0,
            attn_factor: 1.25,
            beta_fast: 33.0,
            beta_slow: 2.0,
        };
        let sections = [16, 24, 23, 1];
        let window = Window {
            stride: [1, 2, 3],
            padding: [4, 5, 6],
            dilation: [7, 8, 9],
        };
        let plane = Window {
            stride: [1, 2, 1],
            padding: [4, 5, 0],
            dilation: [7, 8, 1],
        };
        let mut ops = vec![
            Op::Leaf,
            Op::Dup,
            Op::Add,
            Op::AddId,
            Op::Sub,
            Op::Mul,
            Op::Div,
            Op::Scale {
                scale: 2.0,
                bias: -1.0,
            },
            Op::Sqr,
            Op::Sqrt,
            Op::Sum,
            Op::SumRows,
            Op::Mean,
            Op::CumSum,
            Op::SsmConv,
            Op::SsmScan { snapshots: 2 },
            Op::Log,
            Op::RepeatBack {
                shape: [6, 5, 4, 3],
            },
            Op::SiluBack,
            Op::RmsNormBack { eps: 1e-4 },
            Op::OutProd,
            Op::GetRowsBack { rows: 5 },
            Op::DiagMaskZero { past: 9 },
            Op::SoftMaxBack { scale: 0.25 },
            Op::RopeBack(rope),
            Op::CrossEntropyLoss,
            Op::CrossEntropyLossBack,
            Op::OptStepAdamW,
            Op::OptStepSgd,
            Op::Acc {
                strides: [20, 200, 2000],
                offset: 8,
            },
            Op::Set {
                strides: [24, 240, 2400],
                offset: 12,
            },
            Op::Sin,
            Op::Cos,
            Op::LeakyRelu { slope: 0.1 },
            Op::CountEqual,
            Op::GroupNorm {
                groups: 2,
                eps: 1e-3,
            },
            Op::Diag,
            Op::Tri {
                part: Triangle::Lower,
            },
            Op::ConvTranspose1d { stride: 2 },
            Op::ConvTranspose2d { stride: 3 },
            Op::Im2Col {
                window: plane,
                planar: true,
                dtype: DType::F16,
            },
            Op::Im2ColBack {
                window: plane,
                planar: false,
                shape: [6, 5, 4, 3],
            },
            Op::Im2Col3d {
                window,
                channels: 12,
                dtype: DType::F16,
            },
            Op::Col2Im1d {
                stride: 2,
                channels: 3,
                crop: 1,
            },
            Op::Conv2d { window: plane },
            Op::Conv2dDepthwise { window: plane },
            Op::Conv3d {
                window,
                channels: 4,
            },
            Op::Pool1d {
                pool: Pool::Mean,
                kernel: 2,
                stride: 3,
                padding: 1,
            },
            Op::Pool2d {
                pool: Pool::Max,
                kernel: [2, 3],
                stride: [4, 5],
                padding: [6, 7],
            },
            Op::Pool2dBack {
                pool: Pool::Mean,
                kernel: [2, 3],
                stride: [4, 5],
                padding: [6, 7],
            },
            Op::WinPart {
                windows: [2, 3],
                size: 14,
            },
            Op::WinUnpart {
                size: 14,
                shape: [6, 5, 4, 3],
            },
            Op::GetRelPos,
            Op::AddRelPos,
            Op::TopKMask,
            Op::Upscale {
                interpolation: Interpolation::Bilinear,
                align_corners: false,
                antialias: true,
                shape: [6, 5, 4, 3],
            },
            Op::Upscale {
                interpolation: Interpolation::Bicubic,
                align_corners: true,
                antialias: false,
                shape: [6, 5, 4, 3],
            },
            Op::PadCircular {
                before: [1, 2, 3, 4],
                after: [5, 6, 7, 8],
            },
            Op::PadReflect1d {
                before: 2,
                after: 3,
            },
            Op::Roll {
                shift: [1, 2, 3, 1],
            },
            Op::TimestepEmbedding {
                dim: 10,
                max_period: 1000,
            },
            Op::RwkvWkv6,
            Op::RwkvWkv7,
            Op::GatedLinearAttn { scale: 0.5 },
            Op::SolveTri,
            Op::LightningIndexer,
            Op::HyperComb {
                eps: 1e-6,
                iterations: 20,
            },
            Op::HyperPre {
                scale: 2.0,
                gated: true,
            },
            Op::HyperPost,
            Op::GatedDeltaNet { snapshots: 3 },
            Op::ArgMax,
            Op::Repeat {
                shape: [6, 5, 4, 3],
            },
            Op::Concat { dim: 3 },
            Op::Norm { eps: 1e-5 },
            Op::RmsNorm { eps: 1e-6 },
            Op::L2Norm { eps: 1e-7 },
            Op::MulMat { precision },
            Op::MulMatId { precision },
            Op::Cast { dtype: DType::F16 },
            Op::Cont,
            Op::Reshape {
                shape: [6, 5, 4, 3],
            },
            Op::View {
                shape: [6, 5, 4, 3],
                strides: [20, 200, 2000],
                offset: 0x1_2345_6788,
            },
            Op::Permute { axes: [0, 2, 1, 3] },
            Op::Transpose,
            Op::GetRows,
            Op::SetRows,
            Op::DiagMaskInf { past: 7 },
            Op::SoftMax {
                scale: 0.125,
                max_bias: 8.0,
            },
            Op::Rope(rope),
            Op::Rope(Rope {
                mode: RopeMode::Normal,
                ..rope
            }),
            Op::Rope(Rope {
                mode: RopeMode::Multi { sections },
                ..rope
            }),
            Op::RopeBack(Rope {
                mode: RopeMode::Interleaved { sections },
                ..rope
            }),
            Op::Rope(Rope {
                mode: RopeMode::Vision { sections },
                ..rope
            }),
            Op::Clamp {
                min: -1.0,
                max: 2.0,
            },
            Op::Pad {
                before: [1, 2, 3, 4],
                after: [5, 6, 7, 8],
            },
            Op::Arange {
                start: 1.0,
                stop: 9.0,
                step: 0.5,
            },
            Op::ArgSort {
                order: SortOrder::Ascending,
            },
            Op::ArgSort {
                order: SortOrder::Descending,
            },
            Op::TopK { k: 6 },
            Op::Fill { value: 3.0 },
            Op::FlashAttn {
                scale: 0.1,
                max_bias: 8.0,
                softcap: 30.0,
                precision,
            },
        ];
        ops.extend(Unary::ALL.map(Op::Unary));
        for swapped in [false, true] {
            ops.extend(Glu::ALL.map(|kind| Op::Glu { kind, swapped }));
        }
        ops.into_iter().map(|op| (op, tensor)).collect()
    }

    #[test]
    fn every_operation_survives_the_round_trip() {
        for (op, mut tensor) in all() {
            let encoded = encode(&op).unwrap();
            tensor.op = encoded.op;
            tensor.op_params = encoded.params;
            assert_eq!(decode(&tensor).unwrap(), op);
        }
        // A view distinguishes a copy into another tensor's memory from a cast.
        let tensor = Description {
            op: encode(&Op::Cpy).unwrap().op,
            is_view: true,
            ..Description::default()
        };
        assert_eq!(decode(&tensor).unwrap(), Op::Cpy);
        // ggml has a separate number for the addition of one element.
        let tensor = Description {
            op: op::ADD1,
            ..Description::default()
        };
        assert_eq!(decode(&tensor).unwrap(), Op::Add);
    }

    #[test]
    fn the_round_trip_covers_every_table_entry() {
        let tried: BTreeSet<OpKind> = all().iter().map(|(op, _)| op.kind()).collect();
        let cpy = OpKind::Cpy; // tested separately
        for (_, kind) in TABLE {
            assert!(
                tried.contains(kind) || *kind == cpy,
                "{kind:?} is not tried"
            );
        }
    }

    /// Compares with numbers from upstream's enumerations and parameter slots.
    #[test]
    fn encoded_numbers_match_upstream() {
        let unary = |unary| encode(&Op::Unary(unary)).unwrap().params[0];
        assert_eq!(
            [Unary::Abs, Unary::Silu, Unary::SoftPlus, Unary::Trunc].map(unary),
            [0, 10, 15, 21]
        );
        let encoded = encode(&Op::Pad {
            before: [1, 2, 3, 4],
            after: [5, 6, 7, 8],
        })
        .unwrap();
        assert_eq!(encoded.op, 64);
        assert_eq!(encoded.params[..9], [1, 5, 2, 6, 3, 7, 4, 8, 0]);
        let encoded = encode(&Op::MulMat {
            precision: Precision::F32,
        })
        .unwrap();
        assert_eq!((encoded.op, encoded.params[0]), (29, 10));
        let encoded = encode(&Op::Rope(Rope::new(64, RopeMode::Neox, 1e4))).unwrap();
        assert_eq!(encoded.op, 48);
        assert_eq!(encoded.params[..5], [0, 64, 2, 0, 0]);
        assert_eq!(encoded.params[5], 1e4f32.to_bits() as i32);
    }

    #[test]
    fn unknown_operations_are_refused_with_reasons() {
        let mut tensor = Description::default();
        for number in [op::FLASH_ATTN_BACK, op::COUNT, u32::MAX] {
            tensor.op = number;
            assert!(decode(&tensor).unwrap_err().contains("not known"));
        }
        for number in [
            op::MAP_CUSTOM1,
            op::MAP_CUSTOM2,
            op::MAP_CUSTOM3,
            op::CUSTOM,
        ] {
            tensor.op = number;
            assert!(
                decode(&tensor)
                    .unwrap_err()
                    .contains("function of its program")
            );
        }
        let refused = |number: u32, at: usize, value: i32| {
            let mut tensor = Description {
                op: number,
                ..Description::default()
            };
            tensor.op_params[at] = value;
            decode(&tensor).unwrap_err()
        };
        assert!(refused(op::ROPE, 2, 9).contains("rope mode 9"));
        assert!(refused(op::ROPE, 2, 4).contains("rope mode 4"));
        assert!(refused(op::ROPE, 1, -2).contains("negative"));
        assert!(refused(op::UNARY, 0, 22).contains("function 22"));
        assert!(refused(op::UNARY, 0, -1).contains("function -1"));
        assert!(refused(op::GLU, 0, 7).contains("gated unit 7"));
        assert!(refused(op::UPSCALE, 0, 3).contains("interpolation 3"));
        assert!(refused(op::TRI, 0, 4).contains("triangle 4"));
        assert!(refused(op::POOL_1D, 0, 2).contains("pooling 2"));
        assert!(refused(op::CONV_2D, 1, -1).contains("negative"));
        assert!(refused(op::SOFT_MAX_BACK, 1, 1).contains("ALiBi"));
        assert!(refused(op::MUL_MAT, 0, 11).contains("precision 11"));
        assert!(refused(op::ARGSORT, 0, 2).contains("order 2"));
        tensor.ne[2] = -1;
        assert!(shape(&tensor).unwrap_err().contains("negative"));
        tensor.dtype = 4;
        assert!(dtype(&tensor).unwrap_err().contains("type 4"));
    }
}
