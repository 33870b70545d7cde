//! A device that combines several devices.
#![forbid(unsafe_code)]

pub mod comm;
mod device;
mod explain;
mod local_plan;
mod memory;
mod partition;
mod predict;
mod rules;
mod shard_workers;
mod stand_in;
mod state;
mod stream;
mod window;

pub use device::{MetaDevice, MetaOptions};
pub use explain::{Explanation, StoredCounts};
pub use partition::{
    Collective, Conversion, Exchange, Leaf, Leaves, Output, Partition, PartitionStep,
    ReplicatedInput, Task,
};
pub use predict::Prediction;
pub use state::{AxisRun, AxisRuns, ShardRange, SplitState, divide, pieces};

#[cfg(all(test, not(loom)))]
mod tests;
