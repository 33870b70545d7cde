//! Encoding for files: as slow as it must be, and weighted by how much each column matters.
//!
//! What a column matters is measured: the mean square of what a model multiplies with that column while it reads sample texts, its row
//! of an importance matrix.

use crate::blocks::*;
use crate::row::{self, EncodeFn};
use crate::search::{LANES, sum_of_squares};
use samite_core::{DType, Error, Result};

/// A block that is chosen for a file.
pub trait Quantize: Block {
    /// The block that stands for elements `x`, as `ggml_quantize_chunk` chooses it. `importance` is not negative, and with it `mean_square` is that of
    /// the whole row: large elements weigh more than others where they are large beside it.
    fn quantize(x: &Self::Elements, importance: Option<&Self::Elements>, mean_square: f32) -> Self;

    /// The same for neighbours in a row. Some formats take less time for several at once than for one after the other.
    fn quantize_several<const L: usize>(
        x: &[Self::Elements; L],
        importance: &[Self::Elements; L],
        mean_square: f32,
    ) -> [Self; L] {
        std::array::from_fn(|i| Self::quantize(&x[i], Some(&importance[i]), mean_square))
    }
}

/// Encodes `src` as a row of `dtype` for a file. `importance` says how much the square of an error in each column counts; formats that do not
/// search, such as Q8_0, make nothing of it.
///
/// Numbers that the format cannot hold give a valid block without meaning.
///
/// # Errors
/// [`Error::Shape`] if `src` is not a whole number of blocks, or `out` or `importance` are not as long as `src` asks for;
/// [`Error::InvalidArgument`] if [`can_quantize`] does not hold for `dtype`, if it [needs](needs_importance) an importance that is not given, or if that has a
/// number below 0 or none.
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

/// Whether [`quantize_row`] knows `dtype`.
pub fn can_quantize(dtype: DType) -> bool {
    quantizer(dtype).is_some()
}

/// Whether `dtype` has so few bits that no row is quantized to it without knowing what matters, as in ggml.
pub fn needs_importance(dtype: DType) -> bool {
    matches!(dtype, DType::IQ1_S | DType::IQ2_XXS | DType::IQ2_XS)
}

enum Quantizer {
    /// There is one way.
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
    // A sum in element order takes as long as the quickest encoders: only where it is used.
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
