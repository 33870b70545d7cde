//! Code shared by the workloads.

use crate::fault::Fault;
use crate::world::World;
use samite_core::CancelToken;
use std::sync::Arc;

/// A period in which faults can strike.
pub(crate) struct Player {
    world: Arc<World>,
    struck_before: usize,
}

impl Player {
    /// Arms at most `faults` faults.
    pub fn new(world: &Arc<World>, faults: usize, cancel: &CancelToken) -> Self {
        world.with(|state| {
            state.faults.armed = true;
            state.faults.left = faults;
            state.offer_cancel(Some(cancel.clone()));
        });
        Player {
            world: Arc::clone(world),
            struck_before: world.with(|state| state.struck().len()),
        }
    }

    /// Disarms faults. Returns a predicate that tells whether the faults that struck explain an
    /// error.
    pub fn stop(self) -> impl Fn(&str) -> bool {
        let file_broke = self.world.with(|state| {
            state.faults.armed = false;
            state.offer_cancel(None);
            let struck = &state.struck()[self.struck_before..];
            struck.iter().any(|strike| strike.fault == Fault::Shrink)
        });
        // The consequences of a shortened file depend on where it ends.
        move |error| is_injected(error) || file_broke && error.contains(".gguf")
    }
}

/// Returns whether an error reports an injected fault or a device that misreports its support.
pub(crate) fn is_injected(error: &str) -> bool {
    error.contains("injected")
}

/// Checks that nothing is left after everything was dropped.
pub(crate) fn close(world: &World) -> Result<(), String> {
    world.with(|state| {
        let left: Vec<_> = state.live().map(|(name, _)| name.to_owned()).collect();
        if !left.is_empty() {
            return Err(format!("buffers were not given back: {}", left.join(", ")));
        }
        state.check_idle("the end")
    })
}
