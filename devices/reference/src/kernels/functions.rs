//! Scalar functions, by their definitions.

use samite_core::{Glu, Unary};
use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// Returns `function(x)`.
pub fn unary(function: Unary, x: f64) -> f64 {
    match function {
        Unary::Abs => x.abs(),
        Unary::Sgn if x > 0.0 => 1.0,
        Unary::Sgn if x < 0.0 => -1.0,
        Unary::Sgn => 0.0,
        Unary::Neg => -x,
        Unary::Step if x > 0.0 => 1.0,
        Unary::Step => 0.0,
        Unary::Tanh => x.tanh(),
        Unary::Elu if x > 0.0 => x,
        Unary::Elu => x.exp_m1(),
        Unary::Relu => x.max(0.0),
        Unary::Sigmoid => sigmoid(x),
        Unary::Gelu => gelu(x),
        Unary::GeluQuick => gelu_quick(x),
        Unary::Silu => x * sigmoid(x),
        Unary::HardSwish => x * hard_sigmoid(x),
        Unary::HardSigmoid => hard_sigmoid(x),
        Unary::Exp => x.exp(),
        Unary::ExpM1 => x.exp_m1(),
        Unary::SoftPlus if x > 20.0 => x,
        Unary::SoftPlus => x.exp().ln_1p(),
        Unary::GeluErf => gelu_erf(x),
        Unary::Xielu {
            alpha_n,
            alpha_p,
            beta,
            eps,
        } => {
            let (alpha_n, alpha_p, beta) =
                (f64::from(alpha_n), f64::from(alpha_p), f64::from(beta));
            if x > 0.0 {
                alpha_p * x * x + beta * x
            } else {
                (x.min(eps.into()).exp_m1() - x) * alpha_n + beta * x
            }
        }
        Unary::Floor => x.floor(),
        Unary::Ceil => x.ceil(),
        Unary::Round => x.round(),
        Unary::Trunc => x.trunc(),
    }
}

/// Returns the gated linear unit of `x` with gate `g`.
pub fn glu(kind: Glu, x: f64, g: f64) -> f64 {
    match kind {
        Glu::Reglu => x.max(0.0) * g,
        Glu::Geglu => gelu(x) * g,
        Glu::Swiglu => x * sigmoid(x) * g,
        Glu::SwigluOai { alpha, limit } => {
            let limit = f64::from(limit);
            let x = x.min(limit);
            x * sigmoid(f64::from(alpha) * x) * (1.0 + g.min(limit).max(-limit))
        }
        Glu::GegluErf => gelu_erf(x) * g,
        Glu::GegluQuick => gelu_quick(x) * g,
        Glu::SwigluClamp { limit } => {
            let limit = f64::from(limit);
            let x = x.min(limit);
            x * sigmoid(x) * g.min(limit).max(-limit)
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn hard_sigmoid(x: f64) -> f64 {
    ((x + 3.0) / 6.0).clamp(0.0, 1.0)
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / PI).sqrt() * x * (1.0 + 0.044715 * x * x)).tanh())
}

fn gelu_quick(x: f64) -> f64 {
    x * sigmoid(1.702 * x)
}

fn gelu_erf(x: f64) -> f64 {
    0.5 * x * (1.0 + libm::erf(x * FRAC_1_SQRT_2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn near(value: f64, expected: f64) {
        assert!(
            (value - expected).abs() < 1e-12,
            "{value} instead of {expected}"
        );
    }

    #[test]
    fn activations() {
        near(unary(Unary::Silu, 1.0), 0.7310585786300049);
        near(unary(Unary::Gelu, 1.0), 0.8411919906082768);
        near(unary(Unary::GeluErf, 1.0), 0.8413447460685429);
        near(unary(Unary::GeluQuick, 1.0), 0.8457957659328212);
        near(unary(Unary::HardSwish, 1.0), 2.0 / 3.0);
        near(unary(Unary::HardSwish, -4.0), 0.0);
        near(unary(Unary::HardSigmoid, 4.0), 1.0);
        near(unary(Unary::Elu, -1.0), -0.6321205588285577);
        near(unary(Unary::SoftPlus, 0.0), std::f64::consts::LN_2);
        near(unary(Unary::SoftPlus, 21.0), 21.0);
        near(unary(Unary::Round, -2.5), -3.0);
        near(unary(Unary::Trunc, -2.5), -2.0);
        near(unary(Unary::Step, 0.0), 0.0);
        near(unary(Unary::Sgn, -3.0), -1.0);
        let xielu = Unary::Xielu {
            alpha_n: 4.0,
            alpha_p: 2.0,
            beta: 0.5,
            eps: 0.0,
        };
        near(unary(xielu, 3.0), 19.5);
        near(unary(xielu, -1.0), ((-1f64).exp_m1() + 1.0) * 4.0 - 0.5);
    }

    #[test]
    fn gated_activations() {
        let oai = Glu::SwigluOai {
            alpha: 2.0,
            limit: 1.0,
        };
        near(glu(oai, 5.0, -3.0), 0.0);
        near(glu(oai, 5.0, 3.0), 2.0 / (1.0 + (-2f64).exp()));
        near(glu(oai, -5.0, 0.5), -5.0 / (1.0 + 10f64.exp()) * 1.5);
        let clamp = Glu::SwigluClamp { limit: 1.0 };
        near(glu(clamp, 5.0, -3.0), -0.7310585786300049);
        near(glu(Glu::Reglu, -1.0, 3.0), 0.0);
        near(glu(Glu::Reglu, 2.0, 3.0), 6.0);
    }
}
