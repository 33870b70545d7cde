//! Whole rows of any type: lengths are checked once here, then one loop runs over the blocks.

use crate::blocks::*;
use crate::float;
use samite_core::{DType, Error, Result};

/// Decodes a row of `dtype` to `out`, with the length of `out`.
///
/// # Errors
/// [`Error::Shape`] if `out` is not a whole number of blocks or the length of `bytes` does not
/// match. [`Error::InvalidArgument`] if [`can_decode`] does not hold for `dtype`.
pub fn decode_row(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let decode = decoder(dtype).ok_or_else(|| {
        Error::invalid(format!(
            "rows of {dtype} cannot be decoded to f32: this format is not implemented"
        ))
    })?;
    check(dtype, bytes.len(), out.len())?;
    decode(bytes, out);
    Ok(())
}

/// Encodes `src` as a row of `dtype`.
///
/// Numbers that the format cannot represent (too large for an f16 scale, infinite, NaN) give a
/// valid block with meaningless values.
///
/// # Errors
/// [`Error::Shape`] if `src` is not a whole number of blocks or the length of `out` does not match.
/// [`Error::InvalidArgument`] if [`can_encode`] does not hold for `dtype`.
pub fn encode_row(dtype: DType, src: &[f32], out: &mut [u8]) -> Result<()> {
    let encode = encoder(dtype).ok_or_else(|| {
        Error::invalid(format!(
            "f32 rows cannot be encoded as {dtype}: this format is not implemented"
        ))
    })?;
    check(dtype, out.len(), src.len())?;
    encode(src, out);
    Ok(())
}

/// Returns whether [`decode_row`] supports `dtype`.
pub fn can_decode(dtype: DType) -> bool {
    decoder(dtype).is_some()
}

/// Returns whether [`encode_row`] supports `dtype`.
pub fn can_encode(dtype: DType) -> bool {
    encoder(dtype).is_some()
}

pub(crate) fn check(dtype: DType, bytes: usize, elements: usize) -> Result<()> {
    let expected = dtype.row_bytes(elements)?;
    if bytes != expected {
        return Err(Error::shape(format!(
            "a row of {elements} {dtype} elements takes {expected} bytes, not {bytes}"
        )));
    }
    Ok(())
}

/// Function that decodes all elements in the bytes.
type DecodeFn = fn(&[u8], &mut [f32]);

/// Function that encodes all elements.
pub(crate) type EncodeFn = fn(&[f32], &mut [u8]);

fn decoder(dtype: DType) -> Option<DecodeFn> {
    Some(match dtype {
        DType::F32 => float::decode_f32,
        DType::F16 => float::decode_f16,
        DType::BF16 => float::decode_bf16,
        DType::F8_E4M3 => float::decode_f8_e4m3,
        DType::F64 => float::decode_f64,
        DType::Q4_0 => decode_blocks::<BlockQ4_0>,
        DType::Q4_1 => decode_blocks::<BlockQ4_1>,
        DType::Q5_0 => decode_blocks::<BlockQ5_0>,
        DType::Q5_1 => decode_blocks::<BlockQ5_1>,
        DType::Q8_0 => decode_blocks::<BlockQ8_0>,
        DType::Q8_1 => decode_blocks::<BlockQ8_1>,
        DType::Q2_K => decode_blocks::<BlockQ2K>,
        DType::Q3_K => decode_blocks::<BlockQ3K>,
        DType::Q4_K => decode_blocks::<BlockQ4K>,
        DType::Q5_K => decode_blocks::<BlockQ5K>,
        DType::Q6_K => decode_blocks::<BlockQ6K>,
        DType::Q8_K => decode_blocks::<BlockQ8K>,
        DType::IQ4_NL => decode_blocks::<BlockIq4Nl>,
        DType::IQ4_XS => decode_blocks::<BlockIq4Xs>,
        DType::MXFP4 => decode_blocks::<BlockMxfp4>,
        DType::TQ1_0 => decode_blocks::<BlockTq1_0>,
        DType::TQ2_0 => decode_blocks::<BlockTq2_0>,
        DType::IQ1_S => decode_blocks::<BlockIq1S>,
        DType::IQ1_M => decode_blocks::<BlockIq1M>,
        DType::IQ2_XXS => decode_blocks::<BlockIq2Xxs>,
        DType::IQ2_XS => decode_blocks::<BlockIq2Xs>,
        DType::IQ2_S => decode_blocks::<BlockIq2S>,
        DType::IQ3_XXS => decode_blocks::<BlockIq3Xxs>,
        DType::IQ3_S => decode_blocks::<BlockIq3S>,
        DType::NVFP4 => decode_blocks::<BlockNvfp4>,
        DType::Q1_0 => decode_blocks::<BlockQ1_0>,
        DType::Q2_0 => decode_blocks::<BlockQ2_0>,
        _ => return None,
    })
}

pub(crate) fn encoder(dtype: DType) -> Option<EncodeFn> {
    Some(match dtype {
        DType::F32 => float::encode_f32,
        DType::F16 => float::encode_f16,
        DType::BF16 => float::encode_bf16,
        DType::F8_E4M3 => float::encode_f8_e4m3,
        DType::Q4_0 => encode_blocks::<BlockQ4_0>,
        DType::Q4_1 => encode_blocks::<BlockQ4_1>,
        DType::Q5_0 => encode_blocks::<BlockQ5_0>,
        DType::Q5_1 => encode_blocks::<BlockQ5_1>,
        DType::Q8_0 => encode_blocks::<BlockQ8_0>,
        DType::Q8_1 => encode_blocks::<BlockQ8_1>,
        DType::Q2_K => encode_blocks::<BlockQ2K>,
        DType::Q3_K => encode_blocks::<BlockQ3K>,
        DType::Q4_K => encode_blocks::<BlockQ4K>,
        DType::Q5_K => encode_blocks::<BlockQ5K>,
        DType::Q6_K => encode_blocks::<BlockQ6K>,
        DType::Q8_K => encode_blocks::<BlockQ8K>,
        DType::IQ4_NL => encode_blocks::<BlockIq4Nl>,
        DType::IQ4_XS => encode_blocks::<BlockIq4Xs>,
        DType::MXFP4 => encode_blocks::<BlockMxfp4>,
        DType::TQ1_0 => encode_blocks::<BlockTq1_0>,
        DType::TQ2_0 => encode_blocks::<BlockTq2_0>,
        DType::NVFP4 => encode_blocks::<BlockNvfp4>,
        DType::Q1_0 => encode_blocks::<BlockQ1_0>,
        DType::Q2_0 => encode_blocks::<BlockQ2_0>,
        _ => return None,
    })
}

fn decode_blocks<B: Decode>(bytes: &[u8], out: &mut [f32]) {
    let out: &mut [B::Elements] = bytemuck::cast_slice_mut(out);
    if let Ok(blocks) = bytemuck::try_cast_slice::<u8, B>(bytes) {
        for (block, out) in blocks.iter().zip(out) {
            block.decode(out);
        }
    } else {
        // Not aligned: every block is copied out.
        for (bytes, out) in bytes.chunks_exact(size_of::<B>()).zip(out) {
            bytemuck::pod_read_unaligned::<B>(bytes).decode(out);
        }
    }
}

fn encode_blocks<B: Encode>(src: &[f32], out: &mut [u8]) {
    let src: &[B::Elements] = bytemuck::cast_slice(src);
    for (src, out) in src.iter().zip(out.chunks_exact_mut(size_of::<B>())) {
        out.copy_from_slice(bytemuck::bytes_of(&B::encode(src)));
    }
}
