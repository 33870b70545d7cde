//! Vector registers, one file for each instruction set, and code that is generic over them.
//!
//! | trait | contents of a register | implemented in |
//! |---|---|---|
//! | [`float::Vector`] | numbers of one row | [`generic`], `avx2`, `avx512`, `neon` |
//! | [`int8::Simd`] | 32 bits of each of some rows: four codes, or a number | `generic_int8`, `sse2`, `avx2`, `avx512`, `neon` |
//! | [`int16::Int16Simd`] | as `int8::Simd`, with products of 16-bit numbers | [`int16`], for AVX2 and AVX-512 |
//!
//! [`math`] has scalar functions that compilers vectorise.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod float;
#[cfg(not(target_arch = "aarch64"))]
pub(crate) mod generic;
#[cfg(any(test, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
pub(crate) mod generic_int8;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) mod int16;
pub(crate) mod int8;
pub(crate) mod math;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
#[cfg(target_arch = "x86_64")]
pub(crate) mod sse2;

/// Prefetches memory, at any address. Does nothing on processors whose hardware prefetcher
/// suffices.
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

/// Does what [`prefetch`] does, exactly where it is called: compilers may move several prefetches
/// together.
#[inline(always)]
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn prefetch_here(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of every x86-64, does nothing if there is no such memory, and
    // changes no register that is in use.
    unsafe {
        std::arch::asm!("prefetcht0 [{}]", in(reg) at, options(nostack, preserves_flags));
    }
}
