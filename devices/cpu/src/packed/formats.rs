//! Panels of each type, unpacked to bytes: what is different between types of weights.

use super::activations::{ColumnSpec, SLAB, Sums};
use super::{LANES, PANEL};
use crate::simd::float::Panel;
use samite_core::DType;
use samite_quant::{IQ4_NL_VALUES, MXFP4_VALUES};
use std::arch::x86_64::*;

/// Bytes of memory that are asked for before they are needed.
const AHEAD: usize = 4096;

/// A part of the rows of a panel, unpacked: codes as unsigned bytes, four of each row in a register, and scales and
/// minimums of each group of elements.
#[repr(C, align(64))]
pub(super) struct Slab {
    pub codes: [[[u8; 64]; 2]; SLAB / 4],
    pub scales: [[[f32; LANES]; 2]; SLAB / 16],
    pub minimums: [[[f32; LANES]; 2]; SLAB / 16],
}

/// Where one half of a panel is in a slab.
#[derive(Clone, Copy)]
pub(super) struct Half {
    slab: *mut Slab,
    half: usize,
}

impl Half {
    /// # Safety
    /// `slab` must be writable as long as this is used; `half` is 0 or 1.
    #[inline(always)]
    pub unsafe fn new(slab: *mut Slab, half: usize) -> Self {
        Half { slab, half }
    }
}

/// Where unpacked weights go. Codes of a group come before its scale, which comes before its minimum; groups of
/// different blocks come one after the other.
pub(super) trait Sink<F: Format> {
    /// Takes the codes of elements `4 * i..4 * i + 4` of the slab.
    ///
    /// # Safety
    /// The slab must have these elements, and the processor AVX-512.
    unsafe fn codes(&mut self, i: usize, codes: __m512i);

    /// Takes the scales of a group of the slab.
    ///
    /// # Safety
    /// As [`codes`](Sink::codes).
    unsafe fn scale(&mut self, group: usize, scales: __m512);

    /// Takes what is subtracted from the products of scales and codes of a group of the slab.
    ///
    /// # Safety
    /// As [`codes`](Sink::codes).
    unsafe fn minimum(&mut self, group: usize, minimums: __m512);
}

impl<F: Format> Sink<F> for Half {
    #[inline(always)]
    unsafe fn codes(&mut self, i: usize, codes: __m512i) {
        // SAFETY: a slab has a place for each.
        unsafe { _mm512_store_si512((&raw mut (*self.slab).codes[i][self.half]).cast(), codes) }
    }

    #[inline(always)]
    unsafe fn scale(&mut self, group: usize, scales: __m512) {
        // SAFETY: as in `codes`.
        unsafe {
            let to = (&raw mut (*self.slab).scales[group][self.half]).cast();
            _mm512_store_ps(to, scales);
        }
    }

    #[inline(always)]
    unsafe fn minimum(&mut self, group: usize, minimums: __m512) {
        // SAFETY: as in `codes`.
        unsafe {
            let to = (&raw mut (*self.slab).minimums[group][self.half]).cast();
            _mm512_store_ps(to, minimums);
        }
    }
}

/// A type of packed weights.
pub(super) trait Format: Sized {
    const DTYPE: DType;
    /// Elements that share a scale.
    const GROUP: usize = 32;
    /// Elements of columns that share a scale: the larger, the faster, and the further from the unrounded product.
    const SCALED: usize = 32;
    /// What has to be done about sums of columns.
    const SUMS: Sums;

    /// What columns must be.
    const COLUMNS: ColumnSpec = ColumnSpec {
        scaled: Self::SCALED,
        group: Self::GROUP,
        sums: Self::SUMS,
    };

    /// Unpacks the part of half a panel that lies in a slab, which has so many blocks.
    ///
    /// # Safety
    /// The blocks must be there, and AVX-512 with BW; the contract of `to`.
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>);
}

/// The part of a panel that lies in a slab.
pub(super) struct PanelSlab {
    at: *const u8,
    /// Number of the slab.
    pub number: usize,
    /// Number of elements of each row.
    pub len: usize,
}

