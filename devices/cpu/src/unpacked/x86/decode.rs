//! Common parts of decoding all families of types: the traits, and macros that implement them.

use half::f16;
use samite_quant::blocks::Block;
use std::arch::x86_64::*;

/// Returns the value of an f16, in one instruction. `half` would detect the instruction in every
/// call.
#[inline(always)]
pub(crate) unsafe fn number(x: f16) -> f32 {
    // SAFETY: called only if F16C is available.
    unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(x.to_bits())))) }
}

/// 32 codes of one block, as bytes.
pub(crate) struct Codes {
    /// Unsigned below 128, or signed if [`Block32::SIGNED`].
    pub codes: __m256i,
    pub scale: f32,
    /// Offset of every element, which is `scale * code + offset`.
    pub offset: f32,
}

/// Formats in blocks of 32.
pub(crate) trait Block32: Block {
    const SIGNED: bool = false;
    unsafe fn codes(&self) -> Codes;
}

/// Returns the low halves of 16 bytes, then the high halves.
#[inline(always)]
pub(crate) unsafe fn halves(bytes: &[u8]) -> __m256i {
    // SAFETY: all callers pass 16 bytes and have AVX2.
    unsafe {
        debug_assert_eq!(bytes.len(), 16);
        let low = _mm_loadu_si128(bytes.as_ptr().cast());
        let both = _mm256_set_m128i(_mm_srli_epi16(low, 4), low);
        _mm256_and_si256(both, _mm256_set1_epi8(15))
    }
}

/// Returns bytes with the value 16 in byte `i` if bit `i` is set.
#[inline(always)]
pub(crate) unsafe fn fifth_bits(bits: [u8; 4]) -> __m256i {
    // SAFETY: callers have AVX2.
    unsafe {
        let set = spread_bits(u32::from_le_bytes(bits));
        _mm256_and_si256(set, _mm256_set1_epi8(16))
    }
}

/// Looks codes up in a table of 16 bytes.
#[inline(always)]
pub(crate) unsafe fn look_up(table: &[i8; 16], codes: __m256i) -> __m256i {
    // SAFETY: the table has 16 bytes, and callers have AVX2.
    unsafe {
        let table = _mm_loadu_si128(table.as_ptr().cast());
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes)
    }
}

macro_rules! block32 {
    ($($block:ty, signed $signed:literal: |$self:ident| ($codes:expr, $scale:expr,
        $offset:expr);)*) => {$(
        impl Block32 for $block {
            const SIGNED: bool = $signed;
            #[inline(always)]
            unsafe fn codes(&self) -> Codes {
                let $self = self;
                // SAFETY: called only if AVX2 and F16C are available.
                unsafe {
                    let scale = $scale;
                    Codes { codes: $codes, scale, offset: $offset(scale) }
                }
            }
        }
    )*};
}
pub(crate) use block32;

/// Formats in blocks of several groups of 32 codes with their scales and the factors of their sums
/// of codes.
pub(crate) trait GroupedBlock: Block {
    /// Number of groups. Even, and 8 for formats that are not [`SIGNED`](GroupedBlock::SIGNED).
    const GROUPS: usize = Self::LEN / 32;
    /// Values that [`unpack`](GroupedBlock::unpack) computes once per block.
    type Unpacked;
    const SIGNED: bool = false;
    /// True if each half of a group has its own scale.
    const HALVES: bool = false;
    unsafe fn unpack(&self) -> Self::Unpacked;
    /// Returns 32 codes.
    unsafe fn codes(&self, unpacked: &Self::Unpacked, group: usize) -> __m256i;
    /// Returns the scales of each four codes.
    unsafe fn scales(unpacked: &Self::Unpacked, group: usize) -> __m256;
    /// Returns scale and offset of each half of a group.
    unsafe fn halves(unpacked: &Self::Unpacked, group: usize) -> [(f32, f32); 2];
    /// Returns the contribution of the offsets of all groups, as lanes with that sum.
    unsafe fn offsets(unpacked: &Self::Unpacked, sums: *const f32, half_sums: *const f32)
    -> __m256;
}

/// Eight scales, and eight minima with the sign with which they are added.
pub(crate) struct Affine {
    pub scales: [f32; 8],
    pub minima: [f32; 8],
}

