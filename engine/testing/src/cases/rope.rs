//! Rotary position embedding.

use super::{FLOATS, rounded_to};
use crate::case::{Cases, Form};
use crate::recipe::Recipe;
use samite_core::{DType, Rope, RopeMode};

pub fn add(cases: &mut Cases) {
    for dtype in FLOATS {
        for mode in [RopeMode::Normal, RopeMode::Neox] {
            let plain = Rope::new(64, mode, 10_000.0);
            let yarn = yarn(plain);
            let ropes = [
                ("all", plain),
                ("half", Rope { dims: 32, ..plain }),
                (
                    "the second half",
                    Rope {
                        dims: 32,
                        offset: 32,
                        ..plain
                    },
                ),
                (
                    "the middle",
                    Rope {
                        dims: 10,
                        offset: 6,
                        ..plain
                    },
                ),
                (
                    "scaled",
                    Rope {
                        freq_scale: 0.5,
                        freq_base: 500_000.0,
                        ..plain
                    },
                ),
                ("YaRN", yarn),
                (
                    "a part by YaRN",
                    Rope {
                        dims: 48,
                        ext_factor: 0.5,
                        ..yarn
                    },
                ),
            ];
            for (note, rope) in ropes {
                for divisors in [false, true] {
                    for (heads, tokens, batch) in [(1, 1, 1), (3, 5, 1), (4, 2, 2)] {
                        one(
                            cases,
                            note,
                            dtype,
                            rope,
                            divisors,
                            [64, heads, tokens, batch],
                            Form::Plain,
                        );
                    }
                }
                one(cases, note, dtype, rope, false, [64, 3, 4, 1], Form::Gaps);
                one(
                    cases,
                    note,
                    dtype,
                    rope,
                    false,
                    [64, 3, 4, 1],
                    Form::Permuted,
                );
            }
            for size in [2, 8, 80, 128] {
                let rope = Rope::new(size, mode, 10_000.0);
                one(cases, "", dtype, rope, false, [size, 2, 3, 1], Form::Plain);
            }
        }
        axes(cases, dtype);
    }
}

/// Returns the same embedding, scaled by YaRN.
fn yarn(plain: Rope) -> Rope {
    Rope {
        original_context: 512,
        freq_scale: 0.25,
        ext_factor: 1.0,
        attn_factor: 1.2,
        ..plain
    }
}

/// Adds cases of tokens with several positions.
fn axes(cases: &mut Cases, dtype: DType) {
    let even = [10, 11, 11, 0];
    for mode in [
        RopeMode::Multi { sections: even },
        RopeMode::Interleaved { sections: even },
        RopeMode::Multi {
            sections: [3, 2, 4, 1],
        },
        RopeMode::Interleaved {
            sections: [12, 10, 5, 5],
        },
        RopeMode::Vision {
            sections: [16, 16, 0, 0],
        },
        RopeMode::Vision {
            sections: [5, 8, 7, 3],
        },
    ] {
        let is_whole = matches!(mode, RopeMode::Vision { .. });
        let plain = Rope::new(if is_whole { 32 } else { 64 }, mode, 10_000.0);
        let part = Rope {
            dims: 24,
            offset: 30,
            ..plain
        };
        let ropes = [("", plain), ("YaRN", yarn(plain)), ("a part", part)];
        for (note, rope) in ropes.into_iter().take(if is_whole { 2 } else { 3 }) {
            for shape in [[64, 1, 1, 1], [64, 3, 5, 2]] {
                one(cases, note, dtype, rope, false, shape, Form::Plain);
                one(cases, note, dtype, rope, true, shape, Form::Plain);
            }
            let shape = [64, 3, 4, 1];
            one(cases, note, dtype, rope, false, shape, Form::Gaps);
        }
    }
}

fn one(
    cases: &mut Cases,
    note: &str,
    dtype: DType,
    rope: Rope,
    divisors: bool,
    shape: [usize; 4],
    form: Form,
) {
    cases.add(note, rounded_to(dtype), |b| {
        let x = b.operand(dtype, shape, Recipe::UNIT, form)?;
        let positions = b.input(
            DType::I32,
            [rope.axes() * shape[2], 1, 1, 1],
            Recipe::Positions { start: 11 },
        )?;
        let factors = Recipe::Uniform { min: 1.0, max: 4.0 };
        let divisors = divisors
            .then(|| b.input(DType::F32, [rope.pairs(), 1, 1, 1], factors))
            .transpose()?;
        b.graph.rope(x, positions, divisors, rope)
    });
}
