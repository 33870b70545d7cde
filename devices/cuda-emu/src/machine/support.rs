//! Operations that the machine supports, by type. The decoder asks before it emits one.

use crate::ptx::instruction::{AtomicOp, Binary, Comparison, Rounding, Ternary, Type, Unary};

fn is_integer(ty: Type) -> bool {
    matches!(
        ty,
        Type::U16 | Type::S16 | Type::U32 | Type::S32 | Type::U64 | Type::S64
    )
}

fn is_bits(ty: Type) -> bool {
    matches!(ty, Type::B16 | Type::B32 | Type::B64)
}

pub(crate) fn is_half(ty: Type) -> bool {
    matches!(ty, Type::F16 | Type::BF16 | Type::F16x2 | Type::BF16x2)
}

fn is_real(ty: Type) -> bool {
    matches!(ty, Type::F32 | Type::F64)
}

pub(crate) fn binary(op: Binary, ty: Type) -> bool {
    match op {
        Binary::Add | Binary::Subtract | Binary::Multiply | Binary::Min | Binary::Max => {
            is_integer(ty) || is_real(ty) || is_half(ty)
        }
        Binary::MultiplyHigh | Binary::Remainder => is_integer(ty),
        Binary::Divide => is_integer(ty) || is_real(ty),
        Binary::And | Binary::Or | Binary::Xor | Binary::ShiftLeft => is_bits(ty),
        Binary::ShiftRight => is_bits(ty) || is_integer(ty),
        Binary::CopySign => is_real(ty),
    }
}

pub(crate) fn unary(op: Unary, ty: Type) -> bool {
    match op {
        Unary::Not | Unary::LogicalNot => is_bits(ty),
        Unary::Reverse => matches!(ty, Type::B32 | Type::B64),
        Unary::Negate | Unary::Absolute => {
            ty.is_signed() && is_integer(ty) || is_real(ty) || is_half(ty)
        }
        Unary::SquareRoot | Unary::ReciprocalRoot | Unary::Reciprocal => is_real(ty),
        Unary::Exp2 | Unary::Tanh => ty == Type::F32 || is_half(ty),
        Unary::Log2 | Unary::Sine | Unary::Cosine => ty == Type::F32,
    }
}

pub(crate) fn ternary(op: Ternary, ty: Type) -> bool {
    match op {
        Ternary::MultiplyAdd => is_integer(ty) || is_real(ty) || is_half(ty),
        Ternary::MultiplyHighAdd => is_integer(ty),
        Ternary::SumOfDifferences => is_integer(ty),
        Ternary::ExtractBits => matches!(ty, Type::U32 | Type::S32),
        _ => ty == Type::B32,
    }
}

pub(crate) fn comparison(op: Comparison, ty: Type) -> bool {
    let is_equality = matches!(op, Comparison::Equal | Comparison::NotEqual);
    let is_ordered = matches!(
        op,
        Comparison::Equal
            | Comparison::NotEqual
            | Comparison::Less
            | Comparison::LessEqual
            | Comparison::Greater
            | Comparison::GreaterEqual
    );
    match ty {
        Type::F16 | Type::BF16 | Type::F32 | Type::F64 => true,
        _ if is_bits(ty) => is_equality,
        _ => is_integer(ty) && is_ordered,
    }
}

pub(crate) fn conversion(to: Type, from: Type, rounding: Rounding, is_integral: bool) -> bool {
    let known = |ty| {
        !matches!(ty, Type::Pred | Type::TF32 | Type::F16x2 | Type::BF16x2)
            && !matches!(ty, Type::B8 | Type::B16 | Type::B32 | Type::B64)
    };
    if to == Type::TF32 {
        return from == Type::F32;
    }
    if !known(to) || !known(from) || rounding == Rounding::NearestAway {
        return false;
    }
    match (to.is_float(), from.is_float()) {
        // Roundings other than to nearest are exact only where the result is a half.
        (true, true) => {
            is_integral
                || rounding == Rounding::Nearest
                || matches!(to, Type::F16 | Type::BF16 | Type::F32)
        }
        (true, false) => rounding == Rounding::Nearest || to == Type::F32,
        _ => true,
    }
}

pub(crate) fn atomic(op: AtomicOp, ty: Type) -> bool {
    match op {
        AtomicOp::Add => {
            matches!(ty, Type::U32 | Type::S32 | Type::U64 | Type::S64)
                || is_real(ty)
                || is_half(ty)
        }
        AtomicOp::Min | AtomicOp::Max => {
            matches!(ty, Type::U32 | Type::S32 | Type::U64 | Type::S64)
        }
        AtomicOp::And | AtomicOp::Or | AtomicOp::Xor => matches!(ty, Type::B32 | Type::B64),
        AtomicOp::Exchange => matches!(ty, Type::B32 | Type::B64),
        AtomicOp::CompareExchange => matches!(ty, Type::B16 | Type::B32 | Type::B64),
        AtomicOp::Increment | AtomicOp::Decrement => ty == Type::U32,
    }
}
