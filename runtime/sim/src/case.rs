//! One case: what is simulated, and what came of it.

use crate::fault::{Faults, Strike};
use std::fmt;
use std::str::FromStr;

/// What a case does on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Random graphs on the scheduler.
    Graphs,
    /// Contexts of language models.
    Models,
    /// Many requests in one context.
    Requests,
    /// Clients of a server of ggml's RPC protocol, some of them hostile.
    Rpc,
    /// Clients of a server of the remote mode, some of them hostile.
    #[cfg(feature = "remote")]
    Remote,
}

impl Workload {
    /// The name that is printed and read.
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

/// Everything that a simulation depends on: running a case again gives the same result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// Decides everything that nothing below limits.
    pub seed: u64,
    /// What is done.
    pub workload: Workload,
    /// At most so many devices beside the host's processor.
    pub devices: usize,
    /// At most so many computed nodes in each random graph.
    pub nodes: usize,
    /// At most so many steps of the workload.
    pub steps: usize,
    /// Exactly these faults; `None` for those that the seed draws.
    pub strikes: Option<Vec<Strike>>,
}

impl Case {
    /// The whole case of a seed: graphs mostly, which are quick; every eighth seed has models, every tenth one requests, every
    /// tenth one a server of RPC, every twentieth one of the remote mode.
    pub fn new(seed: u64) -> Self {
        Case {
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

    /// The case with its limits at their largest.
    fn whole(&self) -> Case {
        Case {
            workload: self.workload,
            ..Case::new(self.seed)
        }
    }

    /// A seed for one purpose, independent of those for others.
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

impl fmt::Display for Case {
    /// The flags of `samite sim` that run it again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = self.whole();
        write!(f, "--seed {}", self.seed)?;
        if self.workload != Case::new(self.seed).workload {
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
            let strikes: Vec<_> = strikes.iter().map(Strike::to_string).collect();
            write!(f, " --faults '{}'", strikes.join(","))?;
        }
        Ok(())
    }
}

/// What came of a case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// What was wrong, if something was.
    pub failure: Option<String>,
    /// Equal for equal runs.
    pub hash: u64,
    /// The faults that struck.
    pub strikes: Vec<Strike>,
    /// The trace, if it was asked for.
    pub trace: Option<String>,
    /// How many steps of the workload were done.
    pub steps: usize,
    /// How many devices took part in the largest plan.
    pub devices: usize,
}
