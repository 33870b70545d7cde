//! Waiting in tests: for a state, not for a time.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// Time after which waiting for a state fails. It only catches hangs: tests wait for less than a
/// second on an idle machine, but the machine may be busy.
pub const HANG_GUARD: Duration = Duration::from_secs(600);

/// Waits until `is_reached` returns true.
///
/// # Panics
/// After [`HANG_GUARD`], with the name of the state.
#[track_caller]
pub fn wait_until(state: impl Display, mut is_reached: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_reached() {
        assert!(start.elapsed() < HANG_GUARD, "never reached: {state}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
