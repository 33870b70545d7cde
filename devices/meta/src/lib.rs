//! One device made of several.
#![forbid(unsafe_code)]

pub mod comm;
mod memory;
mod partition;
mod rules;
mod state;
mod window;

pub use partition::{
    Collective, Conversion, Exchange, Input, Leaf, Leaves, Output, Partition, Step, Task,
};
pub use state::{Piece, Run, Runs, State, divide, pieces};

#[cfg(all(test, not(loom)))]
mod tests;
