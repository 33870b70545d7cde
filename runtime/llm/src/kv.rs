//! The KV cache: which cell holds which token, the memory of the cells, and the rotation of moved keys.

mod cache;
mod cells;
mod shift;

pub(crate) use cache::{KvCache, KvPlan};
pub use cells::Cells;
pub(crate) use shift::Rotation;
