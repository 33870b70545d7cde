//! An operation as ggml's number and words of parameters, and back.

use super::Reason;
use crate::abi::{MAX_OP_PARAMS, Tensor, glu, op, precision, rope_mode};
use samite_core::op::{Glu, Precision, Rope, RopeMode, SortOrder, Unary};
use samite_core::{DType, Op, Shape};

/// An operation as ggml writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Its number.
    pub op: u32,
    /// Its parameters.
    pub params: [i32; MAX_OP_PARAMS],
}

/// Words of parameters, written one by one.
struct Words([i32; MAX_OP_PARAMS]);

impl Words {
    fn int(&mut self, at: usize, value: i32) -> &mut Self {
        self.0[at] = value;
        self
    }

    fn float(&mut self, at: usize, value: f32) -> &mut Self {
        self.0[at] = value.to_bits() as i32;
        self
    }

    fn size(&mut self, at: usize, value: usize) -> Result<&mut Self, Reason> {
        self.0[at] = i32::try_from(value).map_err(|_| too_large(value))?;
        Ok(self)
    }
}

fn too_large(value: usize) -> Reason {
    format!("parameter {value} does not fit into 32 bits").into()
}

fn encode_precision(value: Precision) -> i32 {
    match value {
        Precision::Default => precision::DEFAULT,
        Precision::F32 => precision::F32,
        Precision::BF16 => precision::BF16,
        Precision::F16 => precision::F16,
        Precision::Q8 => precision::Q8,
        Precision::Q4 => precision::Q4,
    }
}

fn decode_precision(value: i32) -> Result<Precision, Reason> {
    Ok(match value {
        precision::DEFAULT => Precision::Default,
        precision::F32 => Precision::F32,
        precision::BF16 => Precision::BF16,
        precision::F16 => Precision::F16,
        precision::Q8 => Precision::Q8,
        precision::Q4 => Precision::Q4,
        other => return Err(format!("precision {other} is not known").into()),
    })
}

