//! Scheduler: places, splits, plans and runs a graph over several devices.
//!
//! The scheduler turns a [`Graph`](samite_core::Graph) into a [`Plan`], which is plain data, in
//! four steps:
//!
//! 1. [`placement`]: a device and a reason for every node.
//! 2. [`split`]: cuts between devices, with the copies that nodes after the cuts read.
//! 3. [`memory_plan`]: memory for every tensor, exact to the byte, by memory type.
//! 4. [`order`]: the waits between asynchronous work.
//!
//! A plan can be [explained](Plan#impl-Display-for-Plan) as text, [JSON](Plan::to_json) or a
//! [picture](Plan::to_svg), and [checked](race_check) by code that shares nothing with steps 3 and
//! 4. A [`Scheduler`] allocates the planned memory, lets devices compile their splits, and runs the
//! plan any number of times. In the steady state it neither plans nor allocates.
//!
//! The scheduler knows devices only through their contract. It does not know kernels or models.

#![forbid(unsafe_code)]

mod bound;
mod buffer_pool;
pub mod compare;
mod compiler;
mod devices;
mod executor;
pub mod explain;
mod host_copies;
pub mod memory_plan;
mod options;
pub mod order;
mod picture;
pub mod placement;
mod plan;
pub mod race_check;
mod run;
mod scheduler;
pub mod split;
mod trace;
mod watch;

pub use compare::nmse;
pub use devices::DeviceSet;
pub use options::{Assignment, Assignments, Fallback, Options};
pub use placement::{Placement, Reason, Refusal};
pub use plan::Plan;
pub use scheduler::{Counters, Scheduler};
pub use split::{Copy, Split};
pub use trace::Trace;
pub use watch::{Watch, WatchedRun};
