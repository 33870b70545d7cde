//! Rows that are loaded as F32: all types that caches use, including those in blocks of 32 elements
//! that share a scale.

use crate::simd::float::{Element, Vector};
use half::f16;
use samite_quant::IQ4_NL_VALUES;
use samite_quant::blocks::{
    Block, BlockIq4Nl, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0,
};
use std::marker::PhantomData;

/// Element type of rows.
pub(crate) trait Stored {
    /// Number of elements for which one line of memory is prefetched.
    const LINE: usize;
    /// True if rows may end within a register.
    const HAS_PARTS: bool;

    /// Returns the line to prefetch with element `i`, in bytes from the start of the row.
    fn line(i: usize) -> usize;

    /// Loads elements from element `i`, a multiple of the number loaded.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn load<V: Vector>(from: *const u8, i: usize) -> V;

    /// Loads `count` elements, fewer than the number of lanes, from element `i`.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn load_part<V: Vector>(from: *const u8, i: usize, count: usize) -> V;
}

impl<E: Element> Stored for E {
    const LINE: usize = 64 / E::BYTES;
    const HAS_PARTS: bool = true;

    #[inline(always)]
    fn line(i: usize) -> usize {
        i * E::BYTES
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const u8, i: usize) -> V {
        // SAFETY: `Element::load` has the same requirements for `from` and `i`.
        unsafe { E::load(from, i) }
    }

    #[inline(always)]
    unsafe fn load_part<V: Vector>(from: *const u8, i: usize, count: usize) -> V {
        // SAFETY: `Element::load_part` has the same requirements: `count` elements from element `i`
        // are readable, and the instructions of `V` are available.
        unsafe { E::load_part(from, i, count) }
    }
}

/// Elements of a block.
const LEN: usize = 32;

/// Rows of blocks of [`LEN`] elements.
pub(crate) struct BlockRows<B>(PhantomData<B>);

impl<B: Loaded> Stored for BlockRows<B> {
    const LINE: usize = LEN;
    const HAS_PARTS: bool = false;

    /// Returns the first byte of the row, then the last byte of every other block, which may be in
    /// the next line.
    #[inline(always)]
    fn line(i: usize) -> usize {
        let block = i / LEN;
        block * size_of::<B>() + block.min(1) * (size_of::<B>() - 1)
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const u8, i: usize) -> V {
        const { assert!(B::LEN == LEN && HALF.is_multiple_of(V::LANES)) };
        // SAFETY: element `i` is in the row, so its whole block is. Rows start and follow one
        // another at multiples of the alignment of blocks, as `Operand::resolve` and `Layout`
        // check. `i` is a multiple of `V::LANES`, which divides `HALF`, so the lanes belong to one
        // half of the block.
        unsafe { B::load(&*from.cast::<B>().add(i / LEN), i % LEN) }
    }

    #[inline(always)]
    unsafe fn load_part<V: Vector>(_: *const u8, _: usize, _: usize) -> V {
        unreachable!("a block is whole registers")
    }
}

/// Bytes of a block's 4-bit codes.
const HALF: usize = LEN / 2;

/// A block of [`LEN`] elements.
pub(crate) trait Loaded: Block {
    /// Loads elements from element `i`.
    ///
    /// # Safety
    /// As [`Vector`]. All elements must belong to one half of the block.
    unsafe fn load<V: Vector>(&self, i: usize) -> V;
}

/// Loads codes of 4 or 5 bits from element `i`.
///
/// # Safety
/// As [`Loaded::load`].
#[inline(always)]
unsafe fn codes<V: Vector>(low: &[u8; HALF], fifth: [u8; 4], i: usize) -> V {
    let fifth = u32::from_le_bytes(fifth) >> i;
    // SAFETY: the lanes belong to one half, so they end at or before element `HALF` of it, and
    // those bytes of `low` exist. The caller has the instructions of `V`.
    unsafe { V::load_codes(low.as_ptr().add(i % HALF), i / HALF * 4, fifth) }
}

/// Returns `d (q - zero)`, which is exact.
///
/// # Safety
/// As [`Vector`].
#[inline(always)]
unsafe fn around<V: Vector>(codes: V, d: f16, zero: f32) -> V {
    // SAFETY: only registers are used, and the caller has the instructions of `V`.
    unsafe {
        let d = V::splat_f16(d);
        codes.mul_add(d, d.mul_add(V::splat(-zero), V::splat(0.0)))
    }
}

/// Returns `d q + m`.
///
/// # Safety
/// As [`Vector`].
#[inline(always)]
unsafe fn above<V: Vector>(codes: V, d: f16, m: f16) -> V {
    // SAFETY: only registers are used, and the caller has the instructions of `V`.
    unsafe { codes.mul_add(V::splat_f16(d), V::splat_f16(m)) }
}

impl Loaded for BlockQ8_0 {
    #[inline(always)]
    unsafe fn load<V: Vector>(&self, i: usize) -> V {
        // SAFETY: all lanes from `i` belong to this block, so that many of the 32 codes exist. The
        // caller has the instructions of `V`.
        unsafe { V::load_i8(self.qs.as_ptr().add(i)).mul_add(V::splat_f16(self.d), V::splat(0.0)) }
    }
}

impl Loaded for BlockQ4_0 {
    #[inline(always)]
    unsafe fn load<V: Vector>(&self, i: usize) -> V {
        // SAFETY: the lanes from `i` belong to one half of the block, as `codes` requires. The
        // caller has the instructions of `V`.
        unsafe { around(codes::<V>(&self.qs, [0; 4], i), self.d, 8.0) }
    }
}

impl Loaded for BlockQ4_1 {
    #[inline(always)]
    unsafe fn load<V: Vector>(&self, i: usize) -> V {
        // SAFETY: the lanes from `i` belong to one half of the block, as `codes` requires. The
        // caller has the instructions of `V`.
        unsafe { above(codes::<V>(&self.qs, [0; 4], i), self.d, self.m) }
    }
}

impl Loaded for BlockQ5_0 {
    #[inline(always)]
    unsafe fn load<V: Vector>(&self, i: usize) -> V {
        // SAFETY: the lanes from `i` belong to one half of the block, as `codes` requires. The
        // caller has the instructions of `V`.
        unsafe { around(codes::<V>(&self.qs, self.qh, i), self.d, 16.0) }
    }
}

impl Loaded for BlockQ5_1 {
    #[inline(always)]
    unsafe fn load<V: Vector>(&self, i: usize) -> V {
        // SAFETY: the lanes from `i` belong to one half of the block, as `codes` requires. The
        // caller has the instructions of `V`.
        unsafe { above(codes::<V>(&self.qs, self.qh, i), self.d, self.m) }
    }
}

impl Loaded for BlockIq4Nl {
    #[inline(always)]
    unsafe fn load<V: Vector>(&self, i: usize) -> V {
        // SAFETY: the lanes from `i` belong to one half of the block, so `qs` has a byte for each
        // from `i % HALF`. The caller has the instructions of `V`.
        unsafe {
            let from = self.qs.as_ptr().add(i % HALF);
            let values = V::load_values(from, i / HALF * 4, &VALUES);
            values.mul_add(V::splat_f16(self.d), V::splat(0.0))
        }
    }
}

static VALUES: [f32; 16] = {
    let mut values = [0.0; 16];
    let mut i = 0;
    while i < values.len() {
        values[i] = IQ4_NL_VALUES[i] as f32;
        i += 1;
    }
    values
};
