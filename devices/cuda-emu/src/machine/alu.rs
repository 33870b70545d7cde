//! Arithmetic over the lanes of a warp.

mod compare;

pub(crate) use compare::compare;

use super::float::{
    add_odd, flush, half_bits, half_value, max_f32, max_f64, min_f32, min_f64, saturate,
};
use super::registers::{LANES, LaneWord, Registers};
use super::support::is_half;
use crate::ptx::instruction::{Binary, Count, PermuteMode, Register, Ternary, Type, Unary, flag};

#[inline(always)]
fn map1<T: LaneWord>(r: &mut Registers, mask: u32, d: Register, a: Register, f: impl Fn(T) -> T) {
    let x = T::get(r, a);
    let mut out = [T::Word::default(); LANES];
    for i in 0..LANES {
        out[i] = f(T::from_word(x[i])).into_word();
    }
    T::set(r, d, mask, &out);
}

#[inline(always)]
fn map2<T: LaneWord>(
    r: &mut Registers,
    mask: u32,
    d: Register,
    [a, b]: [Register; 2],
    f: impl Fn(T, T) -> T,
) {
    let (x, y) = (T::get(r, a), T::get(r, b));
    let mut out = [T::Word::default(); LANES];
    for i in 0..LANES {
        out[i] = f(T::from_word(x[i]), T::from_word(y[i])).into_word();
    }
    T::set(r, d, mask, &out);
}

/// Like [`map2`], with a second operand of 32 bits.
#[inline(always)]
fn map_shift<T: LaneWord>(
    r: &mut Registers,
    mask: u32,
    d: Register,
    [a, b]: [Register; 2],
    f: impl Fn(T, u32) -> T,
) {
    let (x, y) = (T::get(r, a), r.get32(b));
    let mut out = [T::Word::default(); LANES];
    for i in 0..LANES {
        out[i] = f(T::from_word(x[i]), y[i]).into_word();
    }
    T::set(r, d, mask, &out);
}

#[inline(always)]
fn map3<T: LaneWord>(
    r: &mut Registers,
    mask: u32,
    d: Register,
    [a, b, c]: [Register; 3],
    f: impl Fn(T, T, T) -> T,
) {
    let (x, y, z) = (T::get(r, a), T::get(r, b), T::get(r, c));
    let mut out = [T::Word::default(); LANES];
    for i in 0..LANES {
        out[i] = f(T::from_word(x[i]), T::from_word(y[i]), T::from_word(z[i])).into_word();
    }
    T::set(r, d, mask, &out);
}

/// Applies `f` to one or two halves of each lane.
fn map_half<const N: usize>(
    r: &mut Registers,
    mask: u32,
    ty: Type,
    d: Register,
    operands: [Register; N],
    f: impl Fn([f64; N]) -> f64,
) {
    let mut out = [0; LANES];
    let is_pair = matches!(ty, Type::F16x2 | Type::BF16x2);
    for (i, out) in out.iter_mut().enumerate() {
        let low = operands.map(|o| half_value(r.get32(o)[i] as u16, ty));
        *out = u32::from(half_bits(f(low), ty));
        if is_pair {
            let high = operands.map(|o| half_value((r.get32(o)[i] >> 16) as u16, ty));
            *out |= u32::from(half_bits(f(high), ty)) << 16;
        }
    }
    r.set32(d, mask, &out);
}

