//! Operations that are defined by a formula: convolutions, recurrences and similar ones.

use crate::case::{Cases, Form, Limit};
use crate::recipe::Recipe;
use samite_core::{DType, Interpolation, Op, Pool, Shape, TensorId, Triangle, Window};

const LIMIT: Limit = Limit::Nmse(1e-7);

pub fn add(cases: &mut Cases) {
    elements(cases);
    windows(cases);
    norms(cases);
    convolutions(cases);
    images(cases);
    recurrences(cases);
    streams(cases);
    relative_positions(cases);
    masks(cases);
}

/// Adds a case of one operation on f32 inputs of these shapes.
fn plain(cases: &mut Cases, op: Op, shapes: &[Shape]) {
    typed(cases, op, DType::F32, shapes);
}

/// Does what [`plain`] does, with source 0 of another type.
fn typed(cases: &mut Cases, op: Op, first: DType, shapes: &[Shape]) {
    cases.add(&format!("{op}"), LIMIT, |b| {
        let mut sources: Vec<Option<TensorId>> = Vec::new();
        for (index, &shape) in shapes.iter().enumerate() {
            let dtype = if index == 0 { first } else { DType::F32 };
            sources.push(Some(b.input(dtype, shape, Recipe::UNIT)?));
        }
        b.graph.push(op, &sources)
    });
}

fn elements(cases: &mut Cases) {
    for op in [Op::Sin, Op::Cos, Op::LeakyRelu { slope: 0.1 }] {
        for dtype in super::FLOATS {
            for shape in [[1, 1, 1, 1], [33, 3, 2, 2]] {
                cases.add("", super::rounded_to(dtype), |b| {
                    let range = Recipe::Uniform {
                        min: -7.0,
                        max: 7.0,
                    };
                    let x = b.input(dtype, shape, range)?;
                    b.graph.push(op, &[Some(x)])
                });
            }
        }
        for form in [Form::Gaps, Form::Permuted, Form::Transposed] {
            cases.add("", LIMIT, |b| {
                let x = b.operand(DType::F32, [9, 5, 3, 2], Recipe::UNIT, form)?;
                b.graph.push(op, &[Some(x)])
            });
        }
    }
    for part in [
        Triangle::UpperDiag,
        Triangle::Upper,
        Triangle::LowerDiag,
        Triangle::Lower,
    ] {
        plain(cases, Op::Tri { part }, &[[7, 7, 3, 2]]);
    }
    plain(cases, Op::Diag, &[[5, 1, 3, 2]]);
    let equal = |cases: &mut Cases, shape| {
        cases.add("", Limit::Exact, |b| {
            let ids = Recipe::Ids { limit: 3 };
            let x = b.input(DType::I32, shape, ids)?;
            let y = b.input(DType::I32, shape, ids)?;
            b.graph.push(Op::CountEqual, &[Some(x), Some(y)])
        });
    };
    equal(cases, [1, 1, 1, 1]);
    equal(cases, [100, 7, 1, 1]);
    equal(cases, [100, 7, 2, 1]);
    for dim in [10, 11] {
        let op = Op::TimestepEmbedding {
            dim,
            max_period: 1000,
        };
        plain(cases, op, &[[6, 1, 1, 1]]);
    }
}

fn windows(cases: &mut Cases) {
    let strides = [24, 120, 480];
    for offset in [0, 28] {
        let shapes = [[6, 5, 4, 3], [3, 2, 2, 2]];
        plain(cases, Op::Acc { strides, offset }, &shapes);
        plain(cases, Op::Set { strides, offset }, &shapes);
    }
    cases.add("integers", Limit::Exact, |b| {
        let ids = Recipe::Ids { limit: 100 };
        let x = b.input(DType::I32, [6, 5, 4, 3], ids)?;
        let part = b.input(DType::I32, [6, 2, 1, 1], ids)?;
        let op = Op::Set {
            strides,
            offset: 48,
        };
        b.graph.push(op, &[Some(x), Some(part)])
    });
}

fn norms(cases: &mut Cases) {
    for (groups, shape) in [(1, [9, 2, 3, 2]), (4, [8, 5, 12, 2]), (3, [4, 4, 7, 1])] {
        plain(cases, Op::GroupNorm { groups, eps: 1e-6 }, &[shape]);
    }
}

fn window(stride: [u32; 3], padding: [u32; 3], dilation: [u32; 3]) -> Window {
    Window {
        stride,
        padding,
        dilation,
    }
}

