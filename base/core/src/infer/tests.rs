//! Shapes and types of results, and rejected operands.

use super::*;
use crate::layout::shape;
use crate::op::{Glu, Precision, Rope, RopeMode, Unary};

fn t(dtype: DType, extents: &[usize]) -> Layout {
    Layout::contiguous(dtype, shape(extents).unwrap()).unwrap()
}

fn f(extents: &[usize]) -> Layout {
    t(DType::F32, extents)
}

fn ok(op: Op, sources: &[&Layout]) -> Layout {
    infer(&op, &sources.iter().map(|&l| Some(l)).collect::<Vec<_>>()).unwrap()
}

fn err(op: Op, sources: &[&Layout]) -> String {
    infer(&op, &sources.iter().map(|&l| Some(l)).collect::<Vec<_>>())
        .unwrap_err()
        .to_string()
}

const MUL_MAT: Op = Op::MulMat {
    precision: Precision::Default,
};

#[test]
fn mul_mat_shapes() {
    let w = t(DType::Q4_0, &[64, 10, 2]);
    assert_eq!(ok(MUL_MAT, &[&w, &f(&[64, 3, 4, 5])]), f(&[10, 3, 4, 5]));
    assert_eq!(
        err(MUL_MAT, &[&w, &f(&[32, 3, 4])]),
        "mul_mat: rows differ in length: 64 and 32 (operands: q4_0 [64, 10, 2], f32 [32, 3, 4])"
    );
    assert!(err(MUL_MAT, &[&w, &f(&[64, 3, 3])]).contains("batches"));
    assert!(err(MUL_MAT, &[&w]).contains("source 1 is missing"));
    assert!(
        err(
            MUL_MAT,
            &[&f(&[4, 4]).permuted([1, 0, 2, 3]).unwrap(), &f(&[4, 4])]
        )
        .contains("transposed")
    );
    assert!(err(MUL_MAT, &[&f(&[4, 4]), &f(&[4, 4]), &f(&[1])]).contains("at most 2"));
}

#[test]
fn attention_shapes() {
    let (q, kv) = (f(&[64, 5, 8, 1]), t(DType::F16, &[64, 32, 2, 1]));
    let op = Op::FlashAttn {
        scale: 1.0,
        max_bias: 0.0,
        softcap: 0.0,
        precision: Precision::F32,
    };
    assert_eq!(ok(op, &[&q, &kv, &kv]), f(&[64, 8, 5]));
    assert!(err(op, &[&q, &kv, &kv, &t(DType::F16, &[32, 4])]).contains("mask is smaller"));
    assert!(err(op, &[&q, &kv, &kv, &f(&[32, 5])]).contains("mask cannot be f32"));
    let alibi = Op::FlashAttn {
        scale: 1.0,
        max_bias: 8.0,
        softcap: 0.0,
        precision: Precision::F32,
    };
    assert!(err(alibi, &[&q, &kv, &kv]).contains("ALiBi"));

    let back = Op::FlashAttnBack { scale: 1.0 };
    let (k, v, g) = (f(&[64, 32, 2]), f(&[16, 32, 2]), f(&[16, 8, 5]));
    let elements = 64 * 5 * 8 + 64 * 32 * 2 + 16 * 32 * 2;
    assert_eq!(ok(back, &[&g, &q, &k, &v]), f(&[elements]));
    assert!(err(back, &[&q, &q, &k, &v]).contains("gradient does not have the shape"));
    assert!(err(back, &[&g, &q, &kv, &v]).contains("keys cannot be f16"));
}

#[test]
fn get_rows_and_set_rows() {
    let table = t(DType::Q6_K, &[256, 100]);
    assert_eq!(
        ok(Op::GetRows, &[&table, &t(DType::I32, &[7])]),
        f(&[256, 7])
    );
    assert!(err(Op::GetRows, &[&table, &t(DType::I64, &[7])]).contains("i64"));
    let cache = t(DType::F16, &[64, 512]);
    assert_eq!(
        ok(Op::SetRows, &[&f(&[64, 3]), &t(DType::I64, &[3]), &cache]),
        cache
    );
    assert!(err(Op::SetRows, &[&f(&[64, 3]), &t(DType::I64, &[4]), &cache]).contains("row number"));
}

