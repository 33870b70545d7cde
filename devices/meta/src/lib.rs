//! One device made of several.
#![forbid(unsafe_code)]

pub mod comm;
mod crew;
mod device;
mod local_plan;
mod memory;
mod partition;
mod rules;
mod state;
mod stream;
mod window;

pub use device::{MetaDevice, MetaOptions};
pub use partition::{
    Collective, Conversion, Exchange, Input, Leaf, Leaves, Output, Partition, Step, Task,
};
pub use state::{Piece, Run, Runs, State, divide, pieces};

#[cfg(all(test, not(loom)))]
mod tests;
