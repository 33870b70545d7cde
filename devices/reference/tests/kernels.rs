//! Known answers, computed by hand.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Case, as_f32s, as_i32s};
use samite_core::{DType, Glu, Op, Rope, RopeMode, SortOrder, Unary};
use samite_reference::{ReferenceDevice, ReferenceOptions};

#[test]
fn binary_operations_repeat_source_1() {
    let mut c = Case::default();
    let (a, b) = (
        c.counting([2, 3, 1, 1]),
        c.f32(&[1, 3], &[10.0, 20.0, 40.0]),
    );
    let (sum, quotient) = (c.graph.add(a, b).unwrap(), c.graph.div(a, b).unwrap());
    c.expect(sum, &[10.0, 11.0, 22.0, 23.0, 44.0, 45.0]);
    c.expect(quotient, &[0.0, 0.1, 0.1, 0.15, 0.1, 0.125]);
    let b = c.f32(&[2], &[1.0, -1.0]);
    let (product, difference) = (c.graph.mul(a, b).unwrap(), c.graph.sub(a, b).unwrap());
    c.expect(product, &[0.0, -1.0, 2.0, -3.0, 4.0, -5.0]);
    c.expect(difference, &[-1.0, 2.0, 1.0, 4.0, 3.0, 6.0]);
}

#[test]
fn views_are_read_through_their_strides() {
    let mut c = Case::default();
    let a = c.counting([3, 2, 1, 1]);
    let turned = c.graph.transpose(a).unwrap();
    let doubled = c.graph.scale_bias(turned, 2.0, 1.0).unwrap();
    c.expect(doubled, &[1.0, 7.0, 3.0, 9.0, 5.0, 11.0]);
    let last = c.graph.view(a, [2, 1, 1, 1], [12, 12, 12], 16).unwrap();
    let negated = c.graph.unary(last, Unary::Neg).unwrap();
    c.expect(negated, &[-4.0, -5.0]);
}

#[test]
fn elementwise_functions() {
    let mut c = Case::default();
    let x = c.f32(&[4], &[4.0, 9.0, -1.0, 0.25]);
    let g = &mut c.graph;
    let sqr = g.sqr(x).unwrap();
    let clamp = g.clamp(x, 0.0, 5.0).unwrap();
    let fill = g.fill(x, 3.5).unwrap();
    let arange = g.arange(1.0, 2.1, 0.5).unwrap();
    let sqrt = g.sqrt(clamp).unwrap();
    c.expect(sqr, &[16.0, 81.0, 1.0, 0.0625]);
    c.expect(clamp, &[4.0, 5.0, 0.0, 0.25]);
    c.expect(sqrt, &[2.0, 5f32.sqrt(), 0.0, 0.5]);
    c.expect(fill, &[3.5; 4]);
    c.expect(arange, &[1.0, 1.5, 2.0]);
}

#[test]
fn numbers_in_float64_are_not_rounded_between_operations() {
    let mut c = Case::default();
    let x = c.f32(&[4, 2], &[2.0, 3.0, 5.0, 6.0, 7.0, 8.0, 10.0, 11.0]);
    let table = c.f32(&[4, 3], &[0.0; 12]);
    let places = c.i32(&[2], &[2, 0]);
    let g = &mut c.graph;
    let roots = g.sqrt(x).unwrap();
    let stored = g.set_rows(roots, places, table).unwrap();
    let rows = g.get_rows(stored, places).unwrap();
    let copy = g.cont(rows).unwrap();
    let squares = g.sqr(copy).unwrap();
    let difference = g.sub(squares, x).unwrap();
    let largest = |float64| {
        let options = ReferenceOptions {
            float64,
            ..ReferenceOptions::default()
        };
        let device = ReferenceDevice::new(options);
        let differences = as_f32s(&c.run_on(&device, difference).unwrap());
        differences.into_iter().map(f32::abs).fold(0.0, f32::max)
    };
    // Roots of numbers up to 16 that are rounded to 53 bits, or to 24.
    assert!(largest(true) < 1e-14);
    assert!(largest(false) > 1e-8);
}

