//! Matrix products.

use super::*;

#[test]
fn products_of_every_type() {
    let (k, m, n) = (256, 9, 7);
    let x = numbers(2, k * n);
    for dtype in
        DType::all().filter(|&dtype| samite_quant::can_decode(dtype) && dtype != DType::F64)
    {
        let bytes = weights(dtype, 1, k * m);
        let mut decoded = vec![0.0; k * m];
        samite_quant::decode_row(dtype, &bytes, &mut decoded).unwrap();
        for columns in [1, n] {
            let mut g = Graph::new();
            let weights = g.leaf("w", dtype, [k, m, 1, 1]).unwrap();
            let input = input(&mut g, &[k, columns]);
            let product = g.mul_mat(weights, input).unwrap();
            let mut bench = Bench::new(&g, &device(1)).unwrap();
            bench.write(weights, &bytes);
            bench.write(input, &x[..k * columns]);
            bench.run().unwrap();
            let got = bench.read::<f32>(product);
            let (mut error, mut power) = (0.0, 0.0);
            for c in 0..columns {
                for r in 0..m {
                    let pairs = decoded[r * k..][..k].iter().zip(&x[c * k..]);
                    let expected: f64 = pairs.map(|(a, b)| f64::from(a * b)).sum();
                    error += (f64::from(got[c * m + r]) - expected).powi(2);
                    power += expected * expected;
                }
            }
            assert!(error / power < 2e-4, "{dtype} {columns}: {}", error / power);
        }
    }
}

#[test]
fn products_broadcast_weights_and_read_transposed_columns() {
    // Two matrices of columns share one matrix of weights. Columns are transposed.
    let mut g = Graph::new();
    let w = input(&mut g, &[2, 3]);
    let x = input(&mut g, &[1, 2, 2]);
    let turned = g.permute(x, [1, 0, 2, 3]).unwrap();
    g.mul_mat(w, turned).unwrap();
    let out = evaluate(
        &g,
        &[(w, &[1., 0., 0., 1., 1., 1.]), (x, &[1., 2., 3., 4.])],
    );
    near(&out, &[1., 2., 3., 3., 4., 7.]);
}

#[test]
fn products_with_selected_experts() {
    let mut g = Graph::new();
    let experts = input(&mut g, &[2, 1, 3]);
    let x = input(&mut g, &[2, 1, 2]);
    let ids = integers(&mut g, &[2, 2]);
    let product = g.mul_mat_id(experts, x, ids).unwrap();
    let mut bench = Bench::new(&g, &device(1)).unwrap();
    bench.write(experts, &[1f32, 0., 0., 1., 1., 1.]);
    bench.write(x, &[1f32, 2., 3., 4.]);
    bench.write(ids, &[2, 0, 1, 2]);
    bench.run().unwrap();
    near(&bench.read(product), &[3., 1., 4., 7.]);
    // The memory holds old results, which -1 must overwrite.
    bench.write(ids, &[2, -1, -1, 0]);
    bench.run().unwrap();
    near(&bench.read(product), &[3., 0., 0., 3.]);
    bench.write(ids, &[-1, -1, -1, -1]);
    bench.run().unwrap();
    near(&bench.read(product), &[0.; 4]);
}
