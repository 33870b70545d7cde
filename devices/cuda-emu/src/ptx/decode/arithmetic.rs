//! Arithmetic, comparisons and selections.

use super::Mnemonic;
use crate::machine::support;
use crate::ptx::ParseError;
use crate::ptx::body::{Body, PtxOperand};
use crate::ptx::instruction::{
    Action, Binary, Class, Comparison, Count, Logic, NO_REGISTER, NumberTest, PermuteMode, TRUE,
    Ternary, Type, Unary, flag,
};

/// Takes the rounding of an arithmetic operation. Only the default is supported.
fn take_rounding(m: &mut Mnemonic<'_>) {
    m.take("rn");
}

pub(super) fn binary(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let [d, a, b] = m.operands(operands)?;
    let ty = m.expect_type()?;
    if ty == Type::Pred {
        let op = match m.base {
            "and" => Logic::And,
            "or" => Logic::Or,
            "xor" => Logic::Xor,
            _ => return m.unsupported(),
        };
        let d = body.register(d, Class::Pred)?;
        let (a, b) = (body.source(a, ty)?, body.source(b, ty)?);
        return Ok(Action::PredicateLogic { op, d, a, b });
    }
    if matches!(m.base, "mul" | "mul24") && m.take("wide") {
        let (a, b) = (body.source(a, ty)?, body.source(b, ty)?);
        let class = match ty {
            Type::U16 | Type::S16 => Class::R32,
            Type::U32 | Type::S32 => Class::R64,
            _ => return m.unsupported(),
        };
        return Ok(Action::MultiplyWide {
            ty,
            d: body.register(d, class)?,
            a,
            b,
        });
    }
    let base = m.base;
    let op = match base {
        "add" => Binary::Add,
        "sub" => Binary::Subtract,
        "mul" if m.take("hi") => Binary::MultiplyHigh,
        "mul" => {
            m.take("lo");
            Binary::Multiply
        }
        "div" => Binary::Divide,
        "rem" => Binary::Remainder,
        "min" => Binary::Min,
        "max" => Binary::Max,
        "and" => Binary::And,
        "or" => Binary::Or,
        "xor" => Binary::Xor,
        "shl" => Binary::ShiftLeft,
        "shr" => Binary::ShiftRight,
        "copysign" => Binary::CopySign,
        _ => return m.unsupported(),
    };
    take_rounding(m);
    let flags = m.take_flags();
    if !support::binary(op, ty) || (flags & flag::SAT != 0 && ty.class() == Class::R64) {
        return m.unsupported();
    }
    let is_shift = matches!(op, Binary::ShiftLeft | Binary::ShiftRight);
    let d = body.register(d, ty.class())?;
    let a = body.source(a, ty)?;
    let b = body.source(b, if is_shift { Type::U32 } else { ty })?;
    Ok(Action::Binary {
        op,
        ty,
        flags,
        d,
        a,
        b,
    })
}

pub(super) fn unary(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let [d, a] = m.operands(operands)?;
    let ty = m.expect_type()?;
    if ty == Type::Pred && m.base == "not" {
        let a = body.source(a, ty)?;
        return Ok(Action::PredicateNot {
            d: body.register(d, Class::Pred)?,
            a,
        });
    }
    let op = match m.base {
        "abs" => Unary::Absolute,
        "neg" => Unary::Negate,
        "not" => Unary::Not,
        "cnot" => Unary::LogicalNot,
        "brev" => Unary::Reverse,
        "sqrt" => Unary::SquareRoot,
        "rsqrt" => Unary::ReciprocalRoot,
        "rcp" => Unary::Reciprocal,
        "ex2" => Unary::Exp2,
        "lg2" => Unary::Log2,
        "sin" => Unary::Sine,
        "cos" => Unary::Cosine,
        "tanh" => Unary::Tanh,
        _ => return m.unsupported(),
    };
    take_rounding(m);
    let flags = m.take_flags();
    if !support::unary(op, ty) {
        return m.unsupported();
    }
    Ok(Action::Unary {
        op,
        ty,
        flags,
        d: body.register(d, ty.class())?,
        a: body.source(a, ty)?,
    })
}

pub(super) fn count(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let [d, a] = m.operands(operands)?;
    let base = m.base;
    let op = match base {
        "popc" => Count::Ones,
        "clz" => Count::LeadingZeros,
        _ if m.take("shiftamt") => Count::FindHighestShift,
        _ => Count::FindHighest,
    };
    let ty = m.expect_type()?;
    if !matches!(ty.bytes(), 4 | 8) || ty.is_float() {
        return m.unsupported();
    }
    Ok(Action::Count {
        op,
        ty,
        d: body.register(d, Class::R32)?,
        a: body.source(a, ty)?,
    })
}

