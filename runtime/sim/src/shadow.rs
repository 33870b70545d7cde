//! Shadow memory: for each byte of simulated memory, which work wrote it last and which has read it
//! since.
//!
//! Two accesses to a byte, at least one of them a write, must be ordered by synchronization. The
//! shadow compares vector clocks, not the times at which work happened to run, so a missing wait is
//! detected even if the work finished in time.

use crate::time::{VectorClock, WorkId};
use samite_core::MemoryId;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// An access to bytes of a memory.
#[derive(Clone, Debug)]
pub(crate) struct MemoryAccess {
    pub memory: MemoryId,
    pub bytes: Range<usize>,
    pub writes: bool,
    /// True if only some of the bytes are accessed, depending on values.
    pub is_partial: bool,
    /// Description of the accessed object, for messages.
    pub what: Arc<str>,
}

/// Work that accessed bytes, for messages.
#[derive(Clone, Debug)]
struct Touched {
    by: WorkId,
    who: Arc<str>,
}

/// Adjacent bytes with the same history.
#[derive(Clone, Debug, Default)]
struct Segment {
    end: usize,
    written: Option<Touched>,
    /// Last read of each lane since the write.
    read: Vec<Touched>,
    /// True if reading before a write is a bug. The scheduler's intermediate results start like
    /// this.
    is_undefined: bool,
}

/// History of one memory, by the first byte of each segment.
#[derive(Debug, Default)]
struct AccessHistory(BTreeMap<usize, Segment>);

/// History of all memories.
#[derive(Debug, Default)]
pub(crate) struct Shadow(BTreeMap<MemoryId, AccessHistory>);

impl AccessHistory {
    /// Splits segments at the ends of `bytes` and adds new ones where there was no history.
    fn cut(&mut self, bytes: &Range<usize>) {
        for at in [bytes.start, bytes.end] {
            if let Some((_, segment)) = self.0.range_mut(..at).next_back()
                && segment.end > at
            {
                let rest = segment.clone();
                segment.end = at;
                self.0.insert(at, rest);
            }
        }
        let mut at = bytes.start;
        while at < bytes.end {
            match self.0.range(at..bytes.end).next() {
                Some((&start, segment)) if start == at => at = segment.end,
                next => {
                    let end = next.map_or(bytes.end, |(&start, _)| start);
                    let segment = Segment {
                        end,
                        ..Segment::default()
                    };
                    self.0.insert(at, segment);
                    at = end;
                }
            }
        }
    }
}

impl Shadow {
    /// Marks bytes as undefined: they must not be read before they are written.
    pub fn begin_undefined(&mut self, memory: MemoryId, bytes: Range<usize>) {
        self.forget(memory, &bytes);
        let segment = Segment {
            end: bytes.end,
            is_undefined: true,
            ..Segment::default()
        };
        if !bytes.is_empty() {
            self.0
                .entry(memory)
                .or_default()
                .0
                .insert(bytes.start, segment);
        }
    }

    /// Discards the history of freed bytes.
    pub fn forget(&mut self, memory: MemoryId, bytes: &Range<usize>) {
        if let Some(past) = self.0.get_mut(&memory) {
            past.cut(bytes);
            past.0.retain(|start, _| !bytes.contains(start));
        }
    }

