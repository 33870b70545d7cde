//! The outcomes of the checks.

use std::fmt;

/// The outcome of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContractOutcome {
    /// It holds.
    Passed,
    /// The device has nothing that the check is about.
    Skipped(String),
    /// It does not hold.
    Failed(String),
}

/// Outcomes by name of the check.
#[derive(Clone, Debug, Default)]
pub struct ContractReport {
    /// In the order in which they were made.
    pub checks: Vec<(&'static str, ContractOutcome)>,
}

impl ContractReport {
    /// Returns the checks that do not hold, with what is wrong.
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

    /// How many checks hold.
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
