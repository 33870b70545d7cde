//! Gradients, optimizers and training: one program, so that it is linked once.
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests do

mod adapters;
mod fit;
mod gradients;
mod pytorch;
mod training;