    /// Records an access by the work `by`, described by `who`, which starts once everything in
    /// `clock` has finished.
    ///
    /// # Errors
    /// Returns an error if a conflicting earlier access is not ordered before it, or if it reads
    /// undefined bytes.
    pub fn touch(
        &mut self,
        access: &MemoryAccess,
        by: WorkId,
        who: &Arc<str>,
        clock: &VectorClock,
    ) -> Result<(), String> {
        if access.bytes.is_empty() {
            return Ok(());
        }
        let past = self.0.entry(access.memory).or_default();
        past.cut(&access.bytes);
        let mut wrong = None;
        let touched = Touched {
            by,
            who: Arc::clone(who),
        };
        let (verb, what) = (if access.writes { "writes" } else { "reads" }, &access.what);
        for (_, segment) in past.0.range_mut(access.bytes.clone()) {
            let unordered = |earlier: &&Touched| !clock.knows(earlier.by);
            if let Some(earlier) = segment.written.as_ref().filter(unordered) {
                wrong.get_or_insert(format!(
                    "{who} {verb} '{what}', which {} writes, and nothing orders the two",
                    earlier.who
                ));
            }
            if access.writes {
                if let Some(earlier) = segment.read.iter().find(unordered) {
                    wrong.get_or_insert(format!(
                        "{who} writes '{what}', which {} reads, and nothing orders the two",
                        earlier.who
                    ));
                }
                segment.read.clear();
                segment.written = Some(touched.clone());
            } else {
                if segment.written.is_none() && segment.is_undefined && !access.is_partial {
                    wrong.get_or_insert(format!("{who} reads '{what}', which nobody wrote"));
                }
                match segment.read.iter_mut().find(|read| read.by.lane == by.lane) {
                    Some(read) => *read = touched.clone(),
                    None => segment.read.push(touched.clone()),
                }
            }
        }
        wrong.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(memory: MemoryId, bytes: Range<usize>, writes: bool) -> MemoryAccess {
        MemoryAccess {
            memory,
            bytes,
            writes,
            is_partial: false,
            what: "t".into(),
        }
    }

    /// Lanes with clocks that share one shadow.
    struct Lanes {
        shadow: Shadow,
        memory: MemoryId,
        clocks: [VectorClock; 3],
    }

    impl Lanes {
        fn new() -> Self {
            Lanes {
                shadow: Shadow::default(),
                memory: MemoryId::unique(),
                clocks: Default::default(),
            }
        }

        fn touch(&mut self, lane: usize, bytes: Range<usize>, writes: bool) -> Result<(), String> {
            let by = self.clocks[lane].tick(lane);
            let who = format!("lane {lane}").into();
            let access = access(self.memory, bytes, writes);
            self.shadow.touch(&access, by, &who, &self.clocks[lane])
        }

        fn wait(&mut self, lane: usize, other: usize) {
            let known = self.clocks[other].clone();
            self.clocks[lane].join(&known);
        }
    }

    #[test]
    fn unordered_conflicts_are_found_byte_by_byte() {
        let mut lanes = Lanes::new();
        lanes.touch(0, 0..8, true).unwrap();
        lanes.touch(1, 8..16, true).unwrap();
        assert!(lanes.touch(1, 7..8, false).is_err(), "read after write");
        lanes.wait(1, 0);
        lanes.touch(1, 0..16, false).unwrap();
        assert!(lanes.touch(0, 0..1, true).is_err(), "write after read");
        assert!(lanes.touch(2, 15..20, true).is_err(), "write after write");
        lanes.wait(2, 1);
        lanes.touch(2, 4..16, false).unwrap();
        lanes.wait(0, 2);
        lanes.touch(0, 0..64, true).unwrap();
    }

    #[test]
    fn reads_need_no_mutual_order_but_precede_writes() {
        let mut lanes = Lanes::new();
        for lane in 0..3 {
            lanes.touch(lane, 0..4, false).unwrap();
        }
        lanes.wait(0, 1);
        let wrong = lanes.touch(0, 0..4, true).unwrap_err();
        assert!(wrong.contains("lane 2"), "{wrong}");
    }

    #[test]
    fn reads_of_undefined_memory_are_detected() {
        let mut lanes = Lanes::new();
        lanes.touch(0, 0..4, false).unwrap();
        let memory = lanes.memory;
        lanes.shadow.begin_undefined(memory, 2..20);
        lanes.touch(0, 4..8, true).unwrap();
        lanes.touch(0, 4..8, false).unwrap();
        assert!(lanes.touch(0, 3..5, false).is_err());
        lanes.shadow.forget(memory, &(0..20));
        lanes.touch(0, 0..20, false).unwrap();
    }
}
