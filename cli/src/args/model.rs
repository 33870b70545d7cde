//! Typed flags that select a model, its placement and its options.

use super::adapters::{AdapterArgs, ControlArgs};
use super::context::ContextArgs;
use super::devices::DeviceArgs;
#[cfg(feature = "hub")]
use super::hub::HubArgs;
use super::loading::LoadingArgs;
use super::placement::PlacementArgs;
use clap::Args;
use std::path::PathBuf;

/// Flags that select a model, its placement and its options.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// GGUF file; of a split model, any part [default: a small built-in model that generates
    /// stories]
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,

    #[cfg(feature = "hub")]
    #[command(flatten)]
    pub hub: HubArgs,

    #[command(flatten)]
    pub adapters: AdapterArgs,

    #[command(flatten)]
    pub control: ControlArgs,

    #[command(flatten)]
    pub devices: DeviceArgs,

    #[command(flatten)]
    pub placement: PlacementArgs,

    #[command(flatten)]
    pub loading: LoadingArgs,

    #[command(flatten)]
    pub context: ContextArgs,
}
