//! Vector code: one set of generic kernels over [`Vector`], and the instruction sets behind it.
//!
//! - [`math`]: functions of one number that the compiler turns into vector code.
//! - [`float`]: products of F32, F16 and BF16 rows with F32 columns, written once over [`Vector`].
//! - [`blocks`]: rows in blocks of few elements, as caches have them.
//! - [`keys`]: products of few queries with keys, sums of weighted values, and both as F32.
//! - [`outer`]: sums of outer products, for gradients.
//! - [`quantized`]: products of quantized rows with columns quantized to 8 bits.
//!
//! The order in which an element of a product is summed depends on the shapes only: float products have one order for
//! all tiles, quantized ones have one for few columns and one for many. So results do not depend on how work is shared
//! out among threads.

use half::f16;

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod blocks;
pub(crate) mod float;
#[cfg(not(target_arch = "aarch64"))]
pub(crate) mod generic;
pub(crate) mod keys;
pub(crate) mod math;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod outer;
pub(crate) mod quantized;

/// Asks for memory that is needed soon, at any address. Nothing where processors find out by themselves.
#[inline(always)]
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of every x86-64, and does nothing if there is no such memory.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
}

/// [`prefetch`] exactly where it is called: compilers may want to ask for several lines at once.
#[inline(always)]
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn prefetch_here(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as in `prefetch`.
    unsafe {
        std::arch::asm!("prefetcht0 [{}]", in(reg) at, options(nostack, preserves_flags));
    }
}

/// A register of f32 numbers.
///
/// # Safety
/// All functions may only be called where the instruction set of the type is there. Pointers must be valid for the
/// elements that are read or written: [`LANES`](Vector::LANES), or `count` of them, fewer than that.
pub(crate) trait Vector: Copy {
    /// How many numbers it holds.
    const LANES: usize;
    /// Whether numbers of two bytes are loaded almost as fast as those of four.
    const WIDENS: bool = true;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn splat_f16(x: f16) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// The first `count` numbers, then zeros.
    unsafe fn load_part(from: *const f32, count: usize) -> Self;
    unsafe fn load_f16(from: *const u16) -> Self;
    unsafe fn load_bf16(from: *const u16) -> Self;
    unsafe fn load_i8(from: *const i8) -> Self;
    /// Codes of 4 bits of each byte, those from bit `shift` on, and a fifth one: bit `i` of `fifth` for lane `i`.
    unsafe fn load_codes(from: *const u8, shift: usize, fifth: u32) -> Self;
    /// What codes of 4 bits of each byte, those from bit `shift` on, stand for.
    unsafe fn load_values(from: *const u8, shift: usize, values: &[f32; 16]) -> Self;
    /// The first `count` numbers, then zeros.
    #[inline(always)]
    unsafe fn load_f16_part(from: *const u16, count: usize) -> Self {
        // SAFETY: the caller's contract; the padded copy is long enough.
        unsafe { Self::load_f16(padded(from, count).as_ptr()) }
    }
    /// The first `count` numbers, then zeros.
    #[inline(always)]
    unsafe fn load_bf16_part(from: *const u16, count: usize) -> Self {
        // SAFETY: the caller's contract; the padded copy is long enough.
        unsafe { Self::load_bf16(padded(from, count).as_ptr()) }
    }
    unsafe fn store(self, to: *mut f32);
    unsafe fn store_part(self, to: *mut f32, count: usize);
    /// `self * b + c`
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// Sum of all lanes.
    unsafe fn sum(self) -> f32;
    /// The sums of all lanes of some registers, each in the same order.
    #[inline(always)]
    unsafe fn sums(of: &[Self; 8]) -> [f32; 8] {
        // SAFETY: the caller's contract.
        of.map(|x| unsafe { x.sum() })
    }
}

/// A type of weights that is loaded as f32.
pub(crate) trait Element {
    /// Bytes of an element.
    const BYTES: usize;
    /// Whether the lower 16 bits of every element are zeros as f32.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    const UPPER_ONLY: bool = false;

    /// Loads elements from element `i` on.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn load<V: Vector>(from: *const u8, i: usize) -> V;

    /// Loads `count` elements, fewer than there are lanes, from element `i` on.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn load_part<V: Vector>(from: *const u8, i: usize, count: usize) -> V;
}

pub(crate) struct F32;
pub(crate) struct F16;
pub(crate) struct Bf16;

/// Most lanes of any [`Vector`].
const MOST_LANES: usize = 16;

/// `count` 16-bit elements with zeros behind.
///
/// # Safety
/// `count` elements must be readable, at most [`MOST_LANES`].
#[inline(always)]
unsafe fn padded(from: *const u16, count: usize) -> [u16; MOST_LANES] {
    let mut padded = [0; MOST_LANES];
    // SAFETY: the caller's contract.
    unsafe { std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), count) };
    padded
}

impl Element for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const u8, i: usize) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load(from.cast::<f32>().add(i)) }
    }

    #[inline(always)]
    unsafe fn load_part<V: Vector>(from: *const u8, i: usize, count: usize) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load_part(from.cast::<f32>().add(i), count) }
    }
}

impl Element for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const u8, i: usize) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load_f16(from.cast::<u16>().add(i)) }
    }

    #[inline(always)]
    unsafe fn load_part<V: Vector>(from: *const u8, i: usize, count: usize) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load_f16_part(from.cast::<u16>().add(i), count) }
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;
    const UPPER_ONLY: bool = true;

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const u8, i: usize) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load_bf16(from.cast::<u16>().add(i)) }
    }

    #[inline(always)]
    unsafe fn load_part<V: Vector>(from: *const u8, i: usize, count: usize) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load_bf16_part(from.cast::<u16>().add(i), count) }
    }
}
