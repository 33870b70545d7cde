//! Threads.

use std::fmt::Debug;
use std::num::NonZero;

/// Runs several tasks concurrently.
pub trait Threads: Send + Sync + Debug {
    /// Returns how many tasks the machine can run concurrently.
    fn parallelism(&self) -> usize;

    /// Calls `work` with every number below `count`, concurrently or in any order, and returns when
    /// all calls are done. The calling thread takes part.
    ///
    /// # Panics
    /// If `work` panics.
    fn run_all(&self, count: usize, work: &(dyn Fn(usize) + Sync));
}

/// Threads of the operating system. If the system refuses one, the calling thread runs that task
/// after its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemThreads;

impl Threads for SystemThreads {
    fn parallelism(&self) -> usize {
        std::thread::available_parallelism().map_or(1, NonZero::get)
    }

    fn run_all(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        std::thread::scope(|scope| {
            let mut refused = Vec::new();
            for number in 1..count {
                let thread = samite_threads::thread_builder()
                    .and_then(|thread| thread.spawn_scoped(scope, move || work(number)));
                if thread.is_err() {
                    refused.push(number);
                }
            }
            if count > 0 {
                work(0);
            }
            refused.into_iter().for_each(work);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn every_number_is_called_once() {
        for count in [0, 1, 2, 9] {
            let called = Mutex::new(Vec::new());
            SystemThreads.run_all(count, &|number| called.lock().unwrap().push(number));
            let mut called = called.into_inner().unwrap();
            called.sort_unstable();
            assert_eq!(called, (0..count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn work_runs_concurrently() {
        let both = std::sync::Barrier::new(2);
        SystemThreads.run_all(2, &|_| {
            both.wait();
        });
    }
}
