//! Memory-mapped files, and hints to the operating system about them. The only `unsafe` code of the crate.

use crate::error::{Error, Result};
use samite_core::HostMemory;
use std::fs::File;
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::Arc;

/// A whole file, mapped read-only: byte `i` of the mapping is byte `i` of the file.
///
/// Shared by [`std::sync::Arc`], so that a device which uses the memory in place can keep it alive.
///
/// # A file that changes
/// Nobody may write to or shorten a file while it is mapped. Content that changes appears in the mapping; touching a page
/// behind the new end of a shortened file kills the process (SIGBUS), which no library can prevent. Replace a model file
/// by renaming a new one over it, as [`crate::Writer`] does: the mapping then keeps the old content.
/// [`crate::LoadMode::Read`] does not have this problem.
#[derive(Debug)]
pub struct Mapping {
    map: memmap2::Mmap,
}

impl Mapping {
    /// Maps `file`, which must not be empty.
    pub(crate) fn new(file: &File) -> Result<Self> {
        // SAFETY: The mapping is read-only, and nothing is assumed about the bytes but that they can be read: what was
        // checked once is never used to index memory without another check. That the file is not changed from outside
        // cannot be enforced; the type's documentation makes it the user's duty.
        let map = unsafe { memmap2::Mmap::map(file) };
        map.map(|map| Mapping { map }).map_err(|error| {
            Error::io(
                "cannot map the file into memory (try to load it by reading)",
                &error,
            )
        })
    }

    /// The mapping as read-only host memory, which devices can use in place. Keeps the mapping alive.
    pub fn host_memory(self: &Arc<Self>) -> Arc<HostMemory> {
        let base = NonNull::from(&self.map[..]).cast();
        // SAFETY: The mapping is valid for reads as long as the second reference, which is the owner, lives. It is
        // mapped read-only, so this process cannot write to it; that no other process writes to the file is the user's duty, as the type says.
        unsafe { HostMemory::borrow(base, self.map.len(), false, Box::new(Arc::clone(self))) }
    }

    /// Tells the system that `range` will be needed soon. Only a hint: failure is of no consequence.
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

    /// Gives the pages that lie wholly in `range` back to the system; touching them reads the file again. Only a hint.
    pub(crate) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if self.map.get(range.clone()).is_some() {
            let page = samite_core::page_bytes();
            let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
            if start < end {
                // SAFETY: The range is inside the mapping. It is a read-only mapping of a file, so the pages that are
                // dropped have no content but the file's, and come back with the same bytes when they are touched.
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

/// All bytes of the file.
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
    fn released_pages_come_back() {
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
