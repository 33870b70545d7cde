//! Worker threads for kernels.
//!
//! A [`Pool`] keeps the threads of one device, or of several that share it. [`Pool::run`] lets all
//! of them, or some, call one function, the *job*. Inside a job, a [`Team`] has a counter that
//! distributes work, and a barrier for the threads.
//!
//! Workers wait by spinning for some microseconds, then by sleeping. An idle engine therefore uses
//! no CPU, and a busy one does not pay for wake-ups. The calling thread is worker 0. If the pool is
//! busy with another caller's job, the caller does its job alone. Waiting instead could deadlock:
//! that job may wait for something that the caller holds, such as the range lock of some memory.
//!
//! [`PoolOptions`] set the processors and the priority of the threads, and how long they spin.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;

mod options;
mod signal;
mod start;
mod sync;
mod team;

use options::Settings;
pub use options::{CpuSet, PoolError, PoolOptions, Priority};
use signal::Signal;
pub use start::{has_memory, thread_builder};
use sync::{Arc, AtomicBool, AtomicUsize, JoinHandle, Mutex, Ordering, UnsafeCell};
pub use team::Team;

/// Maximum number of threads of one pool.
pub const MAX_THREADS: usize = 512;

/// Function that every worker calls, with its number and the team.
pub type Job<'a> = &'a (dyn Fn(usize, &Team) + Sync);

struct PoolState {
    team: Team,
    job: UnsafeCell<Option<Job<'static>>>,
    /// Start signals, one for each worker except the caller, so that a job wakes only the workers
    /// that take part in it.
    started: Box<[Start]>,
    running: AtomicUsize,
    finished: Signal,
    panicked: AtomicBool,
    shutdown: AtomicBool,
}

/// A signal in its own cache lines.
#[derive(Default)]
#[repr(align(128))]
struct Start(Signal);

// SAFETY: only `job` needs it. A job is `Sync`, so all threads may call it. Only the caller that
// holds `Pool::caller` writes the cell, while no worker reads it: before `started` is raised and
// after `finished` was. Both publish earlier writes.
unsafe impl Sync for PoolState {}

/// Threads of one device, or of several devices in turn. The first job that needs them starts them.
pub struct Pool {
    threads: usize,
    settings: Arc<Settings>,
    /// True while the host wants no workers.
    paused: AtomicBool,
    /// Locked by the caller whose job runs.
    caller: Mutex<Option<Workers>>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

struct Workers {
    shared: Arc<PoolState>,
    handles: Vec<JoinHandle<()>>,
}

/// A job panicked in some thread, which printed the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Panicked;

impl fmt::Display for Panicked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a worker thread panicked")
    }
}

impl std::error::Error for Panicked {}

impl Pool {
    /// Returns a pool of `threads` threads including the caller, at most [`MAX_THREADS`]. With
    /// more threads than processors, waiting threads sleep at once.
    pub fn new(threads: usize, processors: usize) -> Self {
        Self::with_settings(threads, Settings::plain(threads, processors))
    }

    /// Returns a pool with these options.
    ///
    /// # Errors
    /// If the system refuses the processors or the priority. This is tried before the function
    /// returns.
    pub fn with_options(options: &PoolOptions) -> Result<Self, PoolError> {
        let settings = Settings::new(options)?;
        Ok(Self::with_settings(options.threads, settings))
    }

    fn with_settings(threads: usize, settings: Settings) -> Self {
        Pool {
            threads: threads.clamp(1, MAX_THREADS),
            settings: Arc::new(settings),
            paused: AtomicBool::new(false),
            caller: Mutex::new(None),
        }
    }