#[test]
fn rope_checks_pairs_and_positions() {
    let x = f(&[64, 8, 3]);
    let rope = Rope::new(64, RopeMode::Neox, 10000.0);
    assert_eq!(ok(Op::Rope(rope), &[&x, &t(DType::I32, &[3])]), x);
    assert!(err(Op::Rope(rope), &[&x, &t(DType::I32, &[4])]).contains("position"));
    assert!(
        err(
            Op::Rope(Rope { dims: 66, ..rope }),
            &[&x, &t(DType::I32, &[3])]
        )
        .contains("larger than a head")
    );
    assert!(
        err(
            Op::Rope(Rope {
                dims: usize::MAX - 1,
                offset: 2,
                ..rope
            }),
            &[&x, &t(DType::I32, &[3])]
        )
        .contains("larger")
    );
}

#[test]
fn multi_axis_rope_checks_positions_and_sections() {
    let (x, four) = (f(&[64, 8, 3]), t(DType::I32, &[12]));
    let rope = |mode, dims| Op::Rope(Rope::new(dims, mode, 10000.0));
    let sections = [8, 12, 12, 0];
    let multi = rope(RopeMode::Multi { sections }, 64);
    assert_eq!(ok(multi, &[&x, &four]), x);
    assert!(err(multi, &[&x, &t(DType::I32, &[3])]).contains("four positions"));
    let vision = |dims| rope(RopeMode::Vision { sections }, dims);
    assert_eq!(ok(vision(32), &[&x, &four, &f(&[32])]), x);
    assert!(err(vision(64), &[&x, &four]).contains("half of a head"));
    assert!(err(vision(32), &[&x, &four, &f(&[16])]).contains("divisors"));
    for sections in [[0, 0, 0, 9], [u32::MAX, 1, 0, 0], [32, 32, 1, 0]] {
        let mode = RopeMode::Interleaved { sections };
        assert!(err(rope(mode, 64), &[&x, &four]).contains("sections"));
    }
}

/// Checks which position rotates each pair, written by hand from ggml's documentation: `t`, `h`,
/// `w` and `e`.
#[test]
fn each_rope_pair_uses_its_position_axis() {
    let turns = |mode, dims: usize| {
        let rope = Rope::new(dims, mode, 10000.0);
        let turns: Vec<_> = (0..rope.pairs()).map(|pair| rope.turn(pair)).collect();
        let axes: String = turns
            .iter()
            .map(|turn| ['t', 'h', 'w', 'e'][turn.axis])
            .collect();
        (axes, turns.iter().map(|turn| turn.step).collect::<Vec<_>>())
    };
    let whole: Vec<usize> = (0..8).collect();
    assert_eq!(turns(RopeMode::Neox, 16), ("t".repeat(8), whole.clone()));
    let sections = [3, 2, 2, 1];
    let (axes, steps) = turns(RopeMode::Multi { sections }, 16);
    assert_eq!((&*axes, &steps), ("ttthhwwe", &whole));
    let (axes, steps) = turns(RopeMode::Interleaved { sections }, 16);
    assert_eq!((&*axes, &steps), ("thwthwte", &whole));
    // The sections have fewer pairs than the head, so they start again.
    let (axes, _) = turns(
        RopeMode::Multi {
            sections: [1, 1, 1, 0],
        },
        16,
    );
    assert_eq!(axes, "thwthwth");
    let (axes, steps) = turns(
        RopeMode::Vision {
            sections: [4, 4, 0, 0],
        },
        8,
    );
    assert_eq!((&*axes, steps), ("tttthhhh", vec![0, 1, 2, 3, 0, 1, 2, 3]));
}

#[test]
fn glu_with_one_and_two_sources() {
    let op = Op::Glu {
        kind: Glu::Swiglu,
        swapped: false,
    };
    assert_eq!(ok(op, &[&f(&[8, 3])]), f(&[4, 3]));
    assert_eq!(ok(op, &[&f(&[8, 3]), &f(&[8, 3])]), f(&[8, 3]));
    assert!(err(op, &[&f(&[7, 3])]).contains("halves"));
}

