//! Properties of rows of the grid types, besides their bytes.
#![allow(clippy::unwrap_used)] // tests fail by panicking

use proptest::prelude::*;
use samite_quant::blocks::*;
use samite_quant::{Decode, Quantize};

/// Returns the decoded elements of the block for `x`.
fn there_and_back<B>(x: &[f32; 256], importance: Option<&[f32; 256]>) -> [f32; 256]
where
    B: Quantize<Elements = [f32; 256]> + Decode,
{
    let mut out = [f32::NAN; 256];
    B::quantize(x, importance, 1.0).decode(&mut out);
    out
}

type ThereAndBack = fn(&[f32; 256], Option<&[f32; 256]>) -> [f32; 256];

/// For each type, the maximum root mean square error relative to that of evenly distributed
/// elements.
const TYPES: [(ThereAndBack, f32); 7] = [
    (there_and_back::<BlockIq1S>, 0.6),
    (there_and_back::<BlockIq1M>, 0.55),
    (there_and_back::<BlockIq2Xxs>, 0.35),
    (there_and_back::<BlockIq2Xs>, 0.31),
    (there_and_back::<BlockIq2S>, 0.24),
    (there_and_back::<BlockIq3Xxs>, 0.19),
    (there_and_back::<BlockIq3S>, 0.15),
];

#[test]
#[cfg_attr(miri, ignore = "slow, and nothing but numbers")]
fn quantization_errors_are_small_with_and_without_importance() {
    let mut state = 1u32;
    let x = std::array::from_fn(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    });
    for (i, (there_and_back, limit)) in TYPES.into_iter().enumerate() {
        for importance in [None, Some(&[0.5; 256])] {
            let y = there_and_back(&x, importance);
            let errors = x.iter().zip(&y).map(|(x, y)| (x - y) * (x - y));
            let squares = x.iter().map(|x| x * x);
            let error = (errors.sum::<f32>() / squares.sum::<f32>()).sqrt();
            assert!(error < limit, "type {i}: {error}");
        }
    }
}

fn odd_number() -> impl Strategy<Value = f32> {
    prop_oneof![
        any::<f32>(),
        -1.0f32..1.0,
        Just(0.0),
        prop::num::f32::ANY,
        prop::sample::select(vec![
            f32::NAN,
            f32::INFINITY,
            f32::MAX,
            f32::MIN_POSITIVE,
            1e-45
        ]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 0 } else { 64 }))]

    #[test]
    fn any_floats_encode_to_a_valid_block(
        odd in prop::collection::vec(odd_number(), 256),
        weights in prop::collection::vec(prop_oneof![Just(0.0), Just(f32::MAX), 0.0f32..1.0], 256),
        tame in 0usize..=256,
    ) {
        let x = std::array::from_fn(|i| if i < tame { i as f32 - 100.0 } else { odd[i] });
        for (there_and_back, _) in TYPES {
            there_and_back(&x, None);
            there_and_back(&x, Some(weights.as_slice().try_into().unwrap()));
        }
    }
}
