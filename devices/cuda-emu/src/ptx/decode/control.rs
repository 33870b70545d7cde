//! Branches, barriers and hints.

use super::Mnemonic;
use crate::ptx::ParseError;
use crate::ptx::body::{Body, PtxOperand};
use crate::ptx::instruction::{Action, BarrierMode, Class, Constant, NO_REGISTER, TRUE, Type};

pub(super) fn branch(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    m.take("uni");
    match (m.base, operands) {
        ("ret", []) => Ok(body.return_action()),
        ("exit", []) => Ok(Action::Exit),
        ("trap" | "brkpt", []) => Ok(Action::Trap),
        ("bra", [PtxOperand::Name(label)]) => {
            body.branch_to(label, false);
            Ok(Action::Branch { target: 0 })
        }
        ("brx", [index, PtxOperand::Name(table)]) if m.take("idx") => {
            let index = body.source(index, Type::U32)?;
            body.branch_to(table, true);
            Ok(Action::BranchIndexed { index, table: 0 })
        }
        _ => m.unsupported(),
    }
}

pub(super) fn barrier(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    if m.take("warp") {
        let [mask] = m.operands(operands)?;
        if !m.take("sync") {
            return m.unsupported();
        }
        return Ok(Action::WarpBarrier {
            mask: body.source(mask, Type::B32)?,
        });
    }
    m.take("cta");
    let is_aligned = m.base == "bar" || m.take("aligned");
    if m.take("cluster") {
        // A cluster has one block here.
        let is_wait = m.take("wait");
        m.take("arrive");
        m.take("release");
        m.take("acquire");
        m.take("relaxed");
        if !is_wait {
            return Ok(Action::Nop);
        }
        let id = body.constant(Constant::Value(15), false);
        let mode = BarrierMode::Sync;
        let (count, d, p) = (NO_REGISTER, NO_REGISTER, TRUE);
        return Ok(Action::Barrier {
            mode,
            is_aligned,
            id,
            count,
            d,
            p,
            negates: false,
        });
    }
    let mut mode = m.expect_of(
        "mode",
        &[
            ("sync", BarrierMode::Sync),
            ("arrive", BarrierMode::Arrive),
            ("red", BarrierMode::AllTrue),
        ],
    )?;
    let mut d = NO_REGISTER;
    let (mut p, mut negates) = (TRUE, false);
    let mut operands = operands;
    if mode == BarrierMode::AllTrue {
        mode = m.expect_of(
            "operation",
            &[
                ("popc", BarrierMode::CountTrue),
                ("and", BarrierMode::AllTrue),
                ("or", BarrierMode::AnyTrue),
            ],
        )?;
        let ty = m.expect_type()?;
        let expected = if mode == BarrierMode::CountTrue {
            Class::R32
        } else {
            Class::Pred
        };
        if ty.class() != expected {
            return m.unsupported();
        }
        let [first, rest @ .., last] = operands else {
            return m.unsupported();
        };
        d = body.register(first, expected)?;
        (p, negates) = body.predicate(last)?;
        operands = rest;
    }
    let (id, count) = match operands {
        [id] if mode != BarrierMode::Arrive => (id, None),
        [id, count] => (id, Some(count)),
        _ => return m.error("a barrier has a wrong number of operands".into()),
    };
    let id = body.source(id, Type::U32)?;
    let count = match count {
        Some(count) => body.source(count, Type::U32)?,
        None => NO_REGISTER,
    };
    Ok(Action::Barrier {
        mode,
        is_aligned,
        id,
        count,
        d,
        p,
        negates,
    })
}

/// Decodes fences, and instructions that change no result.
pub(super) fn hint(m: &mut Mnemonic<'_>) -> Result<Action, ParseError> {
    match m.base {
        "membar" => {
            let is_wide = m.expect_of(
                "scope",
                &[
                    ("gl", true),
                    ("sys", true),
                    ("cta", false),
                    ("proxy", false),
                ],
            )?;
            while m.take_first().is_some() {}
            Ok(Action::Fence { is_wide })
        }
        "fence" => {
            let is_proxy = m.take("proxy") || m.take("mbarrier_init");
            let is_wide = !is_proxy && !m.take("cta");
            while m.take_first().is_some() {}
            Ok(if is_proxy {
                Action::Nop
            } else {
                Action::Fence { is_wide }
            })
        }
        "griddepcontrol" => Ok(if m.take("wait") {
            Action::WaitForEarlier
        } else {
            Action::Nop
        }),
        _ => Ok(Action::Nop),
    }
}
