//! ggml's RPC protocol: devices for programs on other machines.
//!
//! - [`Server`] lends devices to any program that speaks the protocol, such as llama.cpp's with `--rpc`.
//! - [`RpcBackend`] has the devices of servers, ours and upstream's `ggml-rpc-server`.
//!
//! Messages are those of `samite-wire`. Connections and time come from an [`Environment`](samite_core::Environment).
//!
//! # What is trusted
//! Nothing that a client says. The protocol has no passwords and no encryption, so who can connect can compute; but no message reaches
//! memory that is not the client's own, ends the process, or takes more memory than its share. Whoever breaks a rule loses its
//! connection, and with it its memory; others notice nothing.
#![forbid(unsafe_code)]

mod channel;
mod client;
mod server;

pub use client::{ClientOptions, RpcBackend};
pub use server::{End, Replies, Server, ServerOptions, Session};
