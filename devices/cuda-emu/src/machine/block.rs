//! A resident block: its warps, shared memory and barriers.

use std::collections::HashMap;

use super::asynchronous::Mbarrier;
use super::fault::{AccessKind, FaultKind, MachineResult, Space, Trouble};
use super::memory_access::{SHARED_WINDOW, bounds, race, range_of};
use super::race::{Agent, Releases, Shadow, Touch, VectorClock};
use super::registers::{LANES, Wide, lanes};
use super::warp::Warp;

/// Number of barriers of a block.
pub(crate) const BARRIERS: usize = 16;

/// State of a byte of shared memory.
const UNWRITTEN: u8 = 0;
const WRITTEN: u8 = 1;
/// An asynchronous copy writes it.
pub(crate) const PENDING: u8 = 2;

/// Shared memory of a block.
#[derive(Default)]
pub(crate) struct SharedMemory {
    pub(crate) data: Vec<u8>,
    pub(crate) state: Vec<u8>,
    shadow: Option<Shadow>,
}

impl SharedMemory {
    /// Prepares for a block's start.
    pub(crate) fn start(&mut self, bytes: usize, detects_races: bool) {
        self.data.clear();
        // As floats, it gives NaN; reads of it are faults anyway.
        self.data.resize(bytes, 0xff);
        self.state.clear();
        self.state.resize(bytes, UNWRITTEN);
        if detects_races {
            self.shadow.get_or_insert_default().clear();
        }
    }

    /// Stores bytes whose range was checked.
    pub(crate) fn write(&mut self, start: usize, bytes: &[u8]) {
        self.data[start..start + bytes.len()].copy_from_slice(bytes);
        self.state[start..start + bytes.len()].fill(WRITTEN);
    }

    /// Checks a range's bounds and state, and notes the access.
    pub(crate) fn check_range(
        &mut self,
        address: u64,
        bytes: usize,
        agent: &Agent<'_>,
        (touch, access, lane): (Touch, AccessKind, usize),
        releases: &Releases,
    ) -> MachineResult<std::ops::Range<usize>> {
        let Some(range) = range_of(self.data.len(), address, bytes) else {
            return Err(bounds(lane, Space::Shared, access, address, bytes));
        };
        let state = &self.state[range.clone()];
        let is_written = bytes <= 16 && *state == [WRITTEN; 16][..bytes];
        if !is_written && state.contains(&PENDING) {
            return Err(Trouble::new(lane, FaultKind::PendingCopy { address }));
        }
        if !is_written && access != AccessKind::Write && state.contains(&UNWRITTEN) {
            return Err(Trouble::new(
                lane,
                FaultKind::Uninitialized { address, bytes },
            ));
        }
        if let Some(shadow) = &mut self.shadow {
            shadow
                .touch(releases, agent, touch, range.start, bytes)
                .map_err(|conflict| {
                    let address = conflict.offset as u64 + SHARED_WINDOW;
                    race(lane, Space::Shared, access, address, conflict)
                })?;
        }
        Ok(range)
    }

    /// Does [`check_range`](Self::check_range) for all lanes of a mask.
    pub(crate) fn check(
        &mut self,
        mask: u32,
        at: &Wide,
        bytes: usize,
        agent: &Agent<'_>,
        (touch, access): (Touch, AccessKind),
        releases: &Releases,
    ) -> MachineResult {
        let mut last = None;
        for lane in lanes(mask) {
            // Lanes often read the same bytes.
            if last.replace(at[lane]) == Some(at[lane]) {
                continue;
            }
            self.check_range(at[lane], bytes, agent, (touch, access, lane), releases)?;
        }
        Ok(())
    }
}

/// A barrier of a block.
#[derive(Clone, Copy, Default)]
pub(crate) struct Barrier {
    /// Number of threads, or 0 for all.
    pub(crate) expected: u32,
    pub(crate) arrived: u32,
    /// Warps that wait, and those that arrived without waiting.
    pub(crate) waiting: u32,
    pub(crate) passed: u32,
    /// Threads whose predicate was true.
    pub(crate) trues: u32,
    /// Number of threads that voted.
    pub(crate) votes: u32,
    pub(crate) clock: VectorClock,
    /// Last release that a warp has acquired.
    pub(crate) acquired: u32,
}

/// Where a barrier's result goes.
#[derive(Clone, Copy)]
pub(crate) struct Verdict {
    pub(crate) register: u16,
    pub(crate) mask: u32,
    pub(crate) mode: crate::ptx::instruction::BarrierMode,
}

/// A block that runs.
#[derive(Default)]
pub(crate) struct BlockState {
    /// Number of the block, from 1.
    pub(crate) number: u32,
    pub(crate) index: [u32; 3],
    pub(crate) warps: Vec<Warp>,
    pub(crate) shared: SharedMemory,
    pub(crate) barriers: [Barrier; BARRIERS],
    /// Results that warps get when they pass a barrier.
    pub(crate) verdicts: HashMap<u32, Verdict>,
    pub(crate) mbarriers: HashMap<u64, Mbarrier>,
}

impl Warp {
    /// Bytes of local memory of a lane.
    fn local_bytes(&self) -> usize {
        self.local.len() / LANES
    }

    pub(crate) fn local_of(&self, lane: usize) -> &[u8] {
        let bytes = self.local_bytes();
        &self.local[lane * bytes..(lane + 1) * bytes]
    }

    pub(crate) fn local_of_mut(&mut self, lane: usize) -> &mut [u8] {
        let bytes = self.local_bytes();
        &mut self.local[lane * bytes..(lane + 1) * bytes]
    }
}
