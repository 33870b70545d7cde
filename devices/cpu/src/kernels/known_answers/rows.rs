//! Operations along rows, and operations that select and arrange elements.

use super::*;

#[test]
fn rows_reduced() {
    let x = [1.0, 2.0, 3.0, -4.0, 0.0, 4.0];
    near(&one(&[3, 2], &x, |g, a| g.sum(a)), &[6.0]);
    near(&one(&[3, 2], &x, |g, a| g.sum_rows(a)), &[6.0, 0.0]);
    near(&one(&[3, 2], &x, |g, a| g.mean(a)), &[2.0, 0.0]);
    near(
        &one(&[3, 2], &x, |g, a| g.cumsum(a)),
        &[1., 3., 6., -4., -4., 0.],
    );
    let r = (14f32 / 3.0).sqrt();
    let s = (32f32 / 3.0).sqrt();
    near(
        &one(&[3, 2], &x, |g, a| g.rms_norm(a, 0.0)),
        &[1. / r, 2. / r, 3. / r, -4. / s, 0., 4. / s],
    );
    let t = (2f32 / 3.0).sqrt();
    near(
        &one(&[3, 2], &x, |g, a| g.norm(a, 0.0)),
        &[-1. / t, 0., 1. / t, -4. / s, 0., 4. / s],
    );
    near(&one(&[2], &[3., 4.], |g, a| g.l2_norm(a, 0.0)), &[0.6, 0.8]);
    // Sums over a transposed source.
    let turned = one(&[3, 2], &x, |g, a| {
        let a = g.transpose(a)?;
        g.sum_rows(a)
    });
    near(&turned, &[-3.0, 2.0, 7.0]);
}

#[test]
fn argsort_top_k_and_argmax() {
    let mut g = Graph::new();
    let x = input(&mut g, &[4, 2]);
    let largest = g.argmax(x).unwrap();
    let up = g.argsort(x, SortOrder::Ascending).unwrap();
    let down = g.argsort(x, SortOrder::Descending).unwrap();
    let top = g.top_k(x, 2).unwrap();
    let mut bench = Bench::new(&g, &device(1)).unwrap();
    bench.write(x, &[1f32, 9., -3., 9., 4., 3., 2., 1.]);
    bench.run().unwrap();
    assert_eq!(bench.read::<i32>(largest), [1, 0]);
    let ascending = bench.read::<i32>(up);
    assert_eq!(ascending[..2], [2, 0]);
    assert_eq!(ascending[4..], [3, 2, 1, 0]);
    assert_eq!(bench.read::<i32>(down), [1, 3, 0, 2, 0, 1, 2, 3]);
    let mut top = bench.read::<i32>(top);
    top[..2].sort_unstable();
    top[2..].sort_unstable();
    assert_eq!(top, [1, 3, 0, 1]);
}

#[test]
fn repeat_and_concat_arrange_elements() {
    near(
        &one(&[2], &[1., 2.], |g, a| g.repeat(a, [4, 2, 1, 1])),
        &[1., 2., 1., 2., 1., 2., 1., 2.],
    );
    let pair: [(&[usize], &[f32]); 2] = [(&[2, 1], &[1., 2.]), (&[2, 1], &[3., 4.])];
    near(&two(pair, |g, a, b| g.concat(a, b, 0)), &[1., 2., 3., 4.]);
    let stacked = two(pair, |g, a, b| {
        let stacked = g.concat(a, b, 1)?;
        let turned = g.transpose(stacked)?;
        g.cont(turned)
    });
    near(&stacked, &[1., 3., 2., 4.]);
    let padded = one(&[2], &[1., 2.], |g, a| g.pad(a, [1, 1, 0, 0], [0, 0, 0, 0]));
    near(&padded, &[0., 0., 0., 0., 1., 2.]);
    let mut g = Graph::new();
    g.arange(1.0, 2.0, 0.25).unwrap();
    near(&evaluate(&g, &[]), &[1.0, 1.25, 1.5, 1.75]);
    let masked = one(&[3, 2], &[1.0; 6], |g, a| g.diag_mask_inf(a, 1));
    let no = f32::NEG_INFINITY;
    near(&masked, &[1., 1., no, 1., 1., 1.]);
}

#[test]
fn get_rows_and_set_rows() {
    let mut g = Graph::new();
    let table = input(&mut g, &[32, 3]);
    let quantized = g.cast(table, DType::Q8_0).unwrap();
    let ids = integers(&mut g, &[2]);
    let rows = g.get_rows(quantized, ids).unwrap();
    let cache = g.leaf("cache", DType::F16, [32, 4, 1, 1]).unwrap();
    let cache = g.set_rows(rows, ids, cache).unwrap();
    let out = g.cast(cache, DType::F32).unwrap();
    let x: Vec<f32> = (0..96).map(|i| (i / 32 + 1) as f32).collect();
    let mut bench = Bench::new(&g, &device(1)).unwrap();
    bench.write(table, &x);
    bench.write(ids, &[2, 0]);
    bench.run().unwrap();
    let out = bench.read::<f32>(out);
    let firsts: Vec<_> = out.chunks(32).map(|row| row[5].round()).collect();
    assert_eq!(firsts, [1.0, 0.0, 3.0, 0.0]);
}