/// `op` as ggml writes it.
///
/// # Errors
/// If a parameter does not fit.
pub fn encode(operation: &Op) -> Result<Encoded, Reason> {
    let mut words = Words([0; MAX_OP_PARAMS]);
    let w = &mut words;
    let number = match *operation {
        Op::Leaf => op::NONE,
        Op::Dup => op::DUP,
        Op::Add => op::ADD,
        Op::AddId => op::ADD_ID,
        Op::Sub => op::SUB,
        Op::Mul => op::MUL,
        Op::Div => op::DIV,
        Op::Scale { scale, bias } => {
            w.float(0, scale).float(1, bias);
            op::SCALE
        }
        Op::Sqr => op::SQR,
        Op::Sqrt => op::SQRT,
        Op::Sum => op::SUM,
        Op::SumRows => op::SUM_ROWS,
        Op::Mean => op::MEAN,
        Op::CumSum => op::CUMSUM,
        Op::ArgMax => op::ARGMAX,
        Op::Repeat { .. } => op::REPEAT,
        Op::Concat { dim } => {
            w.size(0, dim)?;
            op::CONCAT
        }
        Op::Norm { eps } => {
            w.float(0, eps);
            op::NORM
        }
        Op::RmsNorm { eps } => {
            w.float(0, eps);
            op::RMS_NORM
        }
        Op::L2Norm { eps } => {
            w.float(0, eps);
            op::L2_NORM
        }
        Op::MulMat { precision } => {
            w.int(0, encode_precision(precision));
            op::MUL_MAT
        }
        Op::MulMatId { precision } => {
            w.int(0, encode_precision(precision));
            op::MUL_MAT_ID
        }
        // A cast is a copy to a tensor of its own.
        Op::Cpy | Op::Cast { .. } => op::CPY,
        Op::Cont => op::CONT,
        Op::Reshape { .. } => op::RESHAPE,
        Op::View { offset, .. } => {
            let bytes = (offset as u64).to_ne_bytes();
            for (i, half) in bytes.chunks_exact(4).enumerate() {
                w.int(i, i32::from_ne_bytes([half[0], half[1], half[2], half[3]]));
            }
            op::VIEW
        }
        Op::Permute { axes } => {
            for (i, axis) in axes.into_iter().enumerate() {
                w.size(i, axis)?;
            }
            op::PERMUTE
        }
        Op::Transpose => op::TRANSPOSE,
        Op::GetRows => op::GET_ROWS,
        Op::SetRows => op::SET_ROWS,
        Op::DiagMaskInf { past } => {
            w.size(0, past)?;
            op::DIAG_MASK_INF
        }
        Op::SoftMax { scale, max_bias } => {
            w.float(0, scale).float(1, max_bias);
            op::SOFT_MAX
        }
        Op::Rope(rope) => {
            let mode = match rope.mode {
                RopeMode::Normal => rope_mode::NORMAL,
                RopeMode::Neox => rope_mode::NEOX,
            };
            w.size(1, rope.dims)?
                .int(2, mode)
                .size(4, rope.original_context)?
                .float(5, rope.freq_base)
                .float(6, rope.freq_scale)
                .float(7, rope.ext_factor)
                .float(8, rope.attn_factor)
                .float(9, rope.beta_fast)
                .float(10, rope.beta_slow)
                .size(15, rope.offset)?;
            op::ROPE
        }
        Op::Clamp { min, max } => {
            w.float(0, min).float(1, max);
            op::CLAMP
        }
        Op::Pad { before, after } => {
            for dim in 0..before.len() {
                w.size(2 * dim, before[dim])?
                    .size(2 * dim + 1, after[dim])?;
            }
            op::PAD
        }
        Op::Arange { start, stop, step } => {
            w.float(0, start).float(1, stop).float(2, step);
            op::ARANGE
        }
        Op::ArgSort { order } => {
            w.int(0, i32::from(order == SortOrder::Descending));
            op::ARGSORT
        }
        Op::TopK { .. } => op::TOP_K,
        Op::Fill { value } => {
            w.float(0, value);
            op::FILL
        }
        Op::FlashAttn {
            scale,
            max_bias,
            softcap,
            precision,
        } => {
            w.float(0, scale)
                .float(1, max_bias)
                .float(2, softcap)
                .int(3, encode_precision(precision));
            op::FLASH_ATTN_EXT
        }
        Op::Unary(unary) => {
            w.int(0, unary_number(unary));
            if let Unary::Xielu {
                alpha_n,
                alpha_p,
                beta,
                eps,
            } = unary
            {
                w.float(1, alpha_n)
                    .float(2, alpha_p)
                    .float(3, beta)
                    .float(4, eps);
            }
            op::UNARY
        }
        Op::Glu { kind, swapped } => {
            let number = match kind {
                Glu::Reglu => glu::REGLU,
                Glu::Geglu => glu::GEGLU,
                Glu::Swiglu => glu::SWIGLU,
                Glu::SwigluOai { alpha, limit } => {
                    w.float(2, alpha).float(3, limit);
                    glu::SWIGLU_OAI
                }
                Glu::GegluErf => glu::GEGLU_ERF,
                Glu::GegluQuick => glu::GEGLU_QUICK,
                Glu::SwigluClamp { limit } => {
                    w.float(3, limit);
                    glu::SWIGLU_CLAMP
                }
            };
            w.int(0, number).int(1, i32::from(swapped));
            op::GLU
        }
        ref other => return Err(format!("{other} has no form in ggml").into()),
    };
    Ok(Encoded {
        op: number,
        params: words.0,
    })
}

/// ggml's number of a function: its place in [`Unary::ALL`].
fn unary_number(unary: Unary) -> i32 {
    Unary::ALL
        .iter()
        .position(|known| known.name() == unary.name())
        .unwrap_or(usize::MAX) as i32
}

/// Reads words of parameters.
struct Params<'a>(&'a [i32; MAX_OP_PARAMS]);

impl Params<'_> {
    fn float(&self, at: usize) -> f32 {
        f32::from_bits(self.0[at] as u32)
    }

    fn size(&self, at: usize) -> Result<usize, Reason> {
        usize::try_from(self.0[at])
            .map_err(|_| format!("parameter {at} is negative: {}", self.0[at]).into())
    }
}

