//! Time.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// A clock that never goes back.
///
/// A simulated one takes one [`Instant`] when it is made, and adds the time that passed in the simulation.
pub trait Clock: Send + Sync + Debug {
    /// Now.
    fn now(&self) -> Instant;

    /// Returns when `time` has passed.
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
