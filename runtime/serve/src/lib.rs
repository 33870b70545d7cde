//! Serves language models over HTTP, with the APIs of OpenAI, Anthropic, Ollama and llama-server,
//! and a web page.
//!
//! [`App`] holds a model, its template and a [`Handle`](samite_requests::Handle) of its engine. A
//! [`Hub`] holds one or more of them, and [`serve`] listens. Each API translates a request into a
//! `Job` (`job.rs`) and sends the engine's events in its own format. All checks run before the
//! headers are sent, so a rejected request gets the right status and an error object that names the
//! field. An accepted request gets a response or a stream. A client that disconnects cancels its
//! request.
//!
//! # Contract
//! - Every response has a status, and every error an error object. Generated text is never an
//!   error.
//! - Requests are limited: bytes and depth of the body, prompt, number of texts, queue. File names
//!   are plain names in one folder, and the server fetches nothing.
//! - Memory that a request derives from its body is charged to its account before it is allocated.
//!   All accounts together have a limit.
//! - Keys identify owners: without [`ServeOptions::shares_prefixes`], nothing that one owner sees
//!   depends on requests of another, except load.
//! - If keys are set, all paths except health and the web page require one. Pages of other origins
//!   may read responses only if they are listed, or if a key is required anyway.
//!
//! # Files
//!
//! | file | content |
//! |---|---|
//! | `options.rs`, `app.rs` | options of a server; state that the requests of a model share |
//! | `hub.rs`, `entry.rs`, `loader.rs` | several models: loading and unloading |
//! | `library.rs`, `model_events.rs` | downloads; events about models |
//! | `server.rs`, `connections.rs` | listening and draining; connection limit |
//! | `timed.rs`, `tls.rs` | time limits of clients; TLS |
//! | `account.rs`, `turns.rs` | memory of a request; turns at expensive work |
//! | `context.rs` | a request's view of a model |
//! | `paths.rs`, `route.rs` | routes each request to its API |
//! | `openapi.rs`, `openapi.json` | description of all paths |
//! | `body.rs` | reads bodies within limits |
//! | `access.rs`, `page.rs` | keys and origins; files of the web page |
//! | `fields.rs`, `error.rs` | reads fields; errors and their objects |
//! | `job.rs`, `chat.rs` | translation into requests of the engine; conversations |
//! | `form.rs`, `compiled_grammars.rs` | constraints of a text |
//! | `sampling.rs`, `settings.rs` | sampling parameters; their report |
//! | `reasoning_budget.rs` | limit for reasoning tokens |
//! | `answer.rs`, `stream.rs` | an answer during generation; whole or as a stream |
//! | `api/` | one file for each API |
//! | `latency.rs` | latency histograms for metrics |
//! | `embedder.rs` | context for embeddings |
//! | `ids.rs` | IDs, random seeds and the time of day |
#![forbid(unsafe_code)]

mod access;
mod account;
mod answer;
mod api;
mod app;
mod body;
mod chat;
mod compiled_grammars;
mod connections;
mod context;
mod embedder;
mod entry;
mod error;
mod fields;
mod form;
#[doc(hidden)]
pub mod fuzz;
mod hub;
mod ids;
mod images;
mod job;
mod kv_transfer;
mod latency;
mod library;
mod loader;
mod min_tokens;
mod model_events;
mod openapi;
mod options;
mod page;
mod paths;
mod reasoning_budget;
mod recent_items;
mod route;
mod sampling;
mod server;
mod settings;
mod stream;
mod stream_sessions;
mod timed;
mod tls;
mod turns;

pub use api::plan::plan;
pub use app::App;
pub use embedder::Embedder;
pub use hub::{Hub, HubLimits, Loaded, ServedModel, Source};
pub use images::ImageFetcher;
pub use kv_transfer::{KvTransferOptions, TransferSecret};
pub use library::{FileProgress, Library};
pub use options::{KvEventSource, ServeOptions, TlsFiles};
pub use server::{ROOM, serve};
