//! Typed flags that load a model's file.

use clap::Args;

/// Flags that load a model's file.
#[derive(Clone, Debug, Args)]
pub struct LoadingArgs {
    /// Method of loading the file. A file that is read causes an error at worst; if a mapped file
    /// is shortened, or its disk goes away, the system kills the program (SIGBUS)
    #[arg(long, value_enum, default_value_t = LoadArg::Read, value_name = "MODE",
        help_heading = "Loading")]
    pub load_mode: LoadArg,

    /// Same as `--load-mode mmap`: weights that need no packing stay in the file, which must not be
    /// shortened while in use
    #[arg(long, overrides_with_all = ["load_mode", "no_mmap"], help_heading = "Loading")]
    pub mmap: bool,

    /// Same as `--load-mode read` (default)
    #[arg(long, overrides_with_all = ["load_mode", "mmap"], help_heading = "Loading")]
    pub no_mmap: bool,

    /// Lock the weights in host memory, packed or mapped, so that they are never paged out; the
    /// system limits how much (see `ulimit -l`)
    #[arg(long, help_heading = "Loading")]
    pub mlock: bool,

    /// Keep weights in the file's layout instead of the device's own, which computes faster [also:
    /// -nr]
    #[arg(long)]
    pub no_repack: bool,
}

/// `--load-mode`
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum LoadArg {
    /// Read the file
    #[value(aliases = ["auto", "none"])]
    Read,
    /// Read the file past the system's page cache, whose contents stay; where the system refuses,
    /// as `read` with a warning
    #[value(alias = "dio")]
    Direct,
    /// Map the file: shared with other processes, and may be larger than memory
    Mmap,
    /// Same as `mmap` with --mlock
    Mlock,
}
