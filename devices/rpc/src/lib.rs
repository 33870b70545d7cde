//! ggml's RPC protocol: shares devices with programs on other machines.
//!
//! - [`Server`] shares devices with any program that speaks the protocol, such as llama.cpp with
//!   `--rpc`.
//! - [`RpcBackend`] provides the devices of servers, samite's and upstream's `ggml-rpc-server`.
//!
//! `samite-wire` defines the messages. Connections and time come from an
//! [`Environment`](samite_core::Environment).
//!
//! # Trust
//! The server does not trust anything that a client sends. The protocol has no passwords and no
//! encryption, so any client that can connect can compute. But no message can access memory outside
//! the client's own, end the process, or use more memory than its quota. A client that breaks a
//! rule loses its connection and its memory; other clients are not affected.
#![forbid(unsafe_code)]

mod channel;
mod client;
mod server;

pub use client::{ClientOptions, RpcBackend};
pub use samite_wire::rpc::version::Protocol;
pub use server::{End, ReplySink, RpcSession, Server, ServerOptions};
