//! The APIs, one file each.

pub mod anthropic;
pub mod embeddings;
pub mod fleet;
pub mod metrics;
pub mod models;
pub mod native;
pub mod ollama;
pub mod openai_chat;
pub mod openai_completions;
pub mod plan;
pub mod props;
pub mod responses;
pub mod slots;
pub mod tokens;
