//! `libllama.so`: samite in the place of llama.cpp's library.
//!
//! Programs that are written against llama.cpp's C header, `llama.h`, run on samite with this library in the place of theirs. It is for one release,
//! because structures go by value and change from release to release: [`layout`] has them, a file for each release; the rest goes by names of fields.
//! `docs/libllama.md` says how it is used, and what is not there; [`table`] says it of each function.
//!
//! # Contract
//! - Every function of the header is exported. None unwinds or ends the process: bad handles, tokens, sizes and null are answered as the header says, with a
//!   line in the caller's log.
//! - Handles of models, contexts, adapters and batches are numbers that are never given twice, so a stale one is known. A sampler is a structure of the
//!   header; what one of this library has in it is such a number.
//! - A context has a lock: threads that share one are served in turn. What it gave stays where it is until the context goes, even where another batch
//!   needed more room.
//! - What a caller promises by the header is believed: that pointers which are not null point to what the header says.
//!
//! # Files
//! | file | what |
//! |---|---|
//! | `entry.rs`, `handles.rs`, `log.rs` | how calls come in and fail, what callers hold, where lines go |
//! | `layout.rs` | structures, constants, defaults of a release |
//! | `names.rs`, `metadata.rs` | what depends on no model; keys and values as texts |
//! | `load.rs`, `devices.rs`, `model.rs`, `vocabulary.rs`, `adapters.rs` | models and where they are, tokens, adapters |
//! | `context.rs`, `abort.rs`, `watch.rs`, `batch.rs`, `results.rs`, `memory.rs`, `state.rs`, `perf.rs` | contexts: batches, results, what is kept, states, times |
//! | `sampler.rs` | samplers, a file for chains, one for grammars, one for the others |
//! | `chat.rs`, `quantize.rs`, `training.rs` | templates, files of other types; what is not there |
//! | `extension.rs` | C++ names that llama.cpp's own programs need |
//! | `table.rs` | all functions, and how far each works |
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
