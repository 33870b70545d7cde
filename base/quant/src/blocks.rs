//! The block formats as plain data, in the file's layout.
//!
//! In the "halved" order of 4-bit codes used below, byte `i` of a group of `n` bytes holds element
//! `i` in its low half and element `i + n` in its high half.

use bytemuck::{Pod, Zeroable};
use half::f16;
use samite_core::{DType, Error, Result};

#[cfg(not(target_endian = "little"))]
compile_error!(
    "samite-quant reads ggml's little-endian blocks in place and needs a little-endian processor"
);

/// A block format: `size_of::<Self>()` bytes that hold [`Block::LEN`] elements.
pub trait Block: Pod {
    /// Elements of one block: `[f32; LEN]`.
    type Elements: Pod;

    /// Type whose rows consist of these blocks.
    const DTYPE: DType;

    /// Number of elements of a block.
    const LEN: usize = size_of::<Self::Elements>() / size_of::<f32>();
}

/// A block that can be decoded.
pub trait Decode: Block {
    /// Writes the block's elements, with the result of ggml's reference function.
    fn decode(&self, out: &mut Self::Elements);
}

/// A block that can be encoded.
pub trait Encode: Block {
    /// Encodes `elements`, with the result of ggml's reference function.
    fn encode(elements: &Self::Elements) -> Self;
}

/// Returns the bytes of one or more rows as blocks, in place.
///
/// # Errors
/// [`Error::InvalidArgument`] if `bytes` is not a whole number of blocks, or not aligned for `B`
/// (1, 2 or 4 bytes). Tensor data in GGUF files is always aligned, because tensors start at
/// multiples of at least 8 bytes.
pub fn blocks_of<B: Block>(bytes: &[u8]) -> Result<&[B]> {
    bytemuck::try_cast_slice(bytes).map_err(|reason| not_blocks::<B>(bytes, reason))
}

/// Does what [`blocks_of`] does, for writing.
///
/// # Errors
/// As [`blocks_of`].
pub fn blocks_of_mut<B: Block>(bytes: &mut [u8]) -> Result<&mut [B]> {
    // Checked first on a shared borrow: the error needs the bytes, which a failed mutable cast
    // would keep borrowed.
    blocks_of::<B>(bytes)?;
    bytemuck::try_cast_slice_mut(bytes).map_err(|reason| not_blocks::<B>(&[], reason))
}

fn not_blocks<B: Block>(bytes: &[u8], reason: bytemuck::PodCastError) -> Error {
    Error::invalid(format!(
        "{} bytes at address {:p} cannot be used as {} blocks of {} bytes in place: {reason}",
        bytes.len(),
        bytes.as_ptr(),
        B::DTYPE,
        size_of::<B>(),
    ))
}