/// Checks operands as they occur in graphs of real models, which must be accepted.
#[test]
fn operands_of_real_models_are_accepted() {
    use DType::*;
    let rope = Op::Rope(Rope::new(64, RopeMode::Neox, 10000.0));
    // Queries in rows that also hold keys and values: gaps between tokens.
    let fused = Layout::strided(F32, [64, 16, 5, 1], [4, 256, 24 * 256, 5 * 24 * 256]).unwrap();
    ok(rope, &[&fused, &t(I32, &[5])]);
    ok(rope, &[&fused, &t(I32, &[5]), &f(&[32])]);
    for (a, b) in [(F32, F16), (F16, F32), (F16, F16), (BF16, F32), (F32, BF16)] {
        assert_eq!(ok(Op::Add, &[&t(a, &[8, 3]), &t(b, &[8])]).dtype(), a);
    }
    ok(
        Op::Concat { dim: 1 },
        &[&t(Q8_0, &[64, 2]), &t(Q8_0, &[64, 3])],
    );
    ok(
        Op::Concat { dim: 0 },
        &[&t(Q8_0, &[64, 2]), &t(Q8_0, &[32, 2])],
    );
    let table = t(Q4_0, &[64, 10, 3, 2]);
    assert_eq!(
        ok(Op::GetRows, &[&table, &t(I32, &[5, 3, 2])]),
        f(&[64, 5, 3, 2])
    );
    assert_eq!(
        ok(Op::GetRows, &[&t(I32, &[1, 8]), &t(I32, &[2])]).dtype(),
        I32
    );
    for (rows, index) in [(F32, I64), (F32, I32), (F16, I64)] {
        let cache = t(Q8_0, &[64, 512, 4]);
        ok(
            Op::SetRows,
            &[&t(rows, &[64, 3, 4]), &t(index, &[3, 2]), &cache],
        );
    }
    // A value cache that is written transposed, element by element.
    ok(
        Op::SetRows,
        &[&f(&[1, 96]), &t(I64, &[96]), &t(F16, &[1, 4096])],
    );
    let cache = Layout::strided(F16, [64, 32, 8, 1], [2, 1024, 128, 32768]).unwrap();
    ok(MUL_MAT, &[&cache, &f(&[64, 5, 32])]);
    ok(MUL_MAT, &[&t(F16, &[64, 7]), &t(F16, &[64, 5])]);
    let attention = Op::FlashAttn {
        scale: 0.125,
        max_bias: 0.0,
        softcap: 30.0,
        precision: Precision::F32,
    };
    let q = f(&[64, 16, 5]).permuted([0, 2, 1, 3]).unwrap();
    let mask = t(F16, &[32, 8]);
    let quantized = Layout::strided(Q8_0, [64, 32, 8, 1], [34, 544, 68, 17408]).unwrap();
    for kv in [&cache, &quantized] {
        let sinks = f(&[16]);
        assert_eq!(ok(attention, &[&q, kv, kv, &mask, &sinks]), f(&[64, 16, 5]));
    }
    let op = Op::SoftMax {
        scale: 1.0,
        max_bias: 8.0,
    };
    ok(op, &[&f(&[32, 5, 16]), &mask, &f(&[16])]);
    let turned = f(&[5, 8]).permuted([1, 0, 2, 3]).unwrap();
    let pad = Op::Pad {
        before: [0; 4],
        after: [0, 3, 0, 0],
    };
    ok(pad, &[&turned]);
    ok(Op::Unary(Unary::Tanh), &[&turned]);
    ok(
        Op::Repeat {
            shape: [4, 6, 1, 1],
        },
        &[&t(I32, &[4, 3])],
    );
    let halves = Layout::strided(F32, [32, 5, 1, 1], [4, 256, 1280, 1280]).unwrap();
    let swiglu = Op::Glu {
        kind: Glu::Swiglu,
        swapped: false,
    };
    ok(swiglu, &[&halves, &halves]);
    ok(Op::Cpy, &[&turned, &t(F16, &[40])]);
    ok(Op::Cast { dtype: F16 }, &[&turned]);
    // Selected experts: a window into a sorted row.
    let chosen = Layout::strided(I32, [2, 5, 1, 1], [4, 32, 160, 160]).unwrap();
    let expert = Op::MulMatId {
        precision: Precision::Default,
    };
    for rows in [1, 2] {
        ok(
            expert,
            &[&t(Q4_0, &[64, 16, 8]), &f(&[64, rows, 5]), &chosen],
        );
    }
    ok(Op::AddId, &[&f(&[16, 2, 5]), &f(&[16, 8]), &chosen]);
    // Empty batches are also tensors.
    ok(Op::RmsNorm { eps: 1e-6 }, &[&f(&[64, 0])]);
    ok(MUL_MAT, &[&t(Q4_0, &[64, 7]), &f(&[64, 0])]);
    ok(
        Op::Reshape {
            shape: [8, 8, 0, 1],
        },
        &[&f(&[64, 0])],
    );
}

