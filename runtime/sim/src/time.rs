//! Order of simulated work: which access is known to have happened before which other one.

/// A place where work happens one piece after the other: the host is lane 0, a stream has a lane of its own.
pub(crate) type Lane = usize;

/// The host's thread.
pub(crate) const HOST: Lane = 0;

/// One piece of work: the piece number `tick` of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub lane: Lane,
    pub tick: u64,
}

/// A vector clock (Mattern 1988): for each lane, how many of its pieces of work are known to be done.
#[derive(Clone, Debug, Default)]
pub(crate) struct VectorClock(Vec<u64>);

impl VectorClock {
    /// Begins the next piece of work of `lane`.
    pub fn tick(&mut self, lane: Lane) -> Stamp {
        if self.0.len() <= lane {
            self.0.resize(lane + 1, 0);
        }
        self.0[lane] += 1;
        Stamp {
            lane,
            tick: self.0[lane],
        }
    }

    /// Learns what `other` knows.
    pub fn join(&mut self, other: &VectorClock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Whether the piece of work is known to be done.
    pub fn knows(&self, stamp: Stamp) -> bool {
        self.0
            .get(stamp.lane)
            .is_some_and(|&tick| tick >= stamp.tick)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_knows_its_own_work_and_what_it_learnt() {
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
