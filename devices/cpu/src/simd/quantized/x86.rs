//! Products of quantized rows with few columns: each row is read as it lies in memory.

// Loops over arrays of registers are written with indices: they must unroll completely.
#![allow(clippy::needless_range_loop)]

use super::Eight;
use super::pairs::{self, Pairs};
use super::wide::{Slab, wide};
use crate::detect::Isa;
use crate::simd::avx2::sum;
use crate::simd::float_products::{Column, Panel, PanelFn};
use half::f16;
use samite_core::DType;
use samite_quant::blocks::*;
use samite_quant::{IQ4_NL_VALUES, MXFP4_VALUES, e8m0_half};
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// The number that an f16 stands for, in one instruction: `half` would look for the instruction at every call.
#[inline(always)]
unsafe fn number(x: f16) -> f32 {
    // SAFETY: only called where F16C is there.
    unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(x.to_bits())))) }
}

/// Columns from which on rows are unpacked for all of them together.
const WIDE: usize = 6;

/// How bytes are multiplied.
pub(super) trait Bytes {
    /// Sums of four products of unsigned bytes, at most 127, with signed ones.
    unsafe fn dot(unsigned: __m256i, signed: __m256i) -> __m256i;
}

pub(super) struct Avx2;
pub(super) struct Vnni;

impl Bytes for Avx2 {
    #[inline(always)]
    unsafe fn dot(unsigned: __m256i, signed: __m256i) -> __m256i {
        // SAFETY: only called where AVX2 is there. 2 * 127 * 128 fits into 16 bits.
        unsafe { _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned, signed), _mm256_set1_epi16(1)) }
    }
}

impl Bytes for Vnni {
    #[inline(always)]
    unsafe fn dot(unsigned: __m256i, signed: __m256i) -> __m256i {
        // SAFETY: only called where AVX-512 VNNI is there.
        unsafe { _mm256_dpbusd_epi32(_mm256_setzero_si256(), unsigned, signed) }
    }
}

/// Sums of four products of signed bytes.
#[inline(always)]
unsafe fn dot_signed<B: Bytes>(a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: as in `Bytes`. Codes are above -128 on one side, so no sign is lost.
    unsafe { B::dot(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a)) }
}

/// 32 codes of one block, as bytes.
pub(super) struct Codes {
    /// Unsigned below 128, or signed where [`Block32::SIGNED`].
    pub codes: __m256i,
    pub scale: f32,
    /// What every element has besides `scale * code`.
    pub offset: f32,
}

/// Formats in blocks of 32.
pub(super) trait Block32: Block {
    const SIGNED: bool = false;
    unsafe fn codes(&self) -> Codes;
}

/// The low halves of 16 bytes, then the high halves.
#[inline(always)]
unsafe fn halves(bytes: &[u8]) -> __m256i {
    // SAFETY: all callers pass 16 bytes; AVX2.
    unsafe {
        debug_assert_eq!(bytes.len(), 16);
        let low = _mm_loadu_si128(bytes.as_ptr().cast());
        let both = _mm256_set_m128i(_mm_srli_epi16(low, 4), low);
        _mm256_and_si256(both, _mm256_set1_epi8(15))
    }
}

/// Byte `i` is 16 if bit `i` is set.
#[inline(always)]
unsafe fn fifth_bits(bits: [u8; 4]) -> __m256i {
    // SAFETY: AVX2.
    unsafe {
        let all = _mm256_set1_epi32(i32::from_le_bytes(bits));
        let spread = _mm256_shuffle_epi8(
            all,
            _mm256_set_epi64x(
                0x0303_0303_0303_0303,
                0x0202_0202_0202_0202,
                0x0101_0101_0101_0101,
                0,
            ),
        );
        let one_each = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, one_each), one_each);
        _mm256_and_si256(set, _mm256_set1_epi8(16))
    }
}

/// Looks codes up in a table of 16 bytes.
#[inline(always)]
unsafe fn look_up(table: &[i8; 16], codes: __m256i) -> __m256i {
    // SAFETY: 16 bytes are there; AVX2.
    unsafe {
        let table = _mm_loadu_si128(table.as_ptr().cast());
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes)
    }
}

macro_rules! block32 {
    ($($block:ty, signed $signed:literal: |$self:ident| ($codes:expr, $scale:expr, $offset:expr);)*) => {$(
        impl Block32 for $block {
            const SIGNED: bool = $signed;
            #[inline(always)]
            unsafe fn codes(&self) -> Codes {
                let $self = self;
                // SAFETY: only called where AVX2 and F16C are there.
                unsafe {
                    let scale = $scale;
                    Codes { codes: $codes, scale, offset: $offset(scale) }
                }
            }
        }
    )*};
}

