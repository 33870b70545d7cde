//! Locked memory, which the system never pages out.

use crate::cancel::CancelToken;
use crate::error::Result;
use crate::memory::MemoryId;
use crate::tensor_ref::TensorRef;
use std::io;
use std::ops::Range;

/// Bytes locked between two checks of the cancel token.
const STEP: usize = 64 << 20;

/// Tensors in host memory that are not paged out until this is dropped.
///
/// Locks do not nest. If small buffers share a page with other locked buffers, that page is
/// unlocked with the first of them.
#[derive(Debug)]
pub struct LockedMemory {
    /// Sorted address ranges. Gaps between them hold at least one page.
    pieces: Vec<Range<usize>>,
    /// Keeps the memory alive until it is unlocked.
    _tensors: Vec<TensorRef>,
}

/// Reason why nothing is locked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LockRefused(Box<str>);

impl LockedMemory {
    /// Locks `tensors`, each with the bytes that it takes in its memory
    /// ([`alloc_size`](crate::BufferType::alloc_size)). Skips tensors outside host memory. Locks
    /// either everything or nothing. Calls `progress` with the locked and the total bytes.
    ///
    /// # Errors
    /// [`Error::Cancelled`](crate::Error::Cancelled). The inner error if the system refuses: it
    /// names the limit and how to raise it.
    pub fn lock(
        tensors: impl IntoIterator<Item = (TensorRef, usize)>,
        cancel: &CancelToken,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Result<Self, LockRefused>> {
        let (mut pieces, mut kept) = (Vec::new(), Vec::new());
        for (tensor, bytes) in tensors {
            let location = tensor.buffer.location();
            if location.memory != MemoryId::HOST || bytes == 0 {
                continue;
            }
            let start = location.offset.saturating_add(tensor.slot.offset);
            pieces.push(start..start.saturating_add(bytes));
            kept.push(tensor);
        }
        let pieces = joined(pieces, page_bytes());
        let needed = pieces.iter().map(ExactSizeIterator::len).sum();
        // If a step fails, dropping this unlocks the locked pages.
        let mut locked = LockedMemory {
            pieces: Vec::with_capacity(pieces.len()),
            _tensors: kept,
        };
        let mut done = 0;
        for piece in pieces {
            for start in piece.clone().step_by(STEP) {
                cancel.check()?;
                let step = start..piece.end.min(start.saturating_add(STEP));
                if let Err(error) = system::lock(&step) {
                    return Ok(Err(refused(needed, &error, system::limit())));
                }
                done += step.len();
                progress(done, needed);
                locked.pieces.push(step);
            }
        }
        Ok(Ok(locked))
    }

    /// Returns the number of locked bytes.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(ExactSizeIterator::len).sum()
    }
}

impl Drop for LockedMemory {
    fn drop(&mut self) {
        self.pieces.iter().for_each(system::unlock);
    }
}

/// Returns the page size of the system, a power of two.
pub fn page_bytes() -> usize {
    let bytes = system::page_bytes();
    bytes
        .filter(|bytes| bytes.is_power_of_two())
        .unwrap_or(4096)
}

/// Rounds `pieces` out to whole pages, sorts them, and merges those that touch.
fn joined(mut pieces: Vec<Range<usize>>, page: usize) -> Vec<Range<usize>> {
    for piece in &mut pieces {
        *piece = piece.start / page * page..piece.end.div_ceil(page).saturating_mul(page);
    }
    pieces.sort_by_key(|piece| piece.start);
    let mut joined: Vec<Range<usize>> = Vec::new();
    for piece in pieces {
        match joined.last_mut().filter(|last| last.end >= piece.start) {
            Some(last) => last.end = last.end.max(piece.end),
            None => joined.push(piece),
        }
    }
    joined
}

