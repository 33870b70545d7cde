//! Products of quantized rows with columns quantized to 8 bits.
//!
//! A column is quantized once for all rows: in blocks of 32, with an f32 scale each ([`Eight`]). The sums of its codes
//! are stored beside it, scaled: a row whose codes have an offset or a minimum is then multiplied as if it had none,
//! and the product of the offset with the sum is added.

// Loops over arrays of registers are written with indices: they must unroll completely.
#![allow(clippy::needless_range_loop)]

/// How a column that was quantized to 8 bits lies in memory: codes, then scales, then scaled sums of each 32 codes, then
/// those of each 16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Eight {
    /// Offset of the scales: one f32 for each 32 elements.
    pub scales: usize,
    /// Offset of the sums of 32 codes times their scale.
    pub sums: usize,
    /// Offset of the sums of 16 codes times their scale.
    pub half_sums: usize,
    /// Size in bytes.
    pub bytes: usize,
}

impl Eight {
    /// For columns of `k` elements, a multiple of 32.
    pub fn new(k: usize) -> Option<Self> {
        let blocks = k / 32;
        let scales = k.checked_next_multiple_of(64)?;
        let sums = scales.checked_add(blocks * 4)?;
        let half_sums = sums.checked_add(blocks * 4)?;
        let bytes = half_sums
            .checked_add(blocks * 8)?
            .checked_next_multiple_of(64)?;
        Some(Eight {
            scales,
            sums,
            half_sums,
            bytes,
        })
    }

    /// Quantizes a column.
    ///
    /// # Safety
    /// `self.bytes` must be writable at `out`, which is aligned to 4; `self` is for as many elements.
    #[inline(always)]
    pub unsafe fn quantize(&self, x: &[f32], out: *mut u8) {
        // SAFETY: the caller's contract.
        unsafe { self.quantize_part(x, 0, out) }
    }

    /// Quantizes elements of a column from element `start` on, a multiple of 32.
    ///
    /// # Safety
    /// As [`quantize`](Eight::quantize), with elements `start..start + x.len()` inside of the column.
    #[inline(always)]
    pub unsafe fn quantize_part(&self, x: &[f32], start: usize, out: *mut u8) {
        let (first, blocks) = (start / 32, x.len() / 32);
        // SAFETY: the caller's contract; the parts do not overlap.
        let (codes, scales, sums, half_sums) = unsafe {
            let floats = |offset| out.add(offset).cast::<f32>();
            let halves = floats(self.half_sums).cast::<[f32; 2]>();
            (
                std::slice::from_raw_parts_mut(out.add(start).cast::<i8>(), x.len()),
                std::slice::from_raw_parts_mut(floats(self.scales).add(first), blocks),
                std::slice::from_raw_parts_mut(floats(self.sums).add(first), blocks),
                std::slice::from_raw_parts_mut(halves.add(first), blocks),
            )
        };
        let blocks = x
            .as_chunks::<32>()
            .0
            .iter()
            .zip(codes.as_chunks_mut::<32>().0);
        let places = scales.iter_mut().zip(sums).zip(half_sums);
        for ((x, codes), ((scale, sum), halves)) in blocks.zip(places) {
            (*scale, *halves) = quantize_block(x, codes);
            *sum = halves[0] + halves[1];
        }
    }
}

