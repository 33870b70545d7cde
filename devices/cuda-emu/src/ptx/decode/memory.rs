//! Loads, stores and atomic accesses.

use super::{Mnemonic, optional_register};
use crate::machine::support;
use crate::ptx::ParseError;
use crate::ptx::body::{Body, PtxOperand, PtxSymbol};
use crate::ptx::instruction::{
    Action, AtomicOp, Class, NO_REGISTER, Ordering, Register, Space, Type,
};

const SPACES: [(&str, Space); 9] = [
    ("global", Space::Global),
    ("shared", Space::Shared),
    ("shared::cta", Space::Shared),
    ("shared::cluster", Space::Shared),
    ("local", Space::Local),
    ("const", Space::Const),
    ("param", Space::Param),
    ("param::entry", Space::Param),
    ("param::func", Space::Param),
];

/// Takes hints about caches, and scopes, which change no result.
fn take_hints(m: &mut Mnemonic<'_>) {
    let hints = [
        "ca",
        "cg",
        "cs",
        "cv",
        "lu",
        "wb",
        "wt",
        "cta",
        "cluster",
        "gpu",
        "sys",
        "L1::no_allocate",
        "L1::evict_first",
        "L1::evict_last",
        "L1::evict_normal",
        "L1::evict_unchanged",
        "L2::64B",
        "L2::128B",
        "L2::256B",
    ];
    for hint in hints {
        m.take(hint);
    }
}

fn take_ordering(m: &mut Mnemonic<'_>) -> Ordering {
    let table = [
        ("volatile", Ordering::Relaxed),
        ("relaxed", Ordering::Relaxed),
        ("acquire", Ordering::Acquire),
        ("release", Ordering::Release),
        ("acq_rel", Ordering::AcquireRelease),
        ("weak", Ordering::Weak),
        ("nc", Ordering::Constant),
    ];
    m.take_of(&table).unwrap_or(Ordering::Weak)
}

/// Returns the registers of a scalar or vector operand.
fn vector(
    m: &Mnemonic<'_>,
    operand: &PtxOperand,
    count: u8,
) -> Result<Vec<PtxOperand>, ParseError> {
    match operand {
        PtxOperand::Vector(list) if count > 1 && list.len() == usize::from(count) => {
            Ok(list.clone())
        }
        PtxOperand::Vector(list) if count == 1 && list.len() == 1 => Ok(list.clone()),
        PtxOperand::Vector(_) => m.error("a vector has a wrong number of elements".into()),
        other if count == 1 => Ok(vec![other.clone()]),
        _ => m.error("an operand is no vector".into()),
    }
}

fn take_count(m: &mut Mnemonic<'_>) -> u8 {
    m.take_of(&[("v2", 2), ("v4", 4)]).unwrap_or(1)
}

pub(super) fn load(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let [to, address] = m.operands(operands)?;
    let space = m.take_of(&SPACES).unwrap_or(Space::Generic);
    let ordering = take_ordering(m);
    take_hints(m);
    let count = take_count(m);
    let ty = m.expect_type()?;
    if ty == Type::Pred || usize::from(count) * ty.bytes() > 16 {
        return m.unsupported();
    }
    let list = vector(m, to, count)?;
    let (mut d, mut is_wide) = ([NO_REGISTER; 4], [false; 4]);
    for (index, operand) in list.iter().enumerate() {
        is_wide[index] = ty.class() == Class::R64
            || matches!(operand, PtxOperand::Register(Class::R64, _)) && !ty.is_float();
        d[index] = if is_wide[index] {
            optional_register(body, operand, Type::B64)?
        } else {
            optional_register(body, operand, Type::B32)?
        };
    }
    if is_wide[..usize::from(count)]
        .iter()
        .any(|&w| w != is_wide[0])
        && to != &PtxOperand::Discarded
    {
        return m.error("the elements of a vector have different sizes".into());
    }
    if space == Space::Param
        && let PtxOperand::Address(base, offset) = address
        && let PtxOperand::Symbol(PtxSymbol::Parameter(start), _) = **base
    {
        let offset = i64::from(start) + offset;
        let Ok(offset) = u32::try_from(offset) else {
            return m.error("a parameter's offset is negative".into());
        };
        return Ok(Action::LoadParameter {
            ty,
            count,
            d,
            is_wide,
            offset,
        });
    }
    let space = parameter_space(body, space, address);
    let address = body.address(address)?;
    let is_wide = is_wide[0];
    Ok(Action::Load {
        ty,
        count,
        space,
        ordering,
        is_wide,
        d,
        address,
    })
}

