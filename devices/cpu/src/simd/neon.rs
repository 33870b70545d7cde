//! Vectors of 4 numbers in NEON registers.

use super::Vector;
use std::arch::aarch64::*;
use std::arch::asm;

impl Vector for float32x4_t {
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: NEON is part of the architecture; pointers by the trait's contract, here and below.
        unsafe { vdupq_n_f32(x) }
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
        // SAFETY: as above; the instruction is part of the architecture.
        unsafe {
            let halves = vld1_u16(from);
            let floats: float32x4_t;
            asm!(
                "fcvtl {floats:v}.4s, {halves:v}.4h",
                floats = lateout(vreg) floats,
                halves = in(vreg) halves,
                options(pure, nomem, nostack, preserves_flags),
            );
            floats
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: as above.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from))) }
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
