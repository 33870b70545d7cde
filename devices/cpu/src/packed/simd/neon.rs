//! NEON, with or without products of bytes (`sdot`) and of matrices of bytes (`smmla`).

use super::Simd;
use crate::simd::Vector;
use std::arch::aarch64::*;
use std::arch::asm;

/// Adds products of the bytes of two registers to a sum, by an instruction that the compiler does not have as a function yet.
macro_rules! add_products {
    ($instruction:literal, $sum:expr, $a:expr, $b:expr) => {
        asm!(
            concat!($instruction, " {sum:v}.4s, {a:v}.16b, {b:v}.16b"),
            sum = inout(vreg) $sum,
            a = in(vreg) $a,
            b = in(vreg) $b,
            options(pure, nomem, nostack, preserves_flags),
        )
    };
}

/// Registers of 4 rows.
pub(crate) struct Neon<const DOT: bool, const MATRIX: bool>;

/// A sum of which a part is still in 16 bits, four for each row.
#[derive(Clone, Copy)]
pub(crate) struct Sum {
    low: int16x8_t,
    high: int16x8_t,
    whole: int32x4_t,
}

impl<const DOT: bool, const MATRIX: bool> Neon<DOT, MATRIX> {
    #[inline(always)]
    unsafe fn of(whole: int32x4_t) -> Sum {
        // SAFETY: every processor has these.
        unsafe {
            Sum {
                low: vdupq_n_s16(0),
                high: vdupq_n_s16(0),
                whole,
            }
        }
    }
}

impl<const DOT: bool, const MATRIX: bool> Simd for Neon<DOT, MATRIX> {
    const LANES: usize = 4;
    const SIGNED: bool = true;
    const PAIRS: bool = MATRIX;
    type Words = uint32x4_t;
    type Floats = float32x4_t;
    type Sum = Sum;

    functions! {
        fn load(at: *const u8) -> uint32x4_t { vreinterpretq_u32_u8(vld1q_u8(at)) }
        fn load_u8(at: *const u8) -> uint32x4_t {
            let bytes = vreinterpret_u8_u32(vdup_n_u32(at.cast::<u32>().read_unaligned()));
            vmovl_u16(vget_low_u16(vmovl_u8(bytes)))
        }
        fn load_i8(at: *const u8) -> uint32x4_t {
            let bytes = vreinterpret_s8_u32(vdup_n_u32(at.cast::<u32>().read_unaligned()));
            vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))
        }
        fn load_u16(at: *const u8) -> uint32x4_t { vmovl_u16(vld1_u16(at.cast())) }
        fn store(words: uint32x4_t, to: *mut u8) { vst1q_u8(to, vreinterpretq_u8_u32(words)) }
        fn splat(word: i32) -> uint32x4_t { vreinterpretq_u32_s32(vdupq_n_s32(word)) }
        fn and(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t { vandq_u32(a, b) }
        fn or(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t { vorrq_u32(a, b) }
        fn xor(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t { veorq_u32(a, b) }
        fn add(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t { vaddq_u32(a, b) }
        fn add_bytes(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
            vreinterpretq_u32_u8(vaddq_u8(vreinterpretq_u8_u32(a), vreinterpretq_u8_u32(b)))
        }
        fn above(bytes: uint32x4_t, limit: i8) -> uint32x4_t {
            vreinterpretq_u32_u8(vcgtq_s8(vreinterpretq_s8_u32(bytes), vdupq_n_s8(limit)))
        }
        fn shl(words: uint32x4_t, bits: usize) -> uint32x4_t { vshlq_u32(words, vdupq_n_s32(bits as i32)) }
        fn shr(words: uint32x4_t, bits: usize) -> uint32x4_t { vshlq_u32(words, vdupq_n_s32(-(bits as i32))) }
        fn look_up(table: &[i8; 16], bytes: uint32x4_t) -> uint32x4_t {
            let table = vreinterpretq_u8_s8(vld1q_s8(table.as_ptr()));
            vreinterpretq_u32_u8(vqtbl1q_u8(table, vreinterpretq_u8_u32(bytes)))
        }
        fn load_f16(at: *const u8) -> float32x4_t { Vector::load_f16(at.cast()) }
        fn load_floats(at: *const f32) -> float32x4_t { vld1q_f32(at) }
        fn store_floats(floats: float32x4_t, to: *mut f32) { vst1q_f32(to, floats) }
        fn splat_float(x: f32) -> float32x4_t { vdupq_n_f32(x) }
        fn floats(words: uint32x4_t) -> float32x4_t { vcvtq_f32_s32(vreinterpretq_s32_u32(words)) }
        fn from_bits(words: uint32x4_t) -> float32x4_t { vreinterpretq_f32_u32(words) }
        fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t { vmulq_f32(a, b) }
        fn mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t { vfmaq_f32(c, a, b) }
        fn start(start: uint32x4_t) -> Sum { Self::of(vreinterpretq_s32_u32(start)) }
        fn dot(sum: &mut Sum, codes: uint32x4_t, x: uint32x4_t, _full: bool) {
            let (codes, x) = (vreinterpretq_s8_u32(codes), vreinterpretq_s8_u32(x));
            if DOT {
                add_products!("sdot", sum.whole, codes, x);
            } else {
                sum.low = vmlal_s8(sum.low, vget_low_s8(codes), vget_low_s8(x));
                sum.high = vmlal_high_s8(sum.high, codes, x);
            }
        }
        fn dot_pairs(sums: [Sum; 2], codes: [uint32x4_t; 2], x: [*const u8; 2], _full: bool) -> [Sum; 2] {
            let [mut a, mut b] = sums;
            // Eight codes of two rows each, and of two columns; products are those of two rows with both columns.
            let (first, second) = (vzip1q_u32(codes[0], codes[1]), vzip2q_u32(codes[0], codes[1]));
            let x = vcombine_s8(vld1_s8(x[0].cast()), vld1_s8(x[1].cast()));
            for (sum, rows) in [(&mut a, first), (&mut b, second)] {
                add_products!("smmla", sum.whole, rows, x);
            }
            [a, b]
        }
        fn mix(sums: [Sum; 2]) -> [Sum; 2] {
            let [a, b] = sums.map(|sum| sum.whole);
            [Self::of(vzip1q_s32(a, b)), Self::of(vzip2q_s32(a, b))]
        }
        fn separate(sums: [Sum; 2]) -> [Sum; 2] {
            let [a, b] = sums.map(|sum| sum.whole);
            [Self::of(vuzp1q_s32(a, b)), Self::of(vuzp2q_s32(a, b))]
        }
        fn carry(sum: &mut Sum) {
            if !DOT {
                // Two sums that come together have room: each has half as many products as there is room for.
                sum.whole = vpadalq_s16(sum.whole, vpaddq_s16(sum.low, sum.high));
                (sum.low, sum.high) = (vdupq_n_s16(0), vdupq_n_s16(0));
            }
        }
        fn total(sum: Sum) -> uint32x4_t { vreinterpretq_u32_s32(sum.whole) }
    }
}
