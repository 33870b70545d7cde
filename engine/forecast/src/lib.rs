//! Forecast of a plan's speed on machines that are not available.
//!
//! A file describes machines: their devices with measured rates, and the links between them
//! ([`Cluster`]). Each device becomes a [paper device](plan_only()), which takes part in planning
//! like a real one but has no memory. The plan is therefore that of the real scheduler, and the
//! splitting of tensors that of the meta device. From plan and rates the crate builds a graph of
//! [tasks](events) that each occupy one resource (a device, a link, the program that drives the
//! others) for some time, and simulates it. The [`Forecast`] contains the total time and its
//! breakdown.
//!
//! | file | content |
//! |---|---|
//! | `machines` | the cluster file and its errors |
//! | `plan_only` | devices that exist only in plans |
//! | `work` | products, attention and bytes of a node, and the time that a device takes for them |
//! | `events` | tasks, resources and time |
//! | `exchange` | collective operations of a split device's members, as tasks |
//! | `drive` | a plan as tasks: copies, splits, messages, overlapping runs |
//! | `forecast` | prefill and decode, and the result |
//!
//! The crate does not know models: the caller provides the plans. Rates are those of whole devices,
//! measured with all of their threads. The forecast excludes the cost of a model's first run,
//! loading and sampling.

#![forbid(unsafe_code)]

mod drive;
pub mod events;
mod exchange;
mod forecast;
mod machines;
mod plan_only;
mod work;

pub use forecast::{Forecast, Phase, Row, Task, forecast};
pub use machines::{
    AccessPath, Algorithm, Cluster, DeviceRates, Exchange, Link, Member, TypeRates,
};
pub use plan_only::plan_only;
pub use work::{Work, work};