/// Computes a unary operation. Returns false if it is unsupported.
pub(crate) fn unary(
    r: &mut Registers,
    mask: u32,
    (op, ty, flags): (Unary, Type, u8),
    d: Register,
    a: Register,
) -> bool {
    if is_half(ty) {
        map_half(r, mask, ty, d, [a], |[x]| match op {
            Unary::Negate => -x,
            Unary::Absolute => x.abs(),
            Unary::Exp2 => x.exp2(),
            _ => x.tanh(),
        });
        return true;
    }
    match (op, ty) {
        (Unary::Not, Type::B16) => map1::<u16>(r, mask, d, a, |x| !x),
        (Unary::Not, Type::B32) => map1::<u32>(r, mask, d, a, |x| !x),
        (Unary::Not, Type::B64) => map1::<u64>(r, mask, d, a, |x| !x),
        (Unary::LogicalNot, Type::B16) => map1::<u16>(r, mask, d, a, |x| u16::from(x == 0)),
        (Unary::LogicalNot, Type::B32) => {
            map1::<u32>(r, mask, d, a, |x| u32::from(x == 0));
        }
        (Unary::LogicalNot, Type::B64) => map1::<u64>(r, mask, d, a, |x| u64::from(x == 0)),
        (Unary::Reverse, Type::B32) => map1::<u32>(r, mask, d, a, u32::reverse_bits),
        (Unary::Reverse, Type::B64) => map1::<u64>(r, mask, d, a, u64::reverse_bits),
        (Unary::Negate, Type::S16) => map1::<i16>(r, mask, d, a, i16::wrapping_neg),
        (Unary::Negate, Type::S32) => map1::<i32>(r, mask, d, a, i32::wrapping_neg),
        (Unary::Negate, Type::S64) => map1::<i64>(r, mask, d, a, i64::wrapping_neg),
        (Unary::Absolute, Type::S16) => map1::<i16>(r, mask, d, a, i16::wrapping_abs),
        (Unary::Absolute, Type::S32) => map1::<i32>(r, mask, d, a, i32::wrapping_abs),
        (Unary::Absolute, Type::S64) => map1::<i64>(r, mask, d, a, i64::wrapping_abs),
        (_, Type::F32) => return unary_f32(r, mask, (op, flags), d, a),
        (Unary::Negate, Type::F64) => map1::<f64>(r, mask, d, a, |x| -x),
        (Unary::Absolute, Type::F64) => map1::<f64>(r, mask, d, a, f64::abs),
        (Unary::SquareRoot, Type::F64) => map1::<f64>(r, mask, d, a, f64::sqrt),
        (Unary::ReciprocalRoot, Type::F64) => map1::<f64>(r, mask, d, a, |x| 1.0 / x.sqrt()),
        (Unary::Reciprocal, Type::F64) => map1::<f64>(r, mask, d, a, |x| 1.0 / x),
        _ => return false,
    }
    true
}

fn unary_f32(
    r: &mut Registers,
    mask: u32,
    (op, flags): (Unary, u8),
    d: Register,
    a: Register,
) -> bool {
    let is_flushed = flags & flag::FTZ != 0;
    let put = move |x: f32| {
        let x = if is_flushed {
            f32::from_bits(flush(x.to_bits()))
        } else {
            x
        };
        if flags & flag::SAT != 0 {
            saturate(x)
        } else {
            x
        }
    };
    let take = move |x: f32| {
        if is_flushed {
            f32::from_bits(flush(x.to_bits()))
        } else {
            x
        }
    };
    let wide = move |r: &mut Registers, f: fn(f64) -> f64| {
        map1::<f32>(r, mask, d, a, |x| put(f(f64::from(take(x))) as f32));
    };
    match op {
        Unary::Negate if flags == 0 => map1::<f32>(r, mask, d, a, |x| -x),
        Unary::Negate => map1::<f32>(r, mask, d, a, |x| put(-take(x))),
        Unary::Absolute if flags == 0 => map1::<f32>(r, mask, d, a, f32::abs),
        Unary::Absolute => map1::<f32>(r, mask, d, a, |x| put(take(x).abs())),
        Unary::SquareRoot => map1::<f32>(r, mask, d, a, |x| put(take(x).sqrt())),
        Unary::ReciprocalRoot => wide(r, |x| 1.0 / x.sqrt()),
        Unary::Reciprocal => map1::<f32>(r, mask, d, a, |x| put(1.0 / take(x))),
        Unary::Exp2 => wide(r, f64::exp2),
        Unary::Log2 => wide(r, f64::log2),
        Unary::Sine => wide(r, f64::sin),
        Unary::Cosine => wide(r, f64::cos),
        Unary::Tanh => wide(r, f64::tanh),
        _ => return false,
    }
    true
}