#[test]
fn add_id_selects_rows_by_index() {
    let mut c = Case::default();
    let a = c.counting([2, 2, 2, 1]);
    let b = c.f32(&[2, 3], &[10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
    let ids = c.i32(&[2, 2], &[2, 0, 1, 1]);
    let y = c.graph.add_id(a, b, ids).unwrap();
    c.expect(y, &[50.0, 61.0, 12.0, 23.0, 34.0, 45.0, 36.0, 47.0]);
    let ids = c.i32(&[2, 2], &[2, -1, 1, -1]);
    let y = c.graph.add_id(a, b, ids).unwrap();
    c.expect(y, &[50.0, 61.0, 2.0, 3.0, 34.0, 45.0, 6.0, 7.0]);
}

#[test]
fn reductions() {
    let mut c = Case::default();
    let a = c.counting([3, 2, 1, 1]);
    let g = &mut c.graph;
    let (sum, rows, mean, running) = (
        g.sum(a).unwrap(),
        g.sum_rows(a).unwrap(),
        g.mean(a).unwrap(),
        g.cumsum(a).unwrap(),
    );
    c.expect(sum, &[15.0]);
    c.expect(rows, &[3.0, 12.0]);
    c.expect(mean, &[1.0, 4.0]);
    c.expect(running, &[0.0, 1.0, 3.0, 3.0, 7.0, 12.0]);
}

/// An f16 accumulator of 4096 ones would stop at 2048.
#[test]
fn sums_of_f16_are_rounded_once() {
    let mut c = Case::default();
    let ones = c.raw("ones", DType::F16, &[4096], [0x00, 0x3c].repeat(4096));
    let sum = c.graph.sum(ones).unwrap();
    assert_eq!(c.run(sum), 0x6c00u16.to_le_bytes());
}

#[test]
fn norms() {
    let mut c = Case::default();
    let x = c.f32(&[2, 2], &[3.0, 4.0, 0.0, 0.0]);
    let g = &mut c.graph;
    let rms = g.rms_norm(x, 0.5).unwrap();
    let norm = g.norm(x, 0.75).unwrap();
    let l2 = g.l2_norm(x, 10.0).unwrap();
    let unit = g.l2_norm(x, 1e-6).unwrap();
    c.expect(rms, &[3.0 / 13f32.sqrt(), 4.0 / 13f32.sqrt(), 0.0, 0.0]);
    c.expect(norm, &[-0.5, 0.5, 0.0, 0.0]);
    c.expect(l2, &[0.3, 0.4, 0.0, 0.0]);
    c.expect(unit, &[0.6, 0.8, 0.0, 0.0]);
}

#[test]
fn matrix_products_share_weights_among_batches() {
    let mut c = Case::default();
    // Two matrices of one row: [1, 2] and [3, 4]; four batches of one row.
    let w = c.f32(&[2, 1, 2], &[1.0, 2.0, 3.0, 4.0]);
    let x = c.f32(&[2, 1, 4], &[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]);
    let y = c.graph.mul_mat(w, x).unwrap();
    c.expect(y, &[1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn quantized_weights_are_decoded() {
    let mut c = Case::default();
    // q8_0: d = 0.5, codes 1 to 32.
    let mut block = vec![0x00, 0x38];
    block.extend(1..=32u8);
    let w = c.raw("w", DType::Q8_0, &[32, 1], block);
    let x = c.f32(&[32, 1], &[2.0; 32]);
    let y = c.graph.mul_mat(w, x).unwrap();
    c.expect(y, &[528.0]);
}

#[test]
fn experts() {
    let mut c = Case::default();
    let experts = c.f32(&[1, 2, 3], &[1.0, 2.0, 10.0, 20.0, 100.0, 200.0]);
    let ids = c.i32(&[2, 2], &[2, 0, 1, 1]);
    let shared = c.f32(&[1, 1, 2], &[1.0, 3.0]);
    let each = c.f32(&[1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let y = c.graph.mul_mat_id(experts, shared, ids).unwrap();
    c.expect(y, &[100.0, 200.0, 1.0, 2.0, 30.0, 60.0, 30.0, 60.0]);
    let y = c.graph.mul_mat_id(experts, each, ids).unwrap();
    c.expect(y, &[100.0, 200.0, 2.0, 4.0, 30.0, 60.0, 40.0, 80.0]);
    let ids = c.i32(&[2, 2], &[2, -1, -1, 1]);
    let y = c.graph.mul_mat_id(experts, each, ids).unwrap();
    c.expect(y, &[100.0, 200.0, 0.0, 0.0, 0.0, 0.0, 40.0, 80.0]);
    let ids = c.i32(&[2, 2], &[2, -2, -1, 1]);
    let y = c.graph.mul_mat_id(experts, each, ids).unwrap();
    assert!(c.error(y).contains("index -2"));
}

#[test]
fn out_of_range_indices_are_errors_that_name_node_and_operand() {
    for bad in [3, -1] {
        let mut c = Case::default();
        let table = c.counting([2, 3, 1, 1]);
        let ids = c.i32(&[1], &[bad]);
        let y = c.graph.get_rows(table, ids).unwrap();
        c.graph.set_name(y, "picked");
        assert_eq!(
            c.error(y),
            format!("reference: get_rows 'picked': index {bad} in 'ids' is not in 0..3")
        );
    }
}

#[test]
fn get_rows_and_set_rows() {
    let mut c = Case::default();
    let table = c.counting([2, 3, 2, 1]);
    let ids = c.i32(&[2, 2], &[2, 0, 1, 1]);
    let y = c.graph.get_rows(table, ids).unwrap();
    c.expect(y, &[4.0, 5.0, 0.0, 1.0, 8.0, 9.0, 8.0, 9.0]);
    let rows = c.f32(&[2, 1, 2], &[-1.0, -2.0, -3.0, -4.0]);
    let numbers = c.raw("numbers", DType::I64, &[1], 1i64.to_le_bytes().to_vec());
    let written = c.graph.set_rows(rows, numbers, table).unwrap();
    c.expect(
        written,
        &[
            0.0, 1.0, -1.0, -2.0, 4.0, 5.0, 6.0, 7.0, -3.0, -4.0, 10.0, 11.0,
        ],
    );
}

#[test]
fn integers_stay_integers_in_get_rows() {
    let mut c = Case::default();
    let table = c.i32(&[1, 3], &[i32::MAX, 16_777_217, -5]);
    let ids = c.i32(&[2], &[1, 0]);
    let y = c.graph.get_rows(table, ids).unwrap();
    assert_eq!(as_i32s(&c.run(y)), [16_777_217, i32::MAX]);
}

#[test]
fn conversions() {
    let mut c = Case::default();
    let x = c.f32(&[4], &[1.5, -2.75, 0.0, 3e9]);
    let ints = c.graph.cast(x, DType::I32).unwrap();
    assert_eq!(as_i32s(&c.run(ints)), [1, -2, 0, i32::MAX]);
    let halves = c.graph.cast(x, DType::F16).unwrap();
    let back = c.graph.cast(halves, DType::F32).unwrap();
    c.expect(back, &[1.5, -2.75, 0.0, f32::INFINITY]);
    // Copies follow logical order, also into another shape and into a view.
    let into = c.f32(&[2, 4], &[9.0; 8]);
    let column = c.graph.view(into, [1, 4, 1, 1], [8, 32, 32], 4).unwrap();
    let copied = c.graph.cpy(x, column).unwrap();
    let whole = c.graph.cont(into).unwrap();
    c.expect(whole, &[9.0, 1.5, 9.0, -2.75, 9.0, 0.0, 9.0, 3e9]);
    assert_eq!(as_f32s(&c.run(copied))[0], 1.5);
}

#[test]
fn blocks_are_copied_unchanged() {
    let mut c = Case::default();
    let bytes: Vec<u8> = (0..66 * 4).map(|i| (i % 251) as u8).collect();
    let x = c.raw("w", DType::IQ2_XXS, &[256, 4], bytes.clone());
    let one = c.graph.rows(x, 3, 1).unwrap();
    let both = c.graph.concat(one, one, 1).unwrap();
    assert_eq!(c.run(both), [&bytes[198..], &bytes[198..]].concat());
    let wide = c.graph.concat(x, x, 0).unwrap();
    assert_eq!(c.run(wide)[..132], [&bytes[..66], &bytes[..66]].concat());
}

#[test]
fn repeat_concat_pad() {
    let mut c = Case::default();
    let x = c.counting([2, 1, 1, 1]);
    let g = &mut c.graph;
    let repeated = g.repeat(x, [4, 2, 1, 1]).unwrap();
    let wide = g.concat(x, x, 0).unwrap();
    let high = g.concat(x, repeated, 1);
    assert!(high.is_err());
    let padded = g.pad(x, [1, 1, 0, 0], [0, 0, 0, 1]).unwrap();
    c.expect(repeated, &[0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
    c.expect(wide, &[0.0, 1.0, 0.0, 1.0]);
    c.expect(
        padded,
        &[0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    );
}

#[test]
fn softmax_with_mask_and_sinks() {
    let ln = |x: f32| x.ln();
    let mut c = Case::default();
    // One row for each of two heads.
    let x = c.f32(&[2, 1, 2], &[ln(1.0), ln(3.0), ln(2.0), ln(2.0)]);
    let mask = c.f32(&[2, 1], &[0.0, f32::NEG_INFINITY]);
    let sinks = c.f32(&[2], &[ln(4.0), ln(4.0)]);
    let g = &mut c.graph;
    let plain = g.soft_max(x, None, None, 1.0, 0.0).unwrap();
    let sunk = g.soft_max(x, None, Some(sinks), 1.0, 0.0).unwrap();
    let masked = g.soft_max(x, Some(mask), Some(sinks), 1.0, 0.0).unwrap();
    c.expect(plain, &[0.25, 0.75, 0.5, 0.5]);
    c.expect(sunk, &[0.125, 0.375, 0.25, 0.25]);
    c.expect(masked, &[0.2, 0.0, 1.0 / 3.0, 0.0]);
    // ALiBi with two heads and max_bias 2: slopes 1/2 and 1/4.
    let bias = c.f32(&[2, 1], &[0.0, ln(16.0)]);
    let zero = c.f32(&[2, 1, 2], &[0.0; 4]);
    let alibi = c.graph.soft_max(zero, Some(bias), None, 1.0, 2.0).unwrap();
    c.expect(alibi, &[0.2, 0.8, 1.0 / 3.0, 2.0 / 3.0]);
}

#[test]
fn diagonal_mask() {
    let mut c = Case::default();
    let x = c.counting([3, 2, 1, 1]);
    let y = c.graph.diag_mask_inf(x, 1).unwrap();
    c.expect(y, &[0.0, 1.0, f32::NEG_INFINITY, 3.0, 4.0, 5.0]);
}

#[test]
fn attention_is_softmax_times_values() {
    let ln = |x: f32| x.ln();
    let mut c = Case::default();
    // Head size 1, one token, two heads that share one head of two keys; values of size 2.
    let q = c.f32(&[1, 1, 2], &[1.0, 0.0]);
    let k = c.f32(&[1, 2, 1], &[0.0, ln(3.0)]);
    let v = c.f32(&[2, 2, 1], &[1.0, 10.0, 2.0, 20.0]);
    let y = c.graph.flash_attn([q, k, v], None, None, 1.0).unwrap();
    c.expect(y, &[1.75, 17.5, 1.5, 15.0]);
    // Mask: key 1 is hidden; sinks of weight 1 and 3.
    let mask = c.raw("mask", DType::F16, &[2, 1], vec![0, 0, 0x00, 0xfc]);
    let sinks = c.f32(&[2], &[0.0, ln(3.0)]);
    let y = c
        .graph
        .flash_attn([q, k, v], Some(mask), Some(sinks), 1.0)
        .unwrap();
    c.expect(y, &[0.5, 5.0, 0.25, 2.5]);
    let none = c.raw("mask", DType::F16, &[2, 1], vec![0x00, 0xfc, 0x00, 0xfc]);
    let y = c
        .graph
        .flash_attn([q, k, v], Some(none), None, 1.0)
        .unwrap();
    c.expect(y, &[0.0; 4]);
}

#[test]
fn attention_with_softcap_and_several_tokens() {
    let mut c = Case::default();
    // Two tokens, one head, keys 0 and 10, cap 2: logits 0 and 2 tanh(5 q).
    let q = c.f32(&[1, 2, 1], &[0.0, 1.0]);
    let k = c.f32(&[1, 2, 1], &[0.0, 10.0]);
    let v = c.f32(&[1, 2, 1], &[0.0, 1.0]);
    let op = Op::FlashAttn {
        scale: 1.0,
        max_bias: 0.0,
        softcap: 2.0,
        precision: Default::default(),
    };
    let y = c.graph.push(op, &[Some(q), Some(k), Some(v)]).unwrap();
    let capped = (2.0 * 5f32.tanh()).exp();
    c.expect(y, &[0.5, capped / (1.0 + capped)]);
}

#[test]
fn rope_rotates_pairs() {
    let mut c = Case::default();
    let x = c.f32(&[4, 1, 2], &[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]);
    let positions = c.i32(&[2], &[0, 3]);
    // Base 4 with four dimensions: angles p and p / 2.
    let (s, co) = (3f32.sin(), 3f32.cos());
    let (s2, c2) = (1.5f32.sin(), 1.5f32.cos());
    let normal = Rope::new(4, RopeMode::Normal, 4.0);
    let y = c.graph.rope(x, positions, None, normal).unwrap();
    c.expect(y, &[1.0, 0.0, 0.0, 1.0, co, s, -s2, c2]);
    let neox = Rope::new(4, RopeMode::Neox, 4.0);
    let y = c.graph.rope(x, positions, None, neox).unwrap();
    c.expect(y, &[1.0, 0.0, 0.0, 1.0, co, -s2, s, c2]);
    // Only the last two elements, at half speed, with a divisor of 2.
    let part = Rope {
        offset: 2,
        freq_scale: 0.5,
        ..Rope::new(2, RopeMode::Neox, 4.0)
    };
    let divisors = c.f32(&[1], &[2.0]);
    let y = c.graph.rope(x, positions, Some(divisors), part).unwrap();
    let (s, co) = (0.75f32.sin(), 0.75f32.cos());
    c.expect(y, &[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, -s, co]);
}

/// Parameters computed by hand: `dim(r) = 8 ln(4096 / (2 pi r)) / (2 ln 10000)` gives 0.6559 for
/// 144 rotations and 2.8142 for 1, so that low = 0, high = 3.
#[test]
fn rope_with_yarn() {
    let mut c = Case::default();
    let x = c.f32(&[8], &[1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
    let positions = c.i32(&[1], &[100]);
    let rope = Rope {
        original_context: 4096,
        freq_scale: 0.25,
        ext_factor: 1.0,
        attn_factor: 1.0,
        beta_fast: 144.0,
        beta_slow: 1.0,
        ..Rope::new(8, RopeMode::Normal, 10000.0)
    };
    let y = c.graph.rope(x, positions, None, rope).unwrap();
    let magnitude = 1.0 + 0.1 * 4f64.ln();
    let mut expected = Vec::new();
    for (pair, extrapolated) in [1.0, 2.0 / 3.0, 1.0 / 3.0, 0.0].into_iter().enumerate() {
        let theta = 100.0 * 0.1f64.powi(pair as i32);
        let angle = theta * (extrapolated + 0.25 * (1.0 - extrapolated));
        expected.extend([
            (angle.cos() * magnitude) as f32,
            (angle.sin() * magnitude) as f32,
        ]);
    }
    c.expect(y, &expected);
}

#[test]
fn sorting() {
    let mut c = Case::default();
    let x = c.f32(&[4, 2], &[3.0, 1.0, 4.0, 1.0, 0.0, 9.0, 9.0, -2.0]);
    let g = &mut c.graph;
    let up = g.argsort(x, SortOrder::Ascending).unwrap();
    let down = g.argsort(x, SortOrder::Descending).unwrap();
    let top = g.top_k(x, 2).unwrap();
    let max = g.argmax(x).unwrap();
    assert_eq!(as_i32s(&c.run(up)), [1, 3, 0, 2, 3, 0, 1, 2]);
    assert_eq!(as_i32s(&c.run(down)), [2, 0, 1, 3, 1, 2, 0, 3]);
    assert_eq!(as_i32s(&c.run(top)), [2, 0, 1, 2]);
    assert_eq!(as_i32s(&c.run(max)), [2, 1]);
}

#[test]
fn gated_units_take_halves_or_two_sources() {
    let mut c = Case::default();
    let x = c.f32(&[4], &[1.0, 2.0, 10.0, -1.0]);
    let op = |swapped| Op::Glu {
        kind: Glu::Reglu,
        swapped,
    };
    let y = c.graph.push(op(false), &[Some(x)]).unwrap();
    c.expect(y, &[10.0, -2.0]);
    let y = c.graph.push(op(true), &[Some(x)]).unwrap();
    c.expect(y, &[10.0, 0.0]);
    let y = c.graph.glu_split(x, x, Glu::Reglu).unwrap();
    c.expect(y, &[1.0, 4.0, 100.0, 0.0]);
}

#[test]
fn empty_tensors_give_empty_results() {
    let mut c = Case::default();
    let x = c.raw("x", DType::F32, &[0, 3], vec![]);
    let none = c.raw("y", DType::F32, &[4, 0], vec![]);
    let g = &mut c.graph;
    let ids = [
        g.rms_norm(none, 1e-5),
        g.sqr(x),
        g.cont(none),
        g.sum_rows(none),
        g.mul_mat(none, none),
    ];
    for id in ids {
        assert!(c.run(id.unwrap()).is_empty());
    }
    let sums = c.graph.sum_rows(x).unwrap();
    c.expect(sums, &[0.0; 3]);
}
