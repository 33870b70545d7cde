//! `samite dev`: commands for developers of samite and of devices.

#[cfg(feature = "sim")]
use super::sim;
use super::{compare, synth, test_ops};
#[cfg(not(feature = "sim"))]
use crate::failure::CommandError;
use crate::failure::CommandResult;
use clap::{Args, Subcommand};

/// Flags of `samite dev`.
#[derive(Debug, Args)]
pub struct DevArgs {
    #[command(subcommand)]
    pub command: DevCommand,
}

/// The command for developers. All are also commands of the program itself, where help hides them.
#[derive(Debug, Subcommand)]
pub enum DevCommand {
    /// Write a model of a known shape with random weights
    Synth(synth::SynthArgs),
    /// Compare a device's operations with the reference device
    TestOps(Box<test_ops::TestOpsArgs>),
    /// Run a model on two devices in lockstep and find the first operation that differs
    Compare(Box<compare::CompareArgs>),
    /// Run the scheduler and models on simulated devices with faults
    #[cfg(feature = "sim")]
    Sim(sim::SimArgs),
    /// Run the scheduler and models on simulated devices with faults; needs the feature `sim`
    #[cfg(not(feature = "sim"))]
    Sim(LeftOutArgs),
}

/// Arguments of a command that this build leaves out. It accepts any, to report the missing feature
/// instead of an unknown flag.
#[cfg(not(feature = "sim"))]
#[derive(Debug, Args)]
pub struct LeftOutArgs {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    _arguments: Vec<std::ffi::OsString>,
}

impl DevCommand {
    /// Runs the command.
    pub fn run(self) -> CommandResult {
        match self {
            DevCommand::Synth(args) => synth::run(args),
            DevCommand::TestOps(args) => test_ops::run(*args),
            DevCommand::Compare(args) => compare::run(*args),
            #[cfg(feature = "sim")]
            DevCommand::Sim(args) => sim::run(args),
            #[cfg(not(feature = "sim"))]
            DevCommand::Sim(_) => Err(CommandError::usage(
                "dev sim: this samite was built without the simulator: build it with --features sim",
            )),
        }
    }
}
