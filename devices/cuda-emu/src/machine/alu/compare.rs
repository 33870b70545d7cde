//! Comparisons of lanes.

use crate::machine::float::{flush, half_value};
use crate::machine::registers::{LaneValues, LaneWord, Registers, collect};
use crate::ptx::instruction::{Comparison, Register, Type, flag};

#[inline(always)]
fn compare_lanes<T: LaneWord + PartialOrd>(
    r: &Registers,
    op: Comparison,
    [a, b]: [Register; 2],
) -> u32 {
    let (x, y) = (T::get(r, a), T::get(r, b));
    let at = |i: usize| (T::from_word(x[i]), T::from_word(y[i]));
    let unordered = |i: usize| at(i).0.partial_cmp(&at(i).1).is_none();
    match op {
        Comparison::Equal => collect(|i| at(i).0 == at(i).1),
        Comparison::NotEqual => collect(|i| at(i).0 < at(i).1 || at(i).0 > at(i).1),
        Comparison::Less => collect(|i| at(i).0 < at(i).1),
        Comparison::LessEqual => collect(|i| at(i).0 <= at(i).1),
        Comparison::Greater => collect(|i| at(i).0 > at(i).1),
        Comparison::GreaterEqual => collect(|i| at(i).0 >= at(i).1),
        Comparison::EqualUnordered => !collect(|i| at(i).0 < at(i).1 || at(i).0 > at(i).1),
        Comparison::NotEqualUnordered => collect(|i| at(i).0 != at(i).1),
        Comparison::LessUnordered => !collect(|i| at(i).0 >= at(i).1),
        Comparison::LessEqualUnordered => !collect(|i| at(i).0 > at(i).1),
        Comparison::GreaterUnordered => !collect(|i| at(i).0 <= at(i).1),
        Comparison::GreaterEqualUnordered => !collect(|i| at(i).0 < at(i).1),
        Comparison::BothNumbers => !collect(unordered),
        Comparison::AnyNan => collect(unordered),
    }
}

/// Compares, and returns a mask of lanes.
pub(crate) fn compare(
    r: &Registers,
    (op, ty, flags): (Comparison, Type, u8),
    [a, b]: [Register; 2],
) -> Option<u32> {
    Some(match ty {
        Type::B16 | Type::U16 => compare_lanes::<u16>(r, op, [a, b]),
        Type::B32 | Type::U32 => compare_lanes::<u32>(r, op, [a, b]),
        Type::S16 => compare_lanes::<i16>(r, op, [a, b]),
        Type::S32 => compare_lanes::<i32>(r, op, [a, b]),
        Type::B64 | Type::U64 => compare_lanes::<u64>(r, op, [a, b]),
        Type::S64 => compare_lanes::<i64>(r, op, [a, b]),
        Type::F64 => compare_lanes::<f64>(r, op, [a, b]),
        Type::F32 if flags & flag::FTZ == 0 => compare_lanes::<f32>(r, op, [a, b]),
        Type::F32 | Type::F16 | Type::BF16 => {
            let value = |bits: u32| match ty {
                Type::F32 => flush(bits),
                _ => (half_value(bits as u16, ty) as f32).to_bits(),
            };
            let values = [a, b].map(|o| r.get32(o).map(value));
            compare_values(op, &values)
        }
        _ => return None,
    })
}

fn compare_values(op: Comparison, values: &[LaneValues; 2]) -> u32 {
    let scratch = Registers {
        r32: values.to_vec(),
        ..Registers::default()
    };
    compare_lanes::<f32>(&scratch, op, [0, 1])
}