fn refused(needed: usize, error: &io::Error, limit: Option<u64>) -> LockRefused {
    let hint = match limit {
        Some(limit) if limit < needed as u64 => {
            let kibibytes = needed.div_ceil(1024);
            format!(
                "the limit RLIMIT_MEMLOCK of this process is {limit} bytes; raise it with `ulimit \
                 -l {kibibytes}`, systemd's LimitMEMLOCK={kibibytes}K, or docker's \
                 --ulimit memlock={needed}"
            )
        }
        // Other locks of the process also count.
        Some(limit) => format!(
            "the limit RLIMIT_MEMLOCK of this process is {limit} bytes, of which others may be in use; if not, the system has not so much memory to lock"
        ),
        None if error.kind() == io::ErrorKind::Unsupported => {
            "this system has no way that is known here".to_owned()
        }
        None => "no limit of this process is in the way: the system has not so much memory to lock"
            .to_owned(),
    };
    let message = format!(
        "cannot lock {needed} bytes in memory ({error}): {hint}; everything works without the lock, but memory may be paged out"
    );
    LockRefused(message.into())
}

#[cfg(unix)]
mod system {
    use std::io;
    use std::ops::Range;

    pub fn lock(pages: &Range<usize>) -> io::Result<()> {
        // SAFETY: locking does not change the content of memory. The system refuses unmapped
        // addresses.
        match unsafe { libc::mlock(pages.start as *const libc::c_void, pages.len()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub fn unlock(pages: &Range<usize>) {
        // SAFETY: unlocking does not change the content of memory, and the system refuses unmapped
        // addresses. A failure is harmless.
        unsafe { libc::munlock(pages.start as *const libc::c_void, pages.len()) };
    }

    /// Returns how many bytes this process may lock, or `None` without a limit.
    pub fn limit() -> Option<u64> {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: `getrlimit` writes only one `rlimit` to the address.
        let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
        (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
    }

    pub fn page_bytes() -> Option<usize> {
        // SAFETY: `sysconf` only reads its argument.
        let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(bytes).ok()
    }
}

#[cfg(not(unix))]
mod system {
    use std::io;
    use std::ops::Range;

    pub fn lock(_: &Range<usize>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn unlock(_: &Range<usize>) {}

    pub fn limit() -> Option<u64> {
        None
    }

    pub fn page_bytes() -> Option<usize> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_is_locked_once() {
        assert!(page_bytes().is_power_of_two());
        assert_eq!(
            joined(
                vec![9000..9001, 100..5000, 4000..4100, 30_000..30_000 + 4096],
                4096
            ),
            [0..12_288, 28_672..36_864]
        );
        assert_eq!(
            joined(vec![8192..12_288, 0..4096], 4096),
            [0..4096, 8192..12_288]
        );
    }

    #[test]
    fn lock_errors_name_the_limit_and_how_to_raise_it() {
        let error = io::Error::from(io::ErrorKind::OutOfMemory);
        let text = |limit| refused(1_000_000, &error, limit).to_string();
        for part in [
            "1000000 bytes",
            "RLIMIT_MEMLOCK",
            "65536 bytes",
            "ulimit -l 977",
            "LimitMEMLOCK=977K",
        ] {
            assert!(text(Some(65_536)).contains(part), "{}", text(Some(65_536)));
        }
        assert!(!text(Some(2_000_000)).contains("ulimit"));
        assert!(text(None).contains("no limit of this process"));
    }

    #[test]
    fn cancellation_locks_no_memory() {
        let cancel = CancelToken::new();
        cancel.cancel();
        let memory = crate::host_buffer_type();
        let layout = crate::Layout::contiguous(crate::DType::F32, [16, 1, 1, 1]).unwrap();
        let group =
            crate::TensorGroup::allocate(&memory, crate::Usage::Weights, &[("a", layout)]).unwrap();
        let tensor = group.tensors[0].tensor().clone();
        let error = LockedMemory::lock([(tensor, 64)], &cancel, &|_, _| {}).unwrap_err();
        assert!(matches!(error, crate::Error::Cancelled));
    }
}