block32! {
    BlockQ4_0, signed false: |b| (halves(&b.qs), number(b.d), |d: f32| -8.0 * d);
    BlockQ4_1, signed false: |b| (halves(&b.qs), number(b.d), |_| number(b.m));
    BlockQ5_0, signed false: |b| (_mm256_or_si256(halves(&b.qs), fifth_bits(b.qh)), number(b.d), |d: f32| -16.0 * d);
    BlockQ5_1, signed false: |b| (_mm256_or_si256(halves(&b.qs), fifth_bits(b.qh)), number(b.d), |_| number(b.m));
    BlockQ8_0, signed true: |b| (_mm256_loadu_si256(b.qs.as_ptr().cast()), number(b.d), |_| 0.0);
    BlockIq4Nl, signed true: |b| (look_up(&IQ4_NL_VALUES, halves(&b.qs)), number(b.d), |_| 0.0);
    BlockMxfp4, signed true: |b| (look_up(&MXFP4_VALUES, halves(&b.qs)), e8m0_half(b.e), |_| 0.0);
}

/// The place of one column's parts.
#[derive(Clone, Copy)]
pub(super) struct Parts {
    pub codes: *const u8,
    pub scales: *const f32,
    pub sums: *const f32,
    pub half_sums: *const f32,
}

#[inline(always)]
pub(super) unsafe fn parts(column: &Column, eight: &Eight) -> Parts {
    let at = |offset| column.x.wrapping_add(offset);
    Parts {
        codes: column.x,
        scales: at(eight.scales).cast(),
        sums: at(eight.sums).cast(),
        half_sums: at(eight.half_sums).cast(),
    }
}

/// `R` rows times `C` columns.
pub(super) trait Tile {
    unsafe fn tile<B: Bytes, const R: usize, const C: usize>(
        panel: &Panel,
        row: usize,
        columns: &[Column],
        eight: &Eight,
    );
}

pub(super) struct Blocks32<T>(PhantomData<T>);
pub(super) struct Blocks256<T>(PhantomData<T>);

impl<T: Block32> Tile for Blocks32<T> {
    #[inline(always)]
    unsafe fn tile<B: Bytes, const R: usize, const C: usize>(
        panel: &Panel,
        row: usize,
        columns: &[Column],
        eight: &Eight,
    ) {
        // SAFETY: the rows and columns exist, by the contract of `PanelFn` and the loops in `panel`.
        unsafe {
            let weights: [*const T; R] = std::array::from_fn(|r| {
                panel.weights.wrapping_add((row + r) * panel.stride).cast()
            });
            let x: [Parts; C] = std::array::from_fn(|c| parts(columns.get_unchecked(c), eight));
            let mut sums = [[_mm256_setzero_ps(); R]; C];
            let mut offsets = [[0.0f32; R]; C];
            for block in 0..panel.k / 32 {
                for r in 0..R {
                    let w = (*weights[r].add(block)).codes();
                    for c in 0..C {
                        let x = &x[c];
                        let q = _mm256_loadu_si256(x.codes.add(block * 32).cast());
                        let products = if T::SIGNED {
                            dot_signed::<B>(w.codes, q)
                        } else {
                            B::dot(w.codes, q)
                        };
                        let scale = _mm256_set1_ps(w.scale * *x.scales.add(block));
                        sums[c][r] =
                            _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), scale, sums[c][r]);
                        if !T::SIGNED {
                            offsets[c][r] += w.offset * *x.sums.add(block);
                        }
                    }
                }
            }
            for c in 0..C {
                for r in 0..R {
                    *columns.get_unchecked(c).out.add(panel.first + row + r) =
                        sum(sums[c][r]) + offsets[c][r];
                }
            }
        }
    }
}

