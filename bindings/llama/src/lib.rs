//! `libllama.so`: a replacement for llama.cpp's library that runs on samite.
//!
//! Programs that use llama.cpp's C header, `llama.h`, run on samite if this library replaces
//! theirs. It is for one release of llama.cpp, because structures are passed by value and change
//! between releases: [`layout`] has one file per release, and the other code uses field names.
//! `docs/libllama.md` explains the use and lists unsupported features; [`table`] has the status of
//! each function.
//!
//! # Contract
//! - Every function of the header is exported. None unwinds or ends the process: invalid handles,
//!   tokens, sizes and null pointers get the header's answer, with a line in the caller's log.
//! - Handles of models, contexts, adapters and batches are numbers that are never reused, so stale
//!   ones are detected. A sampler is a structure of the header; in samplers of this library, it
//!   holds such a number.
//! - A context has a lock, so threads that share one are served in turn. Its results stay in memory
//!   until the context is freed, even if a later batch needs more space.
//! - The library relies on the caller's guarantees in the header: that pointers which are not null
//!   point to what the header says.
//!
//! # Files
//! | file | content |
//! |---|---|
//! | `entry.rs`, `log.rs` | entry and failure of calls; the caller's log |
//! | `handles.rs` | handles of callers |
//! | `layout.rs` | structures, constants, defaults of a release |
//! | `names.rs`, `metadata.rs` | functions that need no model; keys and values as text |
//! | `load.rs`, `devices.rs`, `model.rs` | models and their placement |
//! | `vocabulary.rs`, `adapters.rs` | tokens; adapters |
//! | `context.rs`, `abort.rs`, `watch.rs` | contexts |
//! | `batch.rs`, `results.rs`, `memory.rs`, `state.rs` | what goes into a context and comes out |
//! | `perf.rs` | times |
//! | `sampler.rs` | samplers, with files for chains, grammars and the others |
//! | `chat.rs`, `quantize.rs`, `training.rs` | templates, quantization; unsupported training |
//! | `extension.rs` | C++ names that llama.cpp's own programs need |
//! | `table.rs` | all functions and their status |
#![cfg(unix)]
#![warn(clippy::undocumented_unsafe_blocks)]

mod abort;
mod adapters;
mod batch;
mod chat;
mod context;
mod devices;
mod entry;
mod extension;
mod handles;
#[allow(missing_docs)] // Fields are the header's.
pub mod layout;
mod load;
mod log;
mod memory;
mod metadata;
mod model;
mod names;
mod perf;
mod quantize;
mod results;
mod sampler;
mod state;
pub mod table;
mod training;
mod vocabulary;
mod watch;
