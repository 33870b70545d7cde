//! Structures that are passed by value: one file for each release of llama.cpp.

#[path = "layout/v0_5.rs"]
mod release;

pub use release::*;
