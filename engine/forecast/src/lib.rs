//! How fast a plan would run on machines that are not there.
//!
//! A file describes machines: their devices with measured rates, and the links between them
//! ([`Cluster`]). Each device becomes a [paper device](paper()), which takes part in planning as a
//! real one would and has no memory, so the plan is that of the scheduler itself, and the division
//! of tensors that of the meta device. From plan and rates the crate makes a graph of
//! [tasks](events), each of which takes some time of one resource (a device, a link, the program
//! that drives the others), and plays it as events. The [`Forecast`] says seconds, and where they
//! went.
//!
//! | file | what |
//! |---|---|
//! | `machines` | the file, and what is wrong with it |
//! | `paper` | devices for plans only |
//! | `work` | products, attention and bytes of a node, and how long a device takes for them |
//! | `events` | tasks, resources and time |
//! | `exchange` | what members of a divided device do together, as tasks |
//! | `drive` | a plan as tasks: copies, splits, messages, runs that overlap |
//! | `forecast` | prompt and generation, and the answer |
//!
//! It knows nothing of models: whoever asks brings the plans. Rates are of whole devices, measured
//! with all of their threads; what a model's first run costs, loading and sampling are left out.

#![forbid(unsafe_code)]

mod drive;
pub mod events;
mod exchange;
mod forecast;
mod machines;
mod paper;
mod work;

pub use forecast::{Forecast, Phase, Row, Task, forecast};
pub use machines::{Algorithm, Cluster, DeviceRates, Exchange, Link, Member, Through, TypeRates};
pub use paper::paper;
pub use work::{Work, work};
