//! A device that combines several devices.
#![forbid(unsafe_code)]

pub mod comm;
mod crew;
mod device;
mod elsewhere;
mod explain;
mod local_plan;
mod memory;
mod partition;
mod predict;
mod rules;
mod state;
mod stream;
mod window;

pub use device::{MetaDevice, MetaOptions};
pub use explain::{Explanation, Stored};
pub use partition::{
    Collective, Conversion, Exchange, Input, Leaf, Leaves, Output, Partition, Step, Task,
};
pub use predict::Prediction;
pub use state::{Piece, Run, Runs, State, divide, pieces};

#[cfg(all(test, not(loom)))]
mod tests;
