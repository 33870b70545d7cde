//! Many requests for text in one context, at the same time.
//!
//! A [`Request`] goes in, [`Event`]s come out. An [`Engine`] is a state machine without threads or asynchronous code: each [`step`](Engine::step) computes
//! one batch, in which all requests have a part. [`drive`] gives it a thread, and a [`Handle`] that others submit requests with.
//!
//! # A step
//! 1. Requests that were cancelled, whose reader is gone, or whose time is over, end. There is one way out of a slot, and it frees everything.
//! 2. Those that wait get free slots, by priority and age. What a prompt begins with is looked for among texts that earlier requests left in the context, and
//!    among those that are being computed; it is shared, to the token. [`Started`] says how much was found, and why not more.
//! 3. A batch is planned within a budget of tokens: one for each request that is writing, then parts of prompts in fair turns. So a long prompt
//!    holds up nobody.
//! 4. The batch is computed, and each sampler chooses a token; more, where [drafted](EngineOptions::draft) tokens stand. Events go to the request's own bounded queue.
//!
//! # Contract
//! - What can never be answered is refused at the submission ([`Refusal`]), before anything is told to a client.
//! - A request whose reader does not read is paused, and no other one. If others wait for its slot, it leaves it and goes on later.
//! - Under pressure, texts that are kept go first, those not used for the longest time before others; then the youngest request makes room: it is moved to host memory,
//!   or computed again. None fails for want of memory.
//! - A request gets the tokens that it would get alone, as far as the devices compute the same for a row in any batch.
//! - Models that keep a state of what came, from which nothing can be cut, have states kept shortly before the end of each prompt, and in regular distances.
//!
//! # Files
//!
//! | file | what |
//! |---|---|
//! | `request.rs` | [`Request`], its limits, and why one is refused |
//! | `event.rs` | [`Event`]: what a request is told |
//! | `outbox.rs` | the queue between the engine and a [`Reader`] |
//! | `engine.rs` | [`Engine`]: `admission.rs` gives slots, `batch.rs` plans and computes, `drafts.rs` drafts, `room.rs` makes room |
//! | `running.rs` | one request on its way |
//! | `blocks.rs` | which blocks of tokens are in the cache, for routers |
//! | `disk.rs` | texts that are kept on disk, too |
//! | `draft.rs` | tokens that a text may go on with, and how many of them are worth a try |
//! | `drafter.rs` | [`Drafter`]: a smaller model that says what they are |
//! | `kept.rs` | texts that are kept, and which of them a prompt can go on from |
//! | `driver.rs` | the thread |
//! | `view.rs` | [`View`]: what can be seen from outside |
#![forbid(unsafe_code)]

mod blocks;
mod disk;
mod draft;
mod drafter;
mod driver;
mod engine;
mod event;
mod kept;
mod outbox;
mod request;
mod running;
mod view;

pub use blocks::{BlockEvent, BlockObserver};
pub use drafter::Drafter;
pub use driver::{Handle, drive, drive_sleeping};
pub use engine::{Engine, EngineOptions, Step};
pub use event::{
    CacheMiss, Counts, Event, Failed, FailureKind, Finished, MissCause, Probabilities,
    PromptProgress, Reason, Started, Token,
};
pub use outbox::{Bell, Reader};
pub use request::{CacheWish, Limits, Prepared, Refusal, Request, Shift, Wanted};
pub use view::{SlotView, Totals, View};
