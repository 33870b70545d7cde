//! What components take from the system that they run on: time, files, threads, connections.
//!
//! Code that waits, or depends on the order in which things happen, takes them from an [`Environment`] only. Production code uses the
//! [system's](Environment::system). A test puts others in its place: a clock that it moves, files that become shorter, threads that
//! take turns, a network that loses bytes. Then a run depends on nothing but its input, and can be repeated.
//!
//! Hardware that works at its own pace is not in here: [`Device`](crate::Device), [`Stream`](crate::Stream) and [`Event`](crate::Event) are traits
//! already, so a test brings devices of its own. Files are read through an environment only; they are written directly.

mod chance;
mod clock;
#[cfg(target_os = "linux")]
mod direct;
mod files;
mod network;
mod seats;
mod threads;
mod throttle;

pub use chance::{Chance, NoChance};
pub use clock::{Clock, Instant, SystemClock};
pub use files::{File, Files, SystemFiles, is_own};
pub use network::{Connection, ConnectionHandle, Listener, Network, SystemNetwork};
pub use seats::{Seat, Seats, Stage};
pub use threads::{SystemThreads, Threads};
pub use throttle::Throttle;

use std::sync::Arc;

/// Time, files, threads and connections, as a component is given them.
#[derive(Clone, Debug)]
pub struct Environment {
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Files that are read.
    pub files: Arc<dyn Files>,
    /// Threads.
    pub threads: Arc<dyn Threads>,
    /// Connections to other processes.
    pub network: Arc<dyn Network>,
    /// Rare branches, taken on purpose: in a simulation.
    pub chance: Arc<dyn Chance>,
}

impl Environment {
    /// Those of the operating system.
    pub fn system() -> Self {
        Environment {
            clock: Arc::new(SystemClock),
            files: Arc::new(SystemFiles),
            threads: Arc::new(SystemThreads),
            network: Arc::new(SystemNetwork),
            chance: Arc::new(NoChance),
        }
    }
}

impl Default for Environment {
    fn default() -> Self {
        Environment::system()
    }
}
