//! Access to the operating system: time, files, threads, connections.
//!
//! Code that waits, or that depends on the order of events, uses the system only through an
//! [`Environment`]. Production code uses the [system's](Environment::system). A test replaces it:
//! with a clock that the test moves, files that get shorter, threads that take turns, a network
//! that loses bytes. A run then depends only on its input, and can be repeated.
//!
//! Asynchronous hardware is not part of it: [`Device`](crate::Device), [`Stream`](crate::Stream)
//! and [`Event`](crate::Event) are traits already, so a test brings its own devices. Files are only
//! read through an environment. Code writes them directly.

mod buggify;
mod clock;
#[cfg(target_os = "linux")]
mod direct;
mod files;
mod network;
mod seats;
mod threads;
mod throttle;

pub use buggify::{Buggify, NoBuggify};
pub use clock::{Clock, Instant, SystemClock};
pub use files::{File, Files, SystemFiles, is_own};
pub use network::{Connection, ConnectionHandle, Listener, Network, SystemNetwork};
pub use seats::{Seat, Seats, Stage};
pub use threads::{SystemThreads, Threads};
pub use throttle::Throttle;

use std::sync::Arc;

/// Time, files, threads and connections of a component.
#[derive(Clone, Debug)]
pub struct Environment {
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// Files for reading.
    pub files: Arc<dyn Files>,
    /// The threads.
    pub threads: Arc<dyn Threads>,
    /// Connections to other processes.
    pub network: Arc<dyn Network>,
    /// Fault injection, used in simulations.
    pub buggify: Arc<dyn Buggify>,
}

impl Environment {
    /// Returns the operating system's environment.
    pub fn system() -> Self {
        Environment {
            clock: Arc::new(SystemClock),
            files: Arc::new(SystemFiles),
            threads: Arc::new(SystemThreads),
            network: Arc::new(SystemNetwork),
            buggify: Arc::new(NoBuggify),
        }
    }
}

impl Default for Environment {
    fn default() -> Self {
        Environment::system()
    }
}
