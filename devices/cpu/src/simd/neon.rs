//! NEON registers: 4 numbers, or words of 4 rows, with or without products of bytes (`sdot`) and of
//! matrices of bytes (`smmla`).

use super::float::Vector;
use super::int8::{Simd, functions};
use half::f16;
use std::arch::aarch64::*;
use std::arch::asm;

/// Returns the half-precision numbers with these bits.
#[inline(always)]
fn widened(halves: uint16x4_t) -> float32x4_t {
    let floats;
    // SAFETY: the instruction is part of the architecture.
    unsafe {
        asm!(
            "fcvtl {floats:v}.4s, {halves:v}.4h",
            floats = lateout(vreg) floats,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    floats
}

/// Returns four bits of each byte, starting with bit `shift`.
///
/// # Safety
/// 4 bytes must be readable.
#[inline(always)]
unsafe fn codes(from: *const u8, shift: usize) -> uint32x4_t {
    // SAFETY: NEON is part of the architecture, and 4 bytes are readable at `from`. A negative
    // shift is a shift to the right.
    unsafe {
        let bytes = vreinterpret_u8_u32(vdup_n_u32(from.cast::<u32>().read_unaligned()));
        let bytes = vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
        vandq_u32(
            vshlq_u32(bytes, vdupq_n_s32(-(shift as i32))),
            vdupq_n_u32(15),
        )
    }
}

impl Vector for float32x4_t {
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: NEON is part of the architecture; only registers are touched.
        unsafe { vdupq_n_f32(x) }
    }

    #[inline(always)]
    unsafe fn splat_f16(x: f16) -> Self {
        // SAFETY: NEON is part of the architecture; only registers are touched.
        unsafe { widened(vdup_n_u16(x.to_bits())) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: NEON is part of the architecture; 4 numbers are readable at `from`.
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        let mut lanes = [0.0; 4];
        // SAFETY: NEON is part of the architecture; `count` numbers are readable at `from`, fewer
        // than the 4 of `lanes`, a new array, which is loaded whole.
        unsafe {
            std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count);
            vld1q_f32(lanes.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: NEON is part of the architecture; 4 numbers of two bytes are readable at `from`.
        unsafe { widened(vld1_u16(from)) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: NEON is part of the architecture; 4 numbers of two bytes are readable at `from`.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from))) }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: NEON is part of the architecture; 4 bytes are readable at `from`, and the read
        // needs no alignment.
        unsafe {
            let codes = vreinterpret_s8_u32(vdup_n_u32(from.cast::<u32>().read_unaligned()));
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(codes))))
        }
    }

    #[inline(always)]
    unsafe fn load_codes(from: *const u8, shift: usize, fifth: u32) -> Self {
        // SAFETY: NEON is part of the architecture. 4 bytes are readable at `from`, as `codes`
        // requires, and the array of shifts has 4. A negative shift is a shift to the right.
        unsafe {
            let numbers = vld1q_s32([0, -1, -2, -3].as_ptr());
            let fifth = vandq_u32(vshlq_u32(vdupq_n_u32(fifth), numbers), vdupq_n_u32(1));
            vcvtq_f32_u32(vorrq_u32(codes(from, shift), vshlq_n_u32::<4>(fifth)))
        }
    }

    #[inline(always)]
    unsafe fn load_values(from: *const u8, shift: usize, values: &[f32; 16]) -> Self {
        let mut of = [0; 4];
        // SAFETY: NEON is part of the architecture; 4 bytes are readable at `from`, as `codes`
        // requires; `of` and the array that is loaded have 4 numbers each.
        unsafe {
            vst1q_u32(of.as_mut_ptr(), codes(from, shift));
            vld1q_f32(of.map(|code| values[code as usize & 15]).as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: NEON is part of the architecture; 4 numbers are writable at `to`.
        unsafe { vst1q_f32(to, self) }
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize) {
        let mut lanes = [0.0; 4];
        // SAFETY: NEON is part of the architecture; `lanes` has the 4 numbers stored; `count` of
        // them, fewer than 4, are writable at `to`, which is other memory.
        unsafe {
            vst1q_f32(lanes.as_mut_ptr(), self);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, count);
        }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: NEON is part of the architecture; only registers are touched.
        unsafe { vfmaq_f32(c, self, b) }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: NEON is part of the architecture; only registers are touched.
        unsafe { vaddvq_f32(self) }
    }

    #[inline(always)]
    unsafe fn sums(of: &[Self; 8]) -> [f32; 8] {
        let mut sums = [0.0; 8];
        // SAFETY: NEON is part of the architecture; `sums` has eight numbers, and each step stores
        // to four different ones.
        unsafe {
            for (sums, [a, b, c, d]) in sums
                .as_chunks_mut::<4>()
                .0
                .iter_mut()
                .zip(of.as_chunks::<4>().0)
            {
                let four = vpaddq_f32(vpaddq_f32(*a, *b), vpaddq_f32(*c, *d));
                vst1q_f32(sums.as_mut_ptr(), four);
            }
        }
        sums
    }
}

