//! Time.

use std::fmt::Debug;
use std::time::Duration;

/// A point in time. The standard library's type panics in browsers.
#[cfg(not(all(target_arch = "wasm32", target_os = "unknown")))]
pub use std::time::Instant;
#[cfg(all(target_arch = "wasm32", target_os = "unknown"))]
pub use web_time::Instant;

/// A clock that never goes back.
///
/// An [`Instant`] cannot be made from a number. A simulated clock therefore takes one from the
/// system at its creation, and adds the simulated time.
pub trait Clock: Send + Sync + Debug {
    /// Returns the current time.
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
