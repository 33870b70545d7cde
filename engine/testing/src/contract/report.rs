//! Outcomes of the checks.

use std::fmt;

/// Outcome of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContractOutcome {
    /// The check passed.
    Passed,
    /// The device lacks the feature, for this reason.
    Skipped(String),
    /// The check failed, for this reason.
    Failed(String),
}

/// Outcomes by name of the check.
#[derive(Clone, Debug, Default)]
pub struct ContractReport {
    /// Checks in execution order.
    pub checks: Vec<(&'static str, ContractOutcome)>,
}

impl ContractReport {
    /// Returns the failed checks, with the reasons.
    pub fn failures(&self) -> Vec<(&'static str, &str)> {
        let failed = self
            .checks
            .iter()
            .filter_map(|(name, outcome)| match outcome {
                ContractOutcome::Failed(why) => Some((*name, why.as_str())),
                _ => None,
            });
        failed.collect()
    }

    /// Returns the number of passed checks.
    pub fn passed(&self) -> usize {
        let passed = |(_, outcome): &&(_, _)| *outcome == ContractOutcome::Passed;
        self.checks.iter().filter(passed).count()
    }
}

impl fmt::Display for ContractReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, outcome) in &self.checks {
            match outcome {
                ContractOutcome::Passed => writeln!(f, "{name}: holds")?,
                ContractOutcome::Skipped(why) => writeln!(f, "{name}: skipped, {why}")?,
                ContractOutcome::Failed(why) => writeln!(f, "{name}: FAILED: {why}")?,
            }
        }
        Ok(())
    }
}
