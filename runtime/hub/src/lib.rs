//! Models by name: downloads from [a model hub](https://huggingface.co) into the cache that its
//! other clients use.
//!
//! A [`Reference`] names a repository and optionally a quantization: `owner/name:Q8_0`.
//! [`Hub::list`] lists its files, [`Listing::choose`] selects those of one model, and
//! [`Hub::fetch`] downloads them. [`Cache`] finds downloaded models without network access.
//! [`download`] does all of it in one call.
//!
//! # Contract
//! - A file appears in the cache under its name only after its size and SHA-256 match the hub's. An
//!   interrupted download resumes where it stopped, in the same process or another one.
//! - A server that does not answer, disconnects or sends wrong data results in an [`Error`] with
//!   the reason, after some attempts without progress.
//! - Names from a server are validated before they become paths.
//! - The token is only sent to the hub, not to hosts that it redirects to.
#![forbid(unsafe_code)]

mod cache;
mod client;
mod download;
mod error;
mod fetch;
mod listing;
mod reference;
mod web;

pub use cache::{Cache, Cached};
pub use client::{Hub, HubOptions};
pub use download::download;
pub use error::{Error, Result};
pub use fetch::DownloadProgress;
pub use listing::{Listing, RemoteFile};
pub use reference::Reference;
pub use web::{WebClient, WebHosts};