/// The operation of a tensor.
///
/// Two of ggml's operations mean two things: `CPY` is a copy into another tensor's memory or a cast, `CONT` may also give a
/// new shape. What the operation does to shapes is left to [`import`](super::import).
///
/// # Errors
/// The reason, if samite has no such operation.
pub fn decode(tensor: &Tensor) -> Result<Op, Reason> {
    let p = Params(&tensor.op_params);
    Ok(match tensor.op {
        op::NONE => Op::Leaf,
        op::DUP => Op::Dup,
        op::ADD => Op::Add,
        op::ADD_ID => Op::AddId,
        op::SUB => Op::Sub,
        op::MUL => Op::Mul,
        op::DIV => Op::Div,
        op::SQR => Op::Sqr,
        op::SQRT => Op::Sqrt,
        op::SUM => Op::Sum,
        op::SUM_ROWS => Op::SumRows,
        op::CUMSUM => Op::CumSum,
        op::MEAN => Op::Mean,
        op::ARGMAX => Op::ArgMax,
        op::REPEAT => Op::Repeat {
            shape: shape(tensor)?,
        },
        op::CONCAT => Op::Concat { dim: p.size(0)? },
        op::NORM => Op::Norm { eps: p.float(0) },
        op::RMS_NORM => Op::RmsNorm { eps: p.float(0) },
        op::L2_NORM => Op::L2Norm { eps: p.float(0) },
        op::MUL_MAT => Op::MulMat {
            precision: decode_precision(p.0[0])?,
        },
        op::MUL_MAT_ID => Op::MulMatId {
            precision: decode_precision(p.0[0])?,
        },
        op::SCALE => Op::Scale {
            scale: p.float(0),
            bias: p.float(1),
        },
        op::CPY if tensor.view_src.is_null() => Op::Cast {
            dtype: dtype(tensor)?,
        },
        op::CPY => Op::Cpy,
        op::CONT => Op::Cont,
        op::RESHAPE => Op::Reshape {
            shape: shape(tensor)?,
        },
        op::VIEW => {
            let [low, high] = [p.0[0].to_ne_bytes(), p.0[1].to_ne_bytes()];
            let [a, b, c, d] = low;
            let [e, f, g, h] = high;
            let offset = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
            Op::View {
                shape: shape(tensor)?,
                strides: [tensor.nb[1], tensor.nb[2], tensor.nb[3]],
                offset: usize::try_from(offset)
                    .map_err(|_| Reason::from("the view's offset overflows"))?,
            }
        }
        op::PERMUTE => Op::Permute {
            axes: [p.size(0)?, p.size(1)?, p.size(2)?, p.size(3)?],
        },
        op::TRANSPOSE => Op::Transpose,
        op::GET_ROWS => Op::GetRows,
        op::SET_ROWS => Op::SetRows,
        op::DIAG_MASK_INF => Op::DiagMaskInf { past: p.size(0)? },
        op::SOFT_MAX => Op::SoftMax {
            scale: p.float(0),
            max_bias: p.float(1),
        },
        op::ROPE => Op::Rope(Rope {
            dims: p.size(1)?,
            offset: p.size(15)?,
            mode: match p.0[2] {
                rope_mode::NORMAL => RopeMode::Normal,
                rope_mode::NEOX => RopeMode::Neox,
                other => return Err(format!("rope mode {other} is not known").into()),
            },
            original_context: p.size(4)?,
            freq_base: p.float(5),
            freq_scale: p.float(6),
            ext_factor: p.float(7),
            attn_factor: p.float(8),
            beta_fast: p.float(9),
            beta_slow: p.float(10),
        }),
        op::CLAMP => Op::Clamp {
            min: p.float(0),
            max: p.float(1),
        },
        op::PAD if p.0[8] != 0 => return Err("circular padding is not known".into()),
        op::PAD => Op::Pad {
            before: [p.size(0)?, p.size(2)?, p.size(4)?, p.size(6)?],
            after: [p.size(1)?, p.size(3)?, p.size(5)?, p.size(7)?],
        },
        op::ARANGE => Op::Arange {
            start: p.float(0),
            stop: p.float(1),
            step: p.float(2),
        },
        op::ARGSORT => Op::ArgSort {
            order: match p.0[0] {
                0 => SortOrder::Ascending,
                1 => SortOrder::Descending,
                other => return Err(format!("sort order {other} is not known").into()),
            },
        },
        op::TOP_K => Op::TopK {
            k: shape(tensor)?[0],
        },
        op::FILL => Op::Fill { value: p.float(0) },
        op::FLASH_ATTN_EXT => Op::FlashAttn {
            scale: p.float(0),
            max_bias: p.float(1),
            softcap: p.float(2),
            precision: decode_precision(p.0[3])?,
        },
        op::UNARY => {
            let known = usize::try_from(p.0[0])
                .ok()
                .and_then(|number| Unary::ALL.get(number));
            Op::Unary(match known {
                Some(Unary::Xielu { .. }) => Unary::Xielu {
                    alpha_n: p.float(1),
                    alpha_p: p.float(2),
                    beta: p.float(3),
                    eps: p.float(4),
                },
                Some(unary) => *unary,
                None => return Err(format!("function {} is not known", p.0[0]).into()),
            })
        }
        op::GLU => Op::Glu {
            kind: match p.0[0] {
                glu::REGLU => Glu::Reglu,
                glu::GEGLU => Glu::Geglu,
                glu::SWIGLU => Glu::Swiglu,
                glu::SWIGLU_OAI => Glu::SwigluOai {
                    alpha: p.float(2),
                    limit: p.float(3),
                },
                glu::GEGLU_ERF => Glu::GegluErf,
                glu::GEGLU_QUICK => Glu::GegluQuick,
                glu::SWIGLU_CLAMP => Glu::SwigluClamp { limit: p.float(3) },
                other => return Err(format!("gated unit {other} is not known").into()),
            },
            swapped: p.0[1] != 0,
        },
        other => return Err(format!("operation {other} is not known").into()),
    })
}

