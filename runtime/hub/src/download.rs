//! A model by name in one call.

use crate::cache::Cache;
use crate::client::{Hub, HubOptions};
use crate::error::{Error, Result};
use crate::reference::Reference;
use samite_core::CancelToken;
use std::path::PathBuf;

/// Revision that a name without one means.
const REVISION: &str = "main";

/// Downloads a model such as `owner/name` or `owner/name:Q4_K_M` to the user's cache, unless it is
/// cached, and returns the path of its first file.
///
/// If the hub cannot be reached, the cached model is used. [`HubOptions::from_environment`] and
/// [`Cache::of_user`] name the environment variables. [`Hub::fetch`] reports progress and can be
/// cancelled.
///
/// ```no_run
/// let path = samite_hub::download("ggml-org/SmolLM2-135M-GGUF")?;
/// # Ok::<_, samite_hub::Error>(())
/// ```
///
/// # Errors
/// [`Error::NoCache`] if no cache folder is known, [`Error::Reference`] if the name is invalid;
/// also fails like [`Hub::list`] and [`Hub::fetch`].
pub fn download(name: &str) -> Result<PathBuf> {
    let cache = Cache::of_user().ok_or(Error::NoCache)?;
    Hub::new(HubOptions::from_environment()).download(&cache, &name.parse()?)
}

impl Hub {
    /// Downloads a model to `cache`, unless it is cached, and returns the path of its first file.
    /// If the hub cannot be reached, uses the cached model.
    ///
    /// # Errors
    /// Fails like [`Hub::list`] and [`Hub::fetch`].
    pub fn download(&self, cache: &Cache, reference: &Reference) -> Result<PathBuf> {
        let cached = cache.find(reference, REVISION);
        let impatient = || Hub::new(self.options.clone().with_short_timeout());
        let impatient = cached.is_some().then(impatient);
        let hub = impatient.as_ref().unwrap_or(self);
        let listing = match hub.list(reference, REVISION) {
            Err(error) if error.is_connection() => return cached.ok_or(error),
            listing => listing?,
        };
        let mut first = None;
        for file in listing.choose(reference)? {
            let path = self.fetch(cache, &listing, file, &mut |_| {}, &CancelToken::new())?;
            first.get_or_insert(path);
        }
        first.ok_or_else(|| Error::NotFound(format!("{reference}: no model file")))
    }
}
