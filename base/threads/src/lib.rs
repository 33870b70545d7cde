//! Worker threads for kernels.
//!
//! A [`Pool`] keeps the threads of one device. [`Pool::run`] lets all of them call one function, the *job*. In it, a [`Team`] has a counter that gives out
//! work, and a barrier at which the threads meet.
//!
//! Workers wait by spinning for some microseconds, then by sleeping, so that an idle engine uses no CPU and a busy one
//! does not pay for waking up. The calling thread is worker 0. If the pool is busy with another caller's job, the
//! caller does its job alone. If it waited instead, and that job waited for something that the caller holds, such as the gate of some memory, neither would go on.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

mod signal;
mod team;

use signal::Signal;
pub use team::Team;

/// Turns of a waiting loop before a thread sleeps; some tens of microseconds.
const SPINS: usize = 2_000;

/// What every worker calls, with its number and the team.
pub type Job<'a> = &'a (dyn Fn(usize, &Team) + Sync);

struct Shared {
    team: Team,
    job: UnsafeCell<Option<Job<'static>>>,
    started: Signal,
    running: AtomicUsize,
    finished: Signal,
    panicked: AtomicBool,
    shutdown: AtomicBool,
}

// SAFETY: only `job` needs it; a job is `Sync`, so that all threads may call it. The place is written only by the one caller that holds `Pool::caller`, while no
// worker reads it: before `started` is raised and after `finished` was. Both publish what was written before.
unsafe impl Sync for Shared {}

/// The threads of one device. They are started by the first job that needs them.
pub struct Pool {
    threads: usize,
    spins: usize,
    /// Held by the caller whose job runs.
    caller: Mutex<Option<Workers>>,
}

struct Workers {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
}

/// A job panicked in some thread. What it said was printed by that thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Panicked;

impl std::fmt::Display for Panicked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a worker thread panicked")
    }
}

impl std::error::Error for Panicked {}

impl Pool {
    /// A pool of `threads`, the caller included. With more threads than processors, waiting threads sleep at once.
    pub fn new(threads: usize, processors: usize) -> Self {
        Pool {
            threads: threads.max(1),
            spins: if threads <= processors { SPINS } else { 0 },
            caller: Mutex::new(None),
        }
    }

    /// Number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Lets all threads call `job`, or the caller alone if the others are busy, and returns when all have returned.
    ///
    /// # Errors
    /// If the job panicked in some thread. The pool stays usable.
    pub fn run(&self, job: Job<'_>) -> Result<(), Panicked> {
        let free = if self.threads == 1 {
            None
        } else {
            self.caller.try_lock().ok()
        };
        let Some(mut workers) = free else {
            let team = Team::alone();
            return catch_unwind(AssertUnwindSafe(|| job(0, &team))).map_err(|_| Panicked);
        };
        let workers = workers.get_or_insert_with(|| Workers::start(self.threads, self.spins));
        let shared = &*workers.shared;
        shared.team.reset();
        shared
            .running
            .store(workers.handles.len(), Ordering::Relaxed);
        shared.panicked.store(false, Ordering::Relaxed);
        let finished = shared.finished.get();
        // SAFETY: the lifetime is only hidden: this function does not return or unwind before all workers are done with the job, since panics are
        // caught. Nobody else looks at the place: other callers have no lock, and the job before was waited for, so all workers wait for `started`.
        unsafe {
            *shared.job.get() = Some(std::mem::transmute::<Job<'_>, Job<'static>>(job));
        }
        shared.started.raise();
        let mine = catch_unwind(AssertUnwindSafe(|| job(0, &shared.team)));
        if mine.is_err() {
            shared.team.abandon();
        }
        if !workers.handles.is_empty() {
            shared.finished.wait(finished, self.spins);
        }
        // SAFETY: all workers are done, since the last one raised `finished`, or there are none; the lock keeps other callers away.
        unsafe { *shared.job.get() = None };
        if mine.is_err() || shared.panicked.load(Ordering::Relaxed) {
            return Err(Panicked);
        }
        Ok(())
    }
}

