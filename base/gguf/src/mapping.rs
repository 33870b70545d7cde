//! Memory-mapped files, and hints to the operating system about them. Contains the only `unsafe`
//! code of the crate.

use crate::error::{Error, Result};
use samite_core::HostMemory;
use std::fs::File;
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::Arc;

/// A whole file, mapped read-only: byte `i` of the mapping is byte `i` of the file.
///
/// Shared by [`std::sync::Arc`], so that a device that uses the memory in place can keep it alive.
///
/// # A file that changes
/// A file must not be written to or truncated while it is mapped. Changed content appears in the
/// mapping. Touching a page after the new end of a truncated file kills the process (SIGBUS), which
/// no library can prevent. Replace a model file by renaming a new one over it, as [`crate::Writer`]
/// does: the mapping then keeps the old content. [`crate::LoadMode::Read`] does not have this
/// problem.
#[derive(Debug)]
pub struct Mapping {
    map: memmap2::Mmap,
}

impl Mapping {
    /// Maps `file`, which must not be empty.
    pub(crate) fn new(file: &File) -> Result<Self> {
        // SAFETY: The mapping is read-only, and the code only assumes that the bytes can be read:
        // bytes that were checked once are never used to index memory without another check. It
        // cannot be enforced that the file is not changed from outside. The type's documentation
        // makes this the user's duty.
        let map = unsafe { memmap2::Mmap::map(file) };
        map.map(|map| Mapping { map }).map_err(|error| {
            Error::io(
                "cannot map the file into memory (try to load it by reading)",
                &error,
            )
        })
    }

    /// Returns the mapping as read-only host memory, which devices can use in place. Keeps the
    /// mapping alive.
    pub fn host_memory(self: &Arc<Self>) -> Arc<HostMemory> {
        let base = NonNull::from(&self.map[..]).cast();
        // SAFETY: The mapping is valid for reads while the second reference, the owner, lives. It
        // is mapped read-only, so this process cannot write to it. The type's documentation makes
        // the user responsible for writes by other processes.
        unsafe { HostMemory::borrow(base, self.map.len(), false, Box::new(Arc::clone(self))) }
    }

    /// Hints that `range` will be needed soon. Failure has no consequences.
    pub(crate) fn will_need(&self, range: Range<usize>) {
        #[cfg(unix)]
        if self.map.get(range.clone()).is_some() {
            let _ = self
                .map
                .advise_range(memmap2::Advice::WillNeed, range.start, range.len());
        }
        #[cfg(not(unix))]
        let _ = range;
    }

    /// Returns the pages that lie completely in `range` to the system. Touching them reads the file
    /// again. Only a hint.
    pub(crate) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if self.map.get(range.clone()).is_some() {
            let page = samite_core::page_bytes();
            let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
            if start < end {
                // SAFETY: The range is inside the mapping. It is a read-only mapping of a file, so
                // the dropped pages contain only the file's content, and return with the same bytes
                // when they are touched.
                let _ = unsafe {
                    self.map.unchecked_advise_range(
                        memmap2::UncheckedAdvice::DontNeed,
                        start,
                        end - start,
                    )
                };
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

/// Gives access to all bytes of the file.
impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn released_pages_are_read_again() {
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..50_000u32).map(|i| (i % 251) as u8).collect();
        file.write_all(&content).unwrap();
        let mapping = Mapping::new(&file).unwrap();
        assert_eq!(*mapping, content[..]);
        mapping.will_need(100..40_000);
        mapping.release(100..40_000);
        mapping.release(0..usize::MAX); // Out of bounds: does nothing.
        assert_eq!(*mapping, content[..]);
    }
}
