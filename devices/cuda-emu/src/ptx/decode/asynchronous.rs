//! Asynchronous copies, and the objects that count them.

use super::{Mnemonic, optional_register};
use crate::ptx::ParseError;
use crate::ptx::body::{Body, PtxOperand};
use crate::ptx::instruction::{Action, BulkCopy, Class, MbarrierOp, NO_REGISTER, Space, Type};
use crate::ptx::lexer::Literal;

pub(super) fn decode(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    if m.base == "mbarrier" {
        return mbarrier(body, m, operands);
    }
    if !m.take("async") {
        return m.unsupported();
    }
    if m.take("bulk") {
        return bulk(body, m, operands);
    }
    if m.take("commit_group") {
        return Ok(Action::CommitCopies);
    }
    if m.take("wait_all") {
        return Ok(Action::WaitCopies { pending: 0 });
    }
    if m.take("wait_group") {
        return Ok(Action::WaitCopies {
            pending: number(m, operands)?,
        });
    }
    if m.take("mbarrier") {
        let is_counted = !m.take("noinc");
        let [address] = m.operands(operands)?;
        if !m.take("arrive") {
            return m.unsupported();
        }
        take_space(m);
        m.take("b64");
        return Ok(Action::SignalCopies {
            barrier: body.address(address)?,
            is_counted,
        });
    }
    let is_whole_line = m.take("cg");
    if !is_whole_line && !m.take("ca") {
        return m.unsupported();
    }
    for modifier in [
        "shared",
        "shared::cta",
        "global",
        "L2::64B",
        "L2::128B",
        "L2::256B",
    ] {
        m.take(modifier);
    }
    let (to, from, bytes, size) = match operands {
        [to, from, bytes] => (to, from, bytes, None),
        [to, from, bytes, size] => (to, from, bytes, Some(size)),
        _ => return m.error("'cp.async' has a wrong number of operands".into()),
    };
    let bytes = match *bytes {
        PtxOperand::Number(Literal::Integer(16)) => 16,
        PtxOperand::Number(Literal::Integer(bytes @ (4 | 8))) if !is_whole_line => bytes as u8,
        _ => return m.error("'cp.async' copies 4, 8 or 16 bytes".into()),
    };
    let (to, from) = (body.address(to)?, body.address(from)?);
    let size = match size {
        Some(size) => body.source(size, Type::U32)?,
        None => NO_REGISTER,
    };
    Ok(Action::CopyAsync {
        bytes,
        to,
        from,
        size,
    })
}

fn take_space(m: &mut Mnemonic<'_>) -> Space {
    let spaces = [("shared", ()), ("shared::cta", ()), ("shared::cluster", ())];
    if m.take_of(&spaces).is_some() {
        Space::Shared
    } else {
        Space::Generic
    }
}

fn number(m: &Mnemonic<'_>, operands: &[PtxOperand]) -> Result<u32, ParseError> {
    match operands {
        [PtxOperand::Number(Literal::Integer(n))] if *n < 1 << 16 => Ok(*n as u32),
        _ => m.error(format!("'{}' needs a number", m.base)),
    }
}

fn bulk(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    if m.take("commit_group") {
        return Ok(Action::CommitBulk);
    }
    if m.take("wait_group") {
        m.take("read");
        number(m, operands)?;
        return Ok(Action::WaitBulk);
    }
    let copy = if m.take("mbarrier::complete_tx::bytes") {
        let [to, from, bytes, barrier] = m.operands(operands)?;
        if !((m.take("shared::cluster") || m.take("shared::cta")) && m.take("global")) {
            return m.unsupported();
        }
        let bytes = body.source(bytes, Type::U32)?;
        let (to, from, barrier) = (
            body.address(to)?,
            body.address(from)?,
            body.address(barrier)?,
        );
        BulkCopy::Load {
            to,
            from,
            bytes,
            barrier,
        }
    } else if m.take("bulk_group") {
        let [to, from, bytes] = m.operands(operands)?;
        if !(m.take("global") && m.take("shared::cta")) {
            return m.unsupported();
        }
        let bytes = body.source(bytes, Type::U32)?;
        BulkCopy::Store {
            to: body.address(to)?,
            from: body.address(from)?,
            bytes,
        }
    } else {
        return m.unsupported();
    };
    let index = body.builder.code.bulk_copies.len() as u32;
    body.builder.code.bulk_copies.push(copy);
    Ok(Action::Bulk { copy: index })
}

fn mbarrier(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let space = take_space(m);
    for modifier in ["b64", "release", "acquire", "relaxed", "cta", "cluster"] {
        m.take(modifier);
    }
    let (op, d, address, a) = if m.take("init") {
        let [address, count] = m.operands(operands)?;
        (
            MbarrierOp::Init,
            NO_REGISTER,
            address,
            Some((count, Type::U32)),
        )
    } else if m.take("inval") {
        let [address] = m.operands(operands)?;
        (MbarrierOp::Invalidate, NO_REGISTER, address, None)
    } else if m.take("arrive") {
        arrive(body, m, operands)?
    } else if m.take("expect_tx") {
        let [address, bytes] = m.operands(operands)?;
        (
            MbarrierOp::ExpectBytes,
            NO_REGISTER,
            address,
            Some((bytes, Type::U32)),
        )
    } else if m.take("try_wait") || m.take("test_wait") {
        let by_parity = m.take("parity");
        let (d, address, state) = match operands {
            [d, address, state] | [d, address, state, _] => (d, address, state),
            _ => return m.error("'mbarrier' has a wrong number of operands".into()),
        };
        let ty = if by_parity { Type::U32 } else { Type::B64 };
        let d = body.register(d, Class::Pred)?;
        (
            MbarrierOp::Test { by_parity },
            d,
            address,
            Some((state, ty)),
        )
    } else {
        return m.unsupported();
    };
    let address = body.address(address)?;
    let a = match a {
        Some((a, ty)) => body.source(a, ty)?,
        None => NO_REGISTER,
    };
    Ok(Action::Mbarrier {
        op,
        space,
        d,
        address,
        a,
    })
}

type Parts<'o> = (
    MbarrierOp,
    u16,
    &'o PtxOperand,
    Option<(&'o PtxOperand, Type)>,
);

/// Decodes `mbarrier.arrive`, with or without a state as its result.
fn arrive<'o>(
    body: &Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &'o [PtxOperand],
) -> Result<Parts<'o>, ParseError> {
    let completes = !m.take("noComplete");
    let (d, rest) = match operands {
        [PtxOperand::Address(..), ..] => (NO_REGISTER, operands),
        [d, rest @ ..] => (optional_register(body, d, Type::B64)?, rest),
        [] => return m.unsupported(),
    };
    let (address, count) = match rest {
        [address] => (address, None),
        [address, count] => (address, Some((count, Type::U32))),
        _ => return m.error("'mbarrier' has a wrong number of operands".into()),
    };
    let expects = m.take("expect_tx");
    Ok((MbarrierOp::Arrive { expects, completes }, d, address, count))
}
