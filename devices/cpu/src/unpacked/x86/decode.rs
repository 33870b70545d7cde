//! What decoding of all families of types has in common: the traits, and macros that implement them.

use half::f16;
use samite_quant::blocks::Block;
use std::arch::x86_64::*;

/// The number that an f16 stands for, in one instruction: `half` would look for the instruction at every call.
#[inline(always)]
pub(crate) unsafe fn number(x: f16) -> f32 {
    // SAFETY: only called where F16C is there.
    unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(x.to_bits())))) }
}

/// 32 codes of one block, as bytes.
pub(crate) struct Codes {
    /// Unsigned below 128, or signed where [`Block32::SIGNED`].
    pub codes: __m256i,
    pub scale: f32,
    /// What every element has besides `scale * code`.
    pub offset: f32,
}

/// Formats in blocks of 32.
pub(crate) trait Block32: Block {
    const SIGNED: bool = false;
    unsafe fn codes(&self) -> Codes;
}

/// The low halves of 16 bytes, then the high halves.
#[inline(always)]
pub(crate) unsafe fn halves(bytes: &[u8]) -> __m256i {
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
pub(crate) unsafe fn fifth_bits(bits: [u8; 4]) -> __m256i {
    // SAFETY: AVX2.
    unsafe {
        let set = spread_bits(u32::from_le_bytes(bits));
        _mm256_and_si256(set, _mm256_set1_epi8(16))
    }
}

/// Looks codes up in a table of 16 bytes.
#[inline(always)]
pub(crate) unsafe fn look_up(table: &[i8; 16], codes: __m256i) -> __m256i {
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
pub(crate) use block32;

/// Formats in blocks of several groups of 32 codes with their scales, and what sums of codes are multiplied with.
pub(crate) trait GroupedBlock: Block {
    /// Even, and of formats that are not [`SIGNED`](GroupedBlock::SIGNED) 8.
    const GROUPS: usize = Self::LEN / 32;
    /// What [`unpack`](GroupedBlock::unpack) needs to do only once for a block.
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
pub(crate) struct Affine {
    pub scales: [f32; 8],
    pub minima: [f32; 8],
}

impl Affine {
    /// Codes less one, times a scale.
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
pub(crate) unsafe fn run_of_halves(bytes: &[u8; 128], group: usize) -> __m256i {
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

macro_rules! grouped_affine {
    ($block:ty: |$self:ident| $affine:expr; |$group:ident| $codes:expr) => {
        impl GroupedBlock for $block {
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
                // SAFETY: callers are compiled for AVX2 and F16C; `group` is below 8, so its codes are in the block.
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
                // SAFETY: callers are compiled for AVX2; `sums` has a sum for each of the block's eight groups, and there are
                // eight minima.
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

/// ScalesOf16 scales, for groups of 16.
pub(crate) struct ScalesOf16 {
    pub scales: [f32; 16],
    /// What the sums of each 16 codes are multiplied with.
    pub offsets: [f32; 16],
}

/// The scales of both halves of a group, of those of a block.
#[inline(always)]
pub(crate) unsafe fn two_scales(scales: &[f32], group: usize) -> __m256 {
    // SAFETY: callers have two scales for each group, and `group` is one of them; AVX2.
    unsafe {
        let pair = scales.as_ptr().add(2 * group);
        _mm256_set_m128(_mm_set1_ps(*pair.add(1)), _mm_set1_ps(*pair))
    }
}

/// All bits of byte `i` are set if bit `i` of `bits` is.
#[inline(always)]
pub(crate) unsafe fn spread_bits(bits: u32) -> __m256i {
    // SAFETY: AVX2.
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

/// 32 two-bit codes of a format in the order of [`BlockQ2K::qs`](samite_quant::blocks::BlockQ2K).
#[inline(always)]
pub(crate) unsafe fn two_bits(bytes: &[u8; 64], group: usize) -> __m256i {
    // SAFETY: `group` is below 8; AVX2.
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
                // SAFETY: only called where F16C is there.
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
                // SAFETY: only called where AVX2 is there, here and below.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn scales(unpacked: &ScalesOf16, group: usize) -> __m256 {
                // SAFETY: callers are compiled for AVX2, and `group` is below 8, as `two_scales` asks.
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
                // SAFETY: callers are compiled for AVX2 and FMA; `half_sums` has a sum for each of the block's sixteen half
                // groups, as `offsets_of_16` asks.
                unsafe { offsets_of_16(unpacked, half_sums) }
            }
        }
    };
}
pub(crate) use grouped_of_16;

/// Formats whose codes have signs: a scale for each group, or for each half of one, and no offsets.
macro_rules! grouped_signed {
    ($($block:ty, $scales:literal scales: |$self:ident| $unpack:expr; |$group:ident| $codes:expr;)*) => {$(
        impl GroupedBlock for $block {
            type Unpacked = [f32; $scales];
            const SIGNED: bool = true;
            const HALVES: bool = $scales == 2 * Self::GROUPS;

            #[inline(always)]
            #[allow(unused_unsafe)] // scales that are bytes need no instruction
            unsafe fn unpack(&self) -> [f32; $scales] {
                let $self = self;
                // SAFETY: only called where F16C is there.
                unsafe { $unpack }
            }

            #[inline(always)]
            unsafe fn codes(&self, _: &[f32; $scales], $group: usize) -> __m256i {
                let $self = self;
                // SAFETY: only called where AVX2 is there, for groups of the block.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn scales(unpacked: &[f32; $scales], group: usize) -> __m256 {
                // SAFETY: callers are compiled for AVX2; `group` is one of the block's, each of which has one or two scales.
                unsafe {
                    match Self::HALVES {
                        true => two_scales(unpacked, group),
                        false => _mm256_set1_ps(*unpacked.get_unchecked(group)),
                    }
                }
            }

            #[inline(always)]
            unsafe fn halves(unpacked: &[f32; $scales], group: usize) -> [(f32, f32); 2] {
                match Self::HALVES {
                    true => [(unpacked[2 * group], 0.0), (unpacked[2 * group + 1], 0.0)],
                    false => [(unpacked[group], 0.0); 2],
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