fn ternary_op(m: &mut Mnemonic<'_>) -> Result<(Ternary, Type), ParseError> {
    let base = m.base;
    let op = match base {
        "mad" | "mad24" if m.take("hi") => Ternary::MultiplyHighAdd,
        "mad" | "mad24" | "fma" => {
            m.take("lo");
            Ternary::MultiplyAdd
        }
        "sad" => Ternary::SumOfDifferences,
        "bfe" => Ternary::ExtractBits,
        "prmt" => {
            let ty = m.expect_type()?;
            let modes = [
                ("f4e", PermuteMode::Forward4),
                ("b4e", PermuteMode::Backward4),
                ("rc8", PermuteMode::Replicate8),
                ("ecl", PermuteMode::EdgeLeft),
                ("ecr", PermuteMode::EdgeRight),
                ("rc16", PermuteMode::Replicate16),
            ];
            return Ok((
                Ternary::Permute(m.take_of(&modes).unwrap_or(PermuteMode::Index)),
                ty,
            ));
        }
        "shf" => {
            let is_left = m.expect_of("direction", &[("l", true), ("r", false)])?;
            let clamps = m.expect_of("mode", &[("clamp", true), ("wrap", false)])?;
            if is_left {
                Ternary::FunnelLeft { clamps }
            } else {
                Ternary::FunnelRight { clamps }
            }
        }
        _ => {
            let is_high = m.base == "dp2a" && !m.take("lo");
            if is_high && !m.take("hi") {
                return m.unsupported();
            }
            let signs = [("s32", true), ("u32", false)];
            let signed_a = m.expect_of("type", &signs)?;
            let signed_b = m.expect_of("type", &signs)?;
            let op = if m.base == "dp4a" {
                Ternary::Dot4 { signed_a, signed_b }
            } else {
                Ternary::Dot2 {
                    signed_a,
                    signed_b,
                    high: is_high,
                }
            };
            return Ok((op, Type::B32));
        }
    };
    Ok((op, m.expect_type()?))
}

pub(super) fn ternary(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let [d, a, b, c] = m.operands(operands)?;
    if m.base == "mad" && m.take("wide") {
        let ty = m.expect_type()?;
        let wide = match ty {
            Type::U16 | Type::S16 => Type::U32,
            Type::U32 | Type::S32 => Type::U64,
            _ => return m.unsupported(),
        };
        let (a, b, c) = (
            body.source(a, ty)?,
            body.source(b, ty)?,
            body.source(c, wide)?,
        );
        return Ok(Action::MultiplyWideAdd {
            ty,
            d: body.register(d, wide.class())?,
            a,
            b,
            c,
        });
    }
    let (op, ty) = ternary_op(m)?;
    take_rounding(m);
    let flags = m.take_flags();
    if op == Ternary::ExtractBits && ty.class() == Class::R64 {
        let d = body.register(d, Class::R64)?;
        let a = body.source(a, ty)?;
        let (start, count) = (body.source(b, Type::U32)?, body.source(c, Type::U32)?);
        return Ok(Action::ExtractWide {
            is_signed: ty.is_signed(),
            d,
            a,
            start,
            count,
        });
    }
    if !support::ternary(op, ty) {
        return m.unsupported();
    }
    let (a, b, c) = (
        body.source(a, ty)?,
        body.source(b, ty)?,
        body.source(c, ty)?,
    );
    Ok(Action::Ternary {
        op,
        ty,
        flags,
        d: body.register(d, ty.class())?,
        a,
        b,
        c,
    })
}

pub(super) fn bits(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let [d, a, b, c, e] = m.operands(operands)?;
    let ty = m.expect_type()?;
    if !matches!(ty, Type::B32 | Type::B64) {
        return m.unsupported();
    }
    let d = body.register(d, ty.class())?;
    let (a, b) = (body.source(a, ty)?, body.source(b, ty)?);
    if m.base == "lop3" {
        let PtxOperand::Number(crate::ptx::lexer::Literal::Integer(table)) = *e else {
            return m.error("the table of lop3 is no number".into());
        };
        let c = body.source(c, ty)?;
        if ty != Type::B32 {
            return m.unsupported();
        }
        return Ok(Action::LogicTable {
            d,
            a,
            b,
            c,
            table: table as u8,
        });
    }
    let (start, count) = (body.source(c, Type::U32)?, body.source(e, Type::U32)?);
    Ok(Action::InsertBits {
        is_wide: ty == Type::B64,
        d,
        a,
        b,
        start,
        count,
    })
}

