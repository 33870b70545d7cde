//! x
#![forbid(unsafe_code)]
pub mod arch;
mod error;
mod hparams;
mod model;
mod rules;
#[cfg(test)]
mod testing;
mod vocab;
mod weights;
pub use error::*;
