//! Compares single instructions with the same operations in Rust, for random and special operands.

#![allow(clippy::unwrap_used, clippy::result_large_err)] // tests

mod common;

use common::{Card, noise, pack};
use samite_cuda_emu::machine::Schedule;

const NUMBERS: &str = include_str!("ptx/numbers.ptx");

/// Special values, and random bits.
fn operands(count: usize, seed: u32) -> Vec<u32> {
    let special = [
        0,
        1,
        2,
        31,
        32,
        33,
        0x7fff_ffff,
        0x8000_0000,
        u32::MAX,
        0x3f80_0000,
        0xbf80_0000,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        0x0000_8000,
        0x007f_ffff,
        0x4f00_0000,
        0x4b00_0001,
        0x3f00_0000,
        0x3fc0_0000,
        0xc020_0000,
        0x3c00_4000,
        0x7bff_0001,
        0x0001_fbff,
        0x4788_1000,
    ];
    noise(count, seed)
        .into_iter()
        .map(|n| match n % 4 {
            0 => special[n as usize / 4 % special.len()],
            // Floats of usual size.
            1 => ((n as i32 >> 8) as f32 / 65536.0).to_bits(),
            _ => n.rotate_left(7) ^ 0x5bd1_e995,
        })
        .collect()
}

/// Runs a kernel of `arity` operands a thread on each block of 32 threads.
fn results(name: &str, arity: usize, operands: &[u32]) -> Vec<u32> {
    let mut card = Card::new(NUMBERS);
    let mut all = Vec::new();
    for chunk in operands.chunks_exact(32 * arity) {
        let y = card.upload([[0u8; 4]; 32]);
        let a = card.upload(chunk.iter().map(|v| v.to_le_bytes()));
        card.run(name, [1, 32], &pack(&[&y, &a]), Schedule::new(0))
            .unwrap();
        all.extend(card.words(y, 32));
    }
    all
}

fn is_nan(bits: u32) -> bool {
    f32::from_bits(bits).is_nan()
}

/// Checks an instruction of three operands. Any NaN equals any other if the result is a float.
fn check3(name: &str, is_float: bool, expected: impl Fn(u32, u32, u32) -> u32) {
    let operands = operands(32 * 3 * 40, 7);
    let found = results(name, 3, &operands);
    for (operands, found) in operands.chunks(3).zip(found) {
        let [a, b, c] = *operands else { unreachable!() };
        let expected = expected(a, b, c);
        let is_equal = found == expected || is_float && is_nan(found) && is_nan(expected);
        assert!(
            is_equal,
            "{name}({a:#x}, {b:#x}, {c:#x}) = {found:#x}, not {expected:#x}"
        );
    }
}

fn check1(name: &str, is_float: bool, expected: impl Fn(u32) -> u32) {
    let operands = operands(32 * 40, 11);
    let found = results(name, 1, &operands);
    for (&a, found) in operands.iter().zip(found) {
        let expected = expected(a);
        let is_equal = found == expected || is_float && is_nan(found) && is_nan(expected);
        assert!(is_equal, "{name}({a:#x}) = {found:#x}, not {expected:#x}");
    }
}

fn float(bits: u32) -> f32 {
    f32::from_bits(bits)
}

fn flushed(value: f32) -> f32 {
    if value.is_subnormal() {
        0f32.copysign(value)
    } else {
        value
    }
}

#[test]
fn floats() {
    check3("fma_f32", true, |a, b, c| {
        float(a).mul_add(float(b), float(c)).to_bits()
    });
    check3("fma_ftz", true, |a, b, c| {
        let [a, b, c] = [a, b, c].map(|x| flushed(float(x)));
        flushed(a.mul_add(b, c)).to_bits()
    });
    check3("add_f32", true, |a, b, _| (float(a) + float(b)).to_bits());
    check3("div_f32", true, |a, b, _| (float(a) / float(b)).to_bits());
    check3("min_f32", true, |a, b, _| match (float(a), float(b)) {
        (x, y) if x == y => a | b,
        (x, y) => x.min(y).to_bits(),
    });
    check1("sqrt_f32", true, |a| float(a).sqrt().to_bits());
    check1("rsqrt_f32", true, |a| {
        ((1.0 / f64::from(float(a)).sqrt()) as f32).to_bits()
    });
    check1("floor_f32", true, |a| float(a).floor().to_bits());
    check1("ex2_f32", true, |a| {
        flushed(f64::from(flushed(float(a))).exp2() as f32).to_bits()
    });
}

