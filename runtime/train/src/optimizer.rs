//! Optimizers: AdamW and SGD.

use crate::error::{Error, Result};
use samite_core::{Graph, TensorId};
use serde::{Deserialize, Serialize};

/// An optimizer with its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind", deny_unknown_fields)]
pub enum Optimizer {
    /// AdamW: steps by the running mean of the gradient divided by the root of the running mean of
    /// its square.
    Adamw {
        /// Decay of the running mean.
        #[serde(default = "beta1")]
        beta1: f32,
        /// Decay of the running mean of squares.
        #[serde(default = "beta2")]
        beta2: f32,
        /// Epsilon that is added to the root.
        #[serde(default = "eps")]
        eps: f32,
        /// Fraction of the learning rate by which matrices decay.
        #[serde(default)]
        weight_decay: f32,
    },
    /// Gradient descent with momentum.
    Sgd {
        /// Fraction of the previous direction that is kept.
        #[serde(default)]
        momentum: f32,
        /// Fraction of the learning rate by which matrices decay.
        #[serde(default)]
        weight_decay: f32,
    },
}

fn beta1() -> f32 {
    0.9
}

fn beta2() -> f32 {
    0.999
}

fn eps() -> f32 {
    1e-8
}

impl Default for Optimizer {
    fn default() -> Self {
        Optimizer::Adamw {
            beta1: beta1(),
            beta2: beta2(),
            eps: eps(),
            weight_decay: 0.0,
        }
    }
}

/// Tensors of one parameter.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// The weights.
    pub weights: TensorId,
    /// Gradient of the weights.
    pub gradient: TensorId,
    /// Optimizer state: the running means.
    pub means: [TensorId; 2],
}

impl Optimizer {
    pub(crate) fn check(&self) -> Result<()> {
        let below_1 = |field: &str, value: f32| {
            if (0.0..1.0).contains(&value) {
                Ok(())
            } else {
                Err(Error::config(format!(
                    "training.optimizer.{field} is not from 0 up to, but without, 1"
                )))
            }
        };
        match *self {
            Optimizer::Adamw {
                beta1,
                beta2,
                eps,
                weight_decay,
            } => {
                below_1("beta1", beta1)?;
                below_1("beta2", beta2)?;
                below_1("eps", eps)?;
                below_1("weight_decay", weight_decay)
            }
            Optimizer::Sgd {
                momentum,
                weight_decay,
            } => {
                below_1("momentum", momentum)?;
                below_1("weight_decay", weight_decay)
            }
        }
    }

    /// Returns the number of values that the step operation takes.
    pub fn numbers(&self) -> usize {
        match self {
            Optimizer::Adamw { .. } => 7,
            Optimizer::Sgd { .. } => 2,
        }
    }

    /// Returns the values for step `step`, counted from 0, with a learning rate. Weight decay
    /// applies if `decays` is set.
    pub fn values(&self, step: u64, rate: f32, decays: bool) -> Vec<f32> {
        let decay = |weight_decay| if decays { weight_decay } else { 0.0 };
        match *self {
            Optimizer::Adamw {
                beta1,
                beta2,
                eps,
                weight_decay,
            } => {
                let exponent = step as f64 + 1.0;
                let correction = |beta: f32| 1.0 / (1.0 - f64::from(beta).powf(exponent));
                vec![
                    rate,
                    beta1,
                    beta2,
                    eps,
                    decay(weight_decay),
                    correction(beta1) as f32,
                    correction(beta2) as f32,
                ]
            }
            Optimizer::Sgd { weight_decay, .. } => vec![rate, decay(weight_decay)],
        }
    }

    /// Appends one step of a parameter; `numbers` is the tensor of [`values`](Self::values).
    ///
    /// # Errors
    /// Returns an error if operands do not match.
    pub fn append(
        &self,
        graph: &mut Graph,
        parameter: Parameter,
        numbers: TensorId,
    ) -> Result<TensorId> {
        let Parameter {
            weights,
            gradient,
            means,
        } = parameter;
        Ok(match *self {
            Optimizer::Adamw { .. } => graph.opt_step_adamw(weights, gradient, means, numbers)?,
            Optimizer::Sgd { momentum, .. } => {
                let mut direction = gradient;
                if momentum != 0.0 {
                    let kept = graph.scale(means[0], momentum)?;
                    let sum = graph.add(kept, gradient)?;
                    direction = graph.cpy(sum, means[0])?;
                }
                graph.opt_step_sgd(weights, direction, numbers)?
            }
        })
    }
}