#[test]
fn destinations_with_repeated_elements_are_refused() {
    let same = Layout::strided(DType::F32, [4, 3, 1, 1], [4, 0, 0, 0]).unwrap();
    assert!(err(Op::Cpy, &[&f(&[4, 3]), &same]).contains("share memory"));
    assert!(err(Op::SetRows, &[&f(&[4, 1]), &t(DType::I32, &[1]), &same]).contains("share memory"));
    let mask = Op::DiagMaskInf { past: usize::MAX };
    assert!(err(mask, &[&f(&[4, 3])]).contains("past"));
}

#[test]
fn sizes_that_overflow_are_refused() {
    let huge = usize::MAX / 8;
    assert!(
        err(
            Op::Pad {
                before: [huge, 0, 0, 0],
                after: [usize::MAX, 0, 0, 0]
            },
            &[&f(&[2])]
        )
        .contains("overflow")
    );
    assert!(
        err(
            Op::Repeat {
                shape: [huge, 2, 1, 1]
            },
            &[&f(&[1])]
        )
        .contains("overflow")
    );
    assert!(
        err(
            Op::Arange {
                start: 0.0,
                stop: f32::INFINITY,
                step: 1.0
            },
            &[]
        )
        .contains("range")
    );
    assert!(
        err(
            Op::Arange {
                start: f32::NAN,
                stop: 1.0,
                step: 1.0
            },
            &[]
        )
        .contains("range")
    );
}

#[test]
fn gradients_have_the_shape_of_operands() {
    let (x, g) = (f(&[8, 3, 2]), f(&[4, 3, 2]));
    assert_eq!(ok(Op::OutProd, &[&x, &g]), f(&[8, 4, 2]));
    assert!(err(Op::OutProd, &[&x, &f(&[4, 5, 2])]).contains("3 and 5"));
    let turned = x.permuted([1, 0, 2, 3]).unwrap();
    assert!(err(Op::OutProd, &[&turned, &f(&[4, 8, 2])]).contains("transposed"));
    let back = Op::RepeatBack {
        shape: [4, 1, 2, 1],
    };
    assert_eq!(ok(back, &[&x]), f(&[4, 1, 2]));
    assert!(err(back, &[&f(&[6, 1, 2])]).contains("repeat"));
    let none = Op::RepeatBack {
        shape: [0, 1, 1, 1],
    };
    assert!(err(none, &[&f(&[0])]).contains("repeat"));
    assert_eq!(ok(Op::SiluBack, &[&x, &x]), x);
    assert!(err(Op::RmsNormBack { eps: -1.0 }, &[&x, &x]).contains("eps"));
    assert!(err(Op::SoftMaxBack { scale: 1.0 }, &[&x, &g]).contains("shape"));
    let rows = Op::GetRowsBack { rows: 9 };
    let ids = t(DType::I32, &[3]);
    assert_eq!(ok(rows, &[&f(&[8, 3]), &ids]), f(&[8, 9]));
    assert!(err(rows, &[&f(&[8, 4]), &ids]).contains("row number"));
    assert_eq!(ok(Op::CrossEntropyLoss, &[&x, &x]), f(&[1]));
    assert_eq!(ok(Op::CrossEntropyLossBack, &[&f(&[1]), &x, &x]), x);
    assert!(err(Op::CrossEntropyLossBack, &[&x, &x, &x]).contains("one element"));
}

#[test]
fn optimizer_steps_need_equal_shapes_and_all_parameters() {
    let (w, seven) = (f(&[8, 3]), f(&[7]));
    assert_eq!(ok(Op::OptStepAdamW, &[&w, &w, &w, &w, &seven]), w);
    assert!(err(Op::OptStepAdamW, &[&w, &w, &f(&[8]), &w, &seven]).contains("source 2"));
    assert!(err(Op::OptStepAdamW, &[&w, &w, &w, &w, &f(&[6])]).contains("7 parameters"));
    assert_eq!(ok(Op::OptStepSgd, &[&w, &w, &f(&[2])]), w);
    let half = t(DType::F16, &[8, 3]);
    assert!(err(Op::OptStepSgd, &[&half, &w, &f(&[2])]).contains("f16"));
}

