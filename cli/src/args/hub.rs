//! Typed flags for models by name, and for access to the hub.

use clap::Args;
use samite::hub::Reference;

/// Flags for a model that is named rather than given as a file.
#[derive(Clone, Debug, Args)]
pub struct HubArgs {
    /// Model on a hub instead of a file: OWNER/NAME of its repository, optionally with a
    /// quantization type; downloaded if not present [also: -hf, -hfr]
    #[arg(
        long,
        value_name = "OWNER/NAME[:TYPE]",
        conflicts_with = "model",
        help_heading = "Model by name"
    )]
    pub hf_repo: Option<Reference>,

    /// File of that repository, instead of a quantization type [also: -hff]
    #[arg(
        long,
        value_name = "PATH",
        requires = "hf_repo",
        help_heading = "Model by name"
    )]
    pub hf_file: Option<String>,

    #[command(flatten)]
    pub access: AccessArgs,

    /// Use only models that were downloaded before
    #[arg(long, requires = "hf_repo", help_heading = "Model by name")]
    pub offline: bool,
}

/// Flags for access to the hub.
#[derive(Clone, Debug, Args)]
pub struct AccessArgs {
    /// Access token for the hub [default: HF_TOKEN, or the token stored by the hub's own program]
    /// [also: -hft]
    #[arg(long, value_name = "TOKEN", help_heading = "Model by name")]
    pub hf_token: Option<String>,
}
