//! A barrier: all threads of a group reach it before any of them continues.

use std::fmt;
use std::sync::PoisonError;
use std::time::Duration;

#[cfg(loom)]
use loom::hint::spin_loop;
#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
#[cfg(loom)]
use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
use std::hint::spin_loop;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
#[cfg(not(loom))]
use std::sync::{Condvar, Mutex, MutexGuard};

/// The call that a member makes. All must make the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub what: &'static str,
    pub count: usize,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.what, self.count)
    }
}

/// The reason why a barrier failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Poison(pub String);

#[derive(Default)]
struct BarrierState {
    /// Members that have arrived, and their calls.
    arrived: Vec<(usize, Call)>,
    poison: Option<Poison>,
    sleeping: usize,
}

/// A reusable barrier for `size` threads. A thread that arrives early spins briefly, then sleeps.
pub(super) struct SpinBarrier {
    size: usize,
    spins: usize,
    deadline: Duration,
    /// Number of completed barriers, plus one if the group is poisoned. Spinning threads watch it.
    count: AtomicUsize,
    is_bad: AtomicBool,
    state: Mutex<BarrierState>,
    changed: Condvar,
}

impl SpinBarrier {
    pub fn new(size: usize, spins: usize, deadline: Duration) -> Self {
        SpinBarrier {
            size,
            spins,
            deadline,
            count: AtomicUsize::new(0),
            is_bad: AtomicBool::new(false),
            state: Mutex::new(BarrierState::default()),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BarrierState> {
        // No panic can occur between two related changes of the state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases all threads that sleep or spin.
    fn release(&self, state: &BarrierState) {
        self.count.fetch_add(1, Ordering::Release);
        if state.sleeping > 0 {
            self.changed.notify_all();
        }
    }

    fn poison_locked(&self, state: &mut BarrierState, poison: Poison) -> Poison {
        let poison = state.poison.get_or_insert(poison).clone();
        state.arrived.clear();
        self.is_bad.store(true, Ordering::Release);
        self.release(state);
        poison
    }

    /// Makes every call fail from now on.
    pub fn poison(&self, reason: String) {
        let mut state = self.lock();
        self.poison_locked(&mut state, Poison(reason));
    }

    /// Returns whether the group is poisoned.
    pub fn is_poisoned(&self) -> bool {
        self.lock().poison.is_some()
    }

    /// Resets the barrier after a failure. No thread may be waiting.
    pub fn reset(&self) {
        let mut state = self.lock();
        state.arrived.clear();
        state.poison = None;
        self.is_bad.store(false, Ordering::Release);
    }

    /// Waits for all other members. Their earlier writes are visible afterwards.
    pub fn meet(&self, member: usize, call: Call) -> Result<(), Poison> {
        let mut state = self.lock();
        if let Some(poison) = &state.poison {
            return Err(poison.clone());
        }
        if let Some((other, theirs)) = state.arrived.iter().find(|(_, theirs)| *theirs != call) {
            let poison = Poison(format!(
                "member {member} called {call}, but member {other} called {theirs}"
            ));
            return Err(self.poison_locked(&mut state, poison));
        }
        state.arrived.push((member, call));
        // Only the holder of the lock changes it.
        let before = self.count.load(Ordering::Relaxed);
        if state.arrived.len() == self.size {
            state.arrived.clear();
            self.release(&state);
            return Ok(());
        }
        drop(state);
        for _ in 0..self.spins {
            if self.count.load(Ordering::Acquire) != before {
                break;
            }
            spin_loop();
        }
        if self.count.load(Ordering::Acquire) == before {
            self.sleep(before, call)?;
        }
        // `poison` sets this flag before it releases the threads.
        if self.is_bad.load(Ordering::Acquire) {
            self.lock().poison.clone().map_or(Ok(()), Err)
        } else {
            Ok(())
        }
    }

    /// Sleeps until the barrier after number `before` completes.
    fn sleep(&self, before: usize, call: Call) -> Result<(), Poison> {
        let mut state = self.lock();
        while self.count.load(Ordering::Acquire) == before {
            state.sleeping += 1;
            let (woken, timeout) = self
                .changed
                .wait_timeout(state, self.deadline)
                .unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.sleeping -= 1;
            if timeout.timed_out() && self.count.load(Ordering::Acquire) == before {
                let is_here = |member: &usize| state.arrived.iter().any(|(here, _)| here == member);
                let missing = (0..self.size).filter(|member| !is_here(member));
                let missing: Vec<_> = missing.map(|member| member.to_string()).collect();
                let poison = Poison(format!(
                    "member {} did not come to {call} within {} s",
                    missing.join(", "),
                    self.deadline.as_secs_f32()
                ));
                return Err(self.poison_locked(&mut state, poison));
            }
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const SUM: Call = Call {
        what: "sum",
        count: 4,
    };

    #[test]
    fn mismatched_calls_fail_on_all_members() {
        for spins in [0, 1_000_000_000] {
            let spin_barrier = SpinBarrier::new(2, spins, Duration::from_secs(60));
            let other = Call { count: 5, ..SUM };
            std::thread::scope(|scope| {
                let first = scope.spawn(|| spin_barrier.meet(0, SUM));
                while spin_barrier.lock().arrived.is_empty() {
                    std::thread::yield_now();
                }
                let second = spin_barrier.meet(1, other).unwrap_err();
                assert_eq!(
                    second.0,
                    "member 1 called sum of 5, but member 0 called sum of 4"
                );
                assert_eq!(first.join().unwrap().unwrap_err(), second);
            });
            assert!(spin_barrier.meet(0, SUM).is_err(), "it stays poisoned");
            spin_barrier.reset();
            std::thread::scope(|scope| {
                let first = scope.spawn(|| spin_barrier.meet(0, SUM));
                spin_barrier.meet(1, SUM).unwrap();
                first.join().unwrap().unwrap();
            });
        }
    }

    #[test]
    fn members_that_miss_the_deadline_are_named() {
        let spin_barrier = SpinBarrier::new(3, 10, Duration::from_millis(50));
        let error = spin_barrier.meet(1, SUM).unwrap_err();
        assert_eq!(
            error.0,
            "member 0, 2 did not come to sum of 4 within 0.05 s"
        );
        assert!(spin_barrier.is_poisoned());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize as Number;

    const CALL: Call = Call {
        what: "sum",
        count: 1,
    };

    fn model(f: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(f);
    }

    #[test]
    fn loom_writes_before_the_barrier_are_visible_after_it() {
        model(|| {
            let shared = Arc::new((
                SpinBarrier::new(2, 1, Duration::MAX),
                [Number::new(0), Number::new(0)],
            ));
            let work = |member: usize, shared: &(SpinBarrier, [Number; 2])| {
                for round in 1..3 {
                    shared.1[member].store(round, Ordering::Relaxed);
                    shared.0.meet(member, CALL).unwrap();
                    let other = shared.1[1 - member].load(Ordering::Relaxed);
                    // It may be one round ahead, but never behind.
                    assert!(other == round || other == round + 1);
                }
            };
            let theirs = Arc::clone(&shared);
            let other = loom::thread::spawn(move || work(1, &theirs));
            work(0, &shared);
            other.join().unwrap();
        });
    }

    #[test]
    fn loom_poisoning_wakes_the_waiters() {
        model(|| {
            let shared = Arc::new(SpinBarrier::new(2, 1, Duration::MAX));
            let theirs = Arc::clone(&shared);
            let other = loom::thread::spawn(move || theirs.poison("it failed".to_owned()));
            let error = shared.meet(0, CALL).unwrap_err();
            assert_eq!(error.0, "it failed");
            other.join().unwrap();
        });
    }
}