fn take_comparison(m: &mut Mnemonic<'_>, ty: Type) -> Result<Comparison, ParseError> {
    let table = [
        ("eq", Comparison::Equal),
        ("ne", Comparison::NotEqual),
        ("lt", Comparison::Less),
        ("le", Comparison::LessEqual),
        ("gt", Comparison::Greater),
        ("ge", Comparison::GreaterEqual),
        ("lo", Comparison::Less),
        ("ls", Comparison::LessEqual),
        ("hi", Comparison::Greater),
        ("hs", Comparison::GreaterEqual),
        ("equ", Comparison::EqualUnordered),
        ("neu", Comparison::NotEqualUnordered),
        ("ltu", Comparison::LessUnordered),
        ("leu", Comparison::LessEqualUnordered),
        ("gtu", Comparison::GreaterUnordered),
        ("geu", Comparison::GreaterEqualUnordered),
        ("num", Comparison::BothNumbers),
        ("nan", Comparison::AnyNan),
    ];
    let op = m.expect_of("comparison", &table)?;
    if support::comparison(op, ty) {
        Ok(op)
    } else {
        m.unsupported()
    }
}

pub(super) fn selection(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    match m.base {
        "selp" => {
            let [d, a, b, p] = m.operands(operands)?;
            let ty = m.expect_type()?;
            if ty.class() == Class::Pred {
                return m.unsupported();
            }
            let d = body.register(d, ty.class())?;
            let (a, b) = (body.source(a, ty)?, body.source(b, ty)?);
            let (p, negates) = body.predicate(p)?;
            let (a, b) = if negates { (b, a) } else { (a, b) };
            Ok(Action::Select {
                is_wide: ty.class() == Class::R64,
                d,
                a,
                b,
                p,
            })
        }
        "slct" => {
            let [d, a, b, c] = m.operands(operands)?;
            m.take("ftz");
            let (ty, sign) = (m.expect_type()?, m.expect_type()?);
            if !matches!(sign, Type::S32 | Type::F32) || !matches!(ty.bytes(), 4 | 8) {
                return m.unsupported();
            }
            let d = body.register(d, ty.class())?;
            let (a, b, c) = (
                body.source(a, ty)?,
                body.source(b, ty)?,
                body.source(c, sign)?,
            );
            let is_wide = ty.class() == Class::R64;
            Ok(Action::SelectBySign {
                is_wide,
                is_float: sign == Type::F32,
                d,
                a,
                b,
                c,
            })
        }
        "testp" => {
            let [d, a] = m.operands(operands)?;
            let table = [
                ("finite", NumberTest::Finite),
                ("infinite", NumberTest::Infinite),
                ("number", NumberTest::Number),
                ("notanumber", NumberTest::NotNumber),
                ("normal", NumberTest::Normal),
                ("subnormal", NumberTest::Subnormal),
            ];
            let test = m.expect_of("test", &table)?;
            let ty = m.expect_type()?;
            if !matches!(ty, Type::F32 | Type::F64) {
                return m.unsupported();
            }
            Ok(Action::TestNumber {
                ty,
                test,
                d: body.register(d, Class::Pred)?,
                a: body.source(a, ty)?,
            })
        }
        _ => comparison(body, m, operands),
    }
}

/// Decodes `setp` and `set`.
fn comparison(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    if m.base == "set" {
        return comparison_set(body, m, operands);
    }
    let ty = match m.take_type() {
        Some(ty) => ty,
        None => return m.unsupported(),
    };
    let flags = m.take_flags();
    let logic = m.take_of(&[("and", Logic::And), ("or", Logic::Or), ("xor", Logic::Xor)]);
    let op = take_comparison(m, ty)?;
    let (d, a, b, r) = match (operands, logic) {
        ([d, a, b], None) => (d, a, b, None),
        ([d, a, b, r], Some(_)) => (d, a, b, Some(r)),
        _ => return m.error("'setp' has a wrong number of operands".into()),
    };
    let (d, q) = match d {
        PtxOperand::Pair(d, q) => (
            super::optional_register(body, d, Type::Pred)?,
            super::optional_register(body, q, Type::Pred)?,
        ),
        d => (body.register(d, Class::Pred)?, NO_REGISTER),
    };
    let (r, negates_r) = match r {
        Some(r) => body.predicate(r)?,
        None => (TRUE, false),
    };
    let (a, b) = (body.source(a, ty)?, body.source(b, ty)?);
    let logic = logic.unwrap_or(Logic::And);
    Ok(Action::Compare {
        op,
        ty,
        flags,
        logic,
        negates_r,
        d,
        q,
        a,
        b,
        r,
    })
}

fn comparison_set(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let [d, a, b] = m.operands(operands)?;
    let (result, ty) = (m.expect_type()?, m.expect_type()?);
    let flags = m.take_flags();
    let op = take_comparison(m, ty)?;
    if !matches!(result, Type::U32 | Type::S32 | Type::F32) {
        return m.unsupported();
    }
    let d = body.register(d, Class::R32)?;
    let (a, b) = (body.source(a, ty)?, body.source(b, ty)?);
    Ok(Action::CompareSet {
        op,
        ty,
        flags,
        is_float: result == Type::F32,
        d,
        a,
        b,
    })
}
