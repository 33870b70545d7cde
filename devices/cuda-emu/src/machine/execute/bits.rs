//! Operations that move bits around.

use super::{Flow, unsupported};
use crate::machine::alu;
use crate::machine::fault::MachineResult;
use crate::machine::registers::LANES;
use crate::machine::warp::Warp;
use crate::ptx::instruction::{Action, NO_REGISTER, Register, Type};

/// Executes operations that move bits around.
pub(super) fn execute_bits(warp: &mut Warp, action: &Action, mask: u32) -> MachineResult<Flow> {
    let r = &mut warp.registers;
    let (mut narrow, mut wide) = ([0u32; LANES], [0u64; LANES]);
    let signed = |ty: Type, x: u32| match ty {
        Type::U16 => i64::from(x as u16),
        Type::S16 => i64::from(x as i16),
        Type::S32 => i64::from(x as i32),
        _ => i64::from(x),
    };
    let (d, is_wide) = match *action {
        Action::MultiplyWide { ty, d, a, b } => {
            for i in 0..LANES {
                let (x, y) = (r.get32(a)[i], r.get32(b)[i]);
                wide[i] = signed(ty, x).wrapping_mul(signed(ty, y)) as u64;
            }
            (d, ty.bytes() == 4)
        }
        Action::MultiplyWideAdd { ty, d, a, b, c } => {
            let is_wide = ty.bytes() == 4;
            for i in 0..LANES {
                let (x, y) = (r.get32(a)[i], r.get32(b)[i]);
                let c = if is_wide {
                    r.get64(c)[i]
                } else {
                    u64::from(r.get32(c)[i])
                };
                wide[i] = (signed(ty, x).wrapping_mul(signed(ty, y)) as u64).wrapping_add(c);
            }
            (d, is_wide)
        }
        Action::Select {
            is_wide,
            d,
            a,
            b,
            p,
        } => {
            let p = r.predicate(p);
            for i in 0..LANES {
                let from = if p >> i & 1 == 1 { a } else { b };
                if is_wide {
                    wide[i] = r.get64(from)[i];
                } else {
                    narrow[i] = r.get32(from)[i];
                }
            }
            if !is_wide {
                r.set32(d, mask, &narrow);
                return Ok(Flow::Next);
            }
            (d, true)
        }
        Action::SelectBySign {
            is_wide,
            is_float,
            d,
            a,
            b,
            c,
        } => {
            for i in 0..LANES {
                let c = r.get32(c)[i];
                let is_first = if is_float {
                    f32::from_bits(c) >= 0.0
                } else {
                    c as i32 >= 0
                };
                let from = if is_first { a } else { b };
                wide[i] = if is_wide {
                    r.get64(from)[i]
                } else {
                    u64::from(r.get32(from)[i])
                };
            }
            (d, is_wide)
        }
        _ => return execute_fields(warp, action, mask),
    };
    if is_wide {
        r.set64(d, mask, &wide);
    } else {
        r.set32(d, mask, &wide.map(|w| w as u32));
    }
    Ok(Flow::Next)
}

/// Executes operations on fields of registers.
fn execute_fields(warp: &mut Warp, action: &Action, mask: u32) -> MachineResult<Flow> {
    let r = &mut warp.registers;
    let (mut narrow, mut wide) = ([0u32; LANES], [0u64; LANES]);
    let (d, is_wide) = match *action {
        Action::InsertBits {
            is_wide,
            d,
            a,
            b,
            start,
            count,
        } => {
            for i in 0..LANES {
                let get = |x: Register| {
                    if is_wide {
                        r.get64(x)[i]
                    } else {
                        u64::from(r.get32(x)[i])
                    }
                };
                let size = if is_wide { 64 } else { 32 };
                wide[i] = alu::insert(get(a), get(b), size, r.get32(start)[i], r.get32(count)[i]);
            }
            (d, is_wide)
        }
        Action::ExtractWide {
            is_signed,
            d,
            a,
            start,
            count,
        } => {
            for i in 0..LANES {
                let (start, count) = (r.get32(start)[i], r.get32(count)[i]);
                wide[i] = alu::extract(r.get64(a)[i], 64, start, count, is_signed);
            }
            (d, true)
        }
        Action::LogicTable { d, a, b, c, table } => {
            for i in 0..LANES {
                narrow[i] = alu::logic(r.get32(a)[i], r.get32(b)[i], r.get32(c)[i], table);
            }
            r.set32(d, mask, &narrow);
            return Ok(Flow::Next);
        }
        Action::Pack {
            d,
            is_wide,
            bits,
            parts,
        } => {
            for i in 0..LANES {
                for (k, &part) in parts.iter().enumerate().filter(|(_, p)| **p != NO_REGISTER) {
                    let value = u64::from(r.get32(part)[i]) & ((1 << bits) - 1);
                    wide[i] |= value << (usize::from(bits) * k);
                }
            }
            (d, is_wide)
        }
        Action::Unpack {
            a,
            is_wide,
            bits,
            parts,
        } => {
            let value = if is_wide {
                *r.get64(a)
            } else {
                r.get32(a).map(u64::from)
            };
            for (k, &part) in parts.iter().enumerate().filter(|(_, p)| **p != NO_REGISTER) {
                let limit = (1u64 << bits) - 1;
                let out = value.map(|v| (v >> (usize::from(bits) * k) & limit) as u32);
                r.set32(part, mask, &out);
            }
            return Ok(Flow::Next);
        }
        Action::CompareSet {
            op,
            ty,
            flags,
            is_float,
            d,
            a,
            b,
        } => {
            let Some(value) = alu::compare(r, (op, ty, flags), [a, b]) else {
                return Err(unsupported(mask));
            };
            let one = if is_float { 1f32.to_bits() } else { u32::MAX };
            let out: [u32; LANES] =
                std::array::from_fn(|i| if value >> i & 1 == 1 { one } else { 0 });
            r.set32(d, mask, &out);
            return Ok(Flow::Next);
        }
        _ => return Err(unsupported(mask)),
    };
    if is_wide {
        r.set64(d, mask, &wide);
    } else {
        r.set32(d, mask, &wide.map(|w| w as u32));
    }
    Ok(Flow::Next)
}
