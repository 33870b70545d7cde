//! Softmax and attention.

use crate::case::{Builder, Cases, Form, Limit};
use crate::recipe::Recipe;
use samite_core::{DType, Op, Precision, Result, Shape, TensorId};

pub fn add(cases: &mut Cases) {
    soft_max(cases);
    flash(cases);
    spoilt_cells(cases);
    flash_back(cases);
}

/// Prompts: blocks of tokens and keys that are full or partly full.
const PROMPTS: [Attention; 9] = [
    Attention {
        kv: 70,
        tokens: 32,
        ..SMALL
    },
    Attention {
        kv: 40,
        tokens: 40,
        mask: false,
        ..SMALL
    },
    Attention {
        kv: 65,
        tokens: 65,
        heads: [8, 1],
        head: [64, 64],
        ..SMALL
    },
    Attention {
        kv: 200,
        tokens: 33,
        heads: [2, 2],
        head: [16, 16],
        ..SMALL
    },
    Attention {
        kv: 64,
        tokens: 70,
        heads: [6, 2],
        head: [24, 40],
        batch: 2,
        ..SMALL
    },
    Attention {
        kv: 33,
        tokens: 32,
        heads: [1, 1],
        head: [128, 128],
        ..SMALL
    },
    Attention {
        kv: 90,
        tokens: 32,
        heads: [80, 1],
        head: [8, 8],
        ..SMALL
    },
    Attention {
        kv: 50,
        tokens: 64,
        form: Form::Permuted,
        head: [32, 48],
        ..SMALL
    },
    Attention {
        kv: 50,
        tokens: 36,
        form: Form::Gaps,
        head: [80, 80],
        batch: 2,
        ..SMALL
    },
];

fn flash_back(cases: &mut Cases) {
    let small = [
        Attention {
            kv: 1,
            tokens: 1,
            ..SMALL
        },
        Attention {
            kv: 7,
            tokens: 3,
            ..SMALL
        },
        Attention {
            kv: 9,
            tokens: 5,
            heads: [1, 1],
            head: [3, 5],
            mask: false,
            ..SMALL
        },
    ];
    for a in small.into_iter().chain(PROMPTS) {
        cases.add("", Limit::Nmse(1e-7), |b| {
            let result = [a.head[1], a.heads[0], a.tokens, a.batch];
            let g = b.operand(DType::F32, result, Recipe::UNIT, a.form)?;
            let (q, k, v, mask) = a.operands(b, [DType::F32; 2])?;
            b.graph.flash_attn_back(g, [q, k, v], mask, a.scale())
        });
    }
}

/// Adds cases with cells that a failed request left as NaN. They must not change the results of
/// tokens that do not see them, even in one block with a token that does.
fn spoilt_cells(cases: &mut Cases) {
    use DType::{BF16, F16, F32, Q4_0, Q8_0};
    for dtype in [F32, F16, BF16, Q8_0, Q4_0] {
        for (cells, tokens) in [(20, 2), (90, 5), (1100, 3), (70, 36), (200, 90)] {
            for head in [32, 64] {
                let limit = if dtype == F32 { 1e-7 } else { 5e-4 };
                let note = format!("attention, {cells} cells of {dtype}, some spoilt");
                cases.add(&note, Limit::Nmse(limit), |b| {
                    let spoilt = Recipe::SpoiltRows { cells };
                    let q = b.input(F32, [head, tokens, 4, 1], Recipe::UNIT)?;
                    let k = b.input(dtype, [head, cells, 2, 1], spoilt)?;
                    let v = b.input(dtype, [head, cells, 2, 1], spoilt)?;
                    let mask = Recipe::SpoiltMask { tokens };
                    let mask = b.input(F16, [cells, tokens, 1, 1], mask)?;
                    let attended = b.graph.flash_attn([q, k, v], Some(mask), None, 0.2)?;
                    // The last token sees them, so its result is undefined.
                    let row = size_of::<f32>() * head;
                    let strides = [row, 4 * row, 4 * row * tokens];
                    let others = [head, 4, tokens - 1, 1];
                    let others = b.graph.view(attended, others, strides, 0)?;
                    b.graph.cont(others)
                });
            }
        }
    }
    for dtype in [F32, F16] {
        cases.add("spoilt cells", Limit::Nmse(1e-6), |b| {
            let x = b.input(F32, [40, 3, 2, 1], Recipe::SpoiltElements)?;
            // The mask has a fourth token, which sees all cells, but the logits have three.
            let mask = Recipe::SpoiltMask { tokens: 4 };
            let mask = b.input(dtype, [40, 3, 1, 1], mask)?;
            b.graph.soft_max(x, Some(mask), None, 0.5, 0.0)
        });
    }
}