/// Returns the space that holds a parameter: only kernels' own ones are in a space apart.
fn parameter_space(body: &Body<'_, '_>, space: Space, address: &PtxOperand) -> Space {
    let is_local = match address {
        PtxOperand::Address(base, _) => {
            matches!(**base, PtxOperand::Symbol(PtxSymbol::Local(_), _))
        }
        _ => false,
    };
    if space == Space::Param && (is_local || !body.is_kernel) {
        Space::Local
    } else {
        space
    }
}

pub(super) fn store(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    if m.take("async") || m.take("bulk") {
        return m.unsupported();
    }
    let [address, from] = m.operands(operands)?;
    let space = m.take_of(&SPACES).unwrap_or(Space::Generic);
    let ordering = take_ordering(m);
    take_hints(m);
    let count = take_count(m);
    let ty = m.expect_type()?;
    if ty == Type::Pred || usize::from(count) * ty.bytes() > 16 || space == Space::Const {
        return m.unsupported();
    }
    let list = vector(m, from, count)?;
    let mut is_wide = ty.class() == Class::R64;
    let mut a: [Register; 4] = [NO_REGISTER; 4];
    for (index, operand) in list.iter().enumerate() {
        // The register may be wider than the access.
        if let PtxOperand::Register(Class::R64, _) = operand
            && count == 1
        {
            is_wide = true;
        }
        a[index] = body.source(
            operand,
            if is_wide {
                Type::B64
            } else {
                ty_for_constant(ty)
            },
        )?;
    }
    let space = parameter_space(body, space, address);
    if space == Space::Param {
        return m.error("a kernel stores to its parameters".into());
    }
    let address = body.address(address)?;
    Ok(Action::Store {
        ty,
        count,
        space,
        ordering,
        is_wide,
        a,
        address,
    })
}

fn ty_for_constant(ty: Type) -> Type {
    if ty.bytes() == 1 { Type::B16 } else { ty }
}

pub(super) fn atomic(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    if m.take("async") {
        return m.unsupported();
    }
    let space = m.take_of(&SPACES).unwrap_or(Space::Generic);
    let ordering = match take_ordering(m) {
        Ordering::Weak => Ordering::Relaxed,
        other => other,
    };
    take_hints(m);
    m.take("noftz");
    let table = [
        ("add", AtomicOp::Add),
        ("min", AtomicOp::Min),
        ("max", AtomicOp::Max),
        ("and", AtomicOp::And),
        ("or", AtomicOp::Or),
        ("xor", AtomicOp::Xor),
        ("exch", AtomicOp::Exchange),
        ("cas", AtomicOp::CompareExchange),
        ("inc", AtomicOp::Increment),
        ("dec", AtomicOp::Decrement),
    ];
    let op = m.expect_of("operation", &table)?;
    let ty = m.expect_type()?;
    if !support::atomic(op, ty)
        || !matches!(space, Space::Generic | Space::Global | Space::Shared)
        || (ordering == Ordering::Constant)
    {
        return m.unsupported();
    }
    let (d, rest) = match (m.base, operands) {
        ("atom", [d, rest @ ..]) => (optional_register(body, d, ty)?, rest),
        (_, rest) => (NO_REGISTER, rest),
    };
    let is_exchange = op == AtomicOp::CompareExchange;
    let (address, b, c) = match rest {
        [address, b] if !is_exchange => (address, b, None),
        [address, b, c] if is_exchange => (address, b, Some(c)),
        _ => return m.error(format!("'{}' has a wrong number of operands", m.base)),
    };
    let address = body.address(address)?;
    let b = body.source(b, ty)?;
    let c = match c {
        Some(c) => body.source(c, ty)?,
        None => NO_REGISTER,
    };
    Ok(Action::Atomic {
        op,
        ty,
        space,
        ordering,
        d,
        address,
        b,
        c,
    })
}
