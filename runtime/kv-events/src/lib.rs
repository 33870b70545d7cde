//! Tells routers over ZeroMQ which blocks of tokens a server has in its cache, as vLLM does.
//!
//! A router that knows what each of its servers has in the cache sends a prompt to where most of it is known. [`Publisher::start`] opens the sockets, and
//! [`Publisher::observer`] is what [`Engine::observe_blocks`](samite_requests::Engine::observe_blocks) wants.
//!
//! - **PUB socket**: each message has three parts: the topic, its number (8 bytes, the first one is 0, highest byte first), and a batch of events in MessagePack
//!   (`message.rs`). A subscriber that does not keep up misses messages, which the numbers show.
//! - **ROUTER socket** (optional): whoever sends a number gets the messages from there on, as far as they are kept, each with its number, and at the end one with
//!   the number -1 and nothing in it.
//!
//! There is no encryption and there are no keys: the sockets are for the network of a cluster. What they tell is the tokens of all texts.
//!
//! Source: vLLM's documentation of KV cache events; the layout is that of its arrays, which llm-d and NVIDIA Dynamo read.
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod fuzz;
mod message;
mod publisher;
mod zmtp;

pub use publisher::{PublishError, Publisher, PublisherOptions};
