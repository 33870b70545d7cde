//! Bit-exactness against the output of ggml's reference functions: see `fixtures/make.py`.

use samite_core::DType;
use samite_quant::{can_decode, can_encode, decode_row, encode_row, quantize_row};
use std::path::PathBuf;

fn fixture(folder: &str, name: &str) -> Vec<u8> {
    let path: PathBuf = [
        env!("CARGO_MANIFEST_DIR"),
        "tests",
        "fixtures",
        folder,
        &format!("{name}.bin"),
    ]
    .iter()
    .collect();
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let (numbers, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    numbers.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn decodes_bit_for_bit_as_ggml() {
    let mut seen = 0;
    // ggml has no function to decode Q8_1. The others are plain numbers.
    for dtype in DType::all().filter(|&d| can_decode(d) && d.is_quantized() && d != DType::Q8_1) {
        let file = fixture("decode", dtype.name());
        let blocks = file.len() / (dtype.block_bytes() + 4 * dtype.block_len());
        let (bytes, expected) = file.split_at(blocks * dtype.block_bytes());
        let expected = floats(expected);
        assert_eq!(expected.len(), blocks * dtype.block_len(), "{dtype}");
        let mut out = vec![f32::NAN; expected.len()];
        decode_row(dtype, bytes, &mut out).unwrap();
        for (i, (got, want)) in out.iter().zip(&expected).enumerate() {
            let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
            assert!(same, "{dtype}, element {i}: {got:e} instead of {want:e}");
        }
        seen += 1;
    }
    assert_eq!(seen, 26);
}

#[test]
fn encodes_byte_for_byte_as_ggml() {
    let rows = floats(&fixture("encode", "rows"));
    // Miri is slow.
    let rows = if cfg!(miri) { &rows[..256] } else { &rows[..] };
    let mut seen = 0;
    for dtype in DType::all().filter(|&d| can_encode(d) && d != DType::F32) {
        let expected = fixture("encode", dtype.name());
        let mut out = vec![0; rows.len() / dtype.block_len() * dtype.block_bytes()];
        encode_row(dtype, rows, &mut out).unwrap();
        assert!(out.len() == expected.len() || cfg!(miri), "{dtype}");
        let size = dtype.block_bytes();
        for (i, (got, want)) in out.chunks(size).zip(expected.chunks(size)).enumerate() {
            let at = i * dtype.block_len();
            if is_left_open(dtype, &rows[at..][..dtype.block_len()]) {
                continue;
            }
            assert_eq!(got, want, "{dtype}, block {i} (row {})", at / 256);
        }
        seen += 1;
    }
    assert_eq!(seen, 23);
}

#[test]
#[cfg_attr(miri, ignore = "slow, and nothing but numbers")]
fn quantizes_byte_for_byte_as_ggml() {
    let rows = floats(&fixture("encode", "rows"));
    let importance = floats(&fixture("quantize", "importance"));
    let columns = importance.len();
    let mut better = 0;
    let mut check = |dtype: DType, file: &str, rows: &[f32], importance: Option<&[f32]>| {
        let expected = fixture("quantize", file);
        let size = dtype.row_bytes(columns).unwrap();
        assert_eq!(expected.len(), rows.len() / columns * size, "{file}");
        for (row, (x, want)) in rows.chunks(columns).zip(expected.chunks(size)).enumerate() {
            let mut out = vec![0; size];
            quantize_row(dtype, x, importance, &mut out).unwrap();
            let blocks = out
                .chunks(dtype.block_bytes())
                .zip(want.chunks(dtype.block_bytes()));
            for (block, (got, want)) in blocks.enumerate() {
                let x = &x[block * dtype.block_len()..][..dtype.block_len()];
                if is_misplaced(dtype, x) {
                    let loss = |bytes| {
                        let mut out = [0.0; 256];
                        decode_row(dtype, bytes, &mut out).unwrap();
                        let errors = x.iter().zip(out).map(|(x, out)| (x - out) * (x - out));
                        errors.sum::<f32>()
                    };
                    assert!(loss(got) <= loss(want), "{file}, row {row}, block {block}");
                    better += usize::from(loss(got) < 0.5 * loss(want));
                } else {
                    assert_eq!(got, want, "{file}, row {row}, block {block}");
                }
            }
        }
    };
    for &dtype in WEIGHTED {
        check(dtype, dtype.name(), &rows, Some(&importance));
    }
    for &dtype in WEIGHTED_EVENLY {
        check(dtype, &format!("{}-even", dtype.name()), &rows, None);
    }
    let rows = floats(&fixture("quantize", "few"));
    let importance = floats(&fixture("quantize", "few-importance"));
    for dtype in [DType::Q4_1, DType::Q2_K, DType::Q4_K, DType::Q5_K] {
        let file = format!("{}-few", dtype.name());
        check(dtype, &file, &rows, Some(&importance));
    }
    assert!(better >= 2, "{better}");
}

#[test]
#[cfg_attr(miri, ignore = "slow, and nothing but numbers")]
fn odd_rows_quantize_as_in_ggml() {
    let numbers = floats(&fixture("quantize", "odd-rows"));
    let (rows, importance) = numbers.split_at(numbers.len() / 2);
    let mut seen = 0;
    for &dtype in WEIGHTED.iter().filter(|dtype| !can_encode(**dtype)) {
        let expected = fixture("quantize", &format!("{}-odd", dtype.name()));
        let size = dtype.block_bytes();
        assert_eq!(expected.len(), rows.len() / 256 * size);
        let rows = rows.chunks(256).zip(importance.chunks(256));
        for (row, ((x, importance), want)) in rows.zip(expected.chunks(size)).enumerate() {
            let mut out = vec![0; size];
            quantize_row(dtype, x, Some(importance), &mut out).unwrap();
            if !is_misplaced(dtype, x) {
                assert_eq!(out, want, "{dtype}, row {row}");
            }
        }
        seen += 1;
    }
    assert_eq!(seen, 7);
}

/// Types whose files depend on an importance matrix.
#[rustfmt::skip]
const WEIGHTED: &[DType] = &[
    DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q2_K, DType::Q3_K, DType::Q4_K,
    DType::Q5_K, DType::Q6_K, DType::IQ4_NL, DType::IQ4_XS,
    DType::IQ1_S, DType::IQ1_M, DType::IQ2_XXS, DType::IQ2_XS, DType::IQ2_S, DType::IQ3_XXS,
    DType::IQ3_S,
];

/// Types in `WEIGHTED` whose files use something else than rows of activations, or do not exist.
#[rustfmt::skip]
const WEIGHTED_EVENLY: &[DType] = &[DType::IQ4_NL, DType::IQ1_M, DType::IQ2_S, DType::IQ3_XXS,
    DType::IQ3_S];

#[test]
#[cfg_attr(miri, ignore = "slow, and nothing but numbers")]
fn q6_k_tries_every_scale_that_ggml_tries() {
    // Rows that the scale of one step of the search fits best, from the first step on, and rows
    // that several fit.
    let rows = floats(&fixture("encode", "steps"));
    let expected = fixture("encode", "q6_K-steps");
    let mut out = vec![0; expected.len()];
    encode_row(DType::Q6_K, &rows, &mut out).unwrap();
    let size = DType::Q6_K.block_bytes();
    assert!(out.len() > 20 * size && out.len() == rows.len() / 256 * size);
    for (row, (got, want)) in out.chunks(size).zip(expected.chunks(size)).enumerate() {
        assert_eq!(got, want, "row {row}");
    }
}

/// Returns whether ggml misplaces the points of a block: those after a group of zeros.
fn is_misplaced(dtype: DType, elements: &[f32]) -> bool {
    let is_zero = |x: &[f32]| x.iter().all(|&x| x == 0.0);
    dtype == DType::IQ3_S && elements.chunks(32).any(is_zero) && !is_zero(elements)
}

/// Returns whether ggml leaves bytes of a block uninitialised: codes of a block of zeros.
fn is_left_open(dtype: DType, elements: &[f32]) -> bool {
    dtype == DType::IQ4_NL && elements.iter().all(|x| x.abs() < 1e-15)
}
