//! Shared state of the workers of one job: a barrier, and a counter that distributes work.

use super::signal::Signal;
use super::sync::{AtomicBool, AtomicUsize, Ordering};
use std::ops::Range;

/// Shared state of the workers of one job.
#[derive(Default)]
pub struct Team {
    /// Number of threads of the job.
    size: AtomicUsize,
    /// Iterations of a waiting loop before a thread sleeps.
    spins: usize,
    arrived: AtomicUsize,
    generation: Signal,
    next: AtomicUsize,
    stop_asked: AtomicBool,
    stop: AtomicBool,
    /// Set if a worker panicked, because the others would wait for it forever.
    broken: AtomicBool,
}

impl Team {
    /// Returns a team of only the calling thread.
    pub(crate) fn alone() -> Self {
        Team::new(1, 0)
    }

    /// Returns a team of `size` threads, which spin `spins` times before they sleep.
    pub(crate) fn new(size: usize, spins: usize) -> Self {
        Team {
            size: AtomicUsize::new(size),
            spins,
            ..Team::default()
        }
    }

    /// Resets the team for a job with `size` threads. Must not be called while a thread is in a
    /// barrier.
    pub(crate) fn reset(&self, size: usize) {
        self.size.store(size, Ordering::Relaxed);
        self.next.store(0, Ordering::Relaxed);
        self.stop_asked.store(false, Ordering::Relaxed);
        self.stop.store(false, Ordering::Relaxed);
        self.arrived.store(0, Ordering::Relaxed);
        self.broken.store(false, Ordering::Relaxed);
    }

    /// Releases all other threads from this and every later barrier, and makes them stop.
    pub(crate) fn abandon(&self) {
        self.broken.store(true, Ordering::SeqCst);
        self.generation.raise();
    }

    /// Takes the next of `units` units of work, between `least` and `most` of them while as many
    /// are left: much of the rest at first, so that neighbours stay together, and little at the
    /// end, so that no worker waits long for the last one.
    #[inline]
    pub fn take(&self, units: usize, least: usize, most: usize) -> Range<usize> {
        let size = self.size.load(Ordering::Relaxed);
        let part = |next: usize| {
            let left = units.saturating_sub(next);
            next..next + (left / (4 * size)).max(least).min(most).min(left)
        };
        let taken = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                Some(part(next).end)
            });
        // The update never fails.
        part(taken.unwrap_or_else(|next| next))
    }

    /// Requests that the team stops at the next barrier.
    pub fn ask_to_stop(&self) {
        self.stop_asked.store(true, Ordering::Release);
    }

    /// Returns whether a worker has asked the team to stop.
    pub fn is_asked_to_stop(&self) -> bool {
        self.stop_asked.load(Ordering::Relaxed)
    }

    /// Waits until all workers are here, and gives out work from 0 again. All get the same answer:
    /// whether to go on.
    #[inline]
    pub fn barrier(&self) -> bool {
        // The order matters: `abandon` sets `broken`, then raises the generation. A thread that
        // reads the new generation here also reads `broken`. A thread that reads the old one waits
        // for its change, and so is woken.
        let generation = self.generation.get();
        if self.broken.load(Ordering::SeqCst) {
            return false;
        }
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.size.load(Ordering::Relaxed) {
            self.arrived.store(0, Ordering::Relaxed);
            self.next.store(0, Ordering::Relaxed);
            // Decided here, for all threads: none can pass the next barrier, and change it, before
            // all have read it.
            self.stop
                .store(self.stop_asked.load(Ordering::Acquire), Ordering::Relaxed);
            self.generation.raise();
        } else {
            self.generation.wait(generation, self.spins);
        }
        !self.stop.load(Ordering::Relaxed) && !self.broken.load(Ordering::SeqCst)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn work_chunks_shrink_down_to_the_minimum_size() {
        let team = Team::new(2, 0);
        let take = |units, least, most| {
            let mut parts = Vec::new();
            loop {
                let taken = team.take(units, least, most);
                if taken.is_empty() {
                    team.reset(2);
                    return parts;
                }
                parts.push(taken);
            }
        };
        assert_eq!(
            take(32, 3, 32),
            [
                0..4,
                4..7,
                7..10,
                10..13,
                13..16,
                16..19,
                19..22,
                22..25,
                25..28,
                28..31,
                31..32
            ]
        );
        assert_eq!(take(10, 4, 10), [0..4, 4..8, 8..10]);
        assert_eq!(take(24, 1, 2).len(), 19);
        assert_eq!(take(0, 4, 4), []);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    /// Runs `work` on two threads in all interleavings with up to three preemptions.
    fn all_orders(
        spins: usize,
        work: impl Fn(usize, &Team, &[AtomicUsize]) + Send + Sync + Copy + 'static,
    ) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let team = Arc::new(Team::new(2, spins));
            let counters: Arc<[AtomicUsize; 2]> = Arc::new(Default::default());
            let other = {
                let (team, counters) = (Arc::clone(&team), Arc::clone(&counters));
                loom::thread::spawn(move || work(1, &team, &*counters))
            };
            work(0, &team, &*counters);
            other.join().unwrap();
        });
    }

    #[test]
    fn writes_before_a_barrier_are_visible_after_it() {
        for spins in [0, 1] {
            all_orders(spins, |_, team, done| {
                for phase in 0..2 {
                    loop {
                        let taken = team.take(2, 1, 2);
                        if taken.is_empty() {
                            break;
                        }
                        done[phase].fetch_add(taken.len(), Ordering::Relaxed);
                    }
                    assert!(team.barrier());
                    assert_eq!(done[phase].load(Ordering::Relaxed), 2);
                }
            });
        }
    }

    #[test]
    fn all_workers_stop_at_the_same_barrier() {
        for spins in [0, 1] {
            all_orders(spins, |worker, team, _| {
                assert!(team.barrier());
                // The other one may still be leaving the first barrier, which all have passed.
                if worker == 0 {
                    team.ask_to_stop();
                }
                assert!(!team.barrier());
            });
        }
    }

    #[test]
    fn workers_do_not_wait_for_an_abandoned_worker() {
        for spins in [0, 1] {
            all_orders(spins, |worker, team, _| {
                if worker == 1 {
                    team.abandon();
                } else {
                    assert!(!team.barrier());
                    assert!(!team.barrier());
                }
            });
        }
    }
}
