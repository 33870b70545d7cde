//! Flags that several commands share, as they were typed: structures with fields only.
//!
//! [`crate::setup`] computes what they mean, once, and commands work with that.

mod adapters;
mod context;
mod devices;
#[cfg(feature = "hub")]
mod hub;
mod loading;
mod model;
mod numbers;
mod placement;

pub use adapters::{AdapterArgs, ControlArgs};
pub use context::ContextArgs;
pub use devices::{DeviceArgs, RegistryArgs, ThreadArgs};
#[cfg(feature = "hub")]
pub use hub::{AccessArgs, HubArgs};
pub use loading::{LoadArg, LoadingArgs};
pub use model::ModelArgs;
pub use numbers::{number, number_or_all, sequence_count, thread_count, token_count};
pub use placement::{FallbackArg, PlacementArgs, SplitMode, Switch};
