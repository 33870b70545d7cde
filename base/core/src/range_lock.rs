//! Range lock of a memory region: each byte has any number of readers or one writer.

use std::ops::Range;
use std::sync::PoisonError;

// With `--cfg loom`, tests try every interleaving of threads here. With `--cfg shuttle`, they try
// many interleavings of a whole scheduler.
#[cfg(loom)]
use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(shuttle)]
use shuttle::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(any(loom, shuttle)))]
use std::sync::{Condvar, Mutex, MutexGuard};

/// Kind of access to guarded memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read only. Others may read at the same time.
    Read,
    /// Write and perhaps read. Excludes all other accesses.
    Write,
}

/// Lock with any number of readers or one writer per byte. Unlike `RwLock`, it has separate calls
/// for entering and leaving, so a set of locks can be held without storing guards.
///
/// The lock has no queue. Later threads may enter first, and overlapping readers can starve a
/// writer. A queue would deadlock: a reader could wait after a writer that waits for that reader's
/// own thread, which may read the same bytes twice at once.
#[derive(Default)]
pub(crate) struct RangeLock {
    state: Mutex<RangeLockState>,
    changed: Condvar,
}

#[derive(Default)]
struct RangeLockState {
    /// Accesses in progress. There are few, so a list is faster than a tree.
    inside: Vec<(Range<usize>, Access)>,
    /// Number of threads that wait.
    waiting: usize,
}

impl RangeLock {
    fn lock(&self) -> MutexGuard<'_, RangeLockState> {
        // No code panics between two changes that belong together, so the state is consistent even
        // after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until no access in progress conflicts, then enters.
    pub fn acquire(&self, bytes: Range<usize>, access: Access) {
        let mut state = self.lock();
        let excluded = |(other, theirs): &(Range<usize>, Access)| {
            (access == Access::Write || *theirs == Access::Write)
                && bytes.start < other.end
                && other.start < bytes.end
        };
        while state.inside.iter().any(excluded) {
            state.waiting += 1;
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        state.inside.push((bytes, access));
    }

    /// Undoes one [`acquire`](RangeLock::acquire) with the same `bytes` and `access`, and wakes the
    /// waiting threads.
    pub fn release(&self, bytes: Range<usize>, access: Access) {
        let mut state = self.lock();
        let left = (bytes, access);
        if let Some(at) = state.inside.iter().position(|inside| *inside == left) {
            state.inside.swap_remove(at);
        }
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    #[cfg(test)]
    pub fn inside(&self) -> usize {
        self.lock().inside.len()
    }

    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.lock().waiting
    }

    /// Calls `f` inside the lock. Leaves the lock even if `f` panics.
    pub fn with<R>(&self, bytes: Range<usize>, access: Access, f: impl FnOnce() -> R) -> R {
        struct Release<'a>(&'a RangeLock, Range<usize>, Access);
        impl Drop for Release<'_> {
            fn drop(&mut self) {
                self.0.release(self.1.clone(), self.2);
            }
        }
        self.acquire(bytes.clone(), access);
        let _leave = Release(self, bytes, access);
        f()
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};

    /// One visit of a thread: it enters for some bytes, touches them and leaves.
    type RangeAccess = (Range<usize>, Access);

    /// Tries every interleaving of the visits with up to three preemptions, and checks for each
    /// byte that a writer is alone.
    fn all_orders(visits: &'static [&'static [RangeAccess]]) {
        let mut model = loom::model::Builder::new();
        // Every known bug needs fewer. All interleavings of three threads would take minutes.
        model.preemption_bound = Some(3);
        model.check(move || {
            let range_lock = Arc::new(RangeLock::default());
            // Per byte, the number of readers inside, plus a hundred for a writer. Does not
            // synchronise: only the lock does that.
            let bytes: Arc<[AtomicUsize; 3]> = Arc::new(Default::default());
            let visit =
                |range_lock: &RangeLock, bytes: &[AtomicUsize; 3], visits: &[RangeAccess]| {
                    for (range, access) in visits {
                        let (weight, others) = match access {
                            Access::Read => (1, 100),
                            Access::Write => (100, 1),
                        };
                        range_lock.acquire(range.clone(), *access);
                        for byte in &bytes[range.clone()] {
                            assert!(
                                byte.fetch_add(weight, Ordering::Relaxed) < others,
                                "two that exclude each other are inside"
                            );
                        }
                        for byte in &bytes[range.clone()] {
                            byte.fetch_sub(weight, Ordering::Relaxed);
                        }
                        range_lock.release(range.clone(), *access);
                    }
                };
            let (mine, theirs) = visits.split_first().unwrap();
            let threads: Vec<_> = theirs
                .iter()
                .map(|theirs| {
                    let (range_lock, bytes) = (Arc::clone(&range_lock), Arc::clone(&bytes));
                    loom::thread::spawn(move || visit(&range_lock, &bytes, theirs))
                })
                .collect();
            visit(&range_lock, &bytes, mine);
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
            assert_eq!((range_lock.inside(), range_lock.waiting()), (0, 0));
        });
    }

    #[test]
    fn writers_are_exclusive() {
        all_orders(&[
            &[(0..2, Access::Write)],
            &[(1..3, Access::Read)],
            &[(0..3, Access::Write)],
        ]);
    }

    #[test]
    fn readers_exclude_a_writer_of_overlapping_bytes() {
        all_orders(&[
            &[(0..2, Access::Read), (2..3, Access::Write)],
            &[(1..3, Access::Read)],
            &[(1..2, Access::Write)],
        ]);
    }

    #[test]
    fn every_waiter_is_woken() {
        all_orders(&[
            &[(0..1, Access::Write), (0..1, Access::Write)],
            &[(0..3, Access::Read), (0..1, Access::Read)],
        ]);
    }
}