#[test]
fn elementwise_operations_check_types_and_shapes() {
    assert!(err(Op::Unary(Unary::Silu), &[&t(DType::Q4_0, &[32])]).contains("q4_0"));
    assert_eq!(
        ok(Op::Unary(Unary::Silu), &[&t(DType::F16, &[32])]),
        t(DType::F16, &[32])
    );
    assert!(err(Op::Add, &[&f(&[4]), &f(&[3])]).contains("repeat"));
    assert_eq!(ok(Op::Add, &[&f(&[4, 6]), &f(&[2, 3])]), f(&[4, 6]));
}

#[test]
fn masks_of_sparse_attention_have_the_rows_of_their_picks() {
    let i = |extents: &[usize]| t(DType::I32, extents);
    let (mask, top) = (t(DType::F16, &[37, 5, 1, 2]), i(&[6, 5, 3, 2]));
    let infer_mask = |sources: [Option<&Layout>; 5]| infer(&Op::TopKMask, &sources);
    let given = |scores, blocks, more| infer_mask([Some(&mask), Some(&top), scores, blocks, more]);
    let result = t(DType::F16, &[37, 5, 3, 2]);
    assert_eq!(given(None, None, None).unwrap(), result);
    let (scores, blocks, more) = (f(&[9, 5, 3, 2]), i(&[4, 9]), i(&[1, 5, 3, 2]));
    assert_eq!(
        given(Some(&scores), Some(&blocks), Some(&more)).unwrap(),
        result
    );
    let failed = |result: Result<Layout>| result.unwrap_err().to_string();
    let (low, few, floats) = (f(&[9, 5, 3]), i(&[4, 8]), f(&[4, 9]));
    let short = i(&[1, 5]);
    assert!(failed(given(Some(&low), None, None)).contains("source 2"));
    assert!(failed(given(None, None, Some(&short))).contains("source 4"));
    assert!(failed(given(Some(&scores), Some(&few), None)).contains("each pick"));
    assert!(failed(given(None, Some(&floats), None)).contains("f32"));
    let tall = f(&[37, 4]);
    assert!(err(Op::TopKMask, &[&tall, &top]).contains("repeat"));
    assert!(err(Op::TopKMask, &[&i(&[37]), &top]).contains("i32"));
}

#[test]
fn windows_cover_an_image() {
    let (image, parts) = (f(&[3, 5, 7]), f(&[3, 3, 3, 6]));
    let part = |windows, size| Op::WinPart { windows, size };
    assert_eq!(ok(part([2, 3], 3), &[&image]), parts);
    assert!(err(part([2, 2], 3), &[&image]).contains("cover"));
    assert!(err(part([2, 3], 0), &[&image]).contains("no window"));
    let join = |shape| Op::WinUnpart { size: 3, shape };
    assert_eq!(ok(join([3, 5, 7, 1]), &[&parts]), image);
    assert!(err(join([3, 7, 7, 1]), &[&parts]).contains("source 0"));
    let embeddings = t(DType::F16, &[8, 7]);
    assert_eq!(ok(Op::GetRelPos, &[&embeddings]), t(DType::F16, &[8, 4, 4]));
    assert!(err(Op::GetRelPos, &[&t(DType::F16, &[8, 6])]).contains("even"));
    let (scores, each) = (f(&[16, 6, 2]), f(&[4, 2, 3, 2]));
    assert_eq!(ok(Op::AddRelPos, &[&scores, &each, &each]), scores);
    assert!(err(Op::AddRelPos, &[&scores, &each, &f(&[4, 3, 2, 2])]).contains("source 2"));
    assert!(err(Op::AddRelPos, &[&f(&[16, 5, 2]), &each, &each]).contains("source 0"));
    let back = Op::Pool2dBack {
        pool: crate::op::Pool::Max,
        kernel: [2, 2],
        stride: [2, 1],
        padding: [0, 1],
    };
    assert_eq!(ok(back, &[&f(&[1, 6, 7]), &image]), image);
    assert!(err(back, &[&f(&[1, 5, 7]), &image]).contains("source 0"));
}