impl PanelSlab {
    /// All parts of the panel that begins at row `row`.
    #[inline(always)]
    pub fn all<F: Format>(panel: &Panel, row: usize) -> impl Iterator<Item = Self> {
        let (weights, k) = (panel.weights, panel.k);
        let at = weights.wrapping_add(row / PANEL * panel.stride);
        let bytes = SLAB / F::DTYPE.block_len() * F::DTYPE.block_bytes() * PANEL;
        (0..k.div_ceil(SLAB)).map(move |number| PanelSlab {
            at: at.wrapping_add(number * bytes),
            number,
            len: SLAB.min(k - number * SLAB),
        })
    }

    /// Where the next one begins.
    #[inline(always)]
    pub fn end<F: Format>(&self) -> *const u8 {
        let blocks = self.len / F::DTYPE.block_len();
        self.at
            .wrapping_add(blocks * F::DTYPE.block_bytes() * PANEL)
    }

    /// Unpacks half of it.
    ///
    /// # Safety
    /// The panel must be there, and AVX-512 with BW; the contract of `to`.
    #[inline(always)]
    pub unsafe fn unpack<F: Format>(&self, half: usize, to: &mut impl Sink<F>) {
        let blocks = self.len / F::DTYPE.block_len();
        let at = half * blocks * F::DTYPE.block_bytes() * LANES;
        // SAFETY: the caller's contract.
        unsafe { F::unpack(self.at.add(at), blocks, to) }
    }
}

#[inline(always)]
unsafe fn load(at: *const u8) -> __m512i {
    // SAFETY: the caller's contract; asking for memory is allowed at any address.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast());
        _mm512_loadu_si512(at.cast())
    }
}

/// Half-precision numbers number `i` of all rows.
#[inline(always)]
unsafe fn halves(at: *const u8, i: usize) -> __m512 {
    // SAFETY: the caller's contract; asking for memory is allowed at any address.
    unsafe {
        let at = at.add(i * 2 * LANES);
        _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()))
    }
}

#[inline(always)]
unsafe fn low(x: __m512i) -> __m512i {
    // SAFETY: the caller's contract.
    unsafe { _mm512_and_si512(x, _mm512_set1_epi8(15)) }
}

#[inline(always)]
unsafe fn high(x: __m512i) -> __m512i {
    // SAFETY: the caller's contract.
    unsafe { low(_mm512_srli_epi16::<4>(x)) }
}

/// `a | b & mask`
#[inline(always)]
unsafe fn or_masked(a: __m512i, b: __m512i, mask: i8) -> __m512i {
    // SAFETY: the caller's contract.
    unsafe { _mm512_ternarylogic_epi32::<0b1111_1000>(a, b, _mm512_set1_epi8(mask)) }
}

/// Each 32-bit number shifted right.
#[inline(always)]
unsafe fn shifted(x: __m512i, bits: usize) -> __m512i {
    // SAFETY: the caller's contract.
    unsafe { _mm512_srl_epi32(x, _mm_cvtsi32_si128(bits as i32)) }
}

/// Nibbles of a block of 32: low ones are the first half, high ones the second.
#[inline(always)]
unsafe fn nibbles(half: *const u8, block: usize, mut to: impl FnMut(usize, __m512i)) {
    // SAFETY: the caller's contract.
    unsafe {
        for j in 0..4 {
            let both = load(half.add((block * 4 + j) * 64));
            to(j, low(both));
            to(j + 4, high(both));
        }
    }
}

/// Bits of a block of 32, one for each element, as 16 where they are set.
#[inline(always)]
unsafe fn fifth_bits(bits: __m512i, j: usize) -> __m512i {
    // SAFETY: the caller's contract.
    unsafe {
        let byte = 0x0101_0101 * (j as i32 / 2);
        let lanes = _mm_setr_epi32(
            byte,
            byte + 0x0404_0404,
            byte + 0x0808_0808,
            byte + 0x0c0c_0c0c,
        );
        let bytes = _mm512_shuffle_epi8(bits, _mm512_broadcast_i32x4(lanes));
        let one = if j.is_multiple_of(2) {
            0x0804_0201
        } else {
            0x8040_2010_u32 as i32
        };
        let set = _mm512_test_epi8_mask(bytes, _mm512_set1_epi32(one));
        _mm512_maskz_set1_epi8(set, 16)
    }
}