#[test]
fn comparisons() {
    check3("compare_ltu", false, |a, b, _| {
        u32::from(float(a).partial_cmp(&float(b)).is_none_or(|o| o.is_lt()))
    });
    check3(
        "compare_gt",
        false,
        |a, b, _| if float(a) > float(b) { 1 } else { 2 },
    );
    check3("compare_and", false, |a, b, c| {
        u32::from(b > c && (a as i32) >= (b as i32))
    });
    check3("set_f32", true, |a, b, _| {
        if (a as i32) < b as i32 {
            0x3f80_0000
        } else {
            0
        }
    });
    check3("set_u32", false, |a, b, _| {
        let is_true = float(a).partial_cmp(&float(b)).is_none_or(|o| o.is_gt());
        if is_true { u32::MAX } else { 0 }
    });
    check3(
        "slct_f32",
        false,
        |a, b, c| if float(c) >= 0.0 { a } else { b },
    );
}

#[test]
fn integers() {
    check3("max_s32", false, |a, b, _| (a as i32).max(b as i32) as u32);
    check3("mul_hi_s32", false, |a, b, _| {
        ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32
    });
    check3("mad_hi_u32", false, |a, b, c| {
        { ((u64::from(a) * u64::from(b)) >> 32) as u32 }.wrapping_add(c)
    });
    check3("sad_s32", false, |a, b, c| {
        { (i64::from(a as i32) - i64::from(b as i32)).unsigned_abs() as u32 }.wrapping_add(c)
    });
    check3("lop3_b32", false, |a, b, c| {
        // 0x6a is (a & b) ^ c.
        (a & b) ^ c
    });
    check3("shf_l", false, |a, b, c| {
        if c % 32 == 0 {
            b
        } else {
            b << (c % 32) | a >> (32 - c % 32)
        }
    });
    check3("shf_r", false, |a, b, c| match c {
        0 => a,
        1..=31 => a >> c | b << (32 - c),
        _ => b,
    });
    check3("prmt_b32", false, |a, b, c| {
        let bytes = [a.to_le_bytes(), b.to_le_bytes()].concat();
        let pick = |i: u32| {
            let nibble = c >> (4 * i) & 15;
            let byte = bytes[nibble as usize & 7];
            if nibble < 8 {
                byte
            } else if byte < 128 {
                0
            } else {
                255
            }
        };
        u32::from_le_bytes([pick(0), pick(1), pick(2), pick(3)])
    });
    check3("bfe_u32", false, |a, b, c| {
        (0..c & 63).filter(|i| b % 64 + i < 32).fold(0, |all, i| {
            let bit = a >> (b % 64 + i) & 1;
            if i < 32 { all | bit << i } else { all }
        })
    });
    check3("bfe_s32", false, |a, b, c| {
        let (start, count) = (b & 63, c & 63);
        let bit = |i: u32| a >> i.min(31) & 1;
        let sign = if count == 0 {
            0
        } else {
            bit(start + count - 1)
        };
        (0..32).fold(0, |all, i| {
            all | (if i < count && start + i < 32 {
                bit(start + i)
            } else {
                sign
            }) << i
        })
    });
    check3("bfi_b32", false, |a, b, c| {
        (0..7)
            .map(|i| (i, c % 32 + i))
            .filter(|&(_, to)| to < 32)
            .fold(b, |all, (i, to)| (all & !(1 << to)) | (a >> i & 1) << to)
    });
    check3("dp2a_lo", false, |a, b, c| {
        let word = |i: u32| i32::from((a >> (16 * i)) as i16);
        let byte = |i: u32| (b >> (8 * i) & 255) as i32;
        c.wrapping_add((word(0) * byte(0)) as u32)
            .wrapping_add((word(1) * byte(1)) as u32)
    });
    check3("halves", false, |a, b, _| a >> 16 | b << 16);
    check1("popc_b32", false, u32::count_ones);
    check1("clz_b32", false, u32::leading_zeros);
    check1("brev_b32", false, u32::reverse_bits);
    check1("abs_s32", false, |a| (a as i32).unsigned_abs());
    check1("bfind_s32", false, |a| {
        let a = if (a as i32) < 0 { !a } else { a };
        if a == 0 {
            u32::MAX
        } else {
            31 - a.leading_zeros()
        }
    });
    check1("shifts_16", false, |a| {
        let h = a as i16;
        i32::from((h << 5).wrapping_add(h >> 3)) as u32
    });
}

#[test]
fn conversions() {
    check1("to_s32_rni", false, |a| {
        float(a).round_ties_even() as i32 as u32
    });
    check1("to_s32_rzi", false, |a| float(a) as i32 as u32);
    check1("to_u32_rpi", false, |a| float(a).ceil() as u32);
    check1("to_s8_sat", false, |a| (a as i32).clamp(-128, 127) as u32);
    check1("from_s16", true, |a| f32::from(a as i16).to_bits());
    // The nearest half is found by search.
    check1("to_f16", false, |a| {
        let x = f64::from(float(a));
        if x.is_nan() {
            return 0x7fff;
        }
        let sign = float(a).to_bits() >> 16 & 0x8000;
        if x.abs() >= 65520.0 {
            return sign | 0x7c00;
        }
        let best = (0..0x7c00u32).min_by(|&p, &q| {
            let away = |h: u32| (half(h) - x.abs()).abs();
            away(p).total_cmp(&away(q)).then((p & 1).cmp(&(q & 1)))
        });
        sign | best.unwrap()
    });
    check1("to_f16_rz", false, |a| {
        let x = f64::from(float(a));
        if x.is_nan() {
            return 0x7fff;
        }
        let sign = float(a).to_bits() >> 16 & 0x8000;
        if x.is_infinite() {
            return sign | 0x7c00;
        }
        sign | (0..0x7c00u32).rev().find(|&h| half(h) <= x.abs()).unwrap()
    });
}