    /// Returns the number of threads, including the caller.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Ends the workers once the current job is done. Until [`resume`](Self::resume), every caller
    /// does its job alone, with the same results. Must not be called in a job.
    pub fn pause(&self) {
        self.paused.store(true, Ordering::SeqCst);
        // Every thread that takes the lock after this sees that the pool is paused.
        *self.caller.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Lets workers take part again. The next job starts them.
    pub fn resume(&self) {
        self.paused.store(false, Ordering::SeqCst);
    }

    /// Makes the calling thread run on the processors and with the priority of the
    /// [options](PoolOptions) from now on. Jobs do this for their callers.
    pub fn bind_caller(&self) {
        self.settings.apply_to_caller();
    }

    /// Calls `job` in all threads, or only in the caller if the others are busy or paused. Returns
    /// when all calls have returned.
    ///
    /// # Errors
    /// If the job panicked in some thread. The pool stays usable.
    pub fn run(&self, job: Job<'_>) -> Result<(), Panicked> {
        self.run_with(self.threads, job)
    }

    /// Does what [`run`](Self::run) does with `threads` of the pool's threads, including the
    /// caller. The others stay asleep.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_with(&self, threads: usize, job: Job<'_>) -> Result<(), Panicked> {
        self.bind_caller();
        let size = threads.min(self.threads);
        let free = match size {
            0 | 1 => None,
            _ => self.caller.try_lock().ok(),
        };
        let free = free.filter(|_| !self.paused.load(Ordering::SeqCst));
        let Some(mut workers) = free else {
            let team = Team::alone();
            return catch_unwind(AssertUnwindSafe(|| job(0, &team))).map_err(|_| Panicked);
        };
        let workers = workers.get_or_insert_with(|| Workers::start(self.threads, &self.settings));
        let shared = &*workers.shared;
        // Fewer if the system refused some.
        let others = workers.handles.len().min(size - 1);
        shared.team.reset(others + 1);
        shared.running.store(others, Ordering::Relaxed);
        shared.panicked.store(false, Ordering::Relaxed);
        let finished = shared.finished.get();
        // SAFETY: only the lifetime is hidden. This function does not return or unwind before all
        // workers are done with the job, since panics are caught. No other thread accesses the
        // cell: other callers do not have the lock, and the previous job was waited for, so all
        // workers wait for `started`.
        shared.job.with_mut(|place| unsafe {
            *place = Some(std::mem::transmute::<Job<'_>, Job<'static>>(job));
        });
        for start in &shared.started[..others] {
            start.0.raise();
        }
        let mine = catch_unwind(AssertUnwindSafe(|| job(0, &shared.team)));
        if mine.is_err() {
            shared.team.abandon();
        }
        if others > 0 {
            shared.finished.wait(finished, self.settings.spins);
        }
        // SAFETY: all workers are done, since the last one raised `finished`, or there are none.
        // The lock keeps other callers away.
        shared.job.with_mut(|place| unsafe { *place = None });
        if mine.is_err() || shared.panicked.load(Ordering::Relaxed) {
            return Err(Panicked);
        }
        Ok(())
    }
}

