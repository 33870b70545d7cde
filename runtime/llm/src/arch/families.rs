//! All architectures, those that resemble each other in one file.

mod llama;
mod qwen;

use super::Architecture;

/// All architectures.
pub const ARCHITECTURES: &[Architecture] =
    &[llama::LLAMA, qwen::QWEN2, qwen::QWEN3, qwen::QWEN3MOE];
