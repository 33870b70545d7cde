//! `samite dev`: commands for developers of samite and of devices.

use super::{compare, sim, synth, test_ops};
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
    TestOps(test_ops::TestOpsArgs),
    /// Run a model on two devices in lockstep and find the first operation that differs
    Compare(Box<compare::CompareArgs>),
    /// Run the scheduler and models on simulated devices with faults
    Sim(sim::SimArgs),
}

impl DevCommand {
    /// Runs the command.
    pub fn run(self) -> CommandResult {
        match self {
            DevCommand::Synth(args) => synth::run(args),
            DevCommand::TestOps(args) => test_ops::run(args),
            DevCommand::Compare(args) => compare::run(*args),
            DevCommand::Sim(args) => sim::run(args),
        }
    }
}
