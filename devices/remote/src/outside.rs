//! What sessions take from outside: time, chance, tasks, and who does their requests.
//!
//! Everything else about a session is the same wherever it runs: over TLS on the system's threads, or in a simulation, which moves time, carries messages
//! and does requests when it likes.

use crate::server::Worker;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::{Duration, Instant};

/// Something that goes on beside others.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What a server's or a client's sessions run on.
pub trait Outside: fmt::Debug + Send + Sync {
    /// The time.
    fn now(&self) -> Instant;

    /// Is ready after a while.
    fn sleep(&self, time: Duration) -> Task;

    /// Stops who calls for a while, in which others go on.
    fn pause(&self, time: Duration);

    /// Fills `bytes` with what nobody can guess.
    ///
    /// # Errors
    /// What the system says.
    fn random(&self, bytes: &mut [u8]) -> io::Result<()>;

    /// Lets a task go on beside others.
    fn spawn(&self, task: Task);

    /// Has the requests of a new session done, until there are no more.
    ///
    /// # Errors
    /// What the system says.
    fn work(&self, worker: Worker) -> io::Result<()>;
}

/// Time and threads of the system, and tasks of a runtime.
#[derive(Debug)]
pub(crate) struct System(pub tokio::runtime::Handle);

impl Outside for System {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn sleep(&self, time: Duration) -> Task {
        // Timers belong to the runtime in which they begin.
        Box::pin(async move { tokio::time::sleep(time).await })
    }

    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }

    fn random(&self, bytes: &mut [u8]) -> io::Result<()> {
        crate::identity::fill_random(bytes)
    }

    fn spawn(&self, task: Task) {
        self.0.spawn(task);
    }

    fn work(&self, worker: Worker) -> io::Result<()> {
        let thread = samite_core::thread_builder()?.name("remote session".to_owned());
        thread.spawn(move || worker.run()).map(drop)
    }
}
