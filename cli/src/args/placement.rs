//! Typed flags that place a model's layers and tensors on devices.

use super::numbers::number_or_all;
use crate::ranks::RankArgs;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;

const MAX_LAYERS: i64 = 1024;

/// Flags that place a model on devices.
#[derive(Clone, Debug, Args)]
pub struct PlacementArgs {
    /// Placement of model parts on the devices in use: `layers=0-3:cpu`, `*_exps*:cpu`,
    /// `output:blas`; several separated by `;`
    #[arg(long, value_name = "RULES", help_heading = "Placement",
        value_parser = NonEmptyStringValueParser::new())]
    pub place: Vec<String>,

    /// Place only the last N layers, including the output, on devices other than the last one
    /// [also: -ngl]
    #[arg(
        long = "ngl",
        visible_alias = "n-gpu-layers",
        value_name = "N|all",
        help_heading = "Placement",
        value_parser = number_or_all,
        allow_negative_numbers = true
    )]
    pub ngl: Option<usize>,

    /// Place tensors whose names match a regular expression on a device: `expression=device,…`
    /// [also: -ot]
    #[arg(
        long = "override-tensor",
        value_name = "LIST",
        help_heading = "Placement"
    )]
    pub override_tensor: Vec<String>,

    /// Keep all expert weights on the CPU [also: -cmoe]
    #[arg(long, help_heading = "Placement")]
    pub cpu_moe: bool,

    /// Keep the expert weights of the first N layers on the CPU [also: -ncmoe]
    #[arg(
        long,
        value_name = "N",
        help_heading = "Placement",
        value_parser = clap::value_parser!(u16).range(..=MAX_LAYERS)
    )]
    pub n_cpu_moe: Option<u16>,

    /// Split a model across devices by whole layers; by tensors, so that all devices named by
    /// --device compute each layer together; or not at all, so that the first device has everything
    /// [also: -sm]
    #[arg(long, value_enum, default_value_t = SplitMode::Layer, value_name = "MODE",
        help_heading = "Placement")]
    pub split_mode: SplitMode,

    /// Index of the GPU that has everything with --split-mode none [also: -mg]
    #[arg(
        long,
        value_name = "N",
        default_value = "0",
        help_heading = "Placement"
    )]
    pub main_gpu: usize,

    /// Split tensors even if a single device is predicted to be faster
    #[arg(long, help_heading = "Placement")]
    pub split_anyway: bool,

    /// Proportions for splitting layers across the devices before the last one, or tensors across
    /// all [also: -ts]
    #[arg(long = "tensor-split", value_name = "LIST", help_heading = "Placement")]
    pub tensor_split: Option<String>,

    #[command(flatten)]
    pub ranks: RankArgs,

    /// Fit layers to the free memory of the devices before the last one, unless other flags place
    /// layers [also: -fit]
    #[arg(long, value_enum, default_value_t = Switch::On, help_heading = "Placement")]
    pub fit: Switch,

    /// MiB to leave free on each device when fitting layers [also: -fitt]
    #[arg(long, value_name = "MIB", default_value = "512", help_heading = "Placement",
        value_parser = clap::value_parser!(u32))]
    pub fit_target: u32,

    /// Action for operations that run on a slower device because a faster one refuses them
    #[arg(long, value_enum, default_value_t = FallbackArg::Warn, help_heading = "Placement")]
    pub fallback: FallbackArg,
}

/// `--split-mode`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SplitMode {
    /// Whole layers
    Layer,
    /// Tensors: every device has a part of each layer
    Tensor,
    /// No split: the first device has everything
    None,
}

/// A flag that is on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Switch {
    /// Enable
    On,
    /// Disable
    Off,
}

/// `--fallback`
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum FallbackArg {
    /// Continue silently
    Allow,
    /// Print a warning
    Warn,
    /// Fail
    Deny,
}
