//! Models by name: downloads from [a hub of models](https://huggingface.co), into the cache that its other clients use.
//!
//! A [`Reference`] names a repository and perhaps a quantization: `owner/name:Q8_0`. [`Hub::list`] asks for its files, [`Listing::choose`] picks those of
//! one model, and [`Hub::fetch`] downloads them. [`Cache`] knows what is there already, without any network.
//!
//! # Contract
//! - A file appears in the cache under its name when its size and its SHA-256 are what the hub says, or not at all. A download that ended early goes on
//!   where it ended, in the same process or another one.
//! - A server that does not answer, breaks off or lies is an [`Error`] that says which, after some attempts that got no further.
//! - Names from a server are checked before they become paths.
//! - The token goes to the hub only, not where it redirects to.
#![forbid(unsafe_code)]

mod cache;
mod client;
mod error;
mod fetch;
mod listing;
mod reference;

pub use cache::{Cache, Cached};
pub use client::{Hub, HubOptions};
pub use error::{Error, Result};
pub use fetch::Progress;
pub use listing::{Listing, RemoteFile};
pub use reference::Reference;