fn soft_max(cases: &mut Cases) {
    let logits = Recipe::Uniform {
        min: -4.0,
        max: 4.0,
    };
    let shapes: [(Shape, Shape); 6] = [
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([7, 3, 1, 1], [7, 3, 1, 1]),
        ([33, 2, 12, 1], [33, 2, 1, 1]),
        ([64, 5, 4, 2], [64, 8, 2, 1]),
        ([16, 3, 6, 2], [16, 3, 6, 2]),
        ([257, 1, 8, 1], [257, 32, 1, 1]),
    ];
    for (shape, mask_shape) in shapes {
        for mask in [None, Some(DType::F32), Some(DType::F16)] {
            for sinks in [false, true] {
                for (scale, max_bias) in [(1.0, 0.0), (0.125, 0.0), (0.5, 8.0)] {
                    if max_bias > 0.0 && mask.is_none() {
                        continue;
                    }
                    cases.add("", Limit::Nmse(1e-6), |b| {
                        let x = b.input(DType::F32, shape, logits)?;
                        let mask = mask
                            .map(|dtype| b.input(dtype, mask_shape, Recipe::Mask))
                            .transpose()?;
                        let sinks = sinks
                            .then(|| b.input(DType::F32, [shape[2], 1, 1, 1], Recipe::UNIT))
                            .transpose()?;
                        b.graph.soft_max(x, mask, sinks, scale, max_bias)
                    });
                }
            }
        }
    }
}

/// Shape of an attention.
#[derive(Clone, Copy)]
struct Attention {
    /// Sizes of keys and values.
    head: [usize; 2],
    kv: usize,
    tokens: usize,
    /// Numbers of heads of queries, and of keys and values.
    heads: [usize; 2],
    batch: usize,
    mask: bool,
    sinks: bool,
    max_bias: f32,
    softcap: f32,
    form: Form,
}

impl Attention {
    /// Returns queries, keys and values, the latter two of these types, and the mask.
    fn operands(
        &self,
        b: &mut Builder,
        [k_type, v_type]: [DType; 2],
    ) -> Result<(TensorId, TensorId, TensorId, Option<TensorId>)> {
        let ([k_size, v_size], [heads, kv_heads]) = (self.head, self.heads);
        let mut operand = |dtype, size, rows, heads| {
            let shape = [size, rows, heads, self.batch];
            b.operand(dtype, shape, Recipe::UNIT, self.form)
        };
        let q = operand(DType::F32, k_size, self.tokens, heads)?;
        let k = operand(k_type, k_size, self.kv, kv_heads)?;
        let v = operand(v_type, v_size, self.kv, kv_heads)?;
        let shape = [self.kv, self.tokens, 1, self.batch];
        let mask = self
            .mask
            .then(|| b.input(DType::F16, shape, Recipe::Mask))
            .transpose()?;
        Ok((q, k, v, mask))
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head[0] as f32).sqrt()
    }
}

const SMALL: Attention = Attention {
    head: [32, 32],
    kv: 9,
    tokens: 3,
    heads: [4, 2],
    batch: 1,
    mask: true,
    sinks: false,
    max_bias: 0.0,
    softcap: 0.0,
    form: Form::Plain,
};