/// Value of a finite, positive f16.
fn half(bits: u32) -> f64 {
    let (exponent, fraction) = (bits >> 10 & 31, f64::from(bits & 0x3ff));
    match exponent {
        0 => fraction / f64::from(1 << 24),
        _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent as i32 - 15),
    }
}

fn any_half(bits: u32) -> Option<f64> {
    let value = half(bits & 0x7fff);
    (bits >> 10 & 31 != 31).then_some(if bits & 0x8000 == 0 { value } else { -value })
}

/// Checks operations of pairs of halves by the distance of neighbours.
#[test]
fn pairs_of_halves() {
    let check = |name: &str, expected: &dyn Fn(f64, f64, f64) -> f64| {
        let operands = operands(32 * 3 * 40, 13);
        let found = results(name, 3, &operands);
        let mut compared = 0;
        for (operands, found) in operands.chunks(3).zip(found) {
            for shift in [0, 16] {
                let part = |x: u32| any_half(x >> shift & 0xffff);
                let (Some(a), Some(b), Some(c)) =
                    (part(operands[0]), part(operands[1]), part(operands[2]))
                else {
                    continue;
                };
                // Exact: f64 holds any product of halves, and sums of near ones.
                let expected = expected(a, b, c);
                let bits = found >> shift & 0xffff;
                let Some(value) = any_half(bits) else {
                    assert!(expected.abs() >= 65520.0);
                    continue;
                };
                let magnitude = bits & 0x7fff;
                let near = [magnitude.saturating_sub(1), magnitude + 1].map(half);
                let distance = (value.abs() - expected.abs()).abs();
                let is_nearest = near.iter().all(|n| (n - expected.abs()).abs() >= distance);
                assert!(
                    is_nearest && value * expected >= 0.0,
                    "{name} {operands:x?} {found:#x}"
                );
                compared += 1;
            }
        }
        assert!(compared > 1000);
    };
    check("fma_f16x2", &|a, b, c| a * b + c);
    check("add_f16x2", &|a, b, _| a + b);
    check("mul_f16x2", &|a, b, _| a * b);
}

#[test]
fn exchanges() {
    let operands = operands(32 * 10, 17);
    let same = results("match_any", 1, &operands);
    let ballots = results("ballot", 1, &operands);
    for (warp, operands) in operands.chunks(32).enumerate() {
        let mask = |f: &dyn Fn(u32) -> bool| {
            (0..32)
                .filter(|&i| f(operands[i]))
                .fold(0u32, |all, i| all | 1 << i)
        };
        for lane in 0..32 {
            let own = operands[lane] & 3;
            assert_eq!(same[warp * 32 + lane], mask(&|v| v & 3 == own));
            assert_eq!(ballots[warp * 32 + lane], mask(&|v| (v as i32) < 0));
        }
    }
}

#[test]
fn wide_numbers() {
    let mut card = Card::new(NUMBERS);
    let operands = operands(96, 19);
    let y = card.upload([[0u8; 8]; 32]);
    let a = card.upload(operands.iter().map(|v| v.to_le_bytes()));
    card.run("wide", [1, 32], &pack(&[&y, &a]), Schedule::new(0))
        .unwrap();
    let found = card.words(y, 64);
    for (operands, found) in operands.chunks(3).zip(found.chunks(2)) {
        let [a, b, c] = [0, 1, 2].map(|i| i64::from(operands[i] as i32));
        let expected = (b.wrapping_mul(c)).wrapping_add(a.wrapping_mul(b)) as u64;
        assert_eq!(u64::from(found[0]) | u64::from(found[1]) << 32, expected);
    }
    let doubles: Vec<f64> = operands
        .iter()
        .map(|&v| f64::from(v as i32) / 3.0)
        .collect();
    let a = card.upload(doubles.iter().map(|v| v.to_le_bytes()));
    card.run("doubles", [1, 32], &pack(&[&y, &a]), Schedule::new(0))
        .unwrap();
    let found = card.words(y, 64);
    for (doubles, found) in doubles.chunks(3).zip(found.chunks(2)) {
        let bits = u64::from(found[0]) | u64::from(found[1]) << 32;
        assert_eq!(bits, doubles[0].mul_add(doubles[1], doubles[2]).to_bits());
    }
}