/// Counts or finds bits. The result has 32 bits.
pub(crate) fn count(
    r: &mut Registers,
    mask: u32,
    (op, ty): (Count, Type),
    d: Register,
    a: Register,
) {
    let mut out = [0; LANES];
    let size = ty.bytes() as u32 * 8;
    for (i, out) in out.iter_mut().enumerate() {
        let bits = if size == 64 {
            r.get64(a)[i]
        } else {
            u64::from(r.get32(a)[i])
        };
        // The highest bit that differs from the sign.
        let value = if ty.is_signed() && bits >> (size - 1) & 1 == 1 {
            !bits & (u64::MAX >> (64 - size))
        } else {
            bits
        };
        *out = match op {
            Count::Ones => bits.count_ones(),
            Count::LeadingZeros => bits.leading_zeros() - (64 - size),
            _ if value == 0 => u32::MAX,
            Count::FindHighest => 63 - value.leading_zeros(),
            Count::FindHighestShift => value.leading_zeros() - (64 - size),
        };
    }
    r.set32(d, mask, &out);
}

macro_rules! integers {
    ($r:ident, $mask:ident, $d:ident, $ab:ident, $ty:ident, |$x:ident, $y:ident| $f:expr) => {
        match $ty {
            Type::U16 => map2::<u16>($r, $mask, $d, $ab, |$x, $y| $f),
            Type::S16 => map2::<i16>($r, $mask, $d, $ab, |$x, $y| $f),
            Type::U32 => map2::<u32>($r, $mask, $d, $ab, |$x, $y| $f),
            Type::S32 => map2::<i32>($r, $mask, $d, $ab, |$x, $y| $f),
            Type::U64 => map2::<u64>($r, $mask, $d, $ab, |$x, $y| $f),
            Type::S64 => map2::<i64>($r, $mask, $d, $ab, |$x, $y| $f),
            _ => return false,
        }
    };
}

macro_rules! bits {
    ($r:ident, $mask:ident, $d:ident, $ab:ident, $ty:ident, |$x:ident, $y:ident| $f:expr) => {
        match $ty {
            Type::B16 | Type::B32 => map2::<u32>($r, $mask, $d, $ab, |$x, $y| $f),
            Type::B64 => map2::<u64>($r, $mask, $d, $ab, |$x, $y| $f),
            _ => return false,
        }
    };
}