pub(super) struct Q8_0;

impl Format for Q8_0 {
    const DTYPE: DType = DType::Q8_0;
    const SUMS: Sums = Sums::Offset(128);

    #[inline(always)]
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>) {
        // SAFETY: the caller's contract.
        unsafe {
            let scales = half.add(blocks * 32 * LANES);
            for i in 0..blocks {
                for j in 0..8 {
                    let codes = load(half.add((i * 8 + j) * 64));
                    to.codes(i * 8 + j, _mm512_xor_si512(codes, _mm512_set1_epi8(-128)));
                }
                to.scale(i, halves(scales, i));
            }
        }
    }
}

pub(super) struct Q4_0;

impl Format for Q4_0 {
    const DTYPE: DType = DType::Q4_0;
    const SUMS: Sums = Sums::Offset(8);

    #[inline(always)]
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>) {
        // SAFETY: the caller's contract.
        unsafe {
            let scales = half.add(blocks * 16 * LANES);
            for i in 0..blocks {
                nibbles(half, i, |j, codes| to.codes(i * 8 + j, codes));
                to.scale(i, halves(scales, i));
            }
        }
    }
}

/// A table of signed numbers as unsigned ones, 128 more each, for each lane.
#[inline(always)]
unsafe fn table(values: &[i8; 16]) -> __m512i {
    // SAFETY: the caller's contract.
    unsafe {
        let values = _mm_loadu_si128(values.as_ptr().cast());
        _mm512_broadcast_i32x4(_mm_xor_si128(values, _mm_set1_epi8(-128)))
    }
}

pub(super) struct Iq4Nl;

impl Format for Iq4Nl {
    const DTYPE: DType = DType::IQ4_NL;
    const SUMS: Sums = Sums::Offset(128);

    #[inline(always)]
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>) {
        // SAFETY: the caller's contract.
        unsafe {
            let values = table(&IQ4_NL_VALUES);
            let scales = half.add(blocks * 16 * LANES);
            for i in 0..blocks {
                nibbles(half, i, |j, codes| {
                    to.codes(i * 8 + j, _mm512_shuffle_epi8(values, codes));
                });
                to.scale(i, halves(scales, i));
            }
        }
    }
}

pub(super) struct Mxfp4;

impl Format for Mxfp4 {
    const DTYPE: DType = DType::MXFP4;
    const SUMS: Sums = Sums::Offset(128);

    #[inline(always)]
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>) {
        // SAFETY: the caller's contract.
        unsafe {
            let values = table(&MXFP4_VALUES);
            let exponents = half.add(blocks * 16 * LANES);
            for i in 0..blocks {
                nibbles(half, i, |j, codes| {
                    to.codes(i * 8 + j, _mm512_shuffle_epi8(values, codes));
                });
                let e = _mm_loadu_si128(exponents.add(i * LANES).cast());
                let e = _mm512_cvtepu8_epi32(e);
                // As `e8m0_half`: 2^(e - 128), which is not normal for the smallest two.
                let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
                let small = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
                let is_small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
                let scales = _mm512_mask_mov_epi32(normal, is_small, small);
                to.scale(i, _mm512_castsi512_ps(scales));
            }
        }
    }
}

pub(super) struct Iq4Xs;

impl Format for Iq4Xs {
    const DTYPE: DType = DType::IQ4_XS;
    const SCALED: usize = 256;
    const SUMS: Sums = Sums::Offset(128);

