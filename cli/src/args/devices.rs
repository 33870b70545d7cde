//! Typed flags that select backends, devices and CPU threads.

use super::numbers::thread_count;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use std::path::PathBuf;

/// Number of CPU threads.
#[derive(Clone, Copy, Debug, Args)]
pub struct ThreadArgs {
    /// Number of CPU threads [default: all available]
    #[arg(short = 't', long, value_name = "N", value_parser = thread_count)]
    pub threads: Option<usize>,
}

/// Flags that select backends.
#[derive(Clone, Debug, Default, Args)]
pub struct RegistryArgs {
    /// Backends to disable: `blas`, or plugins such as `vulkan`; several separated by `,` [also:
    /// SAMITE_DISABLE]
    #[arg(long, value_name = "NAME", help_heading = "Backends")]
    pub disable: Vec<String>,

    /// ggml plugin to load, in addition to those of SAMITE_BACKEND_PATH
    #[arg(long, value_name = "FILE", help_heading = "Backends")]
    pub plugin: Vec<PathBuf>,

    /// RPC servers whose devices are used as RPC0, RPC1 and so on: addresses such as
    /// 192.168.0.7:50052, several separated by `,`
    #[arg(long, value_name = "SERVERS", value_delimiter = ',',
        value_parser = NonEmptyStringValueParser::new(), help_heading = "Backends")]
    pub rpc: Vec<String>,

    #[cfg(feature = "remote")]
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// Flags for samite's own servers.
#[cfg(feature = "remote")]
#[derive(Clone, Debug, Default, Args)]
pub struct RemoteArgs {
    /// samite servers whose devices are used as remote0, remote1 and so on: addresses that `samite
    /// remote-server` prints, several separated by `,`
    #[arg(long, value_name = "SERVERS", value_delimiter = ',',
        value_parser = NonEmptyStringValueParser::new(), help_heading = "Backends")]
    pub remote: Vec<String>,

    /// File with the token for these servers, a copy of the token file that the server names
    #[arg(long, value_name = "FILE", help_heading = "Backends")]
    pub remote_token: Option<PathBuf>,

    /// Seconds to wait for the server of a lost device to come back; the model is then reloaded and
    /// resumes
    #[arg(long, value_name = "SECONDS", default_value_t = 60, help_heading = "Backends",
        value_parser = clap::value_parser!(u32).range(0..=86400))]
    pub remote_wait: u32,
}

/// Flags that select devices.
#[derive(Clone, Debug, Args)]
pub struct DeviceArgs {
    /// Devices in order of preference, for example `blas,cpu`, with parameters as in
    /// `cpu:threads=4`; `auto` for the best ones (see `samite devices`) [also: -dev]
    #[arg(
        long = "device",
        visible_alias = "dev",
        value_name = "LIST",
        default_value = "auto"
    )]
    pub list: String,

    /// Use only the named devices, without the CPU as a fallback for operations that a GPU does not
    /// support
    #[arg(long)]
    pub only: bool,

    #[command(flatten)]
    pub backends: RegistryArgs,
}