/// Adds products of the bytes of two registers to a sum, with an instruction for which the compiler
/// does not have an intrinsic yet.
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

/// A sum with a part in 16 bits, four for each row.
#[derive(Clone, Copy)]
pub(crate) struct NeonSum {
    low: int16x8_t,
    high: int16x8_t,
    whole: int32x4_t,
}

impl<const DOT: bool, const MATRIX: bool> Neon<DOT, MATRIX> {
    #[inline(always)]
    unsafe fn from_whole(whole: int32x4_t) -> NeonSum {
        // SAFETY: every processor has these instructions.
        unsafe {
            NeonSum {
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
    const COLUMN_PAIRS: bool = MATRIX;
    type Words = uint32x4_t;
    type Floats = float32x4_t;
    type Sum = NeonSum;

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
        fn shl(words: uint32x4_t, bits: usize) -> uint32x4_t { vshlq_u32(words,
            vdupq_n_s32(bits as i32)) }
        fn shr(words: uint32x4_t, bits: usize) -> uint32x4_t { vshlq_u32(words,
            vdupq_n_s32(-(bits as i32))) }
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
        fn mul_add(a: float32x4_t, b: float32x4_t,
            c: float32x4_t) -> float32x4_t { vfmaq_f32(c, a, b) }
        fn start(start: uint32x4_t) -> NeonSum { Self::from_whole(vreinterpretq_s32_u32(start)) }
        fn dot(sum: &mut NeonSum, codes: uint32x4_t, x: uint32x4_t, _full: bool) {
            let (codes, x) = (vreinterpretq_s8_u32(codes), vreinterpretq_s8_u32(x));
            if DOT {
                add_products!("sdot", sum.whole, codes, x);
            } else {
                sum.low = vmlal_s8(sum.low, vget_low_s8(codes), vget_low_s8(x));
                sum.high = vmlal_high_s8(sum.high, codes, x);
            }
        }
        fn dot_pairs(sums: [NeonSum; 2], codes: [uint32x4_t; 2], x: [*const u8; 2],
            _full: bool) -> [NeonSum; 2] {
            let [mut a, mut b] = sums;
            // Eight codes of two rows each, and of two columns. Products are those of two rows with
            // both columns.
            let (first, second) = (vzip1q_u32(codes[0], codes[1]), vzip2q_u32(codes[0], codes[1]));
            let x = vcombine_s8(vld1_s8(x[0].cast()), vld1_s8(x[1].cast()));
            for (sum, rows) in [(&mut a, first), (&mut b, second)] {
                add_products!("smmla", sum.whole, rows, x);
            }
            [a, b]
        }
        fn mix(sums: [NeonSum; 2]) -> [NeonSum; 2] {
            let [a, b] = sums.map(|sum| sum.whole);
            [Self::from_whole(vzip1q_s32(a, b)), Self::from_whole(vzip2q_s32(a, b))]
        }
        fn separate(sums: [NeonSum; 2]) -> [NeonSum; 2] {
            let [a, b] = sums.map(|sum| sum.whole);
            [Self::from_whole(vuzp1q_s32(a, b)), Self::from_whole(vuzp2q_s32(a, b))]
        }
        fn carry(sum: &mut NeonSum) {
            if !DOT {
                // Adding two sums does not overflow: each has half as many products as there is
                // room for.
                sum.whole = vpadalq_s16(sum.whole, vpaddq_s16(sum.low, sum.high));
                (sum.low, sum.high) = (vdupq_n_s16(0), vdupq_n_s16(0));
            }
        }
        fn total(sum: NeonSum) -> uint32x4_t { vreinterpretq_u32_s32(sum.whole) }
    }
}
