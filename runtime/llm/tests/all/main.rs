//! Tests with whole models, in one program, so that it is linked once. `steady` counts allocations
//! and is a separate program.
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests do

mod adapters;
mod architectures;
mod common;
mod compare;
mod context;
mod cuda;
mod devices;
mod embeddings;
mod fit;
mod given;
mod gpu;
mod importance;
mod llama_cpp;
mod members;
mod model;
mod mutations;
mod quantize;
mod saved;
mod session;
mod tensor_split;
mod threads;
mod types;
mod vocabularies;
mod watch;
mod windows;