/// Eight groups of 32 codes with their scales, and what sums of codes are multiplied with.
pub(super) trait Block256: Block {
    /// What [`unpack`](Block256::unpack) needs to do only once for a block.
    type Unpacked;
    const SIGNED: bool = false;
    /// Whether both halves of a group have scales of their own.
    const HALVES: bool = false;
    unsafe fn unpack(&self) -> Self::Unpacked;
    /// 32 codes.
    unsafe fn codes(&self, unpacked: &Self::Unpacked, group: usize) -> __m256i;
    /// The scales of each four codes.
    unsafe fn scales(unpacked: &Self::Unpacked, group: usize) -> __m256;
    /// Scale and offset of each half of a group.
    unsafe fn halves(unpacked: &Self::Unpacked, group: usize) -> [(f32, f32); 2];
    /// What the offsets of all groups add: lanes may be anything that adds up to it.
    unsafe fn offsets(unpacked: &Self::Unpacked, sums: *const f32, half_sums: *const f32)
    -> __m256;
}

/// Eight scales, and eight minima with the sign that they are added with.
pub(super) struct Affine {
    scales: [f32; 8],
    minima: [f32; 8],
}

impl Affine {
    /// Codes less one, times a scale.
    #[inline(always)]
    fn ternary(d: f32) -> Self {
        Affine {
            scales: [d; 8],
            minima: [-d; 8],
        }
    }
}

#[inline(always)]
unsafe fn affine(d: f32, dmin: f32, (scales, minima): ([u8; 8], [u8; 8])) -> Affine {
    // SAFETY: AVX2.
    unsafe {
        let widen = |bytes: [u8; 8]| {
            let bytes = _mm_set_epi64x(0, i64::from_le_bytes(bytes));
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))
        };
        let scale = |bytes, d| {
            let mut scaled = [0.0; 8];
            let product = _mm256_mul_ps(widen(bytes), _mm256_set1_ps(d));
            _mm256_storeu_ps(scaled.as_mut_ptr(), product);
            scaled
        };
        Affine {
            scales: scale(scales, d),
            minima: scale(minima, -dmin),
        }
    }
}

/// Run `group / 2` of 32 bytes: low halves for even groups, high halves for odd ones.
#[inline(always)]
unsafe fn run_of_halves(bytes: &[u8; 128], group: usize) -> __m256i {
    // SAFETY: `group` is below 8; AVX2.
    unsafe {
        let both = _mm256_loadu_si256(bytes.as_ptr().add(32 * (group / 2)).cast());
        let half = if group.is_multiple_of(2) {
            both
        } else {
            _mm256_srli_epi16(both, 4)
        };
        _mm256_and_si256(half, _mm256_set1_epi8(15))
    }
}

macro_rules! affine {
    ($block:ty: |$self:ident| $affine:expr; |$group:ident| $codes:expr) => {
        impl Block256 for $block {
            type Unpacked = Affine;

            #[inline(always)]
            unsafe fn unpack(&self) -> Affine {
                let $self = self;
                // SAFETY: only called where AVX2 and F16C are there, here and below.
                unsafe { $affine }
            }

            #[inline(always)]
            unsafe fn codes(&self, _: &Affine, $group: usize) -> __m256i {
                let $self = self;
                // SAFETY: as above.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn scales(unpacked: &Affine, group: usize) -> __m256 {
                // SAFETY: as above; `group` is below 8.
                unsafe { _mm256_set1_ps(*unpacked.scales.get_unchecked(group)) }
            }

            #[inline(always)]
            unsafe fn halves(unpacked: &Affine, group: usize) -> [(f32, f32); 2] {
                [(unpacked.scales[group], unpacked.minima[group]); 2]
            }

            #[inline(always)]
            unsafe fn offsets(unpacked: &Affine, sums: *const f32, _: *const f32) -> __m256 {
                // SAFETY: as above; there are eight sums.
                unsafe {
                    _mm256_mul_ps(
                        _mm256_loadu_ps(unpacked.minima.as_ptr()),
                        _mm256_loadu_ps(sums),
                    )
                }
            }
        }
    };
}

affine! {
    BlockQ4K: |b| affine(number(b.d), number(b.dmin), b.scales_and_minima());
    |group| run_of_halves(&b.qs, group)
}

affine! {
    BlockQ5K: |b| affine(number(b.d), number(b.dmin), b.scales_and_minima());
    |group| {
        let bits = _mm256_loadu_si256(b.qh.as_ptr().cast());
        let bit = _mm256_set1_epi8((1u8 << group) as i8);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(bits, bit), bit);
        let fifth = _mm256_and_si256(set, _mm256_set1_epi8(16));
        _mm256_or_si256(run_of_halves(&b.qs, group), fifth)
    }
}

affine! {
    BlockTq2_0: |b| Affine::ternary(number(b.d));
    |group| two_bits(&b.qs, group)
}