impl Workers {
    /// Starts the threads. If the system refuses some, the team is smaller.
    fn start(threads: usize, settings: &Arc<Settings>) -> Self {
        let shared = |size| {
            Arc::new(PoolState {
                team: Team::new(size, settings.spins),
                job: UnsafeCell::new(None),
                started: (1..size).map(|_| Start::default()).collect(),
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
                let settings = Arc::clone(settings);
                let thread = sync::thread_builder().and_then(|thread| {
                    let thread = thread.name(format!("samite-worker-{number}"));
                    thread.spawn(move || work(&shared, number, &settings))
                });
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
        for start in &self.shared.started {
            start.0.raise();
        }
        for handle in self.handles.drain(..) {
            // A worker catches panics of jobs, so joining does not fail.
            let _ = handle.join();
        }
    }
}

fn work(shared: &PoolState, number: usize, settings: &Settings) {
    settings.apply_to_worker(number);
    let started = &shared.started[number - 1].0;
    let mut seen = 0;
    loop {
        started.wait(seen, settings.spins);
        seen = seen.wrapping_add(1);
        if shared.shutdown.load(Ordering::Acquire) {
            return;
        }
        // SAFETY: the caller wrote the job before raising `started`, and waits for `finished`
        // before it writes again.
        let job = shared.job.with(|place| unsafe { *place });
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

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)] // Helpers of tests are tests.
mod tests {
    use super::*;

    /// Returns the reduced number of rounds for Miri, which is slow but switches threads more
    /// often.
    fn rounds(usual: usize) -> std::ops::Range<usize> {
        0..if cfg!(miri) {
            usual.div_ceil(100)
        } else {
            usual
        }
    }

    /// Runs jobs of several phases whose results depend on every barrier and every unit of work.
    fn stress(pool: &Pool, jobs: usize) {
        for job in rounds(jobs) {
            let (phases, units) = (1 + job % 4, 1 + job % 7);
            let done: Vec<AtomicUsize> = (0..phases).map(|_| AtomicUsize::new(0)).collect();
            pool.run(&|_, team: &Team| {
                for phase in 0..phases {
                    if phase > 0 {
                        assert_eq!(done[phase - 1].load(Ordering::Relaxed), units);
                    }
                    loop {
                        let taken = team.take(units, 1 + job % 3, units);
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
    fn concurrent_callers_do_not_block_each_other() {
        let pool = Pool::new(3, 2);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| stress(&pool, 500));
            }
        });
    }

    #[test]
    fn the_caller_runs_the_job_if_the_pool_is_busy() {
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let pool = Pool::new(2, 2);
            pool.run(&|worker, _| {
                if worker == 0 {
                    assert_eq!(workers_of(&pool, 2), [0]);
                }
            })
            .unwrap();
            done.send(()).unwrap();
        });
        is_done
            .recv_timeout(std::time::Duration::from_secs(60))
            .expect("a caller waits for a job that waits for it");
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
    fn all_workers_stop_at_the_same_barrier() {
        let pool = Pool::new(4, 2);
        for _ in rounds(500) {
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
        // The next job works.
        stress(&pool, 10);
    }

    /// Returns the numbers of the workers that take part in a job with `threads` threads.
    fn workers_of(pool: &Pool, threads: usize) -> Vec<usize> {
        let seen = Mutex::new(Vec::new());
        pool.run_with(threads, &|worker, team: &Team| {
            seen.lock().unwrap().push(worker);
            assert!(team.barrier());
        })
        .unwrap();
        let mut seen = seen.into_inner().unwrap();
        seen.sort_unstable();
        seen
    }

    #[test]
    fn a_job_gets_the_requested_number_of_threads() {
        let pool = Pool::new(4, 2);
        for round in rounds(300) {
            for threads in [1, 3, 2, 4, 9, 0, 2] {
                let all: Vec<_> = (0..threads.clamp(1, 4)).collect();
                assert_eq!(workers_of(&pool, threads), all, "round {round}");
            }
        }
        stress(&pool, 100);
    }

    #[test]
    fn a_paused_pool_has_no_workers_until_it_is_resumed() {
        let pool = Pool::new(3, 2);
        assert_eq!(workers_of(&pool, 3), [0, 1, 2]);
        pool.pause();
        assert_eq!(workers_of(&pool, 3), [0]);
        assert!(pool.caller.lock().unwrap().is_none());
        pool.resume();
        assert_eq!(workers_of(&pool, 3), [0, 1, 2]);
    }

    #[test]
    fn a_pool_is_paused_and_resumed_while_jobs_run() {
        let pool = Pool::new(3, 2);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let jobs = scope.spawn(|| {
                for _ in rounds(20) {
                    stress(&pool, 50);
                }
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) && !jobs.is_finished() {
                pool.pause();
                assert!(pool.caller.lock().unwrap().is_none());
                pool.resume();
                std::thread::yield_now();
            }
        });
        assert_eq!(workers_of(&pool, 3), [0, 1, 2]);
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_stays_usable() {
        let pool = Pool::new(2, 2);
        for guilty in [0, 1] {
            let outcome = pool.run(&|worker, _: &Team| assert_ne!(worker, guilty, "expected"));
            assert!(outcome.is_err());
        }
        stress(&pool, 10);
    }

    #[test]
    fn workers_do_not_wait_for_a_panicked_worker() {
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let pool = Pool::new(3, 2);
            for job in rounds(300) {
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

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;

    /// Lets `users` use a pool of `threads`, each user in its own thread, in all interleavings with
    /// up to `preemptions` preemptions. Then the first user calls `last`. Workers sleep at once,
    /// which loom's interleavings of [`Signal`] and [`Team`] show to be the harder case.
    fn all_orders([threads, preemptions]: [usize; 2], users: Vec<fn(&Pool)>, last: fn(&Pool)) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(preemptions);
        model.check(move || {
            let pool = Arc::new(Pool::new(threads, 1));
            let (mine, theirs) = users.split_first().unwrap();
            let others: Vec<_> = theirs
                .iter()
                .map(|&user| {
                    let pool = Arc::clone(&pool);
                    loom::thread::spawn(move || user(&pool))
                })
                .collect();
            mine(&pool);
            others.into_iter().for_each(|other| other.join().unwrap());
            last(&pool);
        });
    }

    /// Returns the number of threads that took part in a job that distributed work before a
    /// barrier.
    fn job(pool: &Pool) -> usize {
        let [size, done] = [0, 0].map(AtomicUsize::new);
        pool.run(&|_, team| {
            size.fetch_add(1, Ordering::Relaxed);
            done.fetch_add(team.take(2, 1, 2).len(), Ordering::Relaxed);
            assert!(team.barrier());
            assert_eq!(done.load(Ordering::Relaxed), 2);
        })
        .unwrap();
        size.load(Ordering::Relaxed)
    }

    /// Runs a job that only counts its threads.
    fn short_job(pool: &Pool) -> usize {
        let size = AtomicUsize::new(0);
        pool.run(&|_, _| {
            size.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
        size.load(Ordering::Relaxed)
    }

    fn any_job(pool: &Pool) {
        assert!(matches!(short_job(pool), 1 | 2));
    }

    fn whole_job(pool: &Pool) {
        assert_eq!(short_job(pool), 2);
    }

    #[test]
    fn consecutive_jobs_run_on_all_workers() {
        let jobs: fn(&Pool) = |pool| {
            assert_eq!(job(pool), 2);
            assert_eq!(job(pool), 2);
        };
        all_orders([2, 3], vec![jobs], |_| ());
    }

    #[test]
    fn workers_outside_a_job_stay_asleep() {
        let jobs: fn(&Pool) = |pool| {
            let size = AtomicUsize::new(0);
            pool.run_with(2, &|worker, _| {
                assert!(worker < 2);
                size.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            assert_eq!(size.load(Ordering::Relaxed), 2);
            assert_eq!(short_job(pool), 3);
        };
        all_orders([3, 1], vec![jobs], |_| ());
    }

    #[test]
    fn two_users_share_a_pool() {
        all_orders([2, 3], vec![any_job, any_job], whole_job);
    }

    #[test]
    fn a_pool_can_pause_and_resume_during_a_job() {
        let pause: fn(&Pool) = |pool| {
            pool.pause();
            pool.resume();
        };
        all_orders([2, 3], vec![any_job, pause], whole_job);
    }

    #[test]
    fn a_paused_pool_has_no_workers() {
        let pause: fn(&Pool) = Pool::pause;
        all_orders([2, 3], vec![any_job, pause], |pool| {
            assert!(pool.caller.lock().unwrap().is_none());
            assert_eq!(short_job(pool), 1);
        });
    }

    #[test]
    fn a_worker_panic_ends_only_its_job() {
        let panics: fn(&Pool) = |pool| {
            let outcome = pool.run(&|worker, team| {
                // Panics without a message.
                if worker == 1 {
                    std::panic::resume_unwind(Box::new(()));
                }
                assert!(!team.barrier());
            });
            assert_eq!(outcome, Err(Panicked));
        };
        all_orders([2, 3], vec![panics], whole_job);
    }
}
