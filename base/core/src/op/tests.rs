//! Consistency of the table, and printing and serialisation of operations.

use super::*;
use std::collections::HashSet;

#[test]
fn operation_table_entries_are_consistent() {
    let mut names = HashSet::new();
    for kind in OpKind::ALL {
        let OpFacts {
            name,
            is_view,
            result_in,
            writes,
            may_overwrite,
            ..
        } = *kind.facts();
        assert!(!name.is_empty() && names.insert(name), "{kind:?}: '{name}'");
        let required = *kind.sources().start();
        let mut mentioned = result_in.into_iter().chain(writes.iter().copied());
        assert!(
            mentioned.all(|source| source < required),
            "{kind:?}: a source that is written to must be there"
        );
        assert!(may_overwrite.iter().all(|&source| source < required));
        assert_eq!(
            is_view,
            result_in == Some(0) && writes.is_empty(),
            "{kind:?}"
        );
        // The result is a view of a written source.
        assert!(is_view || result_in.is_none_or(|source| writes.contains(&source)));
        assert!(result_in.is_none() || may_overwrite.is_empty(), "{kind:?}");
    }
    assert_eq!(OpKind::ALL.len(), names.len());
}

#[test]
fn operations_have_the_expected_kinds() {
    for (op, kind) in [
        (Op::Leaf, OpKind::Leaf),
        (Op::TopK { k: 3 }, OpKind::TopK),
        (Op::Unary(Unary::Exp), OpKind::Unary),
        (Op::OptStepSgd, OpKind::OptStepSgd),
    ] {
        assert_eq!(op.kind(), kind);
    }
    assert_eq!(OpKind::FlashAttn.sources(), 3..=5);
    assert_eq!(OpKind::Unary.name(), "unary");
    assert_eq!(Op::Unary(Unary::Exp).name(), "exp");
}

#[test]
fn parameters_are_printed() {
    let scale = |bias| Op::Scale { scale: 0.5, bias };
    let rope = Rope::new(64, RopeMode::Neox, 10000.0);
    let shape = [6, 5, 4, 3];
    let view = Op::View {
        shape,
        strides: [1, 2, 3],
        offset: 64,
    };
    let precise = |precision| Op::MulMat { precision };
    let glu = |swapped| Op::Glu {
        kind: Glu::Swiglu,
        swapped,
    };
    let order = SortOrder::Descending;
    for (op, expected) in [
        (Op::Add, "add"),
        (scale(-1.0), "scale(scale=0.5, bias=-1)"),
        (scale(0.0), "scale(scale=0.5, bias=0)"),
        (Op::RmsNorm { eps: 1e-5 }, "rms_norm(eps=0.00001)"),
        (precise(Precision::Default), "mul_mat"),
        (precise(Precision::F32), "mul_mat(precision=F32)"),
        (Op::Reshape { shape }, "reshape"),
        (view, "view(offset=64)"),
        (
            Op::Permute { axes: [0, 2, 1, 3] },
            "permute(axes=[0, 2, 1, 3])",
        ),
        (Op::Rope(rope), "rope(dims=64, mode=Neox, base=10000)"),
        (Op::ArgSort { order }, "argsort(order=Descending)"),
        (glu(false), "swiglu"),
        (glu(true), "swiglu(swapped=true)"),
        (Op::Unary(Unary::Gelu), "gelu"),
    ] {
        assert_eq!(op.to_string(), expected);
    }
}

/// Checks that floats of every operation are serialised exactly, because the table serialises them.
#[test]
fn operation_floats_round_trip_bit_for_bit() {
    let nan = f32::from_bits(0xffc0_1234);
    for op in [
        Op::Scale {
            scale: nan,
            bias: -0.0,
        },
        Op::SoftMax {
            scale: f32::INFINITY,
            max_bias: nan,
        },
        Op::Rope(Rope {
            beta_slow: nan,
            ..Rope::new(8, RopeMode::Normal, f32::NEG_INFINITY)
        }),
        Op::Unary(Unary::Xielu {
            alpha_n: nan,
            alpha_p: -0.0,
            beta: 1e-45,
            eps: f32::INFINITY,
        }),
        Op::Glu {
            kind: Glu::SwigluOai {
                alpha: nan,
                limit: -0.0,
            },
            swapped: true,
        },
    ] {
        let text = serde_json::to_string(&op).unwrap();
        let back: Op = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_string(&back).unwrap(), text);
        let bits = format!("{op:?}").contains("NaN");
        assert!(bits && text.contains("nan:ffc01234"), "{text}");
    }
    // The format of every release: parameters by name, in one object under the operation's name.
    let op = Op::MulMat {
        precision: Precision::F32,
    };
    assert_eq!(
        serde_json::to_string(&op).unwrap(),
        r#"{"MulMat":{"precision":"F32"}}"#
    );
}

#[test]
fn operations_are_compared_bit_by_bit() {
    let (nan, other_nan) = (f32::NAN, f32::from_bits(0x7fc0_0001));
    let scale = |scale, bias| Op::Scale { scale, bias };
    let xielu = |eps| {
        Op::Unary(Unary::Xielu {
            alpha_n: 1.0,
            alpha_p: 2.0,
            beta: nan,
            eps,
        })
    };
    let rope = |beta_slow| {
        Op::Rope(Rope {
            beta_slow,
            ..Rope::new(8, RopeMode::Normal, 1e4)
        })
    };
    let glu = |limit| Op::Glu {
        kind: Glu::SwigluClamp { limit },
        swapped: false,
    };
    for make in
        [&|x| scale(x, 1.0), &|x| scale(1.0, x), &xielu, &rope, &glu] as [&dyn Fn(f32) -> Op; 5]
    {
        for x in [0.0, nan, 1.0] {
            assert_eq!(make(x), make(x));
        }
        assert_ne!(make(0.0), make(-0.0));
        assert_ne!(make(nan), make(other_nan));
        assert_ne!(make(1.0), make(2.0));
    }
    let narrow = Rope::new(8, RopeMode::Normal, 1e4);
    assert_ne!(Op::Rope(narrow), Op::Rope(Rope { dims: 6, ..narrow }));
    assert_ne!(Op::Rope(narrow), Op::RopeBack(narrow));
    assert_ne!(Op::Add, Op::Mul);
    assert_ne!(Op::Unary(Unary::Exp), Op::Unary(Unary::Abs));
    assert_ne!(Op::TopK { k: 1 }, Op::TopK { k: 2 });
}
