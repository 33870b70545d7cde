//! A language model over HTTP, for the clients that there are: OpenAI's, Anthropic's, ollama's and llama-server's interfaces, and a page.
//!
//! [`App`] has a model, its template and a [`Handle`](samite_requests::Handle) of its engine; a [`Hub`] has one or several of them; [`serve`] listens. Each interface reads a request into
//! the same `Job` (`job.rs`), and tells the same events in its own words. Checks come before headers: a request that is refused has the status that says so,
//! and an error object that names the field. Then the answer, or a stream of it; whoever leaves cancels the request.
//!
//! # Contract
//! - Every answer has a status, and an error its object. What a model writes is never an error.
//! - What a request asks for is limited: bytes and depth of its body, prompt, number of texts, queue. Names of files are plain names in one folder; nothing is
//!   fetched from anywhere.
//! - What a request makes of its body is charged to its account before memory is taken. All
//!   accounts together have a limit.
//! - Keys are owners: without [`ServeOptions::shares_prefixes`], nothing that one sees depends on
//!   requests of another one, except for load.
//! - Where keys are set, everything but health and the page wants one. Pages of other origins read answers only if they are named, or if a key is needed anyway.
//!
//! # Files
//!
//! | file | what |
//! |---|---|
//! | `options.rs`, `app.rs` | how a server is set up; what the requests of a model share |
//! | `hub.rs`, `entry.rs` | several models: which are in memory, and which make room |
//! | `server.rs`, `connections.rs`, `timed.rs`, `tls.rs` | listens, and drains at the end; connections that make room; clients that are late; encryption |
//! | `account.rs`, `context.rs`, `turns.rs` | the memory of a request; its view of a model; turns at what takes long |
//! | `paths.rs`, `route.rs`, `body.rs` | leads each request to its interface; reads bodies within limits |
//! | `access.rs`, `page.rs` | keys and origins; files of the page |
//! | `fields.rs`, `error.rs` | reads fields; errors with their objects |
//! | `job.rs`, `chat.rs` | the one translation into requests of the engine; conversations |
//! | `form.rs`, `sampling.rs`, `settings.rs` | what a text keeps to; how its tokens are chosen; what is told of that |
//! | `reasoning_budget.rs` | a limit for the tokens of reasoning |
//! | `answer.rs`, `stream.rs` | an answer as it comes; whole or as a stream |
//! | `api/` | one file for each interface |
//! | `latency.rs` | how long answers take, for metrics |
//! | `embedder.rs` | a context for embeddings |
//! | `chance.rs` | ids, seeds and the time of day |
#![forbid(unsafe_code)]

mod access;
mod account;
mod answer;
mod api;
mod app;
mod body;
mod chance;
mod chat;
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
mod job;
mod latency;
mod options;
mod page;
mod paths;
mod reasoning_budget;
mod route;
mod sampling;
mod server;
mod settings;
mod stream;
mod timed;
mod tls;
mod turns;

pub use api::plan::plan;
pub use app::App;
pub use embedder::Embedder;
pub use hub::{Hub, HubLimits, Loaded, ServedModel, Source};
pub use options::{ServeOptions, TlsFiles};
pub use server::{ROOM, serve};
