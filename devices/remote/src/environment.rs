//! Environment of sessions: time, randomness, tasks, and execution of requests.
//!
//! Everything else about a session is the same over TLS on the system's threads and in a
//! simulation, which controls time, messages and the execution of requests.

use crate::server::Worker;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::{Duration, Instant};

/// A concurrent task.
pub type BoxedTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Environment of a server's or a client's sessions.
pub trait SessionEnvironment: fmt::Debug + Send + Sync {
    /// Returns the current time.
    fn now(&self) -> Instant;

    /// Returns a future that completes after `time`.
    fn sleep(&self, time: Duration) -> BoxedTask;

    /// Blocks the caller for `time` while other tasks continue.
    fn pause(&self, time: Duration);

    /// Fills `bytes` with unpredictable bytes.
    ///
    /// # Errors
    /// Returns the system's error.
    fn random(&self, bytes: &mut [u8]) -> io::Result<()>;

    /// Starts a concurrent task.
    fn spawn(&self, task: BoxedTask);

    /// Executes the requests of a new session until there are no more.
    ///
    /// # Errors
    /// Returns the system's error.
    fn work(&self, worker: Worker) -> io::Result<()>;
}

/// Time and threads of the system, and tasks of a runtime.
#[derive(Debug)]
pub(crate) struct System(pub tokio::runtime::Handle);

impl SessionEnvironment for System {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn sleep(&self, time: Duration) -> BoxedTask {
        // A timer belongs to the runtime in which it starts.
        Box::pin(async move { tokio::time::sleep(time).await })
    }

    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }

    fn random(&self, bytes: &mut [u8]) -> io::Result<()> {
        crate::identity::fill_random(bytes)
    }

    fn spawn(&self, task: BoxedTask) {
        self.0.spawn(task);
    }

    fn work(&self, worker: Worker) -> io::Result<()> {
        let thread = samite_core::thread_builder()?.name("remote session".to_owned());
        thread.spawn(move || worker.run()).map(drop)
    }
}
