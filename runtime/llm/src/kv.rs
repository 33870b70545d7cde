//! The KV cache: which cell holds which token, and the memory that the cells stand for.

mod cache;
mod cells;

pub(crate) use cache::{KvCache, KvPlan};
pub use cells::Cells;
