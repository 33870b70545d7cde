//! Devices of other machines, over gRPC and TLS 1.3.
//!
//! - [`RemoteServer`] shares devices with clients that have a token.
//! - [`RemoteBackend`] provides the devices of servers, named by addresses such as
//!   `samite://192.168.0.7:50053#5d41…`.
//!
//! The protocol is
//! [`samite.proto`](https://github.com/samite-rs/samite/blob/main/devices/remote/proto/samite.proto),
//! which other languages can use. gRPC provides flow control, keep-alive, and compatibility with
//! existing infrastructure. The modules add the rest:
//!
//! - `identity`, `tls`: the address pins the server's key. A token, which is never sent over the
//!   network, authenticates a client.
//! - `convert`: layouts, errors and graphs as messages.
//! - `server`, `client`: the two sides.
//! - [`bare`], `environment`: both sides without TLS, gRPC and threads, for simulations.
//!
//! # How it works
//! A session is one stream in each direction. Requests are numbered, and the server executes them
//! in order. The client waits only for reads, answers and confirmations: a token of a model is one
//! request with inputs, the number of a graph and the reads, and one reply. A client that loses the
//! connection makes another one and continues: the server reports which requests have arrived, and
//! keeps replies until the client has seen them, so each request is executed exactly once. If the
//! server no longer knows the session, the session and the device are lost.
//!
//! # Trust
//! The server does not trust anything that a client sends, as with ggml's protocol: tensors must
//! lie in the client's own buffers, graphs go through `infer` like all graphs, and every size has a
//! quota. The server reads no message of a client without a token.
#![forbid(unsafe_code)]

pub mod bare;
mod client;
mod convert;
mod environment;
mod identity;
#[allow(missing_docs, clippy::all, clippy::pedantic)]
#[rustfmt::skip]
mod proto;
mod server;
mod tls;

pub use client::{RemoteBackend, RemoteOptions};
pub use identity::{KEY_FILE, TOKEN_FILE, settings_folder};
pub use server::{RemoteServer, RemoteServerOptions};

/// Version of the protocol. Adding fields without changing existing meanings keeps the version.
const VERSION: u32 = 1;
