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

/// Every case of the conformance suite: over every operation, its types, odd sizes, strides,
/// broadcasts, views, and results in place. Always the same ones, in the same order, under unique
/// names.
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

/// Every type that weights can have.
fn weight_types() -> impl Iterator<Item = DType> {
    FLOATS.into_iter().chain(QUANTIZED).chain(DECODED)
}

/// Returns the limit for results of a type: that of f32, or what the rounding to a shorter float
/// allows.
fn rounded_to(dtype: DType) -> Limit {
    Limit::Nmse(match dtype {
        DType::F16 => 1e-6,
        DType::BF16 => 1e-5,
        _ => 1e-7,
    })
}

/// Returns the limit for conversions from one type to another: exact where nothing is rounded or
/// the rounding is defined; quantization may end one level off in a few places.
fn converted(from: DType, to: DType) -> Limit {
    if to.is_quantized() && from != to {
        Limit::Nmse(1e-4)
    } else {
        Limit::Exact
    }
}