impl Affine {
    /// Returns scales for codes minus one, times `d`.
    #[inline(always)]
    pub(crate) fn ternary(d: f32) -> Self {
        Affine {
            scales: [d; 8],
            minima: [-d; 8],
        }
    }
}

#[inline(always)]
pub(crate) unsafe fn affine(d: f32, dmin: f32, (scales, minima): ([u8; 8], [u8; 8])) -> Affine {
    // SAFETY: callers have AVX2.
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

/// Returns half bytes of run `group / 2` of 32 bytes: low halves for even groups, high halves for
/// odd ones.
#[inline(always)]
pub(crate) unsafe fn run_of_halves(bytes: &[u8; 128], group: usize) -> __m256i {
    // SAFETY: `group` is below 8, and callers have AVX2.
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

macro_rules! grouped_affine {
    ($block:ty: |$self:ident| $affine:expr; |$group:ident| $codes:expr) => {
        impl GroupedBlock for $block {
            type Unpacked = Affine;

            #[inline(always)]
            unsafe fn unpack(&self) -> Affine {
                let $self = self;
                // SAFETY: called only if AVX2 and F16C are available, here and below.
                unsafe { $affine }
            }

            #[inline(always)]
            unsafe fn codes(&self, _: &Affine, $group: usize) -> __m256i {
                let $self = self;
                // SAFETY: callers are compiled for AVX2 and F16C; `group` is below 8, so its codes
                // are in the block.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn scales(unpacked: &Affine, group: usize) -> __m256 {
                // SAFETY: callers are compiled for AVX2; `group` is below 8, the number of scales.
                unsafe { _mm256_set1_ps(*unpacked.scales.get_unchecked(group)) }
            }

            #[inline(always)]
            unsafe fn halves(unpacked: &Affine, group: usize) -> [(f32, f32); 2] {
                [(unpacked.scales[group], unpacked.minima[group]); 2]
            }

            #[inline(always)]
            unsafe fn offsets(unpacked: &Affine, sums: *const f32, _: *const f32) -> __m256 {
                // SAFETY: callers are compiled for AVX2; `sums` has a sum for each of the block's
                // eight groups, and there are eight minima.
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
pub(crate) use grouped_affine;

/// Scales for groups of 16.
pub(crate) struct ScalesOf16 {
    pub scales: [f32; 16],
    /// Factors of the sums of each 16 codes.
    pub offsets: [f32; 16],
}

/// Returns the scales of both halves of a group, from those of a block.
#[inline(always)]
pub(crate) unsafe fn two_scales(scales: &[f32], group: usize) -> __m256 {
    // SAFETY: callers have AVX2, and two scales for each group, including `group`.
    unsafe {
        let pair = scales.as_ptr().add(2 * group);
        _mm256_set_m128(_mm_set1_ps(*pair.add(1)), _mm_set1_ps(*pair))
    }
}

/// Returns bytes with all bits of byte `i` set if bit `i` of `bits` is set.
#[inline(always)]
pub(crate) unsafe fn spread_bits(bits: u32) -> __m256i {
    // SAFETY: callers have AVX2.
    unsafe {
        let all = _mm256_set1_epi32(bits as i32);
        let places = _mm256_set_epi64x(
            0x0303_0303_0303_0303,
            0x0202_0202_0202_0202,
            0x0101_0101_0101_0101,
            0,
        );
        let one_each = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
        let spread = _mm256_and_si256(_mm256_shuffle_epi8(all, places), one_each);
        _mm256_cmpeq_epi8(spread, one_each)
    }
}

#[inline(always)]
pub(crate) unsafe fn offsets_of_16(unpacked: &ScalesOf16, half_sums: *const f32) -> __m256 {
    // SAFETY: there are sixteen sums, and callers have AVX2 and FMA.
    unsafe {
        let offsets = unpacked.offsets.as_ptr();
        let high = _mm256_mul_ps(
            _mm256_loadu_ps(offsets.add(8)),
            _mm256_loadu_ps(half_sums.add(8)),
        );
        _mm256_fmadd_ps(_mm256_loadu_ps(offsets), _mm256_loadu_ps(half_sums), high)
    }
}

/// Returns 32 two-bit codes of a format in the order of
/// [`BlockQ2K::qs`](samite_quant::blocks::BlockQ2K).
#[inline(always)]
pub(crate) unsafe fn two_bits(bytes: &[u8; 64], group: usize) -> __m256i {
    // SAFETY: `group` is below 8, and callers have AVX2.
    unsafe {
        let bytes = _mm256_loadu_si256(bytes.as_ptr().add(32 * (group / 4)).cast());
        let shift = _mm_cvtsi32_si128(2 * (group as i32 % 4));
        _mm256_and_si256(_mm256_srl_epi16(bytes, shift), _mm256_set1_epi8(3))
    }
}

macro_rules! grouped_of_16 {
    ($block:ty: |$self:ident| ($scales:expr, $offsets:expr); |$group:ident| $codes:expr) => {
        impl GroupedBlock for $block {
            type Unpacked = ScalesOf16;
            const HALVES: bool = true;

            #[inline(always)]
            unsafe fn unpack(&self) -> ScalesOf16 {
                let $self = self;
                // SAFETY: called only if F16C is available.
                unsafe {
                    ScalesOf16 {
                        scales: $scales,
                        offsets: $offsets,
                    }
                }
            }

            #[inline(always)]
            unsafe fn codes(&self, _: &ScalesOf16, $group: usize) -> __m256i {
                let $self = self;
                // SAFETY: called only if AVX2 is available, here and below.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn scales(unpacked: &ScalesOf16, group: usize) -> __m256 {
                // SAFETY: callers are compiled for AVX2, and `group` is below 8, as `two_scales`
                // requires.
                unsafe { two_scales(&unpacked.scales, group) }
            }

            #[inline(always)]
            unsafe fn halves(unpacked: &ScalesOf16, group: usize) -> [(f32, f32); 2] {
                let half = |i: usize| (unpacked.scales[i], unpacked.offsets[i]);
                [half(2 * group), half(2 * group + 1)]
            }

            #[inline(always)]
            unsafe fn offsets(
                unpacked: &ScalesOf16,
                _: *const f32,
                half_sums: *const f32,
            ) -> __m256 {
                // SAFETY: callers are compiled for AVX2 and FMA; `half_sums` has a sum for each of
                // the block's sixteen half groups, as `offsets_of_16` requires.
                unsafe { offsets_of_16(unpacked, half_sums) }
            }
        }
    };
}
pub(crate) use grouped_of_16;

/// Implements formats whose codes have signs: a scale for each group, or for each half of one, and
/// no offsets.
macro_rules! grouped_signed {
    ($($block:ty, $scales:literal scales: |$self:ident| $unpack:expr;
        |$group:ident| $codes:expr;)*) => {$(
        impl GroupedBlock for $block {
            type Unpacked = [f32; $scales];
            const SIGNED: bool = true;
            const HALVES: bool = $scales == 2 * Self::GROUPS;

            #[inline(always)]
            #[allow(unused_unsafe)] // scales that are bytes need no instruction
            unsafe fn unpack(&self) -> [f32; $scales] {
                let $self = self;
                // SAFETY: called only if F16C is available.
                unsafe { $unpack }
            }

            #[inline(always)]
            unsafe fn codes(&self, _: &[f32; $scales], $group: usize) -> __m256i {
                let $self = self;
                // SAFETY: called only if AVX2 is available, for groups of the block.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn scales(unpacked: &[f32; $scales], group: usize) -> __m256 {
                // SAFETY: callers are compiled for AVX2; `group` is one of the block's, each of
                // which has one or two scales.
                unsafe {
                    if Self::HALVES {
                        two_scales(unpacked, group)
                    } else {
                        _mm256_set1_ps(*unpacked.get_unchecked(group))
                    }
                }
            }

            #[inline(always)]
            unsafe fn halves(unpacked: &[f32; $scales], group: usize) -> [(f32, f32); 2] {
                if Self::HALVES {
                    [(unpacked[2 * group], 0.0), (unpacked[2 * group + 1], 0.0)]
                } else {
                    [(unpacked[group], 0.0); 2]
                }
            }

            #[inline(always)]
            unsafe fn offsets(_: &[f32; $scales], _: *const f32, _: *const f32) -> __m256 {
                // SAFETY: callers are compiled for AVX2; no memory is read.
                unsafe { _mm256_setzero_ps() }
            }
        }
    )*};
}
pub(crate) use grouped_signed;
