//! One compute graph woven through many devices.
//!
//! samite reimplements ggml-backend in Rust, together with what makes it useful: tensors and
//! graphs, devices and their memory, a scheduler that places, splits, plans and runs a graph over
//! several devices, and language models from GGUF files on top. Applications depend on this crate;
//! the parts have crates of their own:
//!
//! | module | content |
//! |---|---|
//! | the root | [`Conversation`], [`TextEmbedder`]; tensors, graphs, the device contract |
//! | [`registry`] | the available devices |
//! | [`sched`] | running a graph on several devices, with explanations |
//! | `forecast` | the predicted speed of a plan on described machines |
//! | [`gguf`], [`quant`] | model files and block formats |
//! | [`chat`] | chat templates, prompts, and parsing of answers |
//! | [`text`] | tokenizers, samplers, UTF-8 streams |
//! | `grammar` | generation constrained by a JSON schema, a regular expression or a grammar |
//! | [`llm`] | models, contexts, generation |
//! | `requests`, `serve` | concurrent requests in one context; an HTTP server |
//! | `kv_events` | KV cache events for routers |
//! | `hub` | models by name, downloaded to the user's cache |
//! | [`train`] | gradients, optimizers, training |
//! | `vision` | image encoders |
//!
//! Each device is a feature. `blas`, `cpu`, `ggml`, `meta`, `ranks`, `reference` and `rpc` are on
//! by default. `wgpu`, `remote`, `grammar`, `hub`, `serve`, `kv-events`, `vision` and `async` are
//! not.
//! `default-features = false, features = ["cpu"]` links the CPU device alone.
//!
//! A graph on the best device of this machine:
//!
//! ```
//! use samite::prelude::*;
//!
//! let mut graph = Graph::new();
//! let x = graph.input("x", DType::F32, [4, 1, 1, 1])?;
//! let doubled = graph.scale(x, 2.0)?;
//! graph.set_output(doubled);
//!
//! let devices = Registry::built_in(Default::default()).automatic();
//! let mut scheduler = Scheduler::new(devices, Default::default())?;
//! scheduler.load(&graph)?;
//! scheduler.write(x, 0, &f32_bytes(&[1.0, 2.0, 3.0, 4.0]))?;
//! scheduler.run(&CancelToken::new())?;
//! let mut bytes = [0; 16];
//! scheduler.read(doubled, 0, &mut bytes)?;
//! assert_eq!(f32_values(&bytes), [2.0, 4.0, 6.0, 8.0]);
//! # Ok::<_, samite::Error>(())
//! ```

#![forbid(unsafe_code)]

mod conversation;
mod embedder;
mod open;

#[cfg(feature = "grammar")]
pub use conversation::ToolChoice;
#[cfg(feature = "async")]
pub use conversation::{AnswerUpdate, Answering, AsyncConversation};
pub use conversation::{Conversation, ConversationError, ConversationOptions, Reply, now};
pub use embedder::TextEmbedder;
pub use open::open;
pub use samite_chat as chat;
pub use samite_core::{
    Access, Backend, Buffer, BufferType, CancelToken, Capabilities, DIMS, DType, Device,
    DeviceKind, DeviceLimits, Error, Event, Flags, Glu, Graph, HostMemory, KeepAlive, Layout,
    Location, MemoryId, MemoryInfo, MemorySet, Node, Op, Parameters, PlacedGraph, Precision,
    Prepared, RangeGuard, Rejected, Result, Rope, RopeMode, Rows, RunControl, RunObserver,
    Selection, Shape, Slot, SortOrder, StoredTensor, Stream, Support, Tensor, TensorGroup,
    TensorId, TensorRef, Unary, Usage, ViewOf, ask_for_memory, counted, free_address_space,
    host_buffer, host_buffer_type, infer, same_buffer_type, shape, share_heap_if_limited,
    thread_builder,
};
pub use samite_disk_cache::cache_folder;
#[cfg(feature = "meta")]
pub use samite_forecast as forecast;
pub use samite_gguf as gguf;
#[cfg(feature = "grammar")]
pub use samite_grammar as grammar;
#[cfg(feature = "hub")]
pub use samite_hub as hub;
#[cfg(feature = "kv-events")]
pub use samite_kv_events as kv_events;
pub use samite_llm as llm;
pub use samite_quant as quant;
pub use samite_registry as registry;
#[cfg(feature = "serve")]
pub use samite_requests as requests;
pub use samite_sched as sched;
#[cfg(feature = "serve")]
pub use samite_serve as serve;
pub use samite_text as text;
pub use samite_train as train;
#[cfg(feature = "vision")]
pub use samite_vision as vision;

/// Most commonly used items.
pub mod prelude {
    pub use crate::registry::Registry;
    pub use crate::sched::{Assignments, Scheduler};
    pub use crate::{
        CancelToken, DType, Device, DeviceKind, Graph, StoredTensor, TensorGroup, TensorId, Usage,
        f32_bytes, f32_values,
    };
    pub use std::sync::Arc;
}

/// Returns the bytes of F32 elements, as stored in tensors.
pub fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// Returns the F32 elements of `bytes`. Ignores an incomplete element at the end.
pub fn f32_values(bytes: &[u8]) -> Vec<f32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|value| f32::from_le_bytes(*value))
        .collect()
}
