//! ggml's plugins as devices.
//!
//! [`GgmlBackend`] searches for plugins in the paths of [`GgmlOptions`], takes the best variant of
//! each, and lists the rest with reasons. A plugin must pass a handshake before its tables are
//! used: `ggml_version` of its `libggml-base`, its score, its interface version, and the presence
//! of mandatory functions.
//!
//! A plugin whose `libggml-base` is missing gets samite's own, see [`base`](crate::base). It must
//! compute a few known results, because it cannot report its release.
//!
//! A library can abort the whole process while it is loaded. With a [prober](GgmlOptions::prober),
//! each plugin is first tried in a separate process, and only the best ones that survive are loaded
//! here. A device is used without being named only if it computed a small graph there; the verdict
//! is cached as long as the file stays the same.
//!
//! # Behaviour of the devices
//! Tensors lie in the plugin's buffers. If those are host memory, other host devices use them
//! without copies, and the device uses theirs. If a device reports that it is asynchronous, so are
//! its streams, with the plugin's events. Resources of queued work are kept alive until a
//! synchronization, and bytes to write are copied, because plugins read them later. Plugins are
//! never unloaded, because their threads may still run. If a device reports support for an
//! operation, a failed assertion inside the plugin ends the process: ggml has no other error path.
//!
//! A plugin's `reset` of a buffer discards the initialisation of its tensors. Several prepared
//! graphs share the memory, so it is called when the last one of them goes.

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
mod trial_cache;

pub use backend::{GgmlBackend, GgmlOptions, PATH_VARIABLE};
pub use probe::{ProbeOptions, probe};

// For samite's `libggml-base`, where it exists.
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
pub(crate) use {library::loader_error, log::event};
