//! Conversions between types.

use super::float::{flush, from_bf16, from_f16, saturate, to_bf16, to_f16, to_f32, to_tf32};
use super::registers::{LANES, Registers};
use crate::ptx::instruction::{Class, Register, Rounding, Type, flag};

/// A conversion, without its registers.
#[derive(Clone, Copy)]
pub(crate) struct NumberConversion {
    pub(crate) to: Type,
    pub(crate) from: Type,
    pub(crate) rounding: Rounding,
    pub(crate) to_integral: bool,
    pub(crate) flags: u8,
}

/// A source value.
#[derive(Clone, Copy)]
enum Value {
    Integer(i128),
    Real(f64),
}

/// Converts the lanes of a register.
pub(crate) fn convert(r: &mut Registers, mask: u32, c: NumberConversion, d: Register, a: Register) {
    if convert_fast(r, mask, c, d, a) {
        return;
    }
    let mut wide = [0u64; LANES];
    for (i, out) in wide.iter_mut().enumerate() {
        let bits = match c.from.class() {
            Class::R64 => r.get64(a)[i],
            _ => u64::from(r.get32(a)[i]),
        };
        *out = convert_bits(bits, c);
    }
    if c.to.class() == Class::R64 {
        r.set64(d, mask, &wide);
    } else {
        r.set32(d, mask, &wide.map(|w| w as u32));
    }
}

/// Does the most frequent conversions in loops that vectorize.
fn convert_fast(
    r: &mut Registers,
    mask: u32,
    c: NumberConversion,
    d: Register,
    a: Register,
) -> bool {
    if c.flags != 0 || c.to_integral {
        return false;
    }
    let nearest = c.rounding == Rounding::Nearest;
    match (c.to, c.from) {
        (Type::U64 | Type::S64, Type::U32) => {
            let value = r.get32(a).map(u64::from);
            r.set64(d, mask, &value);
        }
        (Type::U64 | Type::S64, Type::S32) => {
            let value = r.get32(a).map(|x| i64::from(x as i32) as u64);
            r.set64(d, mask, &value);
        }
        (Type::U32 | Type::S32, Type::U64 | Type::S64) => {
            let value = r.get64(a).map(|x| x as u32);
            r.set32(d, mask, &value);
        }
        (Type::U32 | Type::S32, Type::U32 | Type::S32) => {
            let value = *r.get32(a);
            r.set32(d, mask, &value);
        }
        (Type::U32 | Type::S32 | Type::U16, Type::U16) => {
            let value = r.get32(a).map(|x| x & 0xffff);
            r.set32(d, mask, &value);
        }
        (Type::S32, Type::S16) => {
            let value = r.get32(a).map(|x| i32::from(x as i16) as u32);
            r.set32(d, mask, &value);
        }
        (Type::S32, Type::S8) => {
            let value = r.get32(a).map(|x| i32::from(x as i8) as u32);
            r.set32(d, mask, &value);
        }
        (Type::F32, Type::S32) if nearest => {
            let value = r.get32(a).map(|x| (x as i32 as f32).to_bits());
            r.set32(d, mask, &value);
        }
        (Type::F32, Type::U32) if nearest => {
            let value = r.get32(a).map(|x| (x as f32).to_bits());
            r.set32(d, mask, &value);
        }
        (Type::F32, Type::F16) => {
            let value = r.get32(a).map(|x| from_f16(x as u16).to_bits());
            r.set32(d, mask, &value);
        }
        (Type::F16, Type::F32) => {
            let rounding = c.rounding;
            let convert = |x| u32::from(to_f16(f64::from(f32::from_bits(x)), rounding));
            let value = r.get32(a).map(convert);
            r.set32(d, mask, &value);
        }
        _ => return false,
    }
    true
}

fn value_of(bits: u64, c: NumberConversion) -> Value {
    match c.from {
        Type::U8 => Value::Integer(i128::from(bits as u8)),
        Type::S8 => Value::Integer(i128::from(bits as i8)),
        Type::U16 => Value::Integer(i128::from(bits as u16)),
        Type::S16 => Value::Integer(i128::from(bits as i16)),
        Type::U32 => Value::Integer(i128::from(bits as u32)),
        Type::S32 => Value::Integer(i128::from(bits as i32)),
        Type::S64 => Value::Integer(i128::from(bits as i64)),
        Type::F16 => Value::Real(f64::from(from_f16(bits as u16))),
        Type::BF16 => Value::Real(f64::from(from_bf16(bits as u16))),
        Type::F32 if c.flags & flag::FTZ != 0 => {
            Value::Real(f64::from(f32::from_bits(flush(bits as u32))))
        }
        Type::F32 => Value::Real(f64::from(f32::from_bits(bits as u32))),
        Type::F64 => Value::Real(f64::from_bits(bits)),
        _ => Value::Integer(i128::from(bits)),
    }
}

