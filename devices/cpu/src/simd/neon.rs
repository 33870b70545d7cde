//! Vectors of 4 numbers in NEON registers.

use super::Vector;
use half::f16;
use std::arch::aarch64::*;
use std::arch::asm;

/// The numbers of half precision with these bits.
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

/// Four bits of each byte, those from bit `shift` on.
///
/// # Safety
/// 4 bytes must be readable.
#[inline(always)]
unsafe fn codes(from: *const u8, shift: usize) -> uint32x4_t {
    // SAFETY: the caller's contract; shifting by less than nothing is shifting to the right.
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
        // SAFETY: NEON is part of the architecture; pointers by the trait's contract, here and below.
        unsafe { vdupq_n_f32(x) }
    }

    #[inline(always)]
    unsafe fn splat_f16(x: f16) -> Self {
        // SAFETY: as above.
        unsafe { widened(vdup_n_u16(x.to_bits())) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as above.
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        let mut lanes = [0.0; 4];
        // SAFETY: as above; `count` is below 4.
        unsafe {
            std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count);
            vld1q_f32(lanes.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: as above.
        unsafe { widened(vld1_u16(from)) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: as above.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from))) }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: as above.
        unsafe {
            let codes = vreinterpret_s8_u32(vdup_n_u32(from.cast::<u32>().read_unaligned()));
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(codes))))
        }
    }

    #[inline(always)]
    unsafe fn load_codes(from: *const u8, shift: usize, fifth: u32) -> Self {
        // SAFETY: as above; shifting by less than nothing is shifting to the right.
        unsafe {
            let numbers = vld1q_s32([0, -1, -2, -3].as_ptr());
            let fifth = vandq_u32(vshlq_u32(vdupq_n_u32(fifth), numbers), vdupq_n_u32(1));
            vcvtq_f32_u32(vorrq_u32(codes(from, shift), vshlq_n_u32::<4>(fifth)))
        }
    }

    #[inline(always)]
    unsafe fn load_values(from: *const u8, shift: usize, values: &[f32; 16]) -> Self {
        let mut of = [0; 4];
        // SAFETY: as above; codes are below 16.
        unsafe {
            vst1q_u32(of.as_mut_ptr(), codes(from, shift));
            vld1q_f32(of.map(|code| values[code as usize & 15]).as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above.
        unsafe { vst1q_f32(to, self) }
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize) {
        let mut lanes = [0.0; 4];
        // SAFETY: as above; `count` is below 4.
        unsafe {
            vst1q_f32(lanes.as_mut_ptr(), self);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, count);
        }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: as above.
        unsafe { vfmaq_f32(c, self, b) }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: as above.
        unsafe { vaddvq_f32(self) }
    }

    #[inline(always)]
    unsafe fn sums(of: &[Self; 8]) -> [f32; 8] {
        let mut sums = [0.0; 8];
        // SAFETY: as above.
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