fn flash(cases: &mut Cases) {
    use DType::{BF16, F16, F32, Q4_0, Q8_0};
    for dtype in [F32, F16, BF16, Q8_0, Q4_0] {
        let mut add = |a: Attention| attention(cases, [dtype, dtype], a);
        for head in [
            [32, 32],
            [64, 64],
            [96, 96],
            [128, 128],
            [256, 256],
            [64, 32],
            [192, 128],
        ] {
            for (kv, tokens) in [(1, 1), (7, 3), (40, 1), (33, 9)] {
                add(Attention {
                    head,
                    kv,
                    tokens,
                    ..SMALL
                });
            }
        }
        for heads in [[1, 1], [8, 1], [6, 3], [12, 4]] {
            for batch in [1, 2] {
                add(Attention {
                    heads,
                    batch,
                    ..SMALL
                });
                add(Attention {
                    heads,
                    batch,
                    max_bias: 8.0,
                    ..SMALL
                });
                add(Attention {
                    heads,
                    batch,
                    sinks: true,
                    ..SMALL
                });
            }
        }
        for (mask, sinks) in [(false, false), (false, true), (true, true)] {
            for tokens in [1, 5] {
                for softcap in [0.0, 10.0] {
                    add(Attention {
                        mask,
                        sinks,
                        softcap,
                        tokens,
                        kv: 20,
                        ..SMALL
                    });
                }
            }
        }
        for form in [Form::Gaps, Form::Permuted] {
            for (kv, tokens) in [(17, 1), (17, 4), (64, 20)] {
                add(Attention {
                    form,
                    kv,
                    tokens,
                    head: [64, 64],
                    ..SMALL
                });
            }
        }
        for prompt in PROMPTS.into_iter().filter(|a| fits(dtype, a)) {
            for (sinks, softcap, max_bias) in
                [(false, 0.0, 0.0), (true, 10.0, 0.0), (false, 0.0, 8.0)]
            {
                if max_bias == 0.0 || prompt.mask {
                    add(Attention {
                        sinks,
                        softcap,
                        max_bias,
                        ..prompt
                    });
                }
            }
        }
        for (kv, tokens) in [(256, 1), (300, 33)] {
            add(Attention {
                kv,
                tokens,
                head: [64, 64],
                ..SMALL
            });
        }
    }
    for types in [[F16, Q8_0], [Q8_0, F16], [Q8_0, Q4_0], [F16, F32]] {
        for tokens in [1, 6] {
            attention(cases, types, Attention { tokens, ..SMALL });
        }
    }
    // Head sizes that are not multiples of common sizes.
    for dtype in [F32, F16, BF16] {
        for head in [[8, 8], [40, 40], [80, 80], [72, 24]] {
            for tokens in [1, 4] {
                attention(
                    cases,
                    [dtype, dtype],
                    Attention {
                        head,
                        tokens,
                        ..SMALL
                    },
                );
            }
        }
    }
}

/// Returns whether heads are whole blocks.
fn fits(dtype: DType, a: &Attention) -> bool {
    a.head.iter().all(|size| size % dtype.block_len() == 0)
}

fn attention(cases: &mut Cases, [k_type, v_type]: [DType; 2], a: Attention) {
    let mut notes = Vec::new();
    if a.max_bias > 0.0 {
        notes.push("alibi");
    }
    if a.softcap > 0.0 {
        notes.push("softcap");
    }
    // Devices may round queries and weights of keys to the types of keys and values.
    let limit = match (k_type, v_type) {
        (DType::F32, DType::F32) => 1e-7,
        _ => 5e-4,
    };
    cases.add(&notes.join(", "), Limit::Nmse(limit), |b| {
        let (q, k, v, mask) = a.operands(b, [k_type, v_type])?;
        let sinks = a
            .sinks
            .then(|| b.input(DType::F32, [a.heads[0], 1, 1, 1], Recipe::UNIT))
            .transpose()?;
        let op = Op::FlashAttn {
            scale: a.scale(),
            max_bias: a.max_bias,
            softcap: a.softcap,
            precision: Precision::F32,
        };
        b.graph.push(op, &[Some(q), Some(k), Some(v), mask, sinks])
    });
}
