//! Compiled pipelines on disk, as far as drivers give them out: those of Vulkan do.
//!
//! Drivers check little of such data, and run it. [`Kept::read_trusted`] says what is believed; everything else is as if there were nothing.
#![allow(unsafe_code)]

use crate::kept::Kept;
use crate::waiting::ready;
use std::sync::Mutex;
use std::sync::PoisonError;

/// The driver's collection of pipelines, and where it is kept.
pub struct StoredPipelines {
    kept: Kept,
    pub cache: wgpu::PipelineCache,
    /// Bytes that were found on disk, and that the driver took.
    pub found: usize,
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    /// Pipelines that were made.
    made: usize,
    /// How many of them are on disk.
    stored: usize,
}

impl StoredPipelines {
    /// What is kept, and what comes to it. `None` where there is none, or the driver has no such collections.
    pub fn open(device: &wgpu::Device, kept: Kept) -> Option<Self> {
        if !device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return None;
        }
        let data = kept.read_trusted();
        let found = data.as_deref().and_then(|data| create(device, Some(data)));
        let length = data.map_or(0, |data| data.len());
        let (cache, found) = match found {
            Some(cache) => (cache, length),
            None => (create(device, None)?, 0),
        };
        tracing::debug!("{found} bytes of compiled kernels were kept");
        Some(StoredPipelines {
            kept,
            cache,
            found,
            counts: Mutex::default(),
        })
    }

    /// Takes note of a pipeline that was made.
    pub fn count(&self) {
        self.counts().made += 1;
    }

    /// Keeps what there is, if it is worth while: many are new, or any where these are the last.
    pub fn store(&self, are_last: bool) {
        let mut counts = self.counts();
        let new = counts.made - counts.stored;
        if new > 0 && (are_last || new * 4 >= counts.made) {
            counts.stored = counts.made;
            if let Some(data) = self.cache.get_data() {
                self.kept.write_trusted(&data);
            }
        }
    }

    fn counts(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StoredPipelines {
    fn drop(&mut self) {
        self.store(true);
    }
}

/// A collection, of `data` if there is any; `None` if wgpu or the driver refuses it.
fn create(device: &wgpu::Device, data: Option<&[u8]>) -> Option<wgpu::PipelineCache> {
    let scopes = [
        wgpu::ErrorFilter::Internal,
        wgpu::ErrorFilter::Validation,
        wgpu::ErrorFilter::OutOfMemory,
    ]
    .map(|filter| device.push_error_scope(filter));
    let descriptor = wgpu::PipelineCacheDescriptor {
        label: None,
        data,
        // What is refused is to be known.
        fallback: false,
    };
    // SAFETY: `data` must come from `PipelineCache::get_data` of this driver, unchanged. It was written by `Kept::write_trusted`, which is given such data
    // only; `Kept::read_trusted` gave it, which checks that the file is this user's and that nobody else may write it, that it is about this version of
    // samite, so of wgpu, this adapter and this driver, by all that the driver tells of itself, and that no byte changed since. wgpu checks that the data is of its own format and
    // the adapter's, and the driver, that it is its own. Who can write such a file with the right checksum all the same is this user, or the system's administrator.
    let cache = unsafe { device.create_pipeline_cache(&descriptor) };
    // Those pushed last are popped first.
    let errors = scopes.into_iter().rev().map(|scope| ready(scope.pop()));
    let errors: Vec<_> = errors.flatten().flatten().collect();
    errors.is_empty().then_some(cache)
}
