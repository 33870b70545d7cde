//! Small known answers for every operation, run through the whole device.

mod attention;
mod elementwise;
mod products;
mod rows;

use crate::harness::*;
use samite_core::*;

/// A function of one number.
type ScalarFunction = fn(f32) -> f32;

fn near(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{got:?}");
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        let close = (a - b).abs() <= 1e-5 * b.abs().max(1.0);
        assert!(
            close || a == b,
            "element {i}: {got:?} instead of {expected:?}"
        );
    }
}

/// Runs `build` on one F32 input.
fn one(
    extents: &[usize],
    x: &[f32],
    build: impl Fn(&mut Graph, TensorId) -> Result<TensorId>,
) -> Vec<f32> {
    let mut g = Graph::new();
    let id = input(&mut g, extents);
    build(&mut g, id).unwrap();
    evaluate(&g, &[(id, x)])
}

/// Runs `build` on two F32 inputs.
fn two(
    [a, b]: [(&[usize], &[f32]); 2],
    build: impl Fn(&mut Graph, TensorId, TensorId) -> Result<TensorId>,
) -> Vec<f32> {
    let mut g = Graph::new();
    let (x, y) = (input(&mut g, a.0), input(&mut g, b.0));
    build(&mut g, x, y).unwrap();
    evaluate(&g, &[(x, a.1), (y, b.1)])
}