/// Sixteen scales, for groups of 16.
pub(super) struct Sixteen {
    scales: [f32; 16],
    /// What the sums of each 16 codes are multiplied with.
    offsets: [f32; 16],
}

#[inline(always)]
unsafe fn two_scales(unpacked: &Sixteen, group: usize) -> __m256 {
    // SAFETY: `group` is below 8; AVX2.
    unsafe {
        let pair = unpacked.scales.as_ptr().add(2 * group);
        _mm256_set_m128(_mm_set1_ps(*pair.add(1)), _mm_set1_ps(*pair))
    }
}

#[inline(always)]
unsafe fn sixteen_offsets(unpacked: &Sixteen, half_sums: *const f32) -> __m256 {
    // SAFETY: there are sixteen sums; AVX2 and FMA.
    unsafe {
        let offsets = unpacked.offsets.as_ptr();
        let high = _mm256_mul_ps(
            _mm256_loadu_ps(offsets.add(8)),
            _mm256_loadu_ps(half_sums.add(8)),
        );
        _mm256_fmadd_ps(_mm256_loadu_ps(offsets), _mm256_loadu_ps(half_sums), high)
    }
}

/// 32 two-bit codes of a format in the order of [`BlockQ2K::qs`].
#[inline(always)]
unsafe fn two_bits(bytes: &[u8; 64], group: usize) -> __m256i {
    // SAFETY: `group` is below 8; AVX2.
    unsafe {
        let bytes = _mm256_loadu_si256(bytes.as_ptr().add(32 * (group / 4)).cast());
        let shift = _mm_cvtsi32_si128(2 * (group as i32 % 4));
        _mm256_and_si256(_mm256_srl_epi16(bytes, shift), _mm256_set1_epi8(3))
    }
}

macro_rules! sixteen {
    ($block:ty: |$self:ident| ($scales:expr, $offsets:expr); |$group:ident| $codes:expr) => {
        impl Block256 for $block {
            type Unpacked = Sixteen;
            const HALVES: bool = true;

            #[inline(always)]
            unsafe fn unpack(&self) -> Sixteen {
                let $self = self;
                // SAFETY: only called where F16C is there.
                unsafe {
                    Sixteen {
                        scales: $scales,
                        offsets: $offsets,
                    }
                }
            }

            #[inline(always)]
            unsafe fn codes(&self, _: &Sixteen, $group: usize) -> __m256i {
                let $self = self;
                // SAFETY: only called where AVX2 is there, here and below.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn scales(unpacked: &Sixteen, group: usize) -> __m256 {
                // SAFETY: as above.
                unsafe { two_scales(unpacked, group) }
            }

            #[inline(always)]
            unsafe fn halves(unpacked: &Sixteen, group: usize) -> [(f32, f32); 2] {
                let half = |i: usize| (unpacked.scales[i], unpacked.offsets[i]);
                [half(2 * group), half(2 * group + 1)]
            }

            #[inline(always)]
            unsafe fn offsets(unpacked: &Sixteen, _: *const f32, half_sums: *const f32) -> __m256 {
                // SAFETY: as above.
                unsafe { sixteen_offsets(unpacked, half_sums) }
            }
        }
    };
}

sixteen! {
    BlockQ6K: |b| (
        { let d = number(b.d); b.scales.map(|s| d * f32::from(s)) },
        { let d = -32.0 * number(b.d); b.scales.map(|s| d * f32::from(s)) }
    );
    |group| {
        // Quarters of each half: two in the low and two in the high halves of the bytes of `ql`.
        let (half, quarter) = (group / 4, group % 4);
        let ql = b.ql.as_ptr().add(64 * half + 32 * (quarter % 2));
        let ql = _mm256_loadu_si256(ql.cast());
        let low = if quarter < 2 { ql } else { _mm256_srli_epi16(ql, 4) };
        let low = _mm256_and_si256(low, _mm256_set1_epi8(15));
        _mm256_or_si256(low, _mm256_slli_epi16(two_bits(&b.qh, group), 4))
    }
}

sixteen! {
    BlockQ3K: |b| (
        { let d = number(b.d); b.unpacked_scales().map(|s| d * f32::from(s)) },
        { let d = -4.0 * number(b.d); b.unpacked_scales().map(|s| d * f32::from(s)) }
    );
    |group| {
        let bits = _mm256_loadu_si256(b.hmask.as_ptr().cast());
        let bit = _mm256_set1_epi8((1u8 << group) as i8);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(bits, bit), bit);
        _mm256_or_si256(two_bits(&b.qs, group), _mm256_and_si256(set, _mm256_set1_epi8(4)))
    }
}

