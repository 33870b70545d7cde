//! A queue of jobs with a worker thread.

use samite_core::{Error, Result};
use std::fmt;
use std::sync::{Arc, PoisonError};

// With `--cfg shuttle`, tests try many interleavings of threads here.
#[cfg(shuttle)]
use shuttle::{
    sync::mpsc::{Sender, channel},
    sync::{Condvar, Mutex, MutexGuard},
    thread::{Builder, JoinHandle},
};
#[cfg(not(shuttle))]
use std::{
    sync::mpsc::{Sender, channel},
    sync::{Condvar, Mutex, MutexGuard},
    thread::{Builder, JoinHandle},
};

type QueuedJob = Box<dyn FnOnce() -> Result<()> + Send>;

/// Jobs that a thread runs in order. After a failure, jobs are skipped until the failure is
/// reported.
pub(crate) struct Queue {
    jobs: Option<Sender<QueuedJob>>,
    worker: Option<JoinHandle<()>>,
    progress: Arc<QueueProgress>,
    /// Number of jobs submitted.
    submitted: u64,
}

#[derive(Default)]
struct QueueProgress {
    state: Mutex<ProgressState>,
    changed: Condvar,
}

#[derive(Default)]
struct ProgressState {
    /// Number of jobs done or skipped.
    done: u64,
    /// The first unreported failure, with the number of jobs up to and including it.
    failed: Option<(u64, Error)>,
}

impl QueueProgress {
    fn lock(&self) -> MutexGuard<'_, ProgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until(&self, jobs: u64) -> MutexGuard<'_, ProgressState> {
        self.changed
            .wait_while(self.lock(), |state| state.done < jobs)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn perform(&self, job: QueuedJob) {
        let skip = self.lock().failed.is_some();
        let result = if skip { Ok(()) } else { job() };
        let mut state = self.lock();
        state.done += 1;
        if let Err(error) = result {
            state.failed = Some((state.done, error));
        }
        self.changed.notify_all();
    }
}

/// Holds queued work back while it is closed, so that a test controls the order of events.
#[derive(Debug, Default)]
pub struct Latch {
    state: Mutex<LatchState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LatchState {
    closed: bool,
    /// Number of pieces of work that may start while it is closed.
    tickets: usize,
    /// Number of pieces of work that wait to start.
    held: usize,
}

impl Latch {
    /// Returns an open latch.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn change(&self, change: impl FnOnce(&mut LatchState)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Stops work from starting.
    pub fn close(&self) {
        self.change(|state| state.closed = true);
    }

    /// Lets work continue.
    pub fn open(&self) {
        self.change(|state| (state.closed, state.tickets) = (false, 0));
    }

    /// Lets this number of pieces of work start while it is closed. A copy has two: its start and
    /// its end.
    pub fn let_pass(&self, pieces: usize) {
        self.change(|state| state.tickets += pieces);
    }

    /// Waits until the closed latch holds work back.
    pub fn wait_until_held(&self) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = |state: &mut LatchState| state.held == 0 || state.tickets > 0;
        drop(self.changed.wait_while(state, is_free));
    }

    fn pass(&self) {
        self.change(|state| state.held += 1);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let must_wait = |state: &mut LatchState| state.closed && state.tickets == 0;
        let waited = self.changed.wait_while(state, must_wait);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.tickets = state.tickets.saturating_sub(1);
        state.held -= 1;
    }
}

impl Queue {
    /// Starts the thread.
    pub fn start(name: &str, latch: Option<Arc<Latch>>) -> Result<Self> {
        let (jobs, received) = channel::<QueuedJob>();
        let progress = Arc::new(QueueProgress::default());
        let worker = Builder::new()
            .name(name.to_owned())
            .spawn({
                let progress = Arc::clone(&progress);
                move || {
                    for job in received {
                        if let Some(latch) = &latch {
                            latch.pass();
                        }
                        progress.perform(job);
                    }
                }
            })
            .map_err(|error| Error::io(format!("thread for a stream of {name}"), error))?;
        Ok(Queue {
            jobs: Some(jobs),
            worker: Some(worker),
            progress,
            submitted: 0,
        })
    }

    /// Appends a job.
    pub fn submit(&mut self, job: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(Box::new(job)));
        if !matches!(sent, Some(Ok(()))) {
            return Err(Error::invalid("the thread of a stream has ended"));
        }
        self.submitted += 1;
        Ok(())
    }

    /// Returns the current end of the queue.
    pub fn end(&self) -> QueuePoint {
        QueuePoint {
            progress: Arc::clone(&self.progress),
            jobs: self.submitted,
        }
    }

    /// Waits for all jobs and reports a failure, once.
    pub fn synchronize(&self) -> Result<()> {
        match self.progress.wait_until(self.submitted).failed.take() {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(worker) = self.worker.take() {
            // The worker's thread has reported its panic.
            let _ = worker.join();
        }
    }
}

/// A point between jobs.
#[derive(Clone)]
pub(crate) struct QueuePoint {
    progress: Arc<QueueProgress>,
    jobs: u64,
}

impl QueuePoint {
    /// Waits until the jobs before the point are done, and reports a failure among them.
    pub fn wait(&self) -> Result<()> {
        match &self.progress.wait_until(self.jobs).failed {
            Some((at, error)) if *at <= self.jobs => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for QueuePoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePoint({})", self.jobs)
    }
}
