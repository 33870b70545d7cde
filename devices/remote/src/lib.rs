//! Devices of other machines, over gRPC and TLS 1.3.
//!
//! - [`RemoteServer`] lends devices to those who have a token.
//! - [`RemoteBackend`] has the devices of servers, named by addresses such as `samite://192.168.0.7:50053#5d41…`.
//!
//! The protocol is [`samite.proto`](https://github.com/samite-rs/samite/blob/main/devices/remote/proto/samite.proto), which other languages can use. gRPC brings
//! flow control, keep-alive, and what people run around it; the rest is here:
//!
//! - `identity`, `tls`: the address pins the server's key; a token, of which nothing goes over the wire, proves who a client is.
//! - `convert`: layouts, errors and graphs as messages.
//! - `server`, `client`: who speaks.
//! - [`bare`], `outside`: both sides without TLS, gRPC and threads, for simulations.
//!
//! # How it works
//! A session is one stream each way. Requests have numbers, and the server does them in their order. Nothing is waited for but what is read, asked or
//! confirmed: a token of a model is one request with inputs, the number of a graph and what is read, and one reply. Whoever loses the
//! connection makes another one and goes on: the server says which requests it has, and keeps replies until they are seen, so that each
//! request is done exactly once. A server that does not know the session any more has lost it, and the device with it.
//!
//! # What is trusted
//! Nothing that a client says, as with ggml's protocol: places lie in the client's own buffers, graphs go through `infer` like all graphs, and every size
//! has a quota. A client that has no token gets no message read.
#![forbid(unsafe_code)]

pub mod bare;
mod client;
mod convert;
mod identity;
mod outside;
#[allow(missing_docs, clippy::all, clippy::pedantic)]
#[rustfmt::skip]
mod proto;
mod server;
mod tls;

pub use client::{RemoteBackend, RemoteOptions};
pub use identity::{KEY_FILE, TOKEN_FILE, settings_folder};
pub use server::{RemoteServer, RemoteServerOptions};

/// The version of the protocol. What is added to messages without changing their meaning needs no other one.
const VERSION: u32 = 1;
