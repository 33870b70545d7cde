//! Products by cooperative matrices, whose columns are halves.

use crate::{device, own};
use samite_core::DType;
use samite_testing::{Contents, FusionCase, Recipe};

#[test]
fn columns_beyond_halves_stay_finite_but_nan_stays_nan() {
    const LENGTH: usize = 64;
    const COLUMNS: usize = 20;
    let Some(device) = device("") else { return };
    own(&device).emulate_matrices();
    let mut case = FusionCase::default();
    let w = case.input(DType::F16, [LENGTH, 32, 1, 1], Recipe::UNIT);
    let shape = [LENGTH, COLUMNS, 1, 1];
    let x = case.graph.input("x", DType::F32, shape).unwrap();
    let mut columns = vec![1.0f32; LENGTH * COLUMNS];
    let strange = [(3, f32::NAN), (4, 1e6), (5, f32::NEG_INFINITY)];
    for (column, value) in strange {
        columns[LENGTH * column + 7] = value;
    }
    let bytes = bytemuck::cast_slice(&columns).to_vec();
    case.inputs.push((x, Contents::Bytes(bytes)));
    let y = case.graph.mul_mat(w, x).unwrap();
    case.node(y);
    case.results.push(y);
    let found = case.run(&device, 1, false, &[&case.nodes]);
    let found: &[f32] = bytemuck::cast_slice(&found[0]);
    for (column, results) in found.chunks(32).enumerate() {
        let are_nan = results.iter().all(|result| result.is_nan());
        let are_finite = results.iter().all(|result| result.is_finite());
        let is_expected = if column == 3 { are_nan } else { are_finite };
        assert!(is_expected, "column {column}: {results:?}");
    }
}
