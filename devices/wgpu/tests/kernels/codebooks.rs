//! Codebook types, whose blocks refer to grid points: decoded bit-identically to the reference,
//! used in products of all kinds, and with planted bugs in each decoder.

use crate::{device, mistaken, own};
use samite_core::{DType, Device, Op, Precision};
use samite_testing::{DECODED, FusionCase, Recipe};
use std::sync::Arc;

/// Builds a lookup of three table rows, each with two blocks.
fn lookup(dtype: DType) -> FusionCase {
    let mut work = FusionCase::default();
    let table = work.input(dtype, [512, 5, 1, 1], Recipe::UNIT);
    let numbers = Recipe::DistinctIds { limit: 5 };
    let numbers = work.input(DType::I32, [3, 1, 1, 1], numbers);
    let rows = work.graph.get_rows(table, numbers).unwrap();
    work.node(rows);
    work.results.push(rows);
    work
}

/// Builds products with these numbers of columns, by one matrix and by some of five experts.
fn products(dtype: DType, columns: &[usize]) -> FusionCase {
    let mut work = FusionCase::default();
    let weights = work.input(dtype, [512, 700, 1, 1], Recipe::UNIT);
    let experts = work.input(dtype, [256, 150, 5, 1], Recipe::UNIT);
    for &columns in columns {
        let x = work.input(DType::F32, [512, columns, 1, 1], Recipe::UNIT);
        let y = work.graph.mul_mat(weights, x).unwrap();
        let x = work.input(DType::F32, [256, 2, columns, 1], Recipe::UNIT);
        let chosen = Recipe::DistinctIds { limit: 5 };
        let chosen = work.input(DType::I32, [2, columns, 1, 1], chosen);
        let op = Op::MulMatId {
            precision: Precision::F32,
        };
        let sources = [Some(experts), Some(x), Some(chosen)];
        let z = work.graph.push(op, &sources).unwrap();
        for result in [y, z] {
            work.node(result);
            work.results.push(result);
        }
    }
    work
}

fn error(device: &Arc<dyn Device>, work: &FusionCase) -> f64 {
    work.error(7, &work.run(device, 7, false, &[&work.nodes]))
}

#[test]
fn codebook_rows_and_products_match_the_reference() {
    // With the smaller binding, weights are split.
    for parameters in ["", "subgroups=off,overlaps=off,binding=64KiB"] {
        let Some(device) = device(parameters) else {
            return;
        };
        for dtype in DECODED {
            assert_eq!(
                error(&device, &lookup(dtype)),
                0.0,
                "{dtype}, '{parameters}'"
            );
            let work = products(dtype, &[1, 3, 20]);
            let launches = own(&device).launch_count(&work.graph, &work.nodes).unwrap();
            assert!(
                launches > 7 || parameters.is_empty(),
                "{dtype}: {launches} launches"
            );
            let error = error(&device, &work);
            assert!(error <= 1e-11, "{dtype}, '{parameters}': {error:e}");
        }
    }
}

#[test]
fn codebook_products_by_cooperative_matrices_match_the_reference() {
    let Some(device) = device("") else { return };
    own(&device).emulate_matrices();
    for dtype in DECODED {
        let error = error(&device, &products(dtype, &[20]));
        // Weights and columns have half precision there; otherwise the error would be smaller.
        assert!((1e-9..4e-6).contains(&error), "{dtype}: {error:e}");
    }
}

/// Decoders with one planted bug each. The test must detect all of them.
#[test]
fn planted_decoder_bugs_are_detected() {
    use DType as T;
    for (dtype, right, wrong) in [
        (T::IQ1_S, ">> 15u) * 255u", ">> 15u) * 127u"),
        (T::IQ1_S, "(n % 4u * 3u)) & 7u", "(n % 4u * 3u)) & 3u"),
        (T::IQ1_S, "at + 34u + group / 2u * 2u", "at + 34u"),
        (T::IQ1_S, "x - 2.0 * marks", "x"),
        (T::IQ1_M, "((high >> 16u) & 0xf000u)", "0u"),
        (T::IQ1_M, ">> (group % 4u * 3u)", ""),
        (T::IQ1_M, "(bits_a(at, n) >> 3u) & 1u", "1u"),
        (T::IQ1_M, "grids[4352u + point]", "grids[4351u + point]"),
        (T::IQ2_XXS, "even_a(word_a(at + 6u", "(word_a(at + 6u"),
        (T::IQ2_XXS, "k / 8u * 8u + k % 8u / 2u", "k / 2u"),
        (T::IQ2_XXS, "(f32(s) + 0.5)", "f32(s)"),
        (T::IQ2_XS, "& 511u", "& 255u"),
        (T::IQ2_XS, ">> (group % 2u * 4u)", ""),
        (T::IQ2_XS, "grids[512u + point]", "grids[point]"),
        (T::IQ2_S, ">> (n % 4u * 2u)) & 3u", ">> (n % 4u * 2u)) & 1u"),
        (T::IQ2_S, "byte_a(at + 34u + n)", "byte_a(at + 33u + n)"),
        (T::IQ2_S, "at + 74u + group / 2u", "at + 73u + group / 2u"),
        (T::IQ3_XXS, "(n % 4u * 7u)", "(n % 4u * 8u)"),
        (T::IQ3_XXS, "byte_a(at + 2u + k)", "byte_a(at + 2u)"),
        (T::IQ3_XXS, "0.5 * from_f16", "0.25 * from_f16"),
        (T::IQ3_S, "| (high << 8u)", ""),
        (T::IQ3_S, "byte_a(at + 74u + n)", "0u"),
        (T::IQ3_S, "group / 2u % 2u * 4u", "group % 2u * 4u"),
        (T::IQ3_S, "x * (1.0 - 2.0 * marks)", "x"),
    ] {
        let Some(device) = mistaken("", right, wrong) else {
            return;
        };
        let error = error(&device, &lookup(dtype));
        assert!(error > 1e-6, "{dtype}: '{wrong}' in place of '{right}'");
    }
}

/// Decoders for eight and for four elements share their text; those for whole groups have their
/// own.
#[test]
fn planted_group_decoder_bugs_are_detected() {
    for (right, wrong) in [
        ("(k + j) / 4u", "k / 4u"),
        ("(k + j) / 2u", "k / 2u"),
        ("marks >> 4u) * scale", "marks) * scale"),
        ("k + j + 1u", "k + j"),
    ] {
        let Some(device) = mistaken("", right, wrong) else {
            return;
        };
        let error = error(&device, &products(DType::IQ2_XS, &[1]));
        assert!(error > 1e-6, "'{wrong}' in place of '{right}'");
    }
}