    #[inline(always)]
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>) {
        // SAFETY: the caller's contract; a slab is one block.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let values = table(&IQ4_NL_VALUES);
            let low_bits = half.add(blocks * 128 * LANES);
            let high_bits = low_bits.add(blocks * 4 * LANES);
            let d = halves(high_bits.add(blocks * 2 * LANES), 0);
            let low_bits = load(low_bits);
            let high_bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(high_bits.cast()));
            for group in 0..8 {
                for j in 0..4 {
                    let both = load(half.add((group * 4 + j) * 64));
                    let at = group * 8 + j;
                    to.codes(at, _mm512_shuffle_epi8(values, low(both)));
                    to.codes(at + 4, _mm512_shuffle_epi8(values, high(both)));
                }
                let number = |from, bits, mask| {
                    _mm512_and_si512(shifted(from, bits * group), _mm512_set1_epi32(mask))
                };
                let high = _mm512_slli_epi32::<4>(number(high_bits, 2, 3));
                let scales = _mm512_or_si512(number(low_bits, 4, 15), high);
                let scales = _mm512_sub_epi32(scales, _mm512_set1_epi32(32));
                to.scale(group, _mm512_mul_ps(_mm512_cvtepi32_ps(scales), d));
            }
        }
    }
}

pub(super) struct Q4_1;

impl Format for Q4_1 {
    const DTYPE: DType = DType::Q4_1;
    const SUMS: Sums = Sums::Minus;

    #[inline(always)]
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>) {
        // SAFETY: the caller's contract.
        unsafe {
            let scales = half.add(blocks * 16 * LANES);
            let minimums = scales.add(blocks * 2 * LANES);
            for i in 0..blocks {
                nibbles(half, i, |j, codes| to.codes(i * 8 + j, codes));
                to.scale(i, halves(scales, i));
                let minimums = halves(minimums, i);
                to.minimum(i, _mm512_sub_ps(_mm512_setzero_ps(), minimums));
            }
        }
    }
}

pub(super) struct Q5_0;

impl Format for Q5_0 {
    const DTYPE: DType = DType::Q5_0;
    const SUMS: Sums = Sums::Offset(16);

    #[inline(always)]
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>) {
        // SAFETY: the caller's contract.
        unsafe {
            let bits = half.add(blocks * 16 * LANES);
            let scales = bits.add(blocks * 4 * LANES);
            for i in 0..blocks {
                let bits = load(bits.add((i) * 64));
                nibbles(half, i, |j, codes| {
                    to.codes(i * 8 + j, _mm512_or_si512(codes, fifth_bits(bits, j)));
                });
                to.scale(i, halves(scales, i));
            }
        }
    }
}

pub(super) struct Q5_1;

impl Format for Q5_1 {
    const DTYPE: DType = DType::Q5_1;
    const SUMS: Sums = Sums::Minus;

    #[inline(always)]
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>) {
        // SAFETY: the caller's contract.
        unsafe {
            let bits = half.add(blocks * 16 * LANES);
            let scales = bits.add(blocks * 4 * LANES);
            let minimums = scales.add(blocks * 2 * LANES);
            for i in 0..blocks {
                let bits = load(bits.add((i) * 64));
                nibbles(half, i, |j, codes| {
                    to.codes(i * 8 + j, _mm512_or_si512(codes, fifth_bits(bits, j)));
                });
                to.scale(i, halves(scales, i));
                let minimums = halves(minimums, i);
                to.minimum(i, _mm512_sub_ps(_mm512_setzero_ps(), minimums));
            }
        }
    }
}

/// Scales and minimums of 6 bits, eight of each for a block of 256: bytes 0..4 have the lower four scales, bytes 4..8
/// the lower four minimums, bytes 8..12 nibbles of the others, whose high bits are above those of the first eight.
#[inline(always)]
unsafe fn six_bits<F: Format>(fields: *const u8, d: __m512, d_min: __m512, to: &mut impl Sink<F>) {
    // SAFETY: the caller's contract.
    unsafe {
        let [a, b, c] = [0, 1, 2].map(|i| load(fields.add(i * 64)));
        let six = _mm512_set1_epi8(0x3f);
        let scales = [
            _mm512_and_si512(a, six),
            or_masked(low(c), _mm512_srli_epi32::<2>(a), 0x30),
        ];
        let minimums = [
            _mm512_and_si512(b, six),
            or_masked(high(c), _mm512_srli_epi32::<2>(b), 0x30),
        ];
        for group in 0..8 {
            let number = |from: [__m512i; 2], d| {
                let bytes = shifted(from[group / 4], group % 4 * 8);
                let number = _mm512_and_si512(bytes, _mm512_set1_epi32(0xff));
                _mm512_mul_ps(_mm512_cvtepi32_ps(number), d)
            };
            to.scale(group, number(scales, d));
            to.minimum(group, number(minimums, d_min));
        }
    }
}