sixteen! {
    BlockQ2K: |b| (
        { let d = number(b.d); b.scales.map(|s| d * f32::from(s & 15)) },
        { let d = -number(b.dmin); b.scales.map(|s| d * f32::from(s >> 4)) }
    );
    |group| two_bits(&b.qs, group)
}

impl Block256 for BlockIq4Xs {
    type Unpacked = [f32; 8];
    const SIGNED: bool = true;

    #[inline(always)]
    unsafe fn unpack(&self) -> [f32; 8] {
        // SAFETY: only called where F16C is there.
        let d = unsafe { number(self.d) };
        self.unpacked_scales().map(|s| d * f32::from(s))
    }

    #[inline(always)]
    unsafe fn codes(&self, _: &[f32; 8], group: usize) -> __m256i {
        // SAFETY: only called where AVX2 is there, here and below; `group` is below 8.
        unsafe {
            look_up(
                &IQ4_NL_VALUES,
                halves(self.qs.get_unchecked(16 * group..16 * group + 16)),
            )
        }
    }

    #[inline(always)]
    unsafe fn scales(unpacked: &[f32; 8], group: usize) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_set1_ps(*unpacked.get_unchecked(group)) }
    }

    #[inline(always)]
    unsafe fn halves(unpacked: &[f32; 8], group: usize) -> [(f32, f32); 2] {
        [(unpacked[group], 0.0); 2]
    }

    #[inline(always)]
    unsafe fn offsets(_: &[f32; 8], _: *const f32, _: *const f32) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_setzero_ps() }
    }
}

impl Block256 for BlockTq1_0 {
    /// All codes, since bytes have digits of several groups, and what TQ2_0 has.
    type Unpacked = ([u8; 256], Affine);

    #[inline(always)]
    unsafe fn unpack(&self) -> Self::Unpacked {
        // SAFETY: only called where AVX2 and F16C are there, here and below.
        (self.codes(), Affine::ternary(unsafe { number(self.d) }))
    }

    #[inline(always)]
    unsafe fn codes(&self, (codes, _): &Self::Unpacked, group: usize) -> __m256i {
        // SAFETY: as above; `group` is below 8.
        unsafe { _mm256_loadu_si256(codes.as_chunks::<32>().0.as_ptr().add(group).cast()) }
    }

    #[inline(always)]
    unsafe fn scales((_, affine): &Self::Unpacked, group: usize) -> __m256 {
        // SAFETY: the caller's contract, here and below.
        unsafe { BlockTq2_0::scales(affine, group) }
    }

    #[inline(always)]
    unsafe fn halves((_, affine): &Self::Unpacked, group: usize) -> [(f32, f32); 2] {
        // SAFETY: as above.
        unsafe { BlockTq2_0::halves(affine, group) }
    }

    #[inline(always)]
    unsafe fn offsets(
        (_, affine): &Self::Unpacked,
        sums: *const f32,
        half_sums: *const f32,
    ) -> __m256 {
        // SAFETY: as above.
        unsafe { BlockTq2_0::offsets(affine, sums, half_sums) }
    }
}

