//! Types and kinds of operations.

/// Type of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Type {
    Pred,
    B8,
    U8,
    S8,
    B16,
    U16,
    S16,
    F16,
    BF16,
    B32,
    U32,
    S32,
    F32,
    TF32,
    F16x2,
    BF16x2,
    B64,
    U64,
    S64,
    F64,
}

/// File of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Class {
    Pred,
    R32,
    R64,
}

impl Type {
    /// Parses a type without its dot.
    pub(crate) fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "pred" => Self::Pred,
            "b8" => Self::B8,
            "u8" => Self::U8,
            "s8" => Self::S8,
            "b16" => Self::B16,
            "u16" => Self::U16,
            "s16" => Self::S16,
            "f16" => Self::F16,
            "bf16" => Self::BF16,
            "b32" => Self::B32,
            "u32" => Self::U32,
            "s32" => Self::S32,
            "f32" => Self::F32,
            "tf32" => Self::TF32,
            "f16x2" => Self::F16x2,
            "bf16x2" => Self::BF16x2,
            "b64" => Self::B64,
            "u64" => Self::U64,
            "s64" => Self::S64,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    /// Size in memory.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Pred | Self::B8 | Self::U8 | Self::S8 => 1,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::BF16 => 2,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 8,
            _ => 4,
        }
    }

    pub(crate) fn class(self) -> Class {
        match self.bytes() {
            _ if self == Self::Pred => Class::Pred,
            8 => Class::R64,
            _ => Class::R32,
        }
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub(crate) fn is_float(self) -> bool {
        matches!(
            self,
            Self::F16
                | Self::BF16
                | Self::F32
                | Self::TF32
                | Self::F16x2
                | Self::BF16x2
                | Self::F64
        )
    }
}

/// Operation of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unary {
    Not,
    LogicalNot,
    Negate,
    Absolute,
    Reverse,
    SquareRoot,
    ReciprocalRoot,
    Reciprocal,
    Exp2,
    Log2,
    Sine,
    Cosine,
    Tanh,
}

/// Operation of one operand with a 32-bit result, whatever the operand's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    Ones,
    LeadingZeros,
    FindHighest,
    FindHighestShift,
}

/// Operation of two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binary {
    Add,
    Subtract,
    Multiply,
    MultiplyHigh,
    Divide,
    Remainder,
    Min,
    Max,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRight,
    CopySign,
}

/// Operation of three operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ternary {
    MultiplyAdd,
    MultiplyHighAdd,
    SumOfDifferences,
    ExtractBits,
    Permute(PermuteMode),
    FunnelLeft {
        clamps: bool,
    },
    FunnelRight {
        clamps: bool,
    },
    Dot4 {
        signed_a: bool,
        signed_b: bool,
    },
    Dot2 {
        signed_a: bool,
        signed_b: bool,
        high: bool,
    },
}

/// Mode of `prmt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PermuteMode {
    Index,
    Forward4,
    Backward4,
    Replicate8,
    EdgeLeft,
    EdgeRight,
    Replicate16,
}

/// Modifiers of floating-point operations, as bits.
pub(crate) mod flag {
    /// Subnormal operands and results count as zero.
    pub(crate) const FTZ: u8 = 1;
    /// Clamps to 0..=1, or to the integers' range.
    pub(crate) const SAT: u8 = 2;
    /// Clamps to positive values.
    pub(crate) const RELU: u8 = 4;
    /// `min` and `max` give NaN if an operand is.
    pub(crate) const NAN: u8 = 8;
    /// The result is approximate on cards.
    pub(crate) const APPROX: u8 = 16;
}

/// Comparison. Unordered ones are true if an operand is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    EqualUnordered,
    NotEqualUnordered,
    LessUnordered,
    LessEqualUnordered,
    GreaterUnordered,
    GreaterEqualUnordered,
    BothNumbers,
    AnyNan,
}

/// Logical operation of predicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
}

/// Rounding of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest,
    NearestAway,
    Zero,
    Down,
    Up,
}