macro_rules! blocks {
    ($($(#[$doc:meta])* $name:ident, $dtype:ident,
        $len:literal { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl Block for $name {
            type Elements = [f32; $len];
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

blocks! {
    /// 32 elements `d (q - 8)`.
    BlockQ4_0, Q4_0, 32 {
        /// Scale.
        d: f16,
        /// Codes, halved.
        qs: [u8; 16],
    }

    /// 32 elements `d q + m`.
    BlockQ4_1, Q4_1, 32 {
        /// Scale.
        d: f16,
        /// Minimum.
        m: f16,
        /// Codes, halved.
        qs: [u8; 16],
    }

    /// 32 elements `d (q - 16)`.
    BlockQ5_0, Q5_0, 32 {
        /// Scale.
        d: f16,
        /// The codes' fifth bits: bit `i` of this little-endian number belongs to element `i`.
        qh: [u8; 4],
        /// The codes' low four bits, halved.
        qs: [u8; 16],
    }

    /// 32 elements `d q + m`.
    BlockQ5_1, Q5_1, 32 {
        /// Scale.
        d: f16,
        /// Minimum.
        m: f16,
        /// The codes' fifth bits: bit `i` of this little-endian number belongs to element `i`.
        qh: [u8; 4],
        /// The codes' low four bits, halved.
        qs: [u8; 16],
    }

    /// 32 elements `d q`.
    BlockQ8_0, Q8_0, 32 {
        /// Scale.
        d: f16,
        /// Codes, in order.
        qs: [i8; 32],
    }

    /// 32 elements `d q`, with their sum, for activations that are multiplied with Q4_1 and Q5_1.
    BlockQ8_1, Q8_1, 32 {
        /// Scale.
        d: f16,
        /// `d` times the sum of all codes.
        s: f16,
        /// Codes, in order.
        qs: [i8; 32],
    }

    /// 256 elements `d s q - dmin m` in 16 groups of 16.
    BlockQ2K, Q2_K, 256 {
        /// One byte for each group: scale in the low, minimum in the high half.
        scales: [u8; 16],
        /// Two-bit codes; byte `i` of each half's 32 bytes holds elements `i`, `i + 32`, `i + 64`,
        /// `i + 96` of that half (128 elements), lowest bits first.
        qs: [u8; 64],
        /// Scale of the scales.
        d: f16,
        /// Scale of the minima.
        dmin: f16,
    }

    /// 256 elements `d (s - 32) (q - 4)` in 16 groups of 16.
    BlockQ3K, Q3_K, 256 {
        /// The codes' third bits: bit `k` of byte `i` belongs to element `32 k + i`.
        hmask: [u8; 32],
        /// The codes' low two bits, in the order of [`BlockQ2K::qs`].
        qs: [u8; 64],
        /// Sixteen 6-bit scales: see [`BlockQ3K::unpacked_scales`].
        scales: [u8; 12],
        /// Scale of the scales.
        d: f16,
    }

    /// 256 elements `d s q - dmin m` in 8 groups of 32.
    BlockQ4K, Q4_K, 256 {
        /// Scale of the scales.
        d: f16,
        /// Scale of the minima.
        dmin: f16,
        /// Eight 6-bit scales and minima: see [`BlockQ4K::scales_and_minima`].
        scales: [u8; 12],
        /// Codes, halved in four runs of 32 bytes (64 elements).
        qs: [u8; 128],
    }

    /// 256 elements `d s q - dmin m` in 8 groups of 32.
    BlockQ5K, Q5_K, 256 {
        /// Scale of the scales.
        d: f16,
        /// Scale of the minima.
        dmin: f16,
        /// Eight 6-bit scales and minima: see [`BlockQ5K::scales_and_minima`].
        scales: [u8; 12],
        /// The codes' fifth bits: bit `k` of byte `i` belongs to element `32 k + i`.
        qh: [u8; 32],
        /// The codes' low four bits, halved in four runs of 32 bytes (64 elements).
        qs: [u8; 128],
    }

    /// 256 elements `d s (q - 32)` in 16 groups of 16.
    BlockQ6K, Q6_K, 256 {
        /// The codes' low four bits, halved in two runs of 64 bytes (128 elements).
        ql: [u8; 128],
        /// The codes' high two bits, in the order of [`BlockQ2K::qs`].
        qh: [u8; 64],
        /// One scale for each group.
        scales: [i8; 16],
        /// Scale of the scales.
        d: f16,
    }

    /// 256 elements `d q`, with their sums, for activations that are multiplied with the K and IQ
    /// types.
    BlockQ8K, Q8_K, 256 {
        /// Scale.
        d: f32,
        /// Codes, in order.
        qs: [i8; 256],
        /// Sums of each 16 codes.
        bsums: [i16; 16],
    }

    /// 32 elements `d T[q]` with `T` = [`IQ4_NL_VALUES`](crate::IQ4_NL_VALUES).
    BlockIq4Nl, IQ4_NL, 32 {
        /// Scale.
        d: f16,
        /// Codes, halved.
        qs: [u8; 16],
    }

    /// 256 elements `d (s - 32) T[q]` with `T` = [`IQ4_NL_VALUES`](crate::IQ4_NL_VALUES), in 8
    /// groups of 32.
    BlockIq4Xs, IQ4_XS, 256 {
        /// Scale of the scales.
        d: f16,
        /// High two bits of each group's scale, lowest bits first.
        scales_h: u16,
        /// Low four bits of each group's scale, low half first.
        scales_l: [u8; 4],
        /// Codes, halved in each group's 16 bytes.
        qs: [u8; 128],
    }

    /// 32 elements `2^(e - 127) E2M1(q)`.
    BlockMxfp4, MXFP4, 32 {
        /// E8M0 scale: see [`e8m0_half`](crate::e8m0_half).
        e: u8,
        /// E2M1 codes, halved: see [`MXFP4_VALUES`](crate::MXFP4_VALUES).
        qs: [u8; 16],
    }

    /// 256 elements `d (q - 1)` with `q` in 0, 1, 2.
    ///
    /// A byte holds trits as a fraction of 256 in base 3, first trit most significant.
    BlockTq1_0, TQ1_0, 256 {
        /// Five trits per byte: trit `k` of byte `i` is element `32 k + i` for the first 32 bytes
        /// (160 elements), and element `160 + 16 k + i` for byte `32 + i`.
        qs: [u8; 48],
        /// Four trits per byte: trit `k` of byte `i` is element `240 + 4 k + i`.
        qh: [u8; 4],
        /// Scale.
        d: f16,
    }

    /// 256 elements `d (q - 1)` with `q` in 0, 1, 2 (3 decodes to `2 d`).
    BlockTq2_0, TQ2_0, 256 {
        /// Two-bit codes, in the order of [`BlockQ2K::qs`].
        qs: [u8; 64],
        /// Scale.
        d: f16,
    }

    /// 256 elements `d (s + 1/2) / 4 · g` in 8 groups of 32, `g` coordinates of points with signs.
    BlockIq2Xxs, IQ2_XXS, 256 {
        /// Scale of the scales.
        d: f16,
        /// Eight bytes for each group: the numbers of four points of
        /// [`IQ2_XXS_GRID`](crate::grids::IQ2_XXS_GRID), then a little-endian number of four times
        /// seven bits with the points' signs (an eighth sign makes the number of negative ones
        /// even) and four bits `s`, lowest first.
        qs: [[u8; 8]; 8],
    }

    /// 256 elements `d (s + 1/2) / 4 · g` in 16 groups of 16, `g` coordinates of points with signs.
    BlockIq2Xs, IQ2_XS, 256 {
        /// Scale of the scales.
        d: f16,
        /// For each 8 elements the number of a point of [`IQ2_XS_GRID`](crate::grids::IQ2_XS_GRID)
        /// in the low nine bits, and its signs in the others. (An eighth sign makes the number of
        /// negative ones even.)
        qs: [u16; 32],
        /// The groups' `s`, low half first.
        scales: [u8; 8],
    }

    /// 256 elements `d (s + 1/2) / 4 · g` in 16 groups of 16, `g` coordinates of points with signs.
    BlockIq2S, IQ2_S, 256 {
        /// Scale of the scales.
        d: f16,
        /// For each 8 elements the low eight bits of the number of a point of
        /// [`IQ2_S_GRID`](crate::grids::IQ2_S_GRID).
        qs: [u8; 32],
        /// For each 8 elements their signs: bit `i` belongs to element `i`.
        signs: [u8; 32],
        /// The points' high two bits, four in a byte, lowest first.
        qh: [u8; 8],
        /// The groups' `s`, low half first.
        scales: [u8; 8],
    }

    /// 256 elements `d (s + 1/2) / 2 · g` in 8 groups of 32, `g` coordinates of points with signs.
    BlockIq3Xxs, IQ3_XXS, 256 {
        /// Scale of the scales.
        d: f16,
        /// For each 4 elements the number of a point of
        /// [`IQ3_XXS_GRID`](crate::grids::IQ3_XXS_GRID).
        qs: [u8; 64],
        /// For each group a little-endian number of four times seven bits with the signs of 8
        /// elements (an eighth sign makes the number of negative ones even) and four bits `s`,
        /// lowest first.
        signs: [[u8; 4]; 8],
    }

    /// 256 elements `d (2 s + 1) g` in 8 groups of 32, `g` coordinates of points with signs.
    BlockIq3S, IQ3_S, 256 {
        /// Scale of the scales.
        d: f16,
        /// For each 4 elements the low eight bits of the number of a point of
        /// [`IQ3_S_GRID`](crate::grids::IQ3_S_GRID).
        qs: [u8; 64],
        /// The points' ninth bits: a byte for each group, lowest first.
        qh: [u8; 8],
        /// For each 8 elements their signs: bit `i` belongs to element `i`.
        signs: [u8; 32],
        /// The groups' `s`, low half first.
        scales: [u8; 4],
    }

    /// 256 elements `d (2 s + 1) (g ± 1/8)` in 8 groups of 32, `g` coordinates of points.
    BlockIq1S, IQ1_S, 256 {
        /// Scale of the scales.
        d: f16,
        /// For each 8 elements the low eight bits of the number of a point of
        /// [`IQ1_GRID`](crate::grids::IQ1_GRID).
        qs: [u8; 32],
        /// For each group four times three high bits of points, three bits `s`, and a bit that is
        /// set if an eighth is subtracted instead of added, lowest first.
        qh: [u16; 8],
    }

    /// 256 elements `d (2 s + 1) (g ± 1/8)` in 16 groups of 16, `g` coordinates of points.
    BlockIq1M, IQ1_M, 256 {
        /// For each 8 elements the low eight bits of the number of a point of
        /// [`IQ1_GRID`](crate::grids::IQ1_GRID).
        qs: [u8; 32],
        /// For each 8 elements three high bits of the point, and a bit that is set if an eighth is
        /// subtracted instead of added, low half first.
        qh: [u8; 16],
        /// Four little-endian numbers, each with four times three bits `s` and, above these, four
        /// bits of the f16 `d`, lowest first.
        scales: [[u8; 2]; 4],
    }

    /// 64 elements `UE4M3(d) E2M1(q)` in 4 groups of 16.
    BlockNvfp4, NVFP4, 64 {
        /// A scale for each group: see [`ue4m3_half`](crate::ue4m3_half).
        d: [u8; 4],
        /// E2M1 codes, halved in each group's 8 bytes: see [`MXFP4_VALUES`](crate::MXFP4_VALUES).
        qs: [u8; 32],
    }

    /// 128 elements: `d` where the bit is set, else `-d`.
    BlockQ1_0, Q1_0, 128 {
        /// Scale.
        d: f16,
        /// Bit `i` of byte `j` belongs to element `8 j + i`.
        qs: [u8; 16],
    }

    /// 64 elements `d (q - 1)` with `q` in 0, 1, 2, 3.
    BlockQ2_0, Q2_0, 64 {
        /// Scale.
        d: f16,
        /// Two-bit codes: byte `j` has those of elements `4 j` to `4 j + 3`, lowest bits first.
        qs: [u8; 16],
    }
}

impl BlockQ3K {
    /// Returns the scale of each group of 16 elements, -32 to 31.
    #[inline]
    pub fn unpacked_scales(&self) -> [i8; 16] {
        // Low four bits: bytes 0..8, scales 0..8 in the low and 8..16 in the high halves. High two
        // bits: bytes 8..12, scales j, j + 4, j + 8, j + 12 in byte 8 + j, lowest bits first.
        std::array::from_fn(|j| {
            let low = (self.scales[j % 8] >> (4 * (j / 8))) & 15;
            let high = (self.scales[8 + j % 4] >> (2 * (j / 4))) & 3;
            (low | (high << 4)) as i8 - 32
        })
    }
}

impl BlockQ4K {
    /// Returns the scales and the minima of the eight groups of 32 elements, 0 to 63.
    #[inline]
    pub fn scales_and_minima(&self) -> ([u8; 8], [u8; 8]) {
        unpack_scales_and_minima(&self.scales)
    }
}

impl BlockQ5K {
    /// Returns the scales and the minima of the eight groups of 32 elements, 0 to 63.
    #[inline]
    pub fn scales_and_minima(&self) -> ([u8; 8], [u8; 8]) {
        unpack_scales_and_minima(&self.scales)
    }
}

impl BlockIq4Xs {
    /// Returns the scale of each group of 32 elements, -32 to 31.
    #[inline]
    pub fn unpacked_scales(&self) -> [i8; 8] {
        std::array::from_fn(|j| {
            let low = (self.scales_l[j / 2] >> (4 * (j % 2))) & 15;
            let high = ((self.scales_h >> (2 * j)) & 3) as u8;
            (low | (high << 4)) as i8 - 32
        })
    }
}

/// Unpacks eight scales and minima. Bytes 0..4 and 4..8 hold scales and minima 0..4, with the high
/// two bits of scales and minima 4..8 on top. Bytes 8..12 hold the low four bits of scales 4..8
/// (low half) and of minima 4..8 (high half).
#[inline]
fn unpack_scales_and_minima(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let mut scales = [0; 8];
    let mut minima = [0; 8];
    for j in 0..4 {
        scales[j] = packed[j] & 63;
        minima[j] = packed[j + 4] & 63;
        scales[j + 4] = (packed[j + 8] & 15) | ((packed[j] >> 6) << 4);
        minima[j + 4] = (packed[j + 8] >> 4) | ((packed[j + 4] >> 6) << 4);
    }
    (scales, minima)
}

/// Inverts [`unpack_scales_and_minima`] for numbers below 64. The bits of larger ones overlap
/// others, as in ggml.
pub(crate) fn pack_scales_and_minima(scales: &[u8; 8], minima: &[u8; 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for j in 0..4 {
        packed[j] = scales[j] | ((scales[j + 4] >> 4) << 6);
        packed[j + 4] = minima[j] | ((minima[j + 4] >> 4) << 6);
        packed[j + 8] = (scales[j + 4] & 15) | ((minima[j + 4] & 15) << 4);
    }
    packed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matches_dtype<B: Block>() {
        assert_eq!(size_of::<B>(), B::DTYPE.block_bytes(), "{}", B::DTYPE);
        assert_eq!(B::LEN, B::DTYPE.block_len(), "{}", B::DTYPE);
    }

    #[test]
    fn block_sizes_and_lengths_match_the_dtypes() {
        matches_dtype::<BlockQ4_0>();
        matches_dtype::<BlockQ4_1>();
        matches_dtype::<BlockQ5_0>();
        matches_dtype::<BlockQ5_1>();
        matches_dtype::<BlockQ8_0>();
        matches_dtype::<BlockQ8_1>();
        matches_dtype::<BlockQ2K>();
        matches_dtype::<BlockQ3K>();
        matches_dtype::<BlockQ4K>();
        matches_dtype::<BlockQ5K>();
        matches_dtype::<BlockQ6K>();
        matches_dtype::<BlockQ8K>();
        matches_dtype::<BlockIq4Nl>();
        matches_dtype::<BlockIq4Xs>();
        matches_dtype::<BlockMxfp4>();
        matches_dtype::<BlockTq1_0>();
        matches_dtype::<BlockTq2_0>();
        matches_dtype::<BlockIq2Xxs>();
        matches_dtype::<BlockIq2Xs>();
        matches_dtype::<BlockIq2S>();
        matches_dtype::<BlockIq3Xxs>();
        matches_dtype::<BlockIq3S>();
        matches_dtype::<BlockIq1S>();
        matches_dtype::<BlockIq1M>();
        matches_dtype::<BlockNvfp4>();
        matches_dtype::<BlockQ1_0>();
        matches_dtype::<BlockQ2_0>();
    }

    #[test]
    fn casting_checks_length_and_alignment() {
        let mut words = [0u32; 18];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        assert_eq!(blocks_of::<BlockQ4_0>(bytes).unwrap().len(), 4);
        assert_eq!(blocks_of_mut::<BlockQ4_0>(bytes).unwrap().len(), 4);
        assert!(blocks_of::<BlockQ4_0>(&bytes[..17]).is_err());
        assert!(blocks_of_mut::<BlockQ4_0>(&mut bytes[..17]).is_err());
        let message = blocks_of::<BlockQ4_0>(&bytes[1..19])
            .unwrap_err()
            .to_string();
        assert!(message.contains("q4_0"), "{message}");
        assert_eq!(blocks_of::<BlockMxfp4>(&bytes[1..18]).unwrap().len(), 1);
    }

    proptest! {
        #[test]
        fn packing_six_bit_pairs_is_invertible(
            scales in prop::array::uniform8(0u8..64),
            minima in prop::array::uniform8(0u8..64),
        ) {
            let packed = pack_scales_and_minima(&scales, &minima);
            prop_assert_eq!(unpack_scales_and_minima(&packed), (scales, minima));
        }
    }
}