/// The scale, and the scaled sums of both halves.
#[inline(always)]
fn quantize_block(x: &[f32; 32], codes: &mut [i8; 32]) -> (f32, [f32; 2]) {
    // Added to a number, it rounds it to a whole one, whose lowest bits then are those of the code.
    const ROUND: f32 = 12_582_912.0;
    let mut largest = [0.0f32; 8];
    for x in x.as_chunks::<8>().0 {
        for (largest, x) in largest.iter_mut().zip(x) {
            let magnitude = x.abs();
            *largest = if magnitude > *largest {
                magnitude
            } else {
                *largest
            };
        }
    }
    let largest = largest.into_iter().fold(0.0, f32::max);
    let scale = largest / 127.0;
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    let rounded: [f32; 32] = std::array::from_fn(|i| x[i] * inverse + ROUND);
    let whole: [i32; 32] = std::array::from_fn(|i| (rounded[i].to_bits() as i32) << 24 >> 24);
    for (code, whole) in codes.iter_mut().zip(&whole) {
        *code = *whole as i8;
    }
    let (low, high) = whole.split_at(16);
    let sum = |codes: &[i32]| codes.iter().sum::<i32>() as f32 * scale;
    (scale, [sum(low), sum(high)])
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::product;

/// The product for weights of `dtype` with columns quantized to 8 bits, if there is one.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn product(
    _isa: crate::detect::Isa,
    _dtype: samite_core::DType,
) -> Option<super::float::PanelFn> {
    None
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Eight;
    use crate::detect::Isa;
    use crate::simd::avx2::sum;
    use crate::simd::float::{Column, Panel, PanelFn};
    use half::f16;
    use samite_core::DType;
    use samite_quant::blocks::*;
    use samite_quant::{IQ4_NL_VALUES, MXFP4_VALUES, e8m0_half};
    use std::arch::x86_64::*;

    /// The number that an f16 stands for, in one instruction: `half` would look for the instruction at every call.
    #[inline(always)]
    unsafe fn number(x: f16) -> f32 {
        // SAFETY: only called where F16C is there.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(x.to_bits())))) }
    }

    /// How bytes are multiplied.
    trait Bytes {
        /// Sums of four products of unsigned bytes, at most 127, with signed ones.
        unsafe fn dot(unsigned: __m256i, signed: __m256i) -> __m256i;
    }

    struct Avx2;
    struct Vnni;

    impl Bytes for Avx2 {
        #[inline(always)]
        unsafe fn dot(unsigned: __m256i, signed: __m256i) -> __m256i {
            // SAFETY: only called where AVX2 is there. 2 * 127 * 128 fits into 16 bits.
            unsafe {
                _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned, signed), _mm256_set1_epi16(1))
            }
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
    struct Codes {
        /// Unsigned below 128, or signed where [`Block32::SIGNED`].
        codes: __m256i,
        scale: f32,
        /// What every element has besides `scale * code`.
        offset: f32,
    }

    /// Formats in blocks of 32.
    trait Block32: Block {
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
    struct Parts {
        codes: *const u8,
        scales: *const f32,
        sums: *const f32,
        half_sums: *const f32,
    }

    #[inline(always)]
    unsafe fn parts(column: &Column, eight: &Eight) -> Parts {
        let at = |offset| column.x.wrapping_add(offset);
        Parts {
            codes: column.x,
            scales: at(eight.scales).cast(),
            sums: at(eight.sums).cast(),
            half_sums: at(eight.half_sums).cast(),
        }
    }

    /// `R` rows times `C` columns.
    trait Tile {
        unsafe fn tile<B: Bytes, const R: usize, const C: usize>(
            panel: &Panel,
            row: usize,
            columns: &[Column],
            eight: &Eight,
        );
    }

    struct Blocks32<T>(std::marker::PhantomData<T>);
    struct Blocks256<T>(std::marker::PhantomData<T>);

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
    trait Block256: Block {
        /// What [`unpack`](Block256::unpack) needs to do only once for a block.
        type Unpacked;
        const SIGNED: bool = false;
        unsafe fn unpack(&self) -> Self::Unpacked;
        /// 32 codes.
        unsafe fn codes(&self, unpacked: &Self::Unpacked, group: usize) -> __m256i;
        /// The scales of each four codes.
        unsafe fn scales(unpacked: &Self::Unpacked, group: usize) -> __m256;
        /// What the offsets of all groups add: lanes may be anything that adds up to it.
        unsafe fn offsets(
            unpacked: &Self::Unpacked,
            sums: *const f32,
            half_sums: *const f32,
        ) -> __m256;
    }

    /// Eight scales, and eight minima as vectors.
    struct Affine {
        scales: [f32; 8],
        minima: __m256,
    }

    #[inline(always)]
    unsafe fn affine(d: f32, dmin: f32, (scales, minima): ([u8; 8], [u8; 8])) -> Affine {
        // SAFETY: AVX2.
        unsafe {
            let widen = |bytes: [u8; 8]| {
                let bytes = _mm_set_epi64x(0, i64::from_le_bytes(bytes.map(|b| b)));
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))
            };
            let mut stored = [0.0; 8];
            let scaled = _mm256_mul_ps(widen(scales), _mm256_set1_ps(d));
            _mm256_storeu_ps(stored.as_mut_ptr(), scaled);
            Affine {
                scales: stored,
                minima: _mm256_mul_ps(widen(minima), _mm256_set1_ps(-dmin)),
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

    impl Block256 for BlockQ4K {
        type Unpacked = Affine;

        #[inline(always)]
        unsafe fn unpack(&self) -> Affine {
            // SAFETY: only called where AVX2 is there, here and below.
            unsafe { affine(number(self.d), number(self.dmin), self.scales_and_minima()) }
        }

        #[inline(always)]
        unsafe fn codes(&self, _: &Affine, group: usize) -> __m256i {
            // SAFETY: as above.
            unsafe { run_of_halves(&self.qs, group) }
        }

        #[inline(always)]
        unsafe fn scales(unpacked: &Affine, group: usize) -> __m256 {
            // SAFETY: as above; `group` is below 8.
            unsafe { _mm256_set1_ps(*unpacked.scales.get_unchecked(group)) }
        }

        #[inline(always)]
        unsafe fn offsets(unpacked: &Affine, sums: *const f32, _: *const f32) -> __m256 {
            // SAFETY: as above; there are eight sums.
            unsafe { _mm256_mul_ps(unpacked.minima, _mm256_loadu_ps(sums)) }
        }
    }

    impl Block256 for BlockQ5K {
        type Unpacked = Affine;

        #[inline(always)]
        unsafe fn unpack(&self) -> Affine {
            // SAFETY: only called where AVX2 is there, here and below.
            unsafe { affine(number(self.d), number(self.dmin), self.scales_and_minima()) }
        }

        #[inline(always)]
        unsafe fn codes(&self, _: &Affine, group: usize) -> __m256i {
            // SAFETY: as above.
            unsafe {
                let bits = _mm256_loadu_si256(self.qh.as_ptr().cast());
                let bit = _mm256_set1_epi8((1u8 << group) as i8);
                let set = _mm256_cmpeq_epi8(_mm256_and_si256(bits, bit), bit);
                let fifth = _mm256_and_si256(set, _mm256_set1_epi8(16));
                _mm256_or_si256(run_of_halves(&self.qs, group), fifth)
            }
        }

        #[inline(always)]
        unsafe fn scales(unpacked: &Affine, group: usize) -> __m256 {
            // SAFETY: as above; `group` is below 8.
            unsafe { _mm256_set1_ps(*unpacked.scales.get_unchecked(group)) }
        }

        #[inline(always)]
        unsafe fn offsets(unpacked: &Affine, sums: *const f32, _: *const f32) -> __m256 {
            // SAFETY: as above; there are eight sums.
            unsafe { _mm256_mul_ps(unpacked.minima, _mm256_loadu_ps(sums)) }
        }
    }

    /// Sixteen scales, for groups of 16.
    struct Sixteen {
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
                unsafe fn offsets(
                    unpacked: &Sixteen,
                    _: *const f32,
                    half_sums: *const f32,
                ) -> __m256 {
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
        unsafe fn offsets(_: &[f32; 8], _: *const f32, _: *const f32) -> __m256 {
            // SAFETY: as above.
            unsafe { _mm256_setzero_ps() }
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
                                sums[c][r] = _mm256_fmadd_ps(
                                    _mm256_cvtepi32_ps(products),
                                    scale,
                                    sums[c][r],
                                );
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
    unsafe fn vnni<T: Tile>(rows: &Panel, columns: &[Column]) {
        // SAFETY: the caller's contract.
        unsafe { panel::<T, Vnni>(rows, columns) }
    }

    fn compiled<T: Tile>(isa: Isa) -> Option<PanelFn> {
        match isa {
            Isa::Avx512(_) => Some(vnni::<T>),
            Isa::Avx2(_) => Some(avx2::<T>),
            Isa::Generic => None,
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
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detect::Isa;
    use crate::simd::float::{Column, Panel};
    use samite_core::DType;

    fn numbers(seed: u32, count: usize) -> Vec<f32> {
        (0..count as u32)
            .map(|i| {
                let hash = (i ^ seed).wrapping_mul(0x9e37_79b9).rotate_left(13) >> 8;
                hash as f32 / (1 << 23) as f32 - 0.9
            })
            .collect()
    }

    #[test]
    fn quantized_columns_decode_to_about_themselves() {
        for isa in Isa::all() {
            let mut x = numbers(3, 96);
            x[32..64].fill(0.0);
            let eight = Eight::new(x.len()).unwrap();
            let mut out = vec![0u64; eight.bytes / 8];
            // SAFETY: the memory is large enough and aligned.
            isa.run(|| unsafe { eight.quantize(&x, out.as_mut_ptr().cast()) });
            let bytes: &[u8] = bytemuck::cast_slice(&out);
            let floats =
                |at: usize, n: usize| bytemuck::cast_slice::<u8, f32>(&bytes[at..][..4 * n]);
            let (scales, sums) = (floats(eight.scales, 3), floats(eight.sums, 3));
            let halves = floats(eight.half_sums, 6);
            for (block, x) in x.chunks(32).enumerate() {
                let codes = &bytes[32 * block..][..32];
                let decoded: Vec<f32> = codes
                    .iter()
                    .map(|&c| f32::from(c as i8) * scales[block])
                    .collect();
                for (x, decoded) in x.iter().zip(&decoded) {
                    assert!((x - decoded).abs() <= scales[block] * 0.5001);
                }
                let near = |a: f32, b: f32| (a - b).abs() < 1e-4;
                assert!(near(sums[block], decoded.iter().sum()));
                assert!(near(halves[2 * block], decoded[..16].iter().sum()));
                assert!(near(halves[2 * block + 1], decoded[16..].iter().sum()));
            }
        }
    }

    #[test]
    fn products_agree_with_decoded_rows() {
        for dtype in DType::all() {
            for isa in Isa::all() {
                let Some(function) = product(isa, dtype) else {
                    continue;
                };
                for (rows, columns, blocks) in [(1, 1, 1), (3, 1, 2), (5, 7, 3), (2, 4, 1)] {
                    let k = blocks * 256;
                    let mut weights = vec![0; rows * dtype.row_bytes(k).unwrap()];
                    let originals = numbers(rows as u32 * 77, rows * k);
                    samite_quant::encode_row(dtype, &originals, &mut weights).unwrap();
                    let mut decoded = vec![0.0; rows * k];
                    samite_quant::decode_row(dtype, &weights, &mut decoded).unwrap();
                    let eight = Eight::new(k).unwrap();
                    let x = numbers(5, columns * k);
                    let mut quantized = vec![0u64; columns * eight.bytes / 8];
                    let base = quantized.as_mut_ptr().cast::<u8>();
                    let mut rounded = vec![0.0; columns * k];
                    for c in 0..columns {
                        // SAFETY: there is memory for each column.
                        unsafe { eight.quantize(&x[c * k..][..k], base.add(c * eight.bytes)) };
                        let bytes: &[u8] = &bytemuck::cast_slice(&quantized)[c * eight.bytes..];
                        let scales: &[f32] = bytemuck::cast_slice(&bytes[eight.scales..][..k / 8]);
                        for i in 0..k {
                            rounded[c * k + i] = f32::from(bytes[i] as i8) * scales[i / 32];
                        }
                    }
                    let mut out = vec![f32::NAN; rows * columns];
                    let places: Vec<_> = (0..columns)
                        .map(|c| Column {
                            x: base.wrapping_add(c * eight.bytes),
                            out: out[c * rows..].as_mut_ptr(),
                        })
                        .collect();
                    let panel = Panel {
                        weights: weights.as_ptr(),
                        stride: weights.len() / rows,
                        rows,
                        k,
                        first: 0,
                    };
                    // SAFETY: everything is as large as said, and `isa` was detected.
                    unsafe { function(&panel, &places) };
                    for c in 0..columns {
                        for r in 0..rows {
                            let pairs = decoded[r * k..][..k].iter().zip(&rounded[c * k..]);
                            let expected: f64 =
                                pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                            let got = f64::from(out[c * rows + r]);
                            assert!(
                                (got - expected).abs() < 1e-5 * k as f64,
                                "{dtype} {}: {got} instead of {expected}",
                                isa.name()
                            );
                        }
                    }
                }
            }
        }
    }
}
