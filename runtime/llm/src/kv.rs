//! The KV cache: which cell holds which token, the memory that the cells stand for, and the rotation of keys whose positions moved.

mod cache;
mod cells;
mod shift;

pub(crate) use cache::{KvCache, KvPlan};
pub use cells::Cells;
pub(crate) use shift::Rotation;
