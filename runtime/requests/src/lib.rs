//! Continuous batching: many concurrent generation requests in one context.
//!
//! A [`Request`] goes in, and [`Event`]s come out. An [`Engine`] is a state machine without threads
//! or asynchronous code: each [`step`](Engine::step) computes one batch that includes tokens of all
//! requests. [`drive`] runs it on a thread, and returns a [`Handle`] for submitting requests.
//!
//! # A step
//! 1. Requests end if they were cancelled, their reader was dropped, or their deadline passed.
//!    There is only one way out of a slot, and it frees everything.
//! 2. Waiting requests get free slots, by priority and age. The engine searches for prefixes of the
//!    prompt among the texts that earlier requests left in the context, and among active ones.
//!    Prefixes are shared at the granularity of tokens. [`Started`] reports how much was found, and
//!    why not more.
//! 3. A batch is planned within a token budget: one token for each decoding request, then parts of
//!    prompts in fair turns. A long prompt therefore does not block other requests.
//! 4. The batch is computed, and each sampler chooses a token, or more if
//!    [drafted](EngineOptions::draft) tokens are accepted. Events go to the request's own bounded
//!    queue.
//!
//! # Contract
//! - Requests that can never be answered are rejected at submission ([`Refusal`]), before a client
//!   gets any event.
//! - A request is paused if its reader does not read; other requests are not affected. If others
//!   wait for its slot, it yields the slot and continues later.
//! - Under memory pressure, cached prefixes are evicted first: the least recently used ones if
//!   cells are needed, and those that cost least to compute again if there are too many. Then the
//!   most recent request is preempted: its cache moves to host memory, or it is computed again. No
//!   request fails for lack of memory.
//! - Batching does not change a request's output, provided the device computes each row
//!   independently of its batch.
//! - For models with a recurrent state, which cannot be cut, states are cached shortly before the
//!   end of each prompt and at regular intervals.
//!
//! # Files
//!
//! | file | contents |
//! |---|---|
//! | `request.rs` | [`Request`], its limits, and reasons for rejection |
//! | `event.rs` | [`Event`]: the events of a request |
//! | `event_queue.rs` | the queue between the engine and a [`Reader`] |
//! | `engine.rs` | [`Engine`], with slots in `admission.rs`, `batch.rs`, `drafts.rs`, `room.rs` |
//! | `engine/images.rs`, `image_thread.rs` | images of prompts, whose rows a thread computes |
//! | `engine/saved.rs` | texts for files and other servers |
//! | `running.rs` | one request from submission to end |
//! | `blocks.rs` | events about blocks of tokens in the cache, for routers |
//! | `disk.rs` | the disk cache |
//! | `draft.rs` | guesses of the next tokens, and how many are worth trying |
//! | `drafter.rs` | [`Drafter`]: a smaller draft model |
//! | `prefix_cache.rs` | the prefix cache |
//! | `driver.rs` | the thread |
//! | `view.rs` | [`View`]: the externally visible state |
#![forbid(unsafe_code)]

mod blocks;
mod disk;
mod draft;
mod drafter;
mod driver;
mod engine;
mod event;
mod event_queue;
mod image_thread;
mod prefix_cache;
mod request;
mod running;
mod view;

pub use blocks::{BlockEvent, BlockObserver};
pub use drafter::Drafter;
pub use driver::{Handle, drive, drive_sleeping};
pub use engine::{Engine, EngineOptions, Step};
pub use event::{
    CacheMiss, Counts, Event, Failed, FailureKind, Finished, MissCause, Probabilities,
    PromptProgress, Started, Token,
};

pub use event_queue::{EngineWaker, Reader};
pub use image_thread::RequestRows;
pub use request::{CacheOptions, Limits, Prepared, ProbabilityKind, Refusal, Request, Shift};
pub use samite_llm::Finish;
pub use view::{SlotView, Totals, View};
