//! A thread that loads models.
//!
//! On Linux, threads inherit the priority of the thread that starts them. Threads of HTTP run below
//! the engine's, so they must not start an engine.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{OnceLock, mpsc};
use tokio::sync::oneshot;

type Loading = Box<dyn FnOnce() + Send>;

/// The thread, which runs tasks one after the other until this is dropped.
#[derive(Debug, Default)]
pub struct Loader(OnceLock<mpsc::Sender<Loading>>);

impl Loader {
    /// Starts the thread, with the priority of the caller.
    ///
    /// # Errors
    /// Returns an error if there is no memory for a thread.
    pub fn start(&self) -> io::Result<()> {
        let (sender, tasks) = mpsc::channel::<Loading>();
        let run = move || {
            for task in tasks {
                // The task's result is missing then, which its caller reports.
                let _ = catch_unwind(AssertUnwindSafe(task));
            }
        };
        samite_core::thread_builder()?
            .name("loader".to_owned())
            .spawn(run)?;
        let _ = self.0.set(sender);
        Ok(())
    }

    /// Runs `act` on the thread, and returns its result. Returns `None` if it panics, or if the
    /// thread was not started.
    pub async fn run<T: Send + 'static>(
        &self,
        act: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, result) = oneshot::channel();
        let task = Box::new(move || {
            let _ = sender.send(act());
        });
        self.0.get()?.send(task).ok()?;
        result.await.ok()
    }
}
