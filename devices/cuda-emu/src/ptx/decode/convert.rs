//! Moves and conversions.

use super::{Mnemonic, optional_register};
use crate::machine::support;
use crate::ptx::ParseError;
use crate::ptx::body::{Body, PtxOperand};
use crate::ptx::instruction::{Action, Class, NO_REGISTER, Rounding, Space, Type};

pub(super) fn mov(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let [d, a] = m.operands(operands)?;
    let ty = m.expect_type()?;
    match (d, a) {
        (PtxOperand::Vector(parts), _) => {
            let (parts, bits) = part_registers(body, m, parts, ty, true)?;
            let a = body.source(a, ty)?;
            Ok(Action::Unpack {
                a,
                is_wide: ty.class() == Class::R64,
                bits,
                parts,
            })
        }
        (_, PtxOperand::Vector(parts)) => {
            let (parts, bits) = part_registers(body, m, parts, ty, false)?;
            let d = body.register(d, ty.class())?;
            Ok(Action::Pack {
                d,
                is_wide: ty.class() == Class::R64,
                bits,
                parts,
            })
        }
        (_, PtxOperand::Name(name)) => match (name.as_str(), ty.class()) {
            ("%clock" | "%clock_hi" | "%globaltimer_lo", Class::R32) => Ok(Action::Clock {
                d: body.register(d, Class::R32)?,
                is_wide: false,
            }),
            ("%clock64" | "%globaltimer", Class::R64) => Ok(Action::Clock {
                d: body.register(d, Class::R64)?,
                is_wide: true,
            }),
            _ => m.error(format!("'{name}' is no register or variable")),
        },
        _ => {
            let d = body.register(d, ty.class())?;
            let a = body.source(a, ty)?;
            Ok(match ty.class() {
                Class::Pred => Action::MovePredicate { d, a },
                Class::R32 => Action::Move32 { d, a },
                Class::R64 => Action::Move64 { d, a },
            })
        }
    }
}

/// Returns the registers that make up a value of type `ty`, and the bits of each.
fn part_registers(
    body: &mut Body<'_, '_>,
    m: &Mnemonic<'_>,
    operands: &[PtxOperand],
    ty: Type,
    is_destination: bool,
) -> Result<([u16; 4], u8), ParseError> {
    let part = match (ty.bytes(), operands.len()) {
        (4, 2) | (8, 4) => Type::B16,
        (8, 2) => Type::B32,
        _ => return m.unsupported(),
    };
    let mut parts = [NO_REGISTER; 4];
    for (slot, operand) in parts.iter_mut().zip(operands) {
        *slot = if is_destination {
            optional_register(body, operand, part)?
        } else {
            body.source(operand, part)?
        };
    }
    Ok((parts, part.bytes() as u8 * 8))
}

pub(super) fn cvt(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let to_integral = [
        ("rni", Rounding::Nearest),
        ("rzi", Rounding::Zero),
        ("rmi", Rounding::Down),
        ("rpi", Rounding::Up),
    ];
    let to_float = [
        ("rn", Rounding::Nearest),
        ("rna", Rounding::NearestAway),
        ("rz", Rounding::Zero),
        ("rm", Rounding::Down),
        ("rp", Rounding::Up),
    ];
    let integral = m.take_of(&to_integral);
    let rounding = integral
        .or_else(|| m.take_of(&to_float))
        .unwrap_or(Rounding::Nearest);
    let flags = m.take_flags();
    let (to, from) = (m.expect_type()?, m.expect_type()?);
    if matches!(to, Type::F16x2 | Type::BF16x2) {
        let [d, a, b] = m.operands(operands)?;
        if from != Type::F32 || !matches!(rounding, Rounding::Nearest | Rounding::Zero) {
            return m.unsupported();
        }
        let d = body.register(d, Class::R32)?;
        let (a, b) = (body.source(a, from)?, body.source(b, from)?);
        return Ok(Action::ConvertPair {
            to,
            rounding,
            flags,
            d,
            a,
            b,
        });
    }
    let [d, a] = m.operands(operands)?;
    if !support::conversion(to, from, rounding, integral.is_some()) {
        return m.unsupported();
    }
    // Registers may be wider than the types.
    let a = match (a, from.class()) {
        (PtxOperand::Register(Class::R64, a), Class::R32) if !from.is_float() => {
            return narrow(body, m, to, from, *a, d);
        }
        _ => body.source(a, if from.bytes() == 1 { Type::B16 } else { from })?,
    };
    let (d, to) = match body.register(d, to.class()) {
        Ok(d) => (d, to),
        // An integer that is extended to its register.
        Err(error) => match (to, body.register(d, Class::R64)) {
            (Type::U8 | Type::U16 | Type::U32, Ok(d)) => (d, Type::U64),
            (Type::S8 | Type::S16 | Type::S32, Ok(d)) if from == to => (d, Type::S64),
            _ => return Err(error),
        },
    };
    let to_integral = integral.is_some();
    Ok(Action::Convert {
        to,
        from,
        rounding,
        to_integral,
        flags,
        d,
        a,
    })
}

/// Decodes a conversion from the low bits of a wide register.
fn narrow(
    body: &mut Body<'_, '_>,
    m: &Mnemonic<'_>,
    to: Type,
    from: Type,
    a: u16,
    d: &PtxOperand,
) -> Result<Action, ParseError> {
    // Equal to a conversion of 64 bits if the result has no more bits than the source's type.
    if to.is_float() || to.bytes() > from.bytes() {
        return m.unsupported();
    }
    let (to_integral, flags) = (false, 0);
    let d = body.register(d, to.class())?;
    Ok(Action::Convert {
        to,
        from: Type::U64,
        rounding: Rounding::Nearest,
        to_integral,
        flags,
        d,
        a,
    })
}

pub(super) fn cvta(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let [d, a] = m.operands(operands)?;
    let to = m.take("to");
    let spaces = [
        ("global", Space::Global),
        ("shared", Space::Shared),
        ("shared::cta", Space::Shared),
        ("shared::cluster", Space::Shared),
        ("local", Space::Local),
        ("const", Space::Const),
        ("param", Space::Param),
    ];
    let space = m.expect_of("space", &spaces)?;
    let space = if space == Space::Param && !body.is_kernel {
        Space::Local
    } else {
        space
    };
    if m.base == "isspacep" {
        let d = body.register(d, Class::Pred)?;
        return Ok(Action::IsSpace {
            space,
            d,
            a: body.source(a, Type::U64)?,
        });
    }
    let ty = m.expect_type()?;
    if !matches!(ty, Type::U64 | Type::U32) {
        return m.unsupported();
    }
    let is_wide = ty == Type::U64;
    let (d, a) = (body.register(d, ty.class())?, body.source(a, ty)?);
    Ok(if to {
        Action::FromGeneric {
            space,
            is_wide,
            d,
            a,
        }
    } else {
        Action::ToGeneric {
            space,
            is_wide,
            d,
            a,
        }
    })
}
