//! Measured losses and their standard errors.

/// A loss over several batches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean loss; for texts, in nats per token.
    pub loss: f32,
    /// Standard error of that mean, from the differences between batches; 0 for one batch.
    pub error: f32,
}

impl Evaluation {
    /// Evaluates the losses of at least one batch.
    pub(crate) fn from_losses(losses: &[f32]) -> Self {
        let count = losses.len() as f64;
        let mean = losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / count;
        let spread = |loss: &f32| (f64::from(*loss) - mean).powi(2);
        let spread: f64 = losses.iter().map(spread).sum();
        let error = if losses.len() > 1 {
            (spread / (count - 1.0) / count).sqrt()
        } else {
            0.0
        };
        Evaluation {
            loss: mean as f32,
            error: error as f32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_the_standard_error_of_the_mean() {
        let evaluation = Evaluation::from_losses(&[1.0, 2.0, 3.0, 6.0]);
        assert_eq!(evaluation.loss, 3.0);
        assert!((evaluation.error - (14f32 / 3.0 / 4.0).sqrt()).abs() < 1e-6);
        assert_eq!(
            Evaluation::from_losses(&[4.0]),
            Evaluation {
                loss: 4.0,
                error: 0.0
            }
        );
    }
}
