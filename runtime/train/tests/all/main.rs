//! Gradients, optimizers and training, in one program that is linked once.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

mod adapters;
mod fit;
mod gradients;
mod pytorch;
mod training;
