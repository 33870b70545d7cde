//! A number that threads wait for, first spinning and then sleeping.

use super::sync::{AtomicUsize, Condvar, Mutex, Ordering, fence, spin_loop};
use std::sync::PoisonError;

/// An increasing number that threads can wait for.
#[derive(Default)]
pub(crate) struct Signal {
    value: AtomicUsize,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Signal {
    /// Returns the current value.
    #[inline]
    pub fn get(&self) -> usize {
        self.value.load(Ordering::Acquire)
    }

    /// Adds one and wakes the waiting threads.
    #[inline]
    pub fn raise(&self) {
        self.value.fetch_add(1, Ordering::Release);
        // Here and in `wait`: of two threads that each write one number and then read the other's,
        // at least one sees the other's write.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            // Under the lock, a sleeper is either already asleep or will see the new value.
            let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.changed.notify_all();
        }
    }

    /// Waits until the value is no longer `old`.
    pub fn wait(&self, old: usize, spins: usize) {
        for _ in 0..spins {
            if self.get() != old {
                return;
            }
            spin_loop();
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while self.get() == old {
            guard = self
                .changed
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn every_signal_wakes_its_waiters() {
        for spins in [0, 1] {
            let mut model = loom::model::Builder::new();
            model.preemption_bound = Some(3);
            model.check(move || {
                let signals: Arc<[Signal; 2]> = Arc::new(Default::default());
                let worker = {
                    let signals = Arc::clone(&signals);
                    loom::thread::spawn(move || {
                        let [started, finished] = &*signals;
                        for job in 0..2 {
                            started.wait(job, spins);
                            finished.raise();
                        }
                    })
                };
                let [started, finished] = &*signals;
                for job in 0..2 {
                    started.raise();
                    finished.wait(job, spins);
                }
                worker.join().unwrap();
            });
        }
    }
}
