//! What a context keeps: which cell holds which token, which row the state of which sequence, their memory, and the rotation of moved keys.

mod cache;
mod cells;
mod shift;
mod states;
mod window;

pub(crate) use cache::{KvCache, KvPlan};
pub use cells::Cells;
pub(crate) use shift::Rotation;
pub(crate) use states::States;
pub(crate) use window::Window;
