//! Simulated time as the clock of an environment.

use crate::world::World;
use samite_core::environment::Clock;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A world's clock. It only advances with simulated events.
#[derive(Debug)]
pub(crate) struct SimClock {
    world: Arc<World>,
    start: Instant,
}

impl SimClock {
    pub fn new(world: &Arc<World>) -> Self {
        SimClock {
            world: Arc::clone(world),
            // `Instant` cannot be constructed from a number; only differences matter.
            start: Instant::now(),
        }
    }
}

impl Clock for SimClock {
    fn now(&self) -> Instant {
        self.start + Duration::from_nanos(self.world.now())
    }

    fn sleep(&self, time: Duration) {
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX / 4);
        self.world.with(|state| state.advance(time));
    }
}
