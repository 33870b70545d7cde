//! Arithmetic, functions of one element, gated units.

use super::*;

#[test]
fn arithmetic_repeats_the_second_operand() {
    let a: (&[usize], &[f32]) = (&[4, 2], &[1., 2., 3., 4., 5., 6., 7., 8.]);
    let sum = two([a, (&[4], &[10., 20., 30., 40.])], |g, a, b| g.add(a, b));
    near(&sum, &[11., 22., 33., 44., 15., 26., 37., 48.]);
    let product = two([a, (&[2, 2], &[1., 2., 3., 4.])], |g, a, b| g.mul(a, b));
    near(&product, &[1., 4., 3., 8., 15., 24., 21., 32.]);
    let difference = two([a, (&[1, 2], &[1., 2.])], |g, a, b| g.sub(a, b));
    near(&difference, &[0., 1., 2., 3., 3., 4., 5., 6.]);
    let quotient = two([a, (&[1], &[2.])], |g, a, b| g.div(a, b));
    near(&quotient, &[0.5, 1., 1.5, 2., 2.5, 3., 3.5, 4.]);
}

#[test]
fn arithmetic_on_transposed_and_f16_operands() {
    let turned = two(
        [
            (&[2, 2], &[1., 2., 3., 4.]),
            (&[2, 2], &[10., 20., 30., 40.]),
        ],
        |g, a, b| {
            let b = g.transpose(b)?;
            g.add(a, b)
        },
    );
    near(&turned, &[11., 32., 23., 44.]);
    for dtype in [DType::F16, DType::BF16] {
        let doubled = one(&[3], &[1., -2., 0.5], |g, x| {
            let half = g.cast(x, dtype)?;
            let sum = g.add(half, half)?;
            g.cast(sum, DType::F32)
        });
        near(&doubled, &[2., -4., 1.]);
    }
}

#[test]
fn results_may_overwrite_either_operand() {
    // The harness gives every node its own memory, so memory is shared explicitly, through views.
    for written in [0, 1] {
        let mut g = Graph::new();
        let (a, b) = (input(&mut g, &[3]), input(&mut g, &[3]));
        let difference = g.sub(a, b).unwrap();
        let nodes: Vec<_> = g.ids().collect();
        let buffer = host_buffer_type().allocate(128, Usage::Any).unwrap();
        let places: Vec<_> = [0, 64, 64 * written]
            .map(|offset| {
                Some(TensorRef {
                    buffer: std::sync::Arc::clone(&buffer),
                    slot: Slot {
                        offset,
                        layout: g.tensor(a).layout,
                    },
                })
            })
            .into();
        let place = |id: TensorId| places[id.index()].as_ref().unwrap();
        place(a)
            .write(0, bytemuck::cast_slice(&[5f32, 6., 7.]))
            .unwrap();
        place(b)
            .write(0, bytemuck::cast_slice(&[1f32, 2., 4.]))
            .unwrap();
        let device = device(1);
        let mut stream = device.open_stream().unwrap();
        let mut prepared = stream
            .prepare(PlacedGraph {
                graph: &g,
                nodes: &nodes,
                places: &places,
                workspace: None,
                compiled: None,
            })
            .unwrap();
        let control = RunControl {
            cancel: &CancelToken::new(),
            observer: None,
        };
        stream.run(prepared.as_mut(), control).unwrap();
        let mut out = [0f32; 3];
        place(difference)
            .read(0, bytemuck::cast_slice_mut(&mut out))
            .unwrap();
        assert_eq!(out, [4., 4., 3.]);
    }
}

#[test]
fn unary_functions() {
    let x = [-2.0, -0.5, 0.0, 0.5, 3.5];
    let of = |function| one(&[5], &x, |g, a| g.unary(a, function));
    near(&of(Unary::Abs), &[2.0, 0.5, 0.0, 0.5, 3.5]);
    near(&of(Unary::Sgn), &[-1., -1., 0., 1., 1.]);
    near(&of(Unary::Step), &[0., 0., 0., 1., 1.]);
    near(&of(Unary::Relu), &[0., 0., 0., 0.5, 3.5]);
    near(&of(Unary::Round), &[-2., -1., 0., 1., 4.]);
    near(
        &of(Unary::HardSigmoid),
        &[1. / 6., 2.5 / 6., 0.5, 3.5 / 6., 1.],
    );
    let exact: [(Unary, ScalarFunction); 8] = [
        (Unary::Tanh, f32::tanh),
        (Unary::Exp, f32::exp),
        (Unary::ExpM1, f32::exp_m1),
        (Unary::Sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
        (Unary::Silu, |x| x / (1.0 + (-x).exp())),
        (Unary::SoftPlus, |x| x.exp().ln_1p()),
        (Unary::Elu, |x| if x > 0.0 { x } else { x.exp_m1() }),
        (Unary::GeluQuick, |x| x / (1.0 + (-1.702 * x).exp())),
    ];
    for (function, expected) in exact {
        near(&of(function), &x.map(expected));
    }
    near(
        &of(Unary::Gelu),
        &[-0.045_402, -0.154_286, 0.0, 0.345_714, 3.499_38],
    );
    near(
        &of(Unary::GeluErf),
        &[-0.045_500, -0.154_269, 0.0, 0.345_731, 3.499_186],
    );
    near(
        &one(&[5], &x, |g, a| g.scale_bias(a, 2.0, 1.0)),
        &[-3., 0., 1., 2., 8.],
    );
    near(
        &one(&[5], &x, |g, a| g.clamp(a, -1.0, 1.0)),
        &[-1., -0.5, 0., 0.5, 1.],
    );
    near(&one(&[5], &x, |g, a| g.fill(a, 7.0)), &[7.0; 5]);
    let roots = one(&[5], &x, |g, a| {
        let squares = g.sqr(a)?;
        g.sqrt(squares)
    });
    near(&roots, &[2.0, 0.5, 0.0, 0.5, 3.5]);
}

#[test]
fn gated_units() {
    let x = [1.0, -1.0, 2.0, 3.0];
    near(&one(&[4], &x, |g, a| g.glu(a, Glu::Reglu)), &[2.0, 0.0]);
    let swapped = |g: &mut Graph, a| {
        let kind = Glu::Reglu;
        g.push(
            Op::Glu {
                kind,
                swapped: true,
            },
            &[Some(a)],
        )
    };
    near(&one(&[4], &x, swapped), &[2.0, -3.0]);
    let silu = |x: f32| x / (1.0 + (-x).exp());
    let split = two([(&[2], &x[..2]), (&[2], &x[2..])], |g, a, b| {
        g.glu_split(a, b, Glu::Swiglu)
    });
    near(&split, &[silu(1.0) * 2.0, silu(-1.0) * 3.0]);
    let oai = Glu::SwigluOai {
        alpha: 1.0,
        limit: 2.5,
    };
    near(
        &one(&[4], &x, |g, a| g.glu(a, oai)),
        &[silu(1.0) * 3.0, silu(-1.0) * 3.5],
    );
}
