//! ggml's plugins as devices.
//!
//! [`GgmlBackend`] looks for plugins in the places of [`GgmlOptions`], takes the best variant of each, and lists the rest with
//! reasons. A plugin passes a handshake before its tables are used: `ggml_version` of its `libggml-base`, its
//! score, the number of its interface, and that the functions which cannot be missing are there.
//!
//! A plugin whose `libggml-base` is not found gets samite's own, see [`base`](crate::base), and has to compute a few results that
//! are known, because it cannot say which release it is of.
//!
//! A library can abort the whole process while it is loaded. With a [prober](GgmlOptions::prober), each one is first tried in a
//! process of its own, and only the best ones that survive that are loaded here. A device is used without being named only if it
//! computed a small graph there; the verdict is kept for as long as the file stays the same.
//!
//! # What the devices do
//! Tensors live in the plugin's buffers; if those are host memory, other host devices use them without copies, and the
//! device uses theirs. Where a device says that it works asynchronously, its streams do, with the plugin's events: what queued work
//! uses is kept until somebody has waited for it, and bytes to write are copied, because plugins read them when they get to it.
//! Plugins are never unloaded: their threads may still run. After a device said that it supports an operation, a failed check inside
//! of the plugin ends the process: ggml has no other way.
//!
//! A plugin's `reset` of a buffer is not called: it takes back what tensors in it were told, and memory here is shared by graphs
//! that are prepared for longer.

mod backend;
mod buffer;
mod check;
mod device;
mod discover;
mod event;
mod library;
mod log;
mod optimize;
mod probe;
mod stream;
#[cfg(test)]
mod tests;
mod trial;
mod verdicts;

pub use backend::{GgmlBackend, GgmlOptions, PATH_VARIABLE};
pub use probe::probe;

// For samite's `libggml-base`, where there is one.
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
pub(crate) use {library::loader_error, log::event};