/// Computes a binary operation. Returns false if it is unsupported.
pub(crate) fn binary(
    r: &mut Registers,
    mask: u32,
    (op, ty, flags): (Binary, Type, u8),
    d: Register,
    ab: [Register; 2],
) -> bool {
    match ty {
        Type::F32 => return binary_f32(r, mask, (op, flags), d, ab),
        Type::F64 => return binary_f64(r, mask, (op, flags), d, ab),
        Type::F16 | Type::F16x2 | Type::BF16 | Type::BF16x2 => {
            return binary_half(r, mask, (op, ty, flags), d, ab);
        }
        _ => {}
    }
    let saturates = flags & flag::SAT != 0;
    match op {
        Binary::Add if saturates => map2::<i32>(r, mask, d, ab, i32::saturating_add),
        Binary::Subtract if saturates => map2::<i32>(r, mask, d, ab, i32::saturating_sub),
        Binary::Add => integers!(r, mask, d, ab, ty, |x, y| x.wrapping_add(y)),
        Binary::Subtract => integers!(r, mask, d, ab, ty, |x, y| x.wrapping_sub(y)),
        Binary::Multiply => integers!(r, mask, d, ab, ty, |x, y| x.wrapping_mul(y)),
        Binary::Min => integers!(r, mask, d, ab, ty, |x, y| x.min(y)),
        Binary::Max => integers!(r, mask, d, ab, ty, |x, y| x.max(y)),
        // A division by zero gives ones on cards, as far as is known.
        Binary::Divide => {
            integers!(r, mask, d, ab, ty, |x, y| if y == 0 {
                !0
            } else {
                x.wrapping_div(y)
            });
        }
        Binary::Remainder => {
            integers!(r, mask, d, ab, ty, |x, y| if y == 0 {
                x
            } else {
                x.wrapping_rem(y)
            });
        }
        Binary::MultiplyHigh => match ty {
            Type::U16 => map2::<u16>(r, mask, d, ab, |x, y| {
                ((u32::from(x) * u32::from(y)) >> 16) as u16
            }),
            Type::S16 => map2::<i16>(r, mask, d, ab, |x, y| {
                ((i32::from(x) * i32::from(y)) >> 16) as i16
            }),
            Type::U32 => map2::<u32>(r, mask, d, ab, |x, y| {
                ((u64::from(x) * u64::from(y)) >> 32) as u32
            }),
            Type::S32 => map2::<i32>(r, mask, d, ab, |x, y| {
                ((i64::from(x) * i64::from(y)) >> 32) as i32
            }),
            Type::U64 => map2::<u64>(r, mask, d, ab, |x, y| {
                ((u128::from(x) * u128::from(y)) >> 64) as u64
            }),
            Type::S64 => map2::<i64>(r, mask, d, ab, |x, y| {
                ((i128::from(x) * i128::from(y)) >> 64) as i64
            }),
            _ => return false,
        },
        Binary::And => bits!(r, mask, d, ab, ty, |x, y| x & y),
        Binary::Or => bits!(r, mask, d, ab, ty, |x, y| x | y),
        Binary::Xor => bits!(r, mask, d, ab, ty, |x, y| x ^ y),
        // Amounts beyond the size shift everything out.
        Binary::ShiftLeft => match ty {
            Type::B16 => map_shift::<u16>(r, mask, d, ab, |x, n| if n < 16 { x << n } else { 0 }),
            Type::B32 => map_shift::<u32>(
                r,
                mask,
                d,
                ab,
                |x, n| if n < 32 { x << (n & 31) } else { 0 },
            ),
            Type::B64 => map_shift::<u64>(
                r,
                mask,
                d,
                ab,
                |x, n| if n < 64 { x << (n & 63) } else { 0 },
            ),
            _ => return false,
        },
        Binary::ShiftRight => match ty {
            Type::B16 | Type::U16 => {
                map_shift::<u16>(r, mask, d, ab, |x, n| if n < 16 { x >> n } else { 0 });
            }
            Type::B32 | Type::U32 => {
                map_shift::<u32>(
                    r,
                    mask,
                    d,
                    ab,
                    |x, n| if n < 32 { x >> (n & 31) } else { 0 },
                );
            }
            Type::B64 | Type::U64 => {
                map_shift::<u64>(
                    r,
                    mask,
                    d,
                    ab,
                    |x, n| if n < 64 { x >> (n & 63) } else { 0 },
                );
            }
            Type::S16 => map_shift::<i16>(r, mask, d, ab, |x, n| x >> n.min(15)),
            Type::S32 => map_shift::<i32>(r, mask, d, ab, |x, n| x >> n.min(31)),
            Type::S64 => map_shift::<i64>(r, mask, d, ab, |x, n| x >> n.min(63)),
            _ => return false,
        },
        Binary::CopySign => return false,
    }
    true
}

fn binary_f32(
    r: &mut Registers,
    mask: u32,
    (op, flags): (Binary, u8),
    d: Register,
    ab: [Register; 2],
) -> bool {
    // Modifiers that change results are rare: they get a slow path.
    if flags & (flag::FTZ | flag::SAT | flag::NAN) != 0 {
        let is_flushed = flags & flag::FTZ != 0;
        let take = |x: f32| {
            if is_flushed {
                f32::from_bits(flush(x.to_bits()))
            } else {
                x
            }
        };
        map2::<f32>(r, mask, d, ab, |x, y| {
            let (x, y) = (take(x), take(y));
            let result = take(match op {
                Binary::Add => x + y,
                Binary::Subtract => x - y,
                Binary::Multiply => x * y,
                Binary::Divide => x / y,
                Binary::Min => min_f32(x, y, flags),
                Binary::Max => max_f32(x, y, flags),
                _ => y.copysign(x),
            });
            if flags & flag::SAT != 0 {
                saturate(result)
            } else {
                result
            }
        });
        return true;
    }
    match op {
        Binary::Add => map2::<f32>(r, mask, d, ab, |x, y| x + y),
        Binary::Subtract => map2::<f32>(r, mask, d, ab, |x, y| x - y),
        Binary::Multiply => map2::<f32>(r, mask, d, ab, |x, y| x * y),
        Binary::Divide => map2::<f32>(r, mask, d, ab, |x, y| x / y),
        Binary::Min => map2::<f32>(r, mask, d, ab, |x, y| min_f32(x, y, 0)),
        Binary::Max => map2::<f32>(r, mask, d, ab, |x, y| max_f32(x, y, 0)),
        // The first operand has the sign.
        Binary::CopySign => map2::<f32>(r, mask, d, ab, |x, y| y.copysign(x)),
        _ => return false,
    }
    true
}