fn to_integral(x: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest | Rounding::NearestAway => x.round_ties_even(),
        Rounding::Zero => x.trunc(),
        Rounding::Down => x.floor(),
        Rounding::Up => x.ceil(),
    }
}

/// Returns the least and the greatest value of an integer type.
fn range(ty: Type) -> (i128, i128) {
    let bits = ty.bytes() * 8;
    if ty.is_signed() {
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    } else {
        (0, (1 << bits) - 1)
    }
}

fn convert_bits(bits: u64, c: NumberConversion) -> u64 {
    let value = value_of(bits, c);
    if !c.to.is_float() {
        let (low, high) = range(c.to);
        let integer = match value {
            Value::Integer(v) if c.flags & flag::SAT != 0 => v.clamp(low, high),
            Value::Integer(v) => v,
            // Cards convert NaN to 0, or for 64 bits to the highest bit.
            Value::Real(x) if x.is_nan() => match c.to.bytes() {
                8 => 1 << 63,
                _ => 0,
            },
            Value::Real(x) => (to_integral(x, c.rounding) as i128).clamp(low, high),
        };
        // Signs fill the register.
        return match c.to {
            Type::U8 => u64::from(integer as u8),
            Type::S8 => u64::from(integer as i8 as u32),
            Type::S16 => u64::from(integer as i16 as u32),
            Type::U16 => u64::from(integer as u16),
            Type::U32 | Type::S32 => u64::from(integer as u32),
            _ => integer as u64,
        };
    }
    let real = match value {
        Value::Integer(v) if c.to == Type::F64 => return (v as f64).to_bits(),
        Value::Integer(v) if c.to == Type::F32 && c.rounding == Rounding::Nearest => {
            return u64::from((v as f32).to_bits());
        }
        // Up to 53 bits are exact; larger ones lose nothing that a half can hold, but sticky bits.
        Value::Integer(v) => odd_integer(v),
        Value::Real(x) if c.to_integral => to_integral(x, c.rounding),
        Value::Real(x) => x,
    };
    // Conversions to an integral number are exact.
    let rounding = if c.to_integral {
        Rounding::Nearest
    } else {
        c.rounding
    };
    let real = if c.flags & flag::SAT != 0 && real.is_nan() {
        0.0
    } else if c.flags & flag::SAT != 0 {
        real.clamp(0.0, 1.0)
    } else if c.flags & flag::RELU != 0 && real < 0.0 {
        0.0
    } else {
        real
    };
    match c.to {
        Type::F16 => u64::from(to_f16(real, rounding)),
        Type::BF16 => u64::from(to_bf16(real, rounding)),
        Type::F32 => {
            let bits = to_f32(real, rounding).to_bits();
            u64::from(if c.flags & flag::FTZ != 0 {
                flush(bits)
            } else {
                bits
            })
        }
        Type::TF32 => u64::from(to_tf32(real as f32, rounding)),
        _ => real.to_bits(),
    }
}

/// Converts to f64 with rounding to odd.
fn odd_integer(v: i128) -> f64 {
    let x = v as f64;
    let back = x as i128;
    if back == v || x.to_bits() & 1 == 1 {
        return x;
    }
    let is_further = (v > back) == (x > 0.0);
    f64::from_bits(if is_further {
        x.to_bits() + 1
    } else {
        x.to_bits() - 1
    })
}

/// Converts two registers to a pair of halves. The first operand becomes the upper half.
pub(crate) fn convert_pair(
    r: &mut Registers,
    mask: u32,
    (to, rounding, flags): (Type, Rounding, u8),
    d: Register,
    [a, b]: [Register; 2],
) {
    let half = |bits: u32| {
        let x = f32::from_bits(bits);
        let x = match flags {
            f if f & flag::SAT != 0 => saturate(x),
            f if f & flag::RELU != 0 && x < 0.0 => 0.0,
            _ => x,
        };
        let x = f64::from(x);
        u32::from(if to == Type::F16x2 {
            to_f16(x, rounding)
        } else {
            to_bf16(x, rounding)
        })
    };
    let mut out = [0; LANES];
    for (i, out) in out.iter_mut().enumerate() {
        *out = (half(r.get32(a)[i]) << 16) | half(r.get32(b)[i]);
    }
    r.set32(d, mask, &out);
}
