//! Meaning of the flags that several commands share, computed once from [`crate::args`], which
//! holds them as they were typed.

mod adapters;
mod backends;
mod context;
mod devices;
mod load;
mod model;
mod model_file;
mod placement;

pub use adapters::scaled_files;
pub use backends::BackendSetup;
pub use context::ContextSetup;
pub use devices::{DeviceSetup, Lent};
pub use model::ModelSetup;
pub use model_file::ModelFile;
pub use placement::{divided, predicted};
