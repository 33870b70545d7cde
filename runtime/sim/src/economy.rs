//! Cost checks: runs create no plans and move as many bytes as planned; memory use matches the
//! plan.

use crate::world::World;
use samite_sched::order::Work;
use samite_sched::{Counters, Plan, Scheduler};

/// Resources used up to some point.
pub(crate) struct Spent {
    counters: Counters,
    /// Number of stream copies, and their bytes.
    copies: (usize, usize),
}

impl Spent {
    pub fn so_far(scheduler: &Scheduler, world: &World) -> Self {
        Spent {
            counters: scheduler.counters(),
            copies: world.with(|state| state.copies),
        }
    }

    /// Checks that exactly `runs` runs happened since then, and that they copied what `plan`
    /// predicts.
    pub fn check(&self, runs: usize, scheduler: &Scheduler, plan: &Plan, world: &World) {
        let (before, after) = (self.counters, scheduler.counters());
        let done = Counters {
            runs: before.runs + runs,
            ..before
        };
        if after != done {
            let mistake = format!("a run did more than run: {before:?}, then {after:?}");
            world.with(|state| state.violate(mistake));
        }
        let actions = plan.actions().iter();
        let by_streams = actions.filter_map(|action| match action.work {
            Work::Copy(number) => action.copier.map(|_| plan.copies()[number].bytes),
            _ => None,
        });
        let (number, bytes) = by_streams.fold((0, 0), |(n, all), bytes| (n + 1, all + bytes));
        let planned = (number * runs, bytes * runs);
        let moved = world.with(|state| state.copies);
        let moved = (moved.0 - self.copies.0, moved.1 - self.copies.1);
        if moved != planned {
            let mistake = format!("copies and bytes {moved:?}, planned {planned:?}");
            world.with(|state| state.violate(mistake));
        }
    }
}

/// Checks that the memory in use for intermediate results matches the scheduler's accounting.
pub(crate) fn check_memory(scheduler: &Scheduler, world: &World) {
    for (name, bytes) in scheduler.buffer_sizes() {
        let live = world.with(|state| {
            let mut live = state.live();
            live.find(|(live, _)| *live == name)
                .map_or(0, |(_, live)| live.compute)
        });
        // The host's own memory is not simulated.
        if live != bytes && name != "host memory" {
            let mistake = format!("{live} bytes of {name} are in use, {bytes} accounted for");
            world.with(|state| state.violate(mistake));
        }
    }
}