fn binary_f64(
    r: &mut Registers,
    mask: u32,
    (op, flags): (Binary, u8),
    d: Register,
    ab: [Register; 2],
) -> bool {
    match op {
        Binary::Add => map2::<f64>(r, mask, d, ab, |x, y| x + y),
        Binary::Subtract => map2::<f64>(r, mask, d, ab, |x, y| x - y),
        Binary::Multiply => map2::<f64>(r, mask, d, ab, |x, y| x * y),
        Binary::Divide => map2::<f64>(r, mask, d, ab, |x, y| x / y),
        Binary::Min => map2::<f64>(r, mask, d, ab, |x, y| min_f64(x, y, flags)),
        Binary::Max => map2::<f64>(r, mask, d, ab, |x, y| max_f64(x, y, flags)),
        Binary::CopySign => map2::<f64>(r, mask, d, ab, |x, y| y.copysign(x)),
        _ => return false,
    }
    true
}

fn binary_half(
    r: &mut Registers,
    mask: u32,
    (op, ty, flags): (Binary, Type, u8),
    d: Register,
    ab: [Register; 2],
) -> bool {
    let saturates = flags & flag::SAT != 0;
    map_half(r, mask, ty, d, ab, |[x, y]| {
        let result = match op {
            Binary::Add => add_odd(x, y),
            Binary::Subtract => add_odd(x, -y),
            Binary::Multiply => x * y,
            Binary::Min => min_f64(x, y, flags),
            _ => max_f64(x, y, flags),
        };
        if !saturates {
            result
        } else if result > 0.0 {
            result.min(1.0)
        } else {
            // also NaN
            0.0
        }
    });
    true
}

