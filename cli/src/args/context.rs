//! Typed flags for contexts: their size, batches and KV cache.

use super::numbers::{size, token_count};
use clap::Args;

/// Flags for contexts.
#[derive(Clone, Debug, Args)]
pub struct ContextArgs {
    /// Context size in tokens; 0 for the model's own, as far as memory allows [default: 0]
    #[arg(short = 'c', long, value_name = "N", value_parser = token_count)]
    pub ctx_size: Option<usize>,

    /// Type of the KV cache: f16, f32, bf16, q8_0, …; or two types, for keys and values: `q8_0,f16`
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub kv: String,

    /// Type of cached keys; overrides --kv [also: -ctk]
    #[arg(long, value_name = "TYPE")]
    pub cache_type_k: Option<String>,

    /// Type of cached values; overrides --kv [also: -ctv]
    #[arg(long, value_name = "TYPE")]
    pub cache_type_v: Option<String>,

    /// Maximum number of tokens computed at once [also: -ub]
    #[arg(long = "ubatch-size", value_name = "N", default_value = "512", value_parser = size)]
    pub ubatch_size: usize,

    /// Compute attention in several operations instead of one
    #[arg(long)]
    pub no_flash: bool,

    /// Keep all tokens of the context in sliding-window layers, instead of only those in the
    /// window: uses more memory, but the context can be rewound to any point
    #[arg(long)]
    pub swa_full: bool,

    /// Keep matrix products of long prompts on the CPU if their weights are there, even if a GPU
    /// could compute them
    #[arg(long, alias = "nopo")]
    pub no_op_offload: bool,

    /// Number of copies of inputs and of tensors passed between devices, so that work on several
    /// asynchronous devices overlaps
    #[arg(long, value_name = "N", default_value = "1",
        value_parser = clap::value_parser!(u8).range(1..=16))]
    pub copies: u8,
}