fn convolutions(cases: &mut Cases) {
    let windows = [
        Window::default(),
        window([2, 1, 1], [1, 2, 1], [1, 2, 1]),
        window([3, 2, 2], [0, 1, 2], [2, 1, 1]),
    ];
    for window in windows {
        for kernel in [DType::F32, DType::F16] {
            typed(
                cases,
                Op::Conv2d { window },
                kernel,
                &[[3, 2, 4, 5], [11, 9, 4, 2]],
            );
            typed(
                cases,
                Op::Conv2dDepthwise { window },
                kernel,
                &[[3, 3, 1, 4], [11, 9, 4, 2]],
            );
            let op = Op::Conv3d {
                window,
                channels: 2,
            };
            typed(cases, op, kernel, &[[3, 2, 2, 6], [9, 8, 7, 4]]);
            for dtype in [DType::F32, DType::F16] {
                let flat = Op::Im2Col {
                    window,
                    planar: false,
                    dtype,
                };
                typed(cases, flat, kernel, &[[3, 4, 5, 1], [11, 4, 2, 1]]);
                let planar = Op::Im2Col {
                    window,
                    planar: true,
                    dtype,
                };
                typed(cases, planar, kernel, &[[3, 2, 4, 5], [11, 9, 4, 2]]);
                let deep = Op::Im2Col3d {
                    window,
                    channels: 2,
                    dtype,
                };
                typed(cases, deep, kernel, &[[3, 2, 2, 6], [9, 8, 7, 4]]);
            }
        }
    }
    // So large that some devices do not gather the inputs under it.
    let window = Window::default();
    plain(
        cases,
        Op::Conv2d { window },
        &[[1025, 1024, 1, 1], [1026, 1024, 1, 1]],
    );
    // The first window: positions 9 and 8.
    let back = |planar, shape| Op::Im2ColBack {
        window: Window::default(),
        planar,
        shape,
    };
    plain(
        cases,
        back(true, [11, 9, 4, 2]),
        &[[24, 9, 8, 2], [3, 2, 4, 5]],
    );
    plain(
        cases,
        back(false, [11, 4, 2, 1]),
        &[[12, 9, 2, 1], [3, 4, 5, 1]],
    );
    for stride in [1, 2, 3] {
        for kernel in [DType::F32, DType::F16] {
            let op = Op::ConvTranspose1d { stride };
            typed(cases, op, kernel, &[[3, 4, 2, 1], [7, 2, 1, 1]]);
            let op = Op::ConvTranspose2d { stride };
            typed(cases, op, kernel, &[[3, 2, 4, 5], [4, 3, 5, 2]]);
        }
        for crop in [0, 1] {
            let op = Op::Col2Im1d {
                stride,
                channels: 4,
                crop,
            };
            plain(cases, op, &[[12, 9, 1, 1]]);
        }
    }
}

fn images(cases: &mut Cases) {
    for pool in [Pool::Max, Pool::Mean] {
        for (kernel, stride, padding) in [(1, 1, 0), (3, 2, 1), (2, 3, 0)] {
            for dtype in [DType::F32, DType::F16] {
                let row = Op::Pool1d {
                    pool,
                    kernel,
                    stride,
                    padding,
                };
                typed(cases, row, dtype, &[[11, 3, 2, 2]]);
                let plane = Op::Pool2d {
                    pool,
                    kernel: [kernel, 2],
                    stride: [stride, 1],
                    padding: [padding, 1],
                };
                typed(cases, plane, dtype, &[[11, 6, 2, 2]]);
            }
            let shape = [11, 6, 2, 2];
            let width = (11 + 2 * padding - kernel) / stride + 1;
            let back = Op::Pool2dBack {
                pool,
                kernel: [kernel, 2],
                stride: [stride, 1],
                padding: [padding, 1],
            };
            plain(cases, back, &[[width, 7, 2, 2], shape]);
        }
    }
    for interpolation in [
        Interpolation::Nearest,
        Interpolation::Bilinear,
        Interpolation::Bicubic,
    ] {
        for (from, shape) in [
            ([2, 5, 3, 2], [5, 7, 6, 2]),
            ([9, 7, 2, 1], [4, 3, 2, 1]),
            ([1, 4, 1, 1], [2, 8, 1, 1]),
        ] {
            for (align_corners, antialias) in [(false, false), (true, false), (false, true)] {
                if antialias && interpolation != Interpolation::Bilinear {
                    continue;
                }
                let op = Op::Upscale {
                    interpolation,
                    align_corners,
                    antialias,
                    shape,
                };
                plain(cases, op, &[from]);
            }
        }
    }
    let circular = Op::PadCircular {
        before: [1, 2, 0, 1],
        after: [2, 0, 3, 1],
    };
    plain(cases, circular, &[[5, 4, 3, 2]]);
    let mirrored = Op::PadReflect1d {
        before: 3,
        after: 2,
    };
    plain(cases, mirrored, &[[5, 4, 3, 2]]);
    let roll = Op::Roll {
        shift: [3, 0, 1, 1],
    };
    plain(cases, roll, &[[5, 4, 3, 2]]);
}

