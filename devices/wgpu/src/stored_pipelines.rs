//! Disk cache of compiled pipelines, for drivers that export them. Vulkan drivers do.
//!
//! Drivers execute this data and hardly check it. [`CacheFile::read_trusted`] decides which files
//! to trust; all others are treated as missing.
#![allow(unsafe_code)]

use crate::waiting::ready;
use samite_disk_cache::CacheFile;
use std::sync::Mutex;
use std::sync::PoisonError;

/// The driver's pipeline cache and its file.
pub struct StoredPipelines {
    kept: CacheFile,
    pub cache: wgpu::PipelineCache,
    /// Size in bytes of the data on disk that the driver accepted.
    pub found: usize,
    counts: Mutex<PipelineCounts>,
}

#[derive(Default)]
struct PipelineCounts {
    /// Number of pipelines created.
    made: usize,
    /// Number of them on disk.
    stored: usize,
}

impl StoredPipelines {
    /// Loads the cache from disk, or creates an empty one. Returns `None` if the driver does not
    /// support pipeline caches.
    pub fn open(device: &wgpu::Device, kept: CacheFile) -> Option<Self> {
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

    /// Counts a pipeline that was created.
    pub fn count(&self) {
        self.counts().made += 1;
    }

    /// Writes the cache to disk if that is worthwhile: if many pipelines are new, or if any are and
    /// `are_last` is set.
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

    fn counts(&self) -> std::sync::MutexGuard<'_, PipelineCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StoredPipelines {
    fn drop(&mut self) {
        self.store(true);
    }
}

/// Creates a pipeline cache, from `data` if there is any. Returns `None` if wgpu or the driver
/// rejects it.
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
        // Report rejected data instead of falling back to an empty cache.
        fallback: false,
    };
    // SAFETY: `data` must come from `PipelineCache::get_data` of this driver, unchanged. Only
    // `CacheFile::write_trusted` writes the file, and its caller passes only such data.
    // `CacheFile::read_trusted` checks that this user owns the file and no other user may write it,
    // and that no byte has changed. It also checks that the file belongs to this version of samite
    // (and so of wgpu), this adapter and this driver, by everything that the driver reports about
    // itself. wgpu checks that the data has its format and belongs to the adapter; the driver
    // checks that it is its own. Only this user or the system's administrator can forge such a file
    // with a valid checksum.
    let cache = unsafe { device.create_pipeline_cache(&descriptor) };
    // Error scopes are popped in reverse order.
    let errors = scopes.into_iter().rev().map(|scope| ready(scope.pop()));
    let errors: Vec<_> = errors.flatten().flatten().collect();
    errors.is_empty().then_some(cache)
}
