//! A simulation case and its outcome.

use crate::fault::{FaultOccurrence, Faults};
use std::fmt;
use std::str::FromStr;

/// Application that a case simulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Random graphs on the scheduler.
    Graphs,
    /// Language model contexts.
    Models,
    /// Many requests in one context.
    Requests,
    /// Clients of a ggml RPC server, some of them hostile.
    Rpc,
    /// Clients of a remote-mode server, some of them hostile.
    #[cfg(feature = "remote")]
    Remote,
}

impl Workload {
    /// Returns the name used for printing and parsing.
    pub fn name(self) -> &'static str {
        match self {
            Workload::Graphs => "graphs",
            Workload::Models => "models",
            Workload::Requests => "requests",
            Workload::Rpc => "rpc",
            #[cfg(feature = "remote")]
            Workload::Remote => "remote",
        }
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "graphs" => Ok(Workload::Graphs),
            "models" => Ok(Workload::Models),
            "requests" => Ok(Workload::Requests),
            "rpc" => Ok(Workload::Rpc),
            #[cfg(feature = "remote")]
            "remote" => Ok(Workload::Remote),
            _ => Err(format!(
                "'{name}' is none of graphs, models, requests, rpc and remote"
            )),
        }
    }
}

/// Complete input of a simulation: running a case again gives the same result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimCase {
    /// Seed of everything that the limits below do not decide.
    pub seed: u64,
    /// Simulated application.
    pub workload: Workload,
    /// Maximum number of devices besides the host's processor.
    pub devices: usize,
    /// Maximum number of computed nodes in each random graph.
    pub nodes: usize,
    /// Maximum number of workload steps.
    pub steps: usize,
    /// Exact list of faults; `None` for faults drawn from the seed.
    pub strikes: Option<Vec<FaultOccurrence>>,
}

impl SimCase {
    /// Returns the full case of a seed. Most seeds run graphs, which are fast. Every eighth seed
    /// runs models, every tenth requests, every tenth an RPC server, every twentieth a remote-mode
    /// server.
    pub fn new(seed: u64) -> Self {
        SimCase {
            seed,
            workload: match (seed % 10, seed % 8) {
                (5, _) => Workload::Requests,
                (2, _) => Workload::Rpc,
                #[cfg(feature = "remote")]
                (8, 0 | 4) => Workload::Remote,
                (_, 7) => Workload::Models,
                _ => Workload::Graphs,
            },
            devices: 3,
            nodes: 40,
            steps: 8,
            strikes: None,
        }
    }

    /// Returns the case with its limits at their maximum.
    fn whole(&self) -> SimCase {
        SimCase {
            workload: self.workload,
            ..SimCase::new(self.seed)
        }
    }

    /// Derives a seed for one purpose, independent of the seeds for others.
    pub(crate) fn seed_for(&self, purpose: u64) -> u64 {
        let seed = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        seed ^ purpose.wrapping_mul(0xd6e8_feb8_6659_fd93)
    }

    pub(crate) fn faults(&self) -> Faults {
        match &self.strikes {
            Some(strikes) => Faults::listed(strikes),
            None => Faults::drawn(self.seed_for(1)),
        }
    }
}

impl fmt::Display for SimCase {
    /// Writes the flags of `samite dev sim` that reproduce the case.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = self.whole();
        write!(f, "--seed {}", self.seed)?;
        if self.workload != SimCase::new(self.seed).workload {
            write!(f, " --workload {}", self.workload.name())?;
        }
        for (name, number, most) in [
            ("devices", self.devices, whole.devices),
            ("nodes", self.nodes, whole.nodes),
            ("steps", self.steps, whole.steps),
        ] {
            if number != most {
                write!(f, " --{name} {number}")?;
            }
        }
        if let Some(strikes) = &self.strikes {
            let strikes: Vec<_> = strikes.iter().map(FaultOccurrence::to_string).collect();
            write!(f, " --faults '{}'", strikes.join(","))?;
        }
        Ok(())
    }
}

/// Outcome of a case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CaseOutcome {
    /// Description of the failure, if the case failed.
    pub failure: Option<String>,
    /// Trace hash; equal for equal runs.
    pub hash: u64,
    /// Faults that struck.
    pub strikes: Vec<FaultOccurrence>,
    /// Trace, if requested.
    pub trace: Option<String>,
    /// Number of workload steps completed.
    pub steps: usize,
    /// Number of devices used by the largest plan.
    pub devices: usize,
}
