//! Happens-before order of simulated work.

/// A sequence of work items that run one after another: the host is lane 0, and each stream has its
/// own lane.
pub(crate) type LaneIndex = usize;

/// The host's thread.
pub(crate) const HOST: LaneIndex = 0;

/// Identifies a work item: item number `tick` of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorkId {
    pub lane: LaneIndex,
    pub tick: u64,
}

/// A vector clock (Mattern 1988): for each lane, how many of its work items are known to be
/// finished.
#[derive(Clone, Debug, Default)]
pub(crate) struct VectorClock(Vec<u64>);

impl VectorClock {
    /// Starts the next work item of `lane`.
    pub fn tick(&mut self, lane: LaneIndex) -> WorkId {
        if self.0.len() <= lane {
            self.0.resize(lane + 1, 0);
        }
        self.0[lane] += 1;
        WorkId {
            lane,
            tick: self.0[lane],
        }
    }

    /// Merges the knowledge of `other`.
    pub fn join(&mut self, other: &VectorClock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Returns whether the work item is known to be finished.
    pub fn knows(&self, stamp: WorkId) -> bool {
        self.0
            .get(stamp.lane)
            .is_some_and(|&tick| tick >= stamp.tick)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_clock_knows_its_own_and_joined_work() {
        let (mut host, mut stream) = (VectorClock::default(), VectorClock::default());
        let first = stream.tick(3);
        assert!(stream.knows(first));
        assert!(!host.knows(first));
        host.join(&stream);
        assert!(host.knows(first));
        let second = stream.tick(3);
        assert!(!host.knows(second));
        assert!(!stream.knows(host.tick(HOST)));
    }
}
