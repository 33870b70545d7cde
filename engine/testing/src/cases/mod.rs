//! The cases, one file per family of operations.

mod attention;
mod chains;
mod copies;
mod elementwise;
mod formulas;
mod matmul;
mod rope;
mod rows;
mod rowwise;
mod state;
mod training;

use crate::case::{Case, Cases, Limit};
use samite_core::DType;

/// Returns every case of the conformance suite: every operation with its types, odd sizes, strides,
/// broadcasts, views, and in-place results. The cases, their order and their unique names are
/// always the same.
pub fn cases() -> Vec<Case> {
    let mut all = Cases::default();
    elementwise::add(&mut all);
    rowwise::add(&mut all);
    copies::add(&mut all);
    rows::add(&mut all);
    matmul::add(&mut all);
    attention::add(&mut all);
    rope::add(&mut all);
    chains::add(&mut all);
    state::add(&mut all);
    training::add(&mut all);
    formulas::add(&mut all);
    all.0
}

/// The types of activations.
const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The quantized types of weights that can be encoded and decoded.
const QUANTIZED: [DType; 18] = [
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::IQ4_NL,
    DType::IQ4_XS,
    DType::MXFP4,
    DType::TQ1_0,
    DType::TQ2_0,
    DType::NVFP4,
    DType::Q1_0,
    DType::Q2_0,
];

/// The quantized types of weights that can only be decoded.
pub const DECODED: [DType; 7] = [
    DType::IQ1_S,
    DType::IQ1_M,
    DType::IQ2_XXS,
    DType::IQ2_XS,
    DType::IQ2_S,
    DType::IQ3_XXS,
    DType::IQ3_S,
];

/// Returns every type that weights can have.
fn weight_types() -> impl Iterator<Item = DType> {
    FLOATS
        .into_iter()
        .chain([DType::F8_E4M3])
        .chain(QUANTIZED)
        .chain(DECODED)
}

/// Returns the limit for results of a type: that of f32, or the rounding of a shorter float.
fn rounded_to(dtype: DType) -> Limit {
    Limit::Nmse(match dtype {
        DType::F16 => 1e-6,
        DType::BF16 => 1e-5,
        _ => 1e-7,
    })
}

/// Returns the limit for conversions from one type to another. They are exact if nothing is rounded
/// or the rounding is defined. Quantization may be one level off in a few places.
fn converted(from: DType, to: DType) -> Limit {
    if to.is_quantized() && from != to {
        Limit::Nmse(1e-4)
    } else {
        Limit::Exact
    }
}