impl<T: Block256> Tile for Blocks256<T> {
    #[inline(always)]
    unsafe fn tile<B: Bytes, const R: usize, const C: usize>(
        panel: &Panel,
        row: usize,
        columns: &[Column],
        eight: &Eight,
    ) {
        // SAFETY: as for blocks of 32.
        unsafe {
            let weights: [*const T; R] = std::array::from_fn(|r| {
                panel.weights.wrapping_add((row + r) * panel.stride).cast()
            });
            let x: [Parts; C] = std::array::from_fn(|c| parts(columns.get_unchecked(c), eight));
            let mut sums = [[_mm256_setzero_ps(); R]; C];
            for block in 0..panel.k / 256 {
                for r in 0..R {
                    let w = &*weights[r].add(block);
                    let unpacked = w.unpack();
                    for group in 0..8 {
                        let codes = w.codes(&unpacked, group);
                        let scales = T::scales(&unpacked, group);
                        for c in 0..C {
                            let x = &x[c];
                            let at = block * 8 + group;
                            let q = _mm256_loadu_si256(x.codes.add(at * 32).cast());
                            let products = if T::SIGNED {
                                dot_signed::<B>(codes, q)
                            } else {
                                B::dot(codes, q)
                            };
                            let scale =
                                _mm256_mul_ps(scales, _mm256_broadcast_ss(&*x.scales.add(at)));
                            sums[c][r] =
                                _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), scale, sums[c][r]);
                        }
                    }
                    if !T::SIGNED {
                        for c in 0..C {
                            let x = &x[c];
                            let offsets = T::offsets(
                                &unpacked,
                                x.sums.add(block * 8),
                                x.half_sums.add(block * 16),
                            );
                            sums[c][r] = _mm256_add_ps(sums[c][r], offsets);
                        }
                    }
                }
            }
            for c in 0..C {
                for r in 0..R {
                    *columns.get_unchecked(c).out.add(panel.first + row + r) = sum(sums[c][r]);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn strip<T: Tile, B: Bytes, const R: usize, const C: usize>(
    panel: &Panel,
    columns: &[Column],
    eight: &Eight,
) {
    let mut row = 0;
    // SAFETY: the caller's contract.
    unsafe {
        while row + R <= panel.rows {
            T::tile::<B, R, C>(panel, row, columns, eight);
            row += R;
        }
        while row < panel.rows {
            T::tile::<B, 1, C>(panel, row, columns, eight);
            row += 1;
        }
    }
}

#[inline(always)]
unsafe fn panel<T: Tile, B: Bytes>(panel: &Panel, columns: &[Column]) {
    let Some(eight) = Eight::new(panel.k) else {
        return; // such columns could not be allocated
    };
    let (groups, rest) = columns.as_chunks::<4>();
    // SAFETY: the caller's contract.
    unsafe {
        for group in groups {
            strip::<T, B, 1, 4>(panel, group, &eight);
        }
        for column in rest.as_chunks::<1>().0 {
            strip::<T, B, 4, 1>(panel, column, &eight);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<T: Tile>(rows: &Panel, columns: &[Column]) {
    // SAFETY: the caller's contract.
    unsafe { panel::<T, Avx2>(rows, columns) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn vnni<T: Tile + Slab + Pairs>(rows: &Panel, columns: &[Column]) {
    // SAFETY: the caller's contract.
    unsafe {
        if columns.len() >= WIDE {
            return wide::<T>(rows, columns);
        }
        let Some(eight) = Eight::new(rows.k) else {
            return; // such columns could not be allocated
        };
        let (groups, rest) = columns.as_chunks::<4>();
        for group in groups {
            strip::<T, Vnni, 1, 4>(rows, group, &eight);
        }
        for column in rest {
            pairs::one::<T>(rows, column, &eight);
        }
    }
}

fn compiled<T: Tile + Slab + Pairs>(isa: Isa) -> Option<PanelFn> {
    match isa {
        Isa::Avx512(token) if token.vnni() => Some(vnni::<T>),
        Isa::Avx512(_) | Isa::Avx2(_) => Some(avx2::<T>),
        _ => None,
    }
}

/// The product for weights of `dtype` with columns quantized to 8 bits, if there is one.
pub(crate) fn product(isa: Isa, dtype: DType) -> Option<PanelFn> {
    match dtype {
        DType::Q4_0 => compiled::<Blocks32<BlockQ4_0>>(isa),
        DType::Q4_1 => compiled::<Blocks32<BlockQ4_1>>(isa),
        DType::Q5_0 => compiled::<Blocks32<BlockQ5_0>>(isa),
        DType::Q5_1 => compiled::<Blocks32<BlockQ5_1>>(isa),
        DType::Q8_0 => compiled::<Blocks32<BlockQ8_0>>(isa),
        DType::IQ4_NL => compiled::<Blocks32<BlockIq4Nl>>(isa),
        DType::MXFP4 => compiled::<Blocks32<BlockMxfp4>>(isa),
        DType::Q2_K => compiled::<Blocks256<BlockQ2K>>(isa),
        DType::Q3_K => compiled::<Blocks256<BlockQ3K>>(isa),
        DType::Q4_K => compiled::<Blocks256<BlockQ4K>>(isa),
        DType::Q5_K => compiled::<Blocks256<BlockQ5K>>(isa),
        DType::Q6_K => compiled::<Blocks256<BlockQ6K>>(isa),
        DType::IQ4_XS => compiled::<Blocks256<BlockIq4Xs>>(isa),
        DType::TQ1_0 => compiled::<Blocks256<BlockTq1_0>>(isa),
        DType::TQ2_0 => compiled::<Blocks256<BlockTq2_0>>(isa),
        _ => None,
    }
}
