//! The cache of a context: the tokens in cells, the states of sequences in rows, their memory, and
//! the rotation of shifted keys.

mod cache;
mod cells;
mod plan;
mod shift;
mod states;
mod window;

pub use cache::{CacheKind, KvCache};
pub use cells::Cells;
pub(crate) use plan::KvPlan;
pub(crate) use shift::Rotation;
pub(crate) use states::States;
pub(crate) use window::Window;
