//! The learning rate over time.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// A learning rate that increases linearly to `rate` over the first `warmup` steps, and then
/// decreases to `last_rate` along half a cosine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Maximum rate.
    pub rate: f32,
    /// Rate of the last step. If it is missing, the rate stays constant after the warm-up.
    #[serde(default)]
    pub last_rate: Option<f32>,
    /// Number of steps until the maximum rate.
    #[serde(default)]
    pub warmup: u64,
}

impl Schedule {
    /// Returns the rate of step `step` of `steps`, counted from 0.
    pub fn rate(&self, step: u64, steps: u64) -> f32 {
        if step < self.warmup {
            return self.rate * (step + 1) as f32 / self.warmup as f32;
        }
        let last = self.last_rate.unwrap_or(self.rate);
        let length = steps.saturating_sub(self.warmup + 1).max(1);
        let progress = ((step - self.warmup) as f32 / length as f32).min(1.0);
        let share = 0.5 * (1.0 + (std::f32::consts::PI * progress).cos());
        last + (self.rate - last) * share
    }

    pub(crate) fn check(&self) -> Result<()> {
        for (field, rate) in [("rate", Some(self.rate)), ("last_rate", self.last_rate)] {
            if rate.is_some_and(|rate| !(rate >= 0.0 && rate.is_finite())) {
                return Err(Error::config(format!(
                    "training.schedule.{field} is negative or not a number"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_warms_up_and_decays() {
        let schedule = Schedule {
            rate: 1.0,
            last_rate: Some(0.1),
            warmup: 4,
        };
        let rates: Vec<_> = (0..15).map(|step| schedule.rate(step, 15)).collect();
        assert_eq!(rates[..5], [0.25, 0.5, 0.75, 1.0, 1.0]);
        assert!(rates[4..].is_sorted_by(|a, b| a >= b));
        assert!((rates[9] - 0.55).abs() < 1e-6 && (rates[14] - 0.1).abs() < 1e-6);
        assert_eq!(schedule.rate(99, 15), rates[14]);
        let constant = Schedule {
            last_rate: None,
            ..schedule
        };
        assert_eq!(constant.rate(9, 15), 1.0);
    }
}
