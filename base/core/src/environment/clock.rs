//! Time.

use std::fmt::Debug;
use std::time::Duration;

/// A point in time. The standard library's panics in browsers.
#[cfg(not(all(target_arch = "wasm32", target_os = "unknown")))]
pub use std::time::Instant;
#[cfg(all(target_arch = "wasm32", target_os = "unknown"))]
pub use web_time::Instant;

/// A clock that never goes back.
///
/// An [`Instant`] cannot be made from a number. So a simulated clock asks the system for one when it is made, and adds the time that
/// passed in the simulation.
pub trait Clock: Send + Sync + Debug {
    /// Now.
    fn now(&self) -> Instant;

    /// Blocks the thread until `time` has passed on this clock.
    fn sleep(&self, time: Duration);
}

/// The system's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}
