//! Limit for warnings that a peer can trigger without end.

use super::Instant;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Passes one warning per interval and counts the others.
#[derive(Debug)]
pub struct Throttle {
    interval: Duration,
    state: Mutex<ThrottleState>,
}

#[derive(Debug, Default)]
struct ThrottleState {
    last: Option<Instant>,
    skipped: u64,
}

impl Throttle {
    /// Returns a throttle that passes one warning per `interval`.
    pub fn new(interval: Duration) -> Self {
        Throttle {
            interval,
            state: Mutex::default(),
        }
    }

    /// Returns the number of warnings skipped since the last one, if a warning may pass at `now`.
    pub fn pass(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_early = |last| now.saturating_duration_since(last) < self.interval;
        if state.last.is_some_and(is_early) {
            state.skipped += 1;
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.skipped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_warning_passes_per_interval() {
        let throttle = Throttle::new(Duration::from_secs(60));
        let start = Instant::now();
        let passes = [0, 1, 59, 60, 61, 180].map(|second| {
            let now = start + Duration::from_secs(second);
            throttle.pass(now)
        });
        assert_eq!(passes, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