/// Computes a ternary operation. Returns false if it is unsupported.
pub(crate) fn ternary(
    r: &mut Registers,
    mask: u32,
    (op, ty, flags): (Ternary, Type, u8),
    d: Register,
    abc: [Register; 3],
) -> bool {
    match (op, ty) {
        (Ternary::MultiplyAdd, Type::F32) if flags & (flag::FTZ | flag::SAT) == 0 => {
            map3::<f32>(r, mask, d, abc, f32::mul_add);
        }
        (Ternary::MultiplyAdd, Type::F32) => {
            let is_flushed = flags & flag::FTZ != 0;
            let take = |x: f32| {
                if is_flushed {
                    f32::from_bits(flush(x.to_bits()))
                } else {
                    x
                }
            };
            map3::<f32>(r, mask, d, abc, |x, y, z| {
                let result = take(take(x).mul_add(take(y), take(z)));
                if flags & flag::SAT != 0 {
                    saturate(result)
                } else {
                    result
                }
            });
        }
        (Ternary::MultiplyAdd, Type::F64) => map3::<f64>(r, mask, d, abc, f64::mul_add),
        (Ternary::MultiplyAdd, ty) if is_half(ty) => {
            map_half(r, mask, ty, d, abc, |[x, y, z]| {
                // The product of two halves is exact.
                let result = add_odd(x * y, z);
                match flags {
                    f if f & flag::RELU != 0 => max_f64(result, 0.0, flag::NAN),
                    f if f & flag::SAT != 0 && result > 0.0 => result.min(1.0),
                    f if f & flag::SAT != 0 => 0.0,
                    _ => result,
                }
            });
        }
        (Ternary::MultiplyAdd, Type::U16 | Type::S16) => {
            map3::<u16>(r, mask, d, abc, |x, y, z| x.wrapping_mul(y).wrapping_add(z));
        }
        (Ternary::MultiplyAdd, Type::U32 | Type::S32) => {
            map3::<u32>(r, mask, d, abc, |x, y, z| x.wrapping_mul(y).wrapping_add(z));
        }
        (Ternary::MultiplyAdd, Type::U64 | Type::S64) => {
            map3::<u64>(r, mask, d, abc, |x, y, z| x.wrapping_mul(y).wrapping_add(z));
        }
        (Ternary::MultiplyHighAdd, Type::U32) => map3::<u32>(r, mask, d, abc, |x, y, z| {
            (((u64::from(x) * u64::from(y)) >> 32) as u32).wrapping_add(z)
        }),
        (Ternary::MultiplyHighAdd, Type::S32) => map3::<i32>(r, mask, d, abc, |x, y, z| {
            (((i64::from(x) * i64::from(y)) >> 32) as i32).wrapping_add(z)
        }),
        (Ternary::MultiplyHighAdd, Type::U64) => map3::<u64>(r, mask, d, abc, |x, y, z| {
            (((u128::from(x) * u128::from(y)) >> 64) as u64).wrapping_add(z)
        }),
        (Ternary::MultiplyHighAdd, Type::S64) => map3::<i64>(r, mask, d, abc, |x, y, z| {
            (((i128::from(x) * i128::from(y)) >> 64) as i64).wrapping_add(z)
        }),
        (Ternary::SumOfDifferences, Type::U32) => {
            map3::<u32>(r, mask, d, abc, |x, y, z| x.abs_diff(y).wrapping_add(z));
        }
        (Ternary::SumOfDifferences, Type::S32) => {
            map3::<i32>(r, mask, d, abc, |x, y, z| {
                (x.abs_diff(y) as i32).wrapping_add(z)
            });
        }
        (Ternary::ExtractBits, Type::U32 | Type::S32) => {
            let is_signed = ty == Type::S32;
            map3::<u32>(r, mask, d, abc, |x, start, count| {
                let x = if is_signed {
                    i64::from(x as i32) as u64
                } else {
                    u64::from(x)
                };
                extract(x, 32, start, count, is_signed) as u32
            });
        }
        _ => return ternary_bits(r, mask, op, d, abc),
    }
    true
}

fn ternary_bits(
    r: &mut Registers,
    mask: u32,
    op: Ternary,
    d: Register,
    abc: [Register; 3],
) -> bool {
    match op {
        Ternary::Permute(PermuteMode::Index) => map3::<u32>(r, mask, d, abc, permute),
        Ternary::Permute(mode) => {
            map3::<u32>(r, mask, d, abc, |x, y, z| permute(x, y, selector(mode, z)));
        }
        Ternary::FunnelLeft { clamps } => map3::<u32>(r, mask, d, abc, |low, high, n| {
            let n = if clamps { n.min(32) } else { n & 31 };
            ((((u64::from(high) << 32) | u64::from(low)) << n) >> 32) as u32
        }),
        Ternary::FunnelRight { clamps } => map3::<u32>(r, mask, d, abc, |low, high, n| {
            let n = if clamps { n.min(32) } else { n & 31 };
            (((u64::from(high) << 32) | u64::from(low)) >> n) as u32
        }),
        Ternary::Dot4 { signed_a, signed_b } => match (signed_a, signed_b) {
            (true, true) => map3::<u32>(r, mask, d, abc, dot4::<true, true>),
            (true, false) => map3::<u32>(r, mask, d, abc, dot4::<true, false>),
            (false, true) => map3::<u32>(r, mask, d, abc, dot4::<false, true>),
            (false, false) => {
                map3::<u32>(r, mask, d, abc, dot4::<false, false>);
            }
        },
        Ternary::Dot2 {
            signed_a,
            signed_b,
            high,
        } => map3::<u32>(r, mask, d, abc, |x, y, z| {
            (0..2).fold(z, |sum, i| {
                let word = (x >> (16 * i)) as u16;
                let byte = (y >> (8 * i + if high { 16 } else { 0 })) as u8;
                let word = if signed_a {
                    i32::from(word as i16)
                } else {
                    i32::from(word)
                };
                let byte = if signed_b {
                    i32::from(byte as i8)
                } else {
                    i32::from(byte)
                };
                sum.wrapping_add((word * byte) as u32)
            })
        }),
        _ => return false,
    }
    true
}

