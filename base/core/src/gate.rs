//! The gate of a piece of memory: of each byte, any number of readers or one writer.

use std::ops::Range;
use std::sync::PoisonError;

// With `--cfg loom`, tests try every order in which threads can meet here; with `--cfg shuttle`, many orders of a whole scheduler.
#[cfg(loom)]
use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(shuttle)]
use shuttle::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(any(loom, shuttle)))]
use std::sync::{Condvar, Mutex, MutexGuard};

/// What is going to be done with guarded memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read: others may read at the same time.
    Read,
    /// Written, perhaps also read: nobody else may touch it.
    Write,
}

/// Any number of readers or one writer of each byte. Unlike with `RwLock`, entering and leaving are separate calls, so
/// that a set of gates can be held without storing guards.
///
/// There is no queue: who comes later may enter first, and readers that overlap without a break keep a writer out. A queue would let a reader
/// wait behind a writer that waits for that reader's own thread, which may read the same bytes twice at once.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    /// Who is inside. These are few, so that a list is searched faster than a tree would be.
    inside: Vec<(Range<usize>, Access)>,
    /// How many wait for somebody to leave.
    waiting: usize,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        // Nothing can panic between two changes of the state that belong together, so it is right after a panic too.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody inside conflicts, then is inside.
    pub fn enter(&self, bytes: Range<usize>, access: Access) {
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

    /// Undoes one [`enter`](Gate::enter) with the same `bytes` and `access`, and wakes who waits.
    pub fn leave(&self, bytes: Range<usize>, access: Access) {
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

    /// Calls `f` inside. Leaves also if `f` panics.
    pub fn with<R>(&self, bytes: Range<usize>, access: Access, f: impl FnOnce() -> R) -> R {
        struct Leave<'a>(&'a Gate, Range<usize>, Access);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                self.0.leave(self.1.clone(), self.2);
            }
        }
        self.enter(bytes.clone(), access);
        let _leave = Leave(self, bytes, access);
        f()
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};

    /// What a thread does: it enters for some bytes, touches them, leaves.
    type Visit = (Range<usize>, Access);

    /// Lets threads visit in every order with up to three preemptions, and checks for each byte that a writer is alone.
    fn all_orders(visits: &'static [&'static [Visit]]) {
        let mut model = loom::model::Builder::new();
        // Every known mistake needs fewer; all orders of three threads take minutes.
        model.preemption_bound = Some(3);
        model.check(move || {
            let gate = Arc::new(Gate::default());
            // Of each byte: readers inside, and a hundred for a writer. Not a way to synchronise: the gate alone does that.
            let bytes: Arc<[AtomicUsize; 3]> = Arc::new(Default::default());
            let visit = |gate: &Gate, bytes: &[AtomicUsize; 3], visits: &[Visit]| {
                for (range, access) in visits {
                    let (weight, others) = match access {
                        Access::Read => (1, 100),
                        Access::Write => (100, 1),
                    };
                    gate.enter(range.clone(), *access);
                    for byte in &bytes[range.clone()] {
                        assert!(
                            byte.fetch_add(weight, Ordering::Relaxed) < others,
                            "two that exclude each other are inside"
                        );
                    }
                    for byte in &bytes[range.clone()] {
                        byte.fetch_sub(weight, Ordering::Relaxed);
                    }
                    gate.leave(range.clone(), *access);
                }
            };
            let (mine, theirs) = visits.split_first().unwrap();
            let threads: Vec<_> = theirs
                .iter()
                .map(|theirs| {
                    let (gate, bytes) = (Arc::clone(&gate), Arc::clone(&bytes));
                    loom::thread::spawn(move || visit(&gate, &bytes, theirs))
                })
                .collect();
            visit(&gate, &bytes, mine);
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
            assert_eq!((gate.inside(), gate.waiting()), (0, 0));
        });
    }

    #[test]
    fn a_writer_is_alone() {
        all_orders(&[
            &[(0..2, Access::Write)],
            &[(1..3, Access::Read)],
            &[(0..3, Access::Write)],
        ]);
    }

    #[test]
    fn readers_and_a_writer_of_some_of_their_bytes() {
        all_orders(&[
            &[(0..2, Access::Read), (2..3, Access::Write)],
            &[(1..3, Access::Read)],
            &[(1..2, Access::Write)],
        ]);
    }

    #[test]
    fn nobody_is_forgotten() {
        all_orders(&[
            &[(0..1, Access::Write), (0..1, Access::Write)],
            &[(0..3, Access::Read), (0..1, Access::Read)],
        ]);
    }
}