/// Codes of two bits of a block of 256: bits `2 * j..2 * j + 2` of the bytes of each half are 32 elements.
#[inline(always)]
unsafe fn two_bits(half: *const u8, mut to: impl FnMut(usize, usize, usize, __m512i)) {
    // SAFETY: the caller's contract.
    unsafe {
        let three = _mm512_set1_epi8(3);
        for part in 0..2 {
            for u in 0..8 {
                let all = load(half.add((part * 8 + u) * 64));
                for j in 0..4 {
                    to(part, j, u, _mm512_and_si512(shifted(all, 2 * j), three));
                }
            }
        }
    }
}

pub(super) struct Q2K;

impl Format for Q2K {
    const DTYPE: DType = DType::Q2_K;
    const GROUP: usize = 16;
    const SCALED: usize = 256;
    const SUMS: Sums = Sums::Minus;

    #[inline(always)]
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>) {
        // SAFETY: the caller's contract; a slab is one block.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let fields = half.add(blocks * 64 * LANES);
            let d = fields.add(blocks * 16 * LANES);
            let d_min = halves(d.add(blocks * 2 * LANES), 0);
            let d = halves(d, 0);
            two_bits(half, |part, j, u, codes| {
                to.codes(part * 32 + j * 8 + u, codes);
            });
            for group in 0..16 {
                let both = _mm_loadu_si128(fields.add(group * LANES).cast());
                let both = _mm512_cvtepu8_epi32(both);
                let scale = _mm512_and_si512(both, _mm512_set1_epi32(15));
                let minimum = _mm512_srli_epi32::<4>(both);
                to.scale(group, _mm512_mul_ps(_mm512_cvtepi32_ps(scale), d));
                to.minimum(group, _mm512_mul_ps(_mm512_cvtepi32_ps(minimum), d_min));
            }
        }
    }
}

pub(super) struct Q3K;

impl Format for Q3K {
    const DTYPE: DType = DType::Q3_K;
    const GROUP: usize = 16;
    const SCALED: usize = 256;
    const SUMS: Sums = Sums::Offset(4);

    #[inline(always)]
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>) {
        // SAFETY: the caller's contract; a slab is one block.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let bits = half.add(blocks * 64 * LANES);
            let fields = bits.add(blocks * 32 * LANES);
            let d = halves(fields.add(blocks * 12 * LANES), 0);
            two_bits(half, |part, j, u, codes| {
                // Bit `4 * part + j` is the third one.
                let bits = load(bits.add(u * 64));
                let third = match part * 4 + j {
                    bit @ 0..2 => _mm512_sll_epi32(bits, _mm_cvtsi32_si128(2 - bit as i32)),
                    bit => shifted(bits, bit - 2),
                };
                to.codes(part * 32 + j * 8 + u, or_masked(codes, third, 4));
            });
            // Scales of six bits: bytes 0..8 have the lower four of the first eight, then of the others; bytes 8..12 have
            // the upper two of all.
            let words = [0, 1, 2].map(|i| load(fields.add(i * 64)));
            for group in 0..16 {
                let number = |word: usize, bits: usize, mask| {
                    _mm512_and_si512(shifted(words[word], bits), _mm512_set1_epi32(mask))
                };
                let low = number(group % 8 / 4, group % 4 * 8 + group / 8 * 4, 15);
                let high = number(2, group % 4 * 8 + group / 4 * 2, 3);
                let scale = _mm512_or_si512(low, _mm512_slli_epi32::<4>(high));
                let scale = _mm512_sub_epi32(scale, _mm512_set1_epi32(32));
                to.scale(group, _mm512_mul_ps(_mm512_cvtepi32_ps(scale), d));
            }
        }
    }
}