#[inline(always)]
fn dot4<const SIGNED_A: bool, const SIGNED_B: bool>(x: u32, y: u32, z: u32) -> u32 {
    let mut sum = z as i32;
    for i in 0..4 {
        // Shifts extend the sign, also in vectors.
        let a = if SIGNED_A {
            ((x << (24 - 8 * i)) as i32) >> 24
        } else {
            (x >> (8 * i) & 255) as i32
        };
        let b = if SIGNED_B {
            ((y << (24 - 8 * i)) as i32) >> 24
        } else {
            (y >> (8 * i) & 255) as i32
        };
        sum = sum.wrapping_add(a.wrapping_mul(b));
    }
    sum as u32
}

fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = (u64::from(b) << 32) | u64::from(a);
    (0..4).fold(0, |result, i| {
        let nibble = selector >> (4 * i);
        let byte = (bytes >> (8 * (nibble & 7))) as u8;
        // Bit 3 replicates the sign.
        let byte = if nibble & 8 == 0 {
            byte
        } else {
            (byte as i8 >> 7) as u8
        };
        result | (u32::from(byte) << (8 * i))
    })
}

/// Returns the selector of a mode of `prmt`, with index `n`.
fn selector(mode: PermuteMode, n: u32) -> u32 {
    let n = n & 3;
    let [a, b, c, d] = match mode {
        PermuteMode::Forward4 => [n + 3, n + 2, n + 1, n],
        PermuteMode::Backward4 => [n + 5, n + 6, n + 7, n].map(|i| i & 7),
        PermuteMode::Replicate8 => [n; 4],
        PermuteMode::EdgeLeft => [3, 2.max(n), 1.max(n), n],
        PermuteMode::EdgeRight => [n, n.min(2), n.min(1), 0],
        PermuteMode::Replicate16 => [2 * (n & 1) + 1, 2 * (n & 1), 2 * (n & 1) + 1, 2 * (n & 1)],
        PermuteMode::Index => [3, 2, 1, 0],
    };
    (a << 12) | (b << 8) | (c << 4) | d
}

/// `bfe`: extracts `count` bits from `start`. `x` is sign-extended for signed extraction.
pub(crate) fn extract(x: u64, size: u32, start: u32, count: u32, is_signed: bool) -> u64 {
    let (start, count) = (start & 255, count & 255);
    if count == 0 {
        return 0;
    }
    if !is_signed {
        let x = if start < 64 { x >> start } else { 0 };
        return if count < 64 {
            x & ((1 << count) - 1)
        } else {
            x
        };
    }
    // Bits beyond the top are copies of the sign.
    let x = ((x as i64) >> start.min(63)) as u64;
    let last = (size - 1).saturating_sub(start).min(count - 1);
    let shift = 63 - last.min(63);
    (((x << shift) as i64) >> shift) as u64
}

/// `bfi`: inserts `count` bits of `from` at `start` of `to`.
pub(crate) fn insert(from: u64, to: u64, size: u32, start: u32, count: u32) -> u64 {
    let (start, count) = (start & 255, count & 255);
    if start >= size {
        return to;
    }
    let ones = if count < 64 {
        (1u64 << count) - 1
    } else {
        u64::MAX
    };
    let mask = ones << start;
    (to & !mask) | ((from << start) & mask)
}

/// `lop3`: looks up each bit of the operands in a table.
pub(crate) fn logic(a: u32, b: u32, c: u32, table: u8) -> u32 {
    (0..8u32)
        .filter(|row| table >> row & 1 == 1)
        .fold(0, |all, row| {
            let pick = |value: u32, bit: u32| if row & bit == 0 { !value } else { value };
            all | (pick(a, 4) & pick(b, 2) & pick(c, 1))
        })
}
