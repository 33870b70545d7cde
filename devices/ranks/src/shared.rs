//! Connects processes of one machine through a file that all of them map, preferably in memory
//! (`/dev/shm`).
//!
//! Each process has two buffers in the file, used in turn, and a counter of the pieces that it has
//! written. A round is one piece per process, or several if the data exceeds a buffer. A process
//! writes its next piece only after it has read those of all others, so no unread data is
//! overwritten. Each process holds a lock on a byte of the file. The system releases the lock when
//! the process ends, so the others notice at once. Rank 0 creates the file, and removes its name
//! when all processes have joined.

use samite_core::Result;
use samite_meta::comm::Transport;
use std::time::Duration;

/// Environment variable with the path of the file, the same for all processes.
pub const PATH_VARIABLE: &str = "SAMITE_RANKS_FILE";

/// The reason why processes cannot share memory.
#[derive(Debug, thiserror::Error)]
pub enum SharedError {
    /// The environment is incomplete.
    #[error(
        "{0}: set SAMITE_RANKS to the number of processes, SAMITE_RANK to the number of this one, from 0, and {PATH_VARIABLE} to a file that all use, such as /dev/shm/samite-1"
    )]
    Environment(String),
    /// A system call failed.
    #[error("{path}: {what}: {error}")]
    System {
        /// Path of the file.
        path: String,
        /// Operation that failed.
        what: &'static str,
        /// Error of the system.
        error: std::io::Error,
    },
    /// The other processes are in an unexpected state.
    #[error("{path}: {what}")]
    Others {
        /// Path of the file.
        path: String,
        /// Problem and remedy.
        what: String,
    },
}

/// Connects process `rank` of `size` with the others, which make the same call, within `deadline`.
///
/// # Errors
/// Returns an error if the file cannot be created or used, or if a process does not join in time.
#[cfg(target_os = "linux")]
pub fn start(
    path: &std::path::Path,
    rank: usize,
    size: usize,
    deadline: Duration,
) -> std::result::Result<Box<dyn Transport>, SharedError> {
    Ok(Box::new(linux::Shared::start(path, rank, size, deadline)?))
}

/// Fails, because shared memory is not supported on this system.
///
/// # Errors
/// Always returns an error.
#[cfg(not(target_os = "linux"))]
pub fn start(
    path: &std::path::Path,
    _rank: usize,
    _size: usize,
    _deadline: Duration,
) -> std::result::Result<Box<dyn Transport>, SharedError> {
    Err(SharedError::Others {
        path: path.display().to_string(),
        what: "processes share memory on Linux only: use MPI".to_owned(),
    })
}

/// Combines two transports: exchanges go through `memory`, and `launched`, which knows the
/// launcher, ends the processes together.
pub fn beside(memory: Box<dyn Transport>, launched: Box<dyn Transport>) -> Box<dyn Transport> {
    Box::new(CombinedTransport { memory, launched })
}

struct CombinedTransport {
    memory: Box<dyn Transport>,
    launched: Box<dyn Transport>,
}

impl Transport for CombinedTransport {
    fn name(&self) -> String {
        format!("{}, {}", self.memory.name(), self.launched.name())
    }

    fn rank(&self) -> usize {
        self.memory.rank()
    }

    fn size(&self) -> usize {
        self.memory.size()
    }

    fn begin(&mut self, head: &[u8], body: &[u8], lens: &[usize]) -> Result<()> {
        self.memory.begin(head, body, lens)
    }

    fn test(&mut self) -> Result<bool> {
        self.memory.test()
    }

    fn missing(&mut self) -> Vec<usize> {
        self.memory.missing()
    }

    fn gathered(&self) -> &[u8] {
        self.memory.gathered()
    }

    fn finish(&mut self) -> Result<()> {
        self.memory.finish()?;
        self.launched.finish()
    }

    fn abort(&mut self, exit_code: i32) {
        self.memory.abort(exit_code);
        self.launched.abort(exit_code);
    }
}

#[cfg(target_os = "linux")]
mod linux;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// A transport that lists its calls.
    struct Fake {
        name: &'static str,
        calls: Arc<Mutex<Vec<String>>>,
    }

    impl Fake {
        fn note(&self, call: &str) {
            let call = format!("{} {call}", self.name);
            self.calls.lock().unwrap().push(call);
        }
    }

    impl Transport for Fake {
        fn name(&self) -> String {
            self.name.to_owned()
        }

        fn rank(&self) -> usize {
            self.name.len()
        }

        fn size(&self) -> usize {
            2 * self.name.len()
        }

        fn begin(&mut self, _: &[u8], _: &[u8], _: &[usize]) -> Result<()> {
            self.note("begin");
            Ok(())
        }

        fn test(&mut self) -> Result<bool> {
            self.note("test");
            Ok(true)
        }

        fn missing(&mut self) -> Vec<usize> {
            vec![self.name.len()]
        }

        fn gathered(&self) -> &[u8] {
            self.name.as_bytes()
        }

        fn finish(&mut self) -> Result<()> {
            self.note("finish");
            Ok(())
        }

        fn abort(&mut self, exit_code: i32) {
            self.note(&format!("abort {exit_code}"));
        }
    }

    #[test]
    fn shared_memory_carries_exchanges_and_both_transports_finish() {
        let calls = Arc::default();
        let fake = |name| {
            Box::new(Fake {
                name,
                calls: Arc::clone(&calls),
            })
        };
        let mut both = beside(fake("memory"), fake("mpi"));
        assert_eq!(both.name(), "memory, mpi");
        assert_eq!((both.rank(), both.size()), (6, 12));
        assert_eq!((both.missing(), both.gathered()), (vec![6], &b"memory"[..]));
        both.begin(&[], &[], &[]).unwrap();
        assert!(both.test().unwrap());
        both.finish().unwrap();
        both.abort(3);
        assert_eq!(
            *calls.lock().unwrap(),
            [
                "memory begin",
                "memory test",
                "memory finish",
                "mpi finish",
                "memory abort 3",
                "mpi abort 3"
            ]
        );
    }
}
