//! Publishes KV cache events over ZeroMQ like vLLM: which token blocks a server has in its prefix
//! cache.
//!
//! A router that knows the cached blocks of its servers sends a prompt to the one with the longest
//! cached prefix. [`Publisher::start`] opens the sockets, and [`Publisher::observer`] returns the
//! observer for [`Engine::observe_blocks`](samite_requests::Engine::observe_blocks).
//!
//! - **PUB socket**: each message has three parts: the topic, its sequence number (8 bytes,
//!   big-endian, starting at 0), and a batch of events in MessagePack (`message.rs`). A slow
//!   subscriber misses messages, which it can detect by the numbers.
//! - **ROUTER socket** (optional): a client sends a sequence number and receives the buffered
//!   messages from there on, each with its number, followed by an empty message with the number -1.
//!
//! The sockets have no encryption or authentication and are intended for a cluster's internal
//! network. The events contain the tokens of all texts.
//!
//! Source: vLLM's documentation of KV cache events; the layout is that of its arrays, which llm-d
//! and NVIDIA Dynamo parse.
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod fuzz;
mod message;
mod publisher;
mod zmtp;

pub use publisher::{PublishError, Publisher, PublisherOptions};
