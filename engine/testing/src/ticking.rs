//! Clock whose time passes only when it is read.

use samite_core::environment::Clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Returns a clock that advances by `step` whenever it is read, so that time-dependent results are
/// the same in each run.
pub fn ticking(step: Duration) -> Arc<dyn Clock> {
    Arc::new(Ticking {
        begin: Instant::now(),
        looks: AtomicU32::new(0),
        step,
    })
}

#[derive(Debug)]
struct Ticking {
    begin: Instant,
    looks: AtomicU32,
    step: Duration,
}

impl Clock for Ticking {
    fn now(&self) -> Instant {
        self.begin + self.step * self.looks.fetch_add(1, Ordering::Relaxed)
    }

    fn sleep(&self, _: Duration) {}
}