/// Element type of a tensor.
///
/// # Errors
/// If ggml's number is not one that samite knows.
pub fn dtype(tensor: &Tensor) -> Result<DType, Reason> {
    DType::from_id(tensor.dtype)
        .ok_or_else(|| format!("element type {} is not known", tensor.dtype).into())
}

/// Extents of a tensor.
///
/// # Errors
/// If one is negative.
pub fn shape(tensor: &Tensor) -> Result<Shape, Reason> {
    let mut shape = [0; 4];
    for (to, from) in shape.iter_mut().zip(tensor.ne) {
        *to = usize::try_from(from).map_err(|_| format!("extent {from} is negative"))?;
    }
    Ok(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every operation, with parameters that differ from each other and from zero.
    fn all() -> Vec<(Op, Tensor)> {
        let mut tensor = Tensor::zeroed();
        tensor.dtype = DType::F16.id();
        tensor.ne = [6, 5, 4, 3];
        tensor.nb = [2, 20, 200, 2000];
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
        // A copy into another tensor is told from a cast by the view.
        let mut tensor = Tensor::zeroed();
        tensor.op = encode(&Op::Cpy).unwrap().op;
        tensor.view_src = std::ptr::without_provenance_mut(16);
        assert_eq!(decode(&tensor).unwrap(), Op::Cpy);
    }

    /// Figures from upstream's enumerations and parameter slots.
    #[test]
    fn numbers_are_those_of_upstream() {
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
    fn unknown_things_have_reasons() {
        let mut tensor = Tensor::zeroed();
        for number in [4, 72, 75, op::COUNT, u32::MAX] {
            tensor.op = number;
            assert!(decode(&tensor).unwrap_err().contains("not known"));
        }
        let refused = |number: u32, at: usize, value: i32| {
            let mut tensor = Tensor::zeroed();
            tensor.op = number;
            tensor.op_params[at] = value;
            decode(&tensor).unwrap_err()
        };
        assert!(refused(op::ROPE, 2, 8).contains("rope mode 8"));
        assert!(refused(op::ROPE, 1, -2).contains("negative"));
        assert!(refused(op::UNARY, 0, 22).contains("function 22"));
        assert!(refused(op::UNARY, 0, -1).contains("function -1"));
        assert!(refused(op::GLU, 0, 7).contains("gated unit 7"));
        assert!(refused(op::PAD, 8, 1).contains("circular"));
        assert!(refused(op::MUL_MAT, 0, 11).contains("precision 11"));
        assert!(refused(op::ARGSORT, 0, 2).contains("order 2"));
        tensor.ne[2] = -1;
        assert!(shape(&tensor).unwrap_err().contains("negative"));
        tensor.dtype = 4;
        assert!(dtype(&tensor).unwrap_err().contains("type 4"));
    }
}
