//! Encoding for files, which is slow and weighted by the importance of each column.
//!
//! Importance is measured: it is the mean square of the values that a model multiplies with a
//! column while it reads sample texts. An importance matrix has one row of these per tensor.

use crate::blocks::*;
use crate::row::{self, EncodeFn};
use crate::search::{LANES, sum_of_squares};
use samite_core::{DType, Error, Result};

/// A block that is quantized for a file.
pub trait Quantize: Block {
    /// Quantizes elements `x` like `ggml_quantize_chunk`. `importance` is not negative. If it is
    /// given, `mean_square` is that of the whole row, and elements that are large compared with it
    /// weigh more.
    fn quantize(x: &Self::Elements, importance: Option<&Self::Elements>, mean_square: f32) -> Self;

    /// Quantizes several consecutive blocks of a row. Some formats process several blocks faster
    /// together.
    fn quantize_several<const L: usize>(
        x: &[Self::Elements; L],
        importance: &[Self::Elements; L],
        mean_square: f32,
    ) -> [Self; L] {
        std::array::from_fn(|i| Self::quantize(&x[i], Some(&importance[i]), mean_square))
    }
}

/// Encodes `src` as a row of `dtype` for a file. `importance` is the weight of squared errors in
/// each column. Formats that do not search, such as Q8_0, ignore it.
///
/// Numbers that the format cannot represent give a valid block with meaningless values.
///
/// # Errors
/// [`Error::Shape`] if `src` is not a whole number of blocks, or the length of `out` or
/// `importance` does not match `src`. [`Error::InvalidArgument`] if [`can_quantize`] does not hold
/// for `dtype`, if `dtype` [needs](needs_importance) a missing importance, or if the importance
/// contains a negative number or NaN.
pub fn quantize_row(
    dtype: DType,
    src: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<()> {
    let quantize = quantizer(dtype).ok_or_else(|| {
        Error::invalid(format!(
            "f32 rows cannot be quantized to {dtype}: this format is not implemented"
        ))
    })?;
    row::check(dtype, out.len(), src.len())?;
    match importance {
        Some(importance) if importance.len() != src.len() => {
            return Err(Error::shape(format!(
                "a row of {} elements has an importance of {} columns",
                src.len(),
                importance.len()
            )));
        }
        Some(importance) => {
            if let Some(at) = importance
                .iter()
                .position(|&v| !(v >= 0.0 && v.is_finite()))
            {
                return Err(Error::invalid(format!(
                    "the importance of column {at} is {}",
                    importance[at]
                )));
            }
        }
        None if needs_importance(dtype) => {
            return Err(Error::invalid(format!(
                "{dtype} is not made without an importance matrix"
            )));
        }
        None => {}
    }
    match quantize {
        Quantizer::Plain(encode) => encode(src, out),
        Quantizer::Searching(quantize) => quantize(src, importance, out),
    }
    Ok(())
}

/// Returns whether [`quantize_row`] supports `dtype`.
pub fn can_quantize(dtype: DType) -> bool {
    quantizer(dtype).is_some()
}

/// Returns whether `dtype` has very few bits, so that, as in ggml, rows are quantized to it only
/// with an importance.
pub fn needs_importance(dtype: DType) -> bool {
    matches!(dtype, DType::IQ1_S | DType::IQ2_XXS | DType::IQ2_XS)
}

enum Quantizer {
    /// A single encoder.
    Plain(EncodeFn),
    Searching(fn(&[f32], Option<&[f32]>, &mut [u8])),
}

fn quantizer(dtype: DType) -> Option<Quantizer> {
    let quantize: fn(&[f32], Option<&[f32]>, &mut [u8]) = match dtype {
        DType::Q4_0 => quantize_blocks::<BlockQ4_0>,
        DType::Q4_1 => quantize_blocks::<BlockQ4_1>,
        DType::Q5_0 => quantize_blocks::<BlockQ5_0>,
        DType::Q5_1 => quantize_blocks::<BlockQ5_1>,
        DType::Q2_K => quantize_blocks::<BlockQ2K>,
        DType::Q3_K => quantize_blocks::<BlockQ3K>,
        DType::Q4_K => quantize_blocks::<BlockQ4K>,
        DType::Q5_K => quantize_blocks::<BlockQ5K>,
        DType::Q6_K => quantize_blocks::<BlockQ6K>,
        DType::IQ4_NL => quantize_blocks::<BlockIq4Nl>,
        DType::IQ4_XS => quantize_blocks::<BlockIq4Xs>,
        DType::IQ1_S => quantize_blocks::<BlockIq1S>,
        DType::IQ1_M => quantize_blocks::<BlockIq1M>,
        DType::IQ2_XXS => quantize_blocks::<BlockIq2Xxs>,
        DType::IQ2_XS => quantize_blocks::<BlockIq2Xs>,
        DType::IQ2_S => quantize_blocks::<BlockIq2S>,
        DType::IQ3_XXS => quantize_blocks::<BlockIq3Xxs>,
        DType::IQ3_S => quantize_blocks::<BlockIq3S>,
        _ => return row::encoder(dtype).map(Quantizer::Plain),
    };
    Some(Quantizer::Searching(quantize))
}

fn quantize_blocks<B: Quantize>(src: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    let x: &[B::Elements] = bytemuck::cast_slice(src);
    let mut out = out.chunks_exact_mut(size_of::<B>());
    let mut put = |block: B| {
        if let Some(out) = out.next() {
            out.copy_from_slice(bytemuck::bytes_of(&block));
        }
    };
    let Some(importance) = importance else {
        return x.iter().for_each(|x| put(B::quantize(x, None, 0.0)));
    };
    // A sum in element order takes as long as the fastest encoders, so it is computed only if used.
    let mean_square = sum_of_squares(src) / src.len() as f32;
    let importance: &[B::Elements] = bytemuck::cast_slice(importance);
    let (several, rest) = x.as_chunks::<LANES>();
    let (importance_of_several, importance_of_rest) = importance.as_chunks::<LANES>();
    for (x, importance) in several.iter().zip(importance_of_several) {
        let blocks = B::quantize_several(x, importance, mean_square);
        blocks.into_iter().for_each(&mut put);
    }
    for (x, importance) in rest.iter().zip(importance_of_rest) {
        put(B::quantize(x, Some(importance), mean_square));
    }
}