fn relative_positions(cases: &mut Cases) {
    for (windows, size, shape) in [([3, 2], 3, [5, 7, 6, 1]), ([1, 1], 14, [17, 2, 9, 1])] {
        plain(cases, Op::WinPart { windows, size }, &[shape]);
        let parts = [shape[0], size, size, windows[0] * windows[1]];
        plain(cases, Op::WinUnpart { size, shape }, &[parts]);
    }
    for length in [1, 6] {
        typed(
            cases,
            Op::GetRelPos,
            DType::F16,
            &[[17, 2 * length - 1, 1, 1]],
        );
        let scores = [length, 3, 4, 2];
        plain(
            cases,
            Op::AddRelPos,
            &[[length * length, 12, 2, 1], scores, scores],
        );
    }
}

fn masks(cases: &mut Cases) {
    let cells = 37;
    for dtype in [DType::F32, DType::F16] {
        for (scores, blocks, more) in [
            (None, None, None),
            (Some(40), None, None),
            (None, Some(9), Some(3)),
            (Some(9), Some(9), Some(1)),
        ] {
            cases.add("", Limit::Exact, |b| {
                let ids = |limit| Recipe::SkippedIds { limit };
                let mask = b.input(dtype, [cells, 5, 1, 2], Recipe::Mask)?;
                // Some numbers are too large.
                let limit = blocks.or(scores).unwrap_or(cells) + 2;
                let top = b.input(DType::I32, [6, 5, 3, 2], ids(limit))?;
                let mut sources = vec![Some(mask), Some(top)];
                sources.push(match scores {
                    Some(picks) => Some(b.input(DType::F32, [picks, 5, 3, 2], Recipe::Mask)?),
                    None => None,
                });
                sources.push(match blocks {
                    Some(picks) => Some(b.input(DType::I32, [4, picks, 1, 1], ids(cells + 2))?),
                    None => None,
                });
                sources.push(match more {
                    Some(count) => Some(b.input(DType::I32, [count, 5, 3, 2], ids(cells))?),
                    None => None,
                });
                b.graph.push(Op::TopKMask, &sources)
            });
        }
    }
}

fn recurrences(cases: &mut Cases) {
    for (size, heads, tokens, sequences) in
        [(4, 1, 1, 1), (8, 2, 6, 2), (16, 3, 4, 4), (64, 2, 6, 2)]
    {
        let x = [size, heads, tokens, 1];
        let matrices = [size * size * heads, sequences, 1, 1];
        let bonus = [size, heads, 1, 1];
        plain(cases, Op::RwkvWkv6, &[x, x, x, bonus, x, matrices]);
        plain(cases, Op::RwkvWkv7, &[x, x, x, x, x, x, matrices]);
        let op = Op::GatedLinearAttn { scale: 0.25 };
        plain(cases, op, &[x, x, x, x, matrices]);
    }
}

fn streams(cases: &mut Cases) {
    for (n, columns) in [(1, 3), (5, 4), (17, 2)] {
        cases.add("", Limit::Nmse(1e-6), |b| {
            let large = Recipe::Uniform { min: 1.0, max: 2.0 };
            let a = b.input(DType::F32, [n, n, 2, 1], large)?;
            let x = b.input(DType::F32, [columns, n, 2, 1], Recipe::UNIT)?;
            b.graph.push(Op::SolveTri, &[Some(a), Some(x)])
        });
    }
    for (keys, kv, form) in [
        (DType::F32, 9, Form::Plain),
        (DType::F32, 9, Form::Gaps),
        (DType::F16, 9, Form::Plain),
        (DType::BF16, 1, Form::Plain),
        (DType::Q8_0, 17, Form::Plain),
        (DType::Q4_0, 8, Form::Plain),
    ] {
        cases.add("", LIMIT, |b| {
            let f32 = DType::F32;
            let sources = [
                b.operand(f32, [32, 4, 5, 2], Recipe::UNIT, form)?,
                b.input(keys, [32, 1, kv, 2], Recipe::UNIT)?,
                b.operand(f32, [4, 5, 1, 2], Recipe::UNIT, form)?,
                b.input(DType::F16, [kv, 5, 1, 1], Recipe::UNIT)?,
            ];
            b.graph.push(Op::LightningIndexer, &sources.map(Some))
        });
    }
    let comb = |iterations| Op::HyperComb {
        eps: 1e-6,
        iterations,
    };
    for iterations in [1, 20] {
        plain(
            cases,
            comb(iterations),
            &[[24, 7, 1, 1], [3, 1, 1, 1], [24, 1, 1, 1]],
        );
    }
    let pre = |gated| Op::HyperPre { scale: 0.5, gated };
    plain(cases, pre(false), &[[31, 4, 7, 1], [4, 7, 1, 1]]);
    plain(cases, pre(true), &[[31, 4, 7, 1], [31, 4, 7, 1]]);
    let post: [Shape; 4] = [[31, 7, 1, 1], [31, 4, 7, 1], [4, 7, 1, 1], [4, 4, 7, 1]];
    plain(cases, Op::HyperPost, &post);
    plain(cases, Op::HyperPost, &post[..3]);
}