impl Workers {
    /// Starts the threads; if the system refuses some, the team is smaller.
    fn start(threads: usize, spins: usize) -> Self {
        let shared = |size| {
            Arc::new(Shared {
                team: Team::new(size, spins),
                job: UnsafeCell::new(None),
                started: Signal::default(),
                running: AtomicUsize::new(0),
                finished: Signal::default(),
                panicked: AtomicBool::new(false),
                shutdown: AtomicBool::new(false),
            })
        };
        for size in (1..=threads).rev() {
            let mut workers = Workers {
                shared: shared(size),
                handles: Vec::new(),
            };
            let complete = (1..size).all(|number| {
                let shared = Arc::clone(&workers.shared);
                let thread = std::thread::Builder::new()
                    .name(format!("samite-worker-{number}"))
                    .spawn(move || work(&shared, number, spins));
                match thread {
                    Ok(handle) => {
                        workers.handles.push(handle);
                        true
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot start worker thread {number}");
                        false
                    }
                }
            });
            if complete {
                return workers;
            }
        }
        Workers {
            shared: shared(1),
            handles: Vec::new(),
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::Release);
        self.shared.started.raise();
        for handle in self.handles.drain(..) {
            // A worker catches panics of jobs, so joining does not fail.
            let _ = handle.join();
        }
    }
}

fn work(shared: &Shared, number: usize, spins: usize) {
    let mut seen = 0;
    loop {
        shared.started.wait(seen, spins);
        seen = seen.wrapping_add(1);
        if shared.shutdown.load(Ordering::Acquire) {
            return;
        }
        // SAFETY: the caller wrote the job before raising `started`, and waits for `finished` before it writes again.
        let job = unsafe { *shared.job.get() };
        if let Some(job) = job
            && catch_unwind(AssertUnwindSafe(|| job(number, &shared.team))).is_err()
        {
            shared.panicked.store(true, Ordering::Relaxed);
            shared.team.abandon();
        }
        if shared.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            shared.finished.raise();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs jobs of several phases whose results depend on every barrier and every unit of work.
    fn stress(pool: &Pool, jobs: usize) {
        for job in 0..jobs {
            let (phases, units) = (1 + job % 4, 1 + job % 7);
            let done: Vec<AtomicUsize> = (0..phases).map(|_| AtomicUsize::new(0)).collect();
            pool.run(&|_, team: &Team| {
                for phase in 0..phases {
                    if phase > 0 {
                        assert_eq!(done[phase - 1].load(Ordering::Relaxed), units);
                    }
                    loop {
                        let taken = team.take(units, 1 + job % 3);
                        if taken.is_empty() {
                            break;
                        }
                        done[phase].fetch_add(taken.len(), Ordering::Relaxed);
                    }
                    assert!(team.barrier());
                }
            })
            .unwrap();
            assert!(done.iter().all(|d| d.load(Ordering::Relaxed) == units));
        }
    }

    #[test]
    fn thousands_of_tiny_jobs() {
        for (threads, processors) in [(1, 1), (2, 2), (4, 4), (4, 1)] {
            stress(&Pool::new(threads, processors), 3_000);
        }
    }

    #[test]
    fn callers_do_not_wait_for_each_other() {
        let pool = Pool::new(3, 2);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| stress(&pool, 500));
            }
        });
    }

    #[test]
    fn sleeping_workers_wake_up() {
        let pool = Pool::new(2, 2);
        for _ in 0..3 {
            stress(&pool, 2);
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    #[test]
    fn all_stop_at_the_same_barrier() {
        let pool = Pool::new(4, 2);
        for _ in 0..500 {
            let passed = AtomicUsize::new(0);
            pool.run(&|worker, team: &Team| {
                if worker == 0 {
                    team.ask_to_stop();
                }
                if team.barrier() {
                    passed.fetch_add(1, Ordering::Relaxed);
                    team.barrier();
                }
            })
            .unwrap();
            assert_eq!(passed.load(Ordering::Relaxed), 0);
        }
        // The next job goes on.
        stress(&pool, 10);
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_lives_on() {
        let pool = Pool::new(2, 2);
        for guilty in [0, 1] {
            let outcome = pool.run(&|worker, _: &Team| assert_ne!(worker, guilty, "expected"));
            assert!(outcome.is_err());
        }
        stress(&pool, 10);
    }

    #[test]
    fn nobody_waits_for_a_worker_that_panicked() {
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let pool = Pool::new(3, 2);
            for job in 0..300 {
                let went_on = AtomicUsize::new(0);
                let outcome = pool.run(&|worker, team: &Team| {
                    for phase in 0..3 {
                        assert!((worker, phase) != (job % 3, job / 3 % 3), "expected");
                        if !team.barrier() {
                            return;
                        }
                    }
                    went_on.fetch_add(1, Ordering::Relaxed);
                });
                assert!(outcome.is_err());
                assert_eq!(went_on.load(Ordering::Relaxed), 0);
            }
            stress(&pool, 10);
            done.send(()).unwrap();
        });
        is_done
            .recv_timeout(std::time::Duration::from_secs(60))
            .expect("workers wait for one that panicked");
    }
}
