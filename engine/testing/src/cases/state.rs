//! Operations that carry a state from token to token.

use crate::case::{Cases, Form, Limit};
use crate::recipe::Recipe;
use samite_core::DType;

pub fn add(cases: &mut Cases) {
    convolutions(cases);
    delta_nets(cases);
    scans(cases);
}

fn scans(cases: &mut Cases) {
    let between = |min, max| Recipe::Uniform { min, max };
    for (n, size, heads, groups) in [
        (1, 1, 1, 1),
        (16, 1, 40, 1),
        (128, 64, 4, 2),
        (20, 33, 6, 3),
    ] {
        for (tokens, sequences) in [(1, 1), (5, 2), (33, 1), (1, 4)] {
            for snapshots in [1, 3] {
                let kinds = if n == 1 { &[1][..] } else { &[1, n][..] };
                for &rates in kinds {
                    let kind = if rates == 1 { "one rate" } else { "rates" };
                    cases.add(kind, Limit::Nmse(1e-6), |b| {
                        let f32 = DType::F32;
                        let shared = [n, groups, tokens, sequences];
                        let sources = [
                            b.input(f32, [n, size, heads, sequences + 2], Recipe::UNIT)?,
                            b.input(f32, [size, heads, tokens, sequences], Recipe::UNIT)?,
                            b.input(f32, [heads, tokens, sequences, 1], between(-3.0, 3.0))?,
                            b.input(f32, [rates, heads, 1, 1], between(-2.0, -0.1))?,
                            b.input(f32, shared, Recipe::UNIT)?,
                            b.input(f32, shared, Recipe::UNIT)?,
                            b.input(
                                DType::I32,
                                [sequences, 1, 1, 1],
                                Recipe::Ids {
                                    limit: sequences + 2,
                                },
                            )?,
                        ];
                        b.graph.ssm_scan(sources, snapshots)
                    });
                }
            }
        }
    }
    for form in [Form::Permuted, Form::Gaps] {
        cases.add("views", Limit::Nmse(1e-6), |b| {
            let sources = [
                b.operand(DType::F32, [32, 8, 2, 2], Recipe::UNIT, form)?,
                b.operand(DType::F32, [8, 2, 3, 2], Recipe::UNIT, form)?,
                b.input(DType::F32, [2, 3, 2, 1], between(-3.0, 3.0))?,
                b.input(DType::F32, [1, 2, 1, 1], between(-2.0, -0.1))?,
                b.operand(DType::F32, [32, 1, 3, 2], Recipe::UNIT, form)?,
                b.operand(DType::F32, [32, 1, 3, 2], Recipe::UNIT, form)?,
                b.input(DType::I32, [2, 1, 1, 1], Recipe::Ids { limit: 2 })?,
            ];
            b.graph.ssm_scan(sources, 1)
        });
    }
}

fn convolutions(cases: &mut Cases) {
    for (width, tokens) in [(1, 3), (3, 1), (4, 1), (4, 70), (4, 0)] {
        for (channels, sequences) in [(1, 1), (17, 1), (64, 3)] {
            cases.add("", Limit::Nmse(1e-7), |b| {
                let shape = [width - 1 + tokens, channels, sequences, 1];
                let x = b.input(DType::F32, shape, Recipe::UNIT)?;
                let weights = b.input(DType::F32, [width, channels, 1, 1], Recipe::UNIT)?;
                b.graph.ssm_conv(x, weights)
            });
        }
    }
    for form in [Form::Gaps, Form::Permuted] {
        cases.add("", Limit::Nmse(1e-7), |b| {
            let x = b.operand(DType::F32, [9, 20, 2, 1], Recipe::UNIT, form)?;
            let weights = b.input(DType::F32, [4, 20, 1, 1], Recipe::UNIT)?;
            b.graph.ssm_conv(x, weights)
        });
    }
}

fn delta_nets(cases: &mut Cases) {
    let decay = Recipe::Uniform {
        min: -1.5,
        max: 0.0,
    };
    let beta = Recipe::Uniform { min: 0.0, max: 1.0 };
    for (size, heads, shared) in [(1, 1, 1), (16, 4, 2), (40, 3, 1), (64, 2, 2), (128, 1, 1)] {
        for (tokens, sequences, shared_sequences) in [(1, 1, 1), (5, 2, 1), (33, 1, 1), (1, 4, 4)] {
            for snapshots in [1, 3] {
                let kinds = if size == 1 { &[1][..] } else { &[1, size][..] };
                for &decays in kinds {
                    let kind = if decays == 1 { "one decay" } else { "decays" };
                    cases.add(kind, Limit::Nmse(1e-6), |b| {
                        let f32 = DType::F32;
                        let few = [size, shared, tokens, shared_sequences];
                        // Keys have the usual length of models.
                        let short = Recipe::Uniform {
                            min: -1.0 / (size as f32).sqrt(),
                            max: 1.0 / (size as f32).sqrt(),
                        };
                        let per_token = |width| [width, heads, tokens, sequences];
                        let sources = [
                            b.input(f32, few, short)?,
                            b.input(f32, few, short)?,
                            b.input(f32, per_token(size), Recipe::UNIT)?,
                            b.input(f32, per_token(decays), decay)?,
                            b.input(f32, per_token(1), beta)?,
                            b.input(f32, [size, size, heads, sequences], Recipe::UNIT)?,
                        ];
                        b.graph.gated_delta_net(sources, snapshots)
                    });
                }
            }
        }
    }
    for form in [Form::Permuted, Form::Gaps] {
        cases.add("views", Limit::Nmse(1e-6), |b| {
            let shape = [32, 2, 3, 2];
            let sources = [
                b.operand(DType::F32, shape, Recipe::UNIT, form)?,
                b.operand(DType::F32, shape, Recipe::UNIT, form)?,
                b.operand(DType::F32, shape, Recipe::UNIT, form)?,
                b.input(DType::F32, [1, 2, 3, 2], decay)?,
                b.input(DType::F32, [1, 2, 3, 2], beta)?,
                b.input(DType::F32, [32, 32, 2, 2], Recipe::UNIT)?,
            ];
            b.graph.gated_delta_net(sources, 1)
        });
    }
}
