//! Exchanges between the lanes of a warp.

use super::{Mnemonic, optional_register};
use crate::ptx::ParseError;
use crate::ptx::body::{Body, PtxOperand};
use crate::ptx::instruction::{
    Action, AtomicOp, Class, NO_REGISTER, Register, ShuffleMode, Type, VoteMode,
};

/// Splits `d|p`.
fn pair(
    body: &Body<'_, '_>,
    operand: &PtxOperand,
    ty: Type,
) -> Result<(Register, Register), ParseError> {
    match operand {
        PtxOperand::Pair(d, p) => Ok((
            optional_register(body, d, ty)?,
            optional_register(body, p, Type::Pred)?,
        )),
        d => Ok((optional_register(body, d, ty)?, NO_REGISTER)),
    }
}

pub(super) fn decode(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    if m.base == "activemask" {
        let [d] = m.operands(operands)?;
        m.expect_type()?;
        return Ok(Action::ActiveMask {
            d: body.register(d, Class::R32)?,
        });
    }
    // Forms without `.sync` do not exist on the cards that are supported.
    if m.base != "elect" && !m.take("sync") {
        return m.unsupported();
    }
    let base = m.base;
    match base {
        "shfl" => {
            let [d, a, b, c, mask] = m.operands(operands)?;
            let modes = [
                ("up", ShuffleMode::Up),
                ("down", ShuffleMode::Down),
                ("bfly", ShuffleMode::Butterfly),
                ("idx", ShuffleMode::Index),
            ];
            let mode = m.expect_of("mode", &modes)?;
            let ty = m.expect_type()?;
            if ty.class() != Class::R32 {
                return m.unsupported();
            }
            let (d, p) = pair(body, d, ty)?;
            let (a, b) = (body.source(a, ty)?, body.source(b, Type::B32)?);
            let (c, mask) = (body.source(c, Type::B32)?, body.source(mask, Type::B32)?);
            Ok(Action::Shuffle {
                mode,
                d,
                p,
                a,
                b,
                c,
                mask,
            })
        }
        "vote" => {
            let [d, p, mask] = m.operands(operands)?;
            let modes = [
                ("all", VoteMode::All),
                ("any", VoteMode::Any),
                ("uni", VoteMode::Uniform),
                ("ballot", VoteMode::Ballot),
            ];
            let mode = m.expect_of("mode", &modes)?;
            let ty = m.expect_type()?;
            let (p, negates) = body.predicate(p)?;
            let d = body.register(d, ty.class())?;
            if (ty.class() == Class::Pred) == (mode == VoteMode::Ballot) {
                return m.unsupported();
            }
            Ok(Action::Vote {
                mode,
                d,
                p,
                negates,
                mask: body.source(mask, Type::B32)?,
            })
        }
        "match" => {
            let [d, a, mask] = m.operands(operands)?;
            let all = m.expect_of("mode", &[("all", true), ("any", false)])?;
            let ty = m.expect_type()?;
            let (d, p) = pair(body, d, Type::B32)?;
            let (a, mask) = (body.source(a, ty)?, body.source(mask, Type::B32)?);
            Ok(Action::Match {
                is_wide: ty.class() == Class::R64,
                all,
                d,
                p,
                a,
                mask,
            })
        }
        "redux" => {
            let [d, a, mask] = m.operands(operands)?;
            let table = [
                ("add", AtomicOp::Add),
                ("min", AtomicOp::Min),
                ("max", AtomicOp::Max),
                ("and", AtomicOp::And),
                ("or", AtomicOp::Or),
                ("xor", AtomicOp::Xor),
            ];
            let op = m.expect_of("operation", &table)?;
            let ty = m.expect_type()?;
            if !matches!(ty, Type::B32 | Type::U32 | Type::S32) {
                return m.unsupported();
            }
            let d = body.register(d, Class::R32)?;
            let (a, mask) = (body.source(a, ty)?, body.source(mask, Type::B32)?);
            Ok(Action::Reduce { op, ty, d, a, mask })
        }
        "elect" if m.take("sync") => {
            let [d, mask] = m.operands(operands)?;
            let (d, p) = pair(body, d, Type::B32)?;
            Ok(Action::Elect {
                d,
                p,
                mask: body.source(mask, Type::B32)?,
            })
        }
        _ => m.unsupported(),
    }
}