#[test]
fn the_last_duplicate_row_index_wins() {
    let mut g = Graph::new();
    let rows = input(&mut g, &[2000, 3]);
    let ids = integers(&mut g, &[3]);
    let cache = g.leaf("cache", DType::F32, [2000, 2, 1, 1]).unwrap();
    let cache = g.set_rows(rows, ids, cache).unwrap();
    let x: Vec<f32> = (0..6000).map(|i| (i / 2000) as f32 + 1.0).collect();
    let mut bench = Bench::new(&g, &device(4)).unwrap();
    bench.write(rows, &x);
    bench.write(ids, &[1, 1, 1]);
    for _ in 0..20 {
        bench.run().unwrap();
        assert_eq!(bench.read::<f32>(cache)[2000..], [3.0; 2000]);
    }
}

#[test]
fn rope_rotates_pairs() {
    let mut g = Graph::new();
    let x = input(&mut g, &[4, 1, 2]);
    let positions = integers(&mut g, &[2]);
    let normal = g
        .rope(x, positions, None, Rope::new(4, RopeMode::Normal, 100.0))
        .unwrap();
    let neox = g
        .rope(x, positions, None, Rope::new(2, RopeMode::Neox, 100.0))
        .unwrap();
    let mut bench = Bench::new(&g, &device(1)).unwrap();
    bench.write(x, &[1f32, 0., 1., 0., 1., 2., 3., 4.]);
    bench.write(positions, &[0, 2]);
    bench.run().unwrap();
    // Angles at position 2: 2 and 2 / 10.
    let (s, c) = 2f32.sin_cos();
    let (t, d) = 0.2f32.sin_cos();
    let turned = [c - 2. * s, s + 2. * c, 3. * d - 4. * t, 3. * t + 4. * d];
    let got = bench.read::<f32>(normal);
    near(&got[..4], &[1., 0., 1., 0.]);
    near(&got[4..], &turned);
    let got = bench.read::<f32>(neox);
    near(&got[4..], &[c - 2. * s, s + 2. * c, 3., 4.]);
}

#[test]
fn soft_max_with_mask_and_sinks() {
    let mut g = Graph::new();
    let x = input(&mut g, &[3, 1, 2]);
    let mask = input(&mut g, &[3, 1]);
    let sinks = input(&mut g, &[2]);
    g.soft_max(x, Some(mask), Some(sinks), 2.0, 0.0).unwrap();
    let no = f32::NEG_INFINITY;
    let out = evaluate(
        &g,
        &[
            (x, &[0.5, 0., 9., 0., 0., 9.]),
            (mask, &[0., 1., no]),
            (sinks, &[0., no]),
        ],
    );
    let e = std::f32::consts::E;
    let both = e / (1. + 2. * e);
    near(&out, &[both, both, 0., 1. / (1. + e), e / (1. + e), 0.]);
}

#[test]
fn copies_between_types_and_layouts() {
    let x = numbers(4, 64 * 6);
    // Through a transposed copy and back.
    let back = one(&[64, 6], &x, |g, a| {
        let a = g.transpose(a)?;
        let half = g.cast(a, DType::BF16)?;
        let half = g.transpose(half)?;
        g.cast(half, DType::F32)
    });
    for (a, b) in back.iter().zip(&x) {
        assert!((a - b).abs() < 0.01);
    }
    for dtype in [DType::F16, DType::Q8_0, DType::Q4_0] {
        let mut g = Graph::new();
        let a = input(&mut g, &[64, 6]);
        let into = g.leaf("into", dtype, [64, 3, 2, 1]).unwrap();
        let copy = g.cpy(a, into).unwrap();
        let out = g.leaf("out", DType::F32, [32, 12, 1, 1]).unwrap();
        g.cpy(copy, out).unwrap();
        let got = evaluate(&g, &[(a, &x)]);
        let mut bytes = vec![0; 6 * dtype.row_bytes(64).unwrap()];
        samite_quant::encode_row(dtype, &x, &mut bytes).unwrap();
        let mut expected = vec![0.0; x.len()];
        samite_quant::decode_row(dtype, &bytes, &mut expected).unwrap();
        assert_eq!(got, expected, "{dtype}");
    }
    let mut g = Graph::new();
    let a = input(&mut g, &[3]);
    let whole = g.cast(a, DType::I32).unwrap();
    g.cast(whole, DType::F32).unwrap();
    assert_eq!(evaluate(&g, &[(a, &[1.0, -2.0, 3.9])]), [1.0, -2.0, 3.0]);
}
