//! Properties of every type and any input.
#![allow(clippy::unwrap_used)] // tests fail by panicking

use proptest::prelude::*;
use samite_core::{DType, Error};
use samite_quant::{can_decode, can_encode, decode_row, encode_row};

const ROW: usize = 256;

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    decode_row(dtype, bytes, &mut out).unwrap();
    out
}

fn encode(dtype: DType, x: &[f32]) -> Vec<u8> {
    let mut out = vec![0; dtype.row_bytes(x.len()).unwrap()];
    encode_row(dtype, x, &mut out).unwrap();
    out
}

/// Returns the RMS error, relative to the RMS of `x`.
fn relative_error(x: &[f32], y: &[f32]) -> f64 {
    let square = |v: f32| f64::from(v) * f64::from(v);
    let error: f64 = x.iter().zip(y).map(|(a, b)| square(a - b)).sum();
    let signal: f64 = x.iter().copied().map(square).sum();
    (error / signal).sqrt()
}

/// Every type that can be encoded, with the largest [`relative_error`] of a row of evenly
/// distributed numbers.
const LIMITS: [(DType, f64); 24] = [
    (DType::F32, 0.0),
    (DType::F16, 0.00025),
    (DType::BF16, 0.002),
    (DType::F8_E4M3, 0.032),
    (DType::Q4_0, 0.085),
    (DType::Q4_1, 0.078),
    (DType::Q5_0, 0.041),
    (DType::Q5_1, 0.038),
    (DType::Q8_0, 0.005),
    (DType::Q8_1, 0.005),
    (DType::Q2_K, 0.31),
    (DType::Q3_K, 0.165),
    (DType::Q4_K, 0.07),
    (DType::Q5_K, 0.036),
    (DType::Q6_K, 0.0175),
    (DType::Q8_K, 0.0052),
    (DType::IQ4_NL, 0.087),
    (DType::IQ4_XS, 0.083),
    (DType::TQ1_0, 0.62),
    (DType::TQ2_0, 0.62),
    (DType::MXFP4, 0.185),
    (DType::NVFP4, 0.13),
    (DType::Q1_0, 0.62),
    (DType::Q2_0, 0.62),
];

#[test]
fn the_limits_cover_every_encodable_type() {
    for dtype in DType::all() {
        let listed = LIMITS.iter().any(|(d, _)| *d == dtype);
        assert_eq!(can_encode(dtype), listed, "{dtype}");
        assert!(can_decode(dtype) || !can_encode(dtype), "{dtype}");
    }
    assert!(can_decode(DType::F64) && !can_encode(DType::F64));
}

#[test]
fn unknown_formats_and_wrong_lengths_are_errors() {
    for dtype in DType::all() {
        let (length, size) = (dtype.block_len(), dtype.block_bytes());
        let mut out = vec![0.0; 2 * length];
        let bytes = vec![0; 2 * size];
        match decode_row(dtype, &bytes, &mut out) {
            Ok(()) => assert!(can_decode(dtype)),
            Err(Error::InvalidArgument(message)) => {
                assert!(!can_decode(dtype) && message.contains(dtype.name()));
                continue;
            }
            Err(other) => panic!("{dtype}: {other}"),
        }
        for wrong in [0, size, 2 * size - 1] {
            let error = decode_row(dtype, &bytes[..wrong], &mut out).unwrap_err();
            assert!(matches!(error, Error::Shape(_)), "{dtype}: {error}");
        }
        if length > 1 {
            let error = decode_row(dtype, &bytes[..size], &mut out[..length - 1]).unwrap_err();
            assert!(matches!(error, Error::Shape(_)), "{dtype}: {error}");
        }
        decode_row(dtype, &[], &mut []).unwrap();

        let src = vec![0.0; 2 * length];
        match encode_row(dtype, &src, &mut vec![0; 2 * size - 1]).unwrap_err() {
            Error::Shape(_) => assert!(can_encode(dtype)),
            Error::InvalidArgument(_) => assert!(!can_encode(dtype)),
            other => panic!("{dtype}: {other}"),
        }
    }
}

#[test]
fn f64_rows_are_rounded_once() {
    let numbers = [1.0 + 2f64.powi(-24) + 2f64.powi(-50), -0.0, f64::MAX, 0.1];
    let bytes: Vec<u8> = numbers.iter().flat_map(|v| v.to_le_bytes()).collect();
    let expected = [1.0 + 2f32.powi(-23), -0.0, f32::INFINITY, 0.1];
    for (got, want) in decode(DType::F64, &bytes).iter().zip(expected) {
        assert_eq!(got.to_bits(), want.to_bits());
    }
}

#[test]
fn zeros_decode_to_zeros() {
    for (dtype, _) in LIMITS {
        let y = decode(dtype, &encode(dtype, &[0.0; ROW]));
        assert!(y.iter().all(|&v| v == 0.0), "{dtype}");
    }
}

proptest! {
    #[test]
    fn any_bytes_decode_the_same_at_any_alignment(
        bytes in prop::collection::vec(any::<u8>(), 2 * 292),
        shift in 1usize..4,
    ) {
        for dtype in DType::all().filter(|&d| can_decode(d)) {
            let bytes = &bytes[..2 * dtype.block_bytes()];
            let mut moved = vec![0; shift];
            moved.extend_from_slice(bytes);
            let (a, b) = (decode(dtype, bytes), decode(dtype, &moved[shift..]));
            let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            prop_assert_eq!(bits(a), bits(b), "{}", dtype);
        }
    }

    #[test]
    fn any_numbers_encode(bits in prop::collection::vec(any::<u32>(), ROW)) {
        let x: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
        for (dtype, _) in LIMITS {
            decode(dtype, &encode(dtype, &x));
        }
    }

    #[test]
    fn rows_with_a_few_extreme_floats_encode(
        mut x in prop::collection::vec(-1.0f32..1.0, ROW),
        odd in prop::collection::vec((0..ROW, prop::num::f32::ANY), 1..4),
    ) {
        for (i, v) in odd {
            x[i] = v;
        }
        for (dtype, _) in LIMITS {
            decode(dtype, &encode(dtype, &x));
        }
    }

    #[test]
    fn errors_stay_within_the_formats_limits(
        x in prop::collection::vec(-1.0f32..1.0, ROW),
        exponent in -1i32..7,
    ) {
        let x: Vec<f32> = x.iter().map(|v| v * 2f32.powi(exponent)).collect();
        for (dtype, limit) in LIMITS {
            let error = relative_error(&x, &decode(dtype, &encode(dtype, &x)));
            prop_assert!(error <= limit, "{}: {} is above {}", dtype, error, limit);
        }
    }

    #[test]
    fn encoding_is_idempotent(
        x in prop::collection::vec(-1.0f32..1.0, ROW),
        exponent in -6i32..7,
    ) {
        // Types that keep their largest magnitude, so that the scale is found again.
        let x: Vec<f32> = x.iter().map(|v| v * 2f32.powi(exponent)).collect();
        for dtype in [
            DType::F32, DType::F16, DType::BF16, DType::F8_E4M3, DType::Q4_0, DType::Q5_0,
            DType::Q8_0, DType::MXFP4, DType::TQ1_0, DType::TQ2_0,
        ] {
            let once = encode(dtype, &x);
            let twice = encode(dtype, &decode(dtype, &once));
            // -0 and +0 are the same number: codes may change between them, elements may not.
            prop_assert_eq!(decode(dtype, &once), decode(dtype, &twice), "{}", dtype);
        }
    }
}