pub(super) struct Q4K;

impl Format for Q4K {
    const DTYPE: DType = DType::Q4_K;
    const SCALED: usize = 256;
    const SUMS: Sums = Sums::Minus;

    #[inline(always)]
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>) {
        // SAFETY: the caller's contract; a slab is one block.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let fields = half.add(blocks * 128 * LANES);
            let d = fields.add(blocks * 12 * LANES);
            let d_min = d.add(blocks * 2 * LANES);
            for i in 0..4 {
                for j in 0..8 {
                    let both = load(half.add((i * 8 + j) * 64));
                    to.codes(i * 16 + j, low(both));
                    to.codes(i * 16 + 8 + j, high(both));
                }
            }
            six_bits(fields, halves(d, 0), halves(d_min, 0), to);
        }
    }
}

pub(super) struct Q5K;

impl Format for Q5K {
    const DTYPE: DType = DType::Q5_K;
    const SCALED: usize = 256;
    const SUMS: Sums = Sums::Minus;

    #[inline(always)]
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>) {
        // SAFETY: the caller's contract; a slab is one block.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let bits = half.add(blocks * 128 * LANES);
            let fields = bits.add(blocks * 32 * LANES);
            let d = fields.add(blocks * 12 * LANES);
            let d_min = d.add(blocks * 2 * LANES);
            for j in 0..8 {
                // Bit `i` is that of element `32 * i` and following ones.
                let bits = load(bits.add(j * 64));
                for i in 0..4 {
                    let both = load(half.add((i * 8 + j) * 64));
                    let fifth = |i: usize| match i {
                        0..4 => _mm512_sll_epi32(bits, _mm_cvtsi32_si128(4 - i as i32)),
                        _ => shifted(bits, i - 4),
                    };
                    to.codes(i * 16 + j, or_masked(low(both), fifth(2 * i), 16));
                    to.codes(i * 16 + 8 + j, or_masked(high(both), fifth(2 * i + 1), 16));
                }
            }
            six_bits(fields, halves(d, 0), halves(d_min, 0), to);
        }
    }
}

pub(super) struct Q6K;

impl Format for Q6K {
    const DTYPE: DType = DType::Q6_K;
    const GROUP: usize = 16;
    const SCALED: usize = 256;
    const SUMS: Sums = Sums::Offset(32);

    #[inline(always)]
    unsafe fn unpack(half: *const u8, blocks: usize, to: &mut impl Sink<Self>) {
        // SAFETY: the caller's contract; a slab is one block.
        unsafe {
            debug_assert_eq!(blocks, 1);
            let bits = half.add(blocks * 128 * LANES);
            let scales = bits.add(blocks * 64 * LANES);
            let d = scales.add(blocks * 16 * LANES);
            for part in 0..2 {
                for j in 0..8 {
                    let codes = half.add((part * 16 + j) * 64);
                    let (a, b) = (load(codes), load(codes.add(8 * 64)));
                    let bits = load(bits.add((part * 8 + j) * 64));
                    let at = part * 32 + j;
                    to.codes(at, or_masked(low(a), _mm512_slli_epi32::<4>(bits), 0x30));
                    to.codes(
                        at + 8,
                        or_masked(low(b), _mm512_slli_epi32::<2>(bits), 0x30),
                    );
                    to.codes(at + 16, or_masked(high(a), bits, 0x30));
                    to.codes(
                        at + 24,
                        or_masked(high(b), _mm512_srli_epi32::<2>(bits), 0x30),
                    );
                }
            }
            let d = halves(d, 0);
            for group in 0..16 {
                let scales = _mm_loadu_si128(scales.add(group * LANES).cast());
                let scales = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(scales));
                to.scale(group, _mm512_mul_ps(scales, d));
            }
        }
    }
}
