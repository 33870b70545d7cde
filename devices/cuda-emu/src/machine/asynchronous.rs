//! Asynchronous copies, and mbarriers that count arrivals and bytes.
//!
//! A `cp.async` reads its source at once, and marks its target, which may not be accessed before
//! the wait. The data land at the wait.

use super::Interpreter;
use super::barrier::join;
use super::block::{BlockState, PENDING};
use super::fault::{AccessKind, FaultKind, MachineResult, Space, Trouble};
use super::memory_access::{
    AccessRequest, Data, SHARED_WINDOW, addresses, agent, bounds, check_alignment, range_of, split,
    to_bytes,
};
use super::race::{Touch, VectorClock};
use super::registers::{LANES, LaneValues, lanes};
use super::warp::Warp;
use crate::ptx::instruction::{BulkCopy, MbarrierOp, NO_REGISTER, Ordering, PtxAddress, Register};

/// A copy that has not landed.
struct PendingCopy {
    lane: usize,
    group: u32,
    to: usize,
    bytes: usize,
    data: [u8; 16],
}

/// Copies of a warp's lanes.
#[derive(Default)]
pub(crate) struct Copies {
    pending: Vec<PendingCopy>,
    /// Number of groups that each lane has committed.
    groups: LaneValues,
}

impl Copies {
    pub(crate) fn clear(&mut self) {
        self.pending.clear();
        self.groups = [0; LANES];
    }

    pub(crate) fn commit(&mut self, mask: u32) {
        for lane in lanes(mask) {
            self.groups[lane] += 1;
        }
    }
}

/// An mbarrier object.
#[derive(Clone, Default)]
pub(crate) struct Mbarrier {
    count: i64,
    pending: i64,
    bytes: i64,
    phase: u64,
    clock: VectorClock,
    /// Clock of the phase that completed last.
    published: VectorClock,
}

impl Mbarrier {
    /// Ends the phase if nothing is missing.
    fn advance(&mut self) {
        if self.pending <= 0 && self.bytes == 0 {
            self.phase += 1;
            self.pending = self.count;
            self.published = self.clock;
        }
    }
}

/// Operands of an mbarrier instruction.
#[derive(Clone, Copy)]
pub(crate) struct MbarrierAction {
    pub(crate) op: MbarrierOp,
    pub(crate) space: Space,
    pub(crate) d: Register,
    pub(crate) address: PtxAddress,
    pub(crate) a: Register,
}

fn no_barrier(lane: usize, address: u64) -> Box<Trouble> {
    let reason = format!("no mbarrier is initialized at {address:#x} of shared memory");
    Trouble::new(lane, FaultKind::Unsupported(reason))
}

impl Interpreter<'_> {
    /// Starts copies from global to shared memory.
    pub(crate) fn copy_async(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        mask: u32,
        pc: u32,
        (bytes, to, from, size): (usize, PtxAddress, PtxAddress, Register),
    ) -> MachineResult {
        let to = addresses(warp, to);
        let mut from = addresses(warp, from);
        let sizes = match size {
            NO_REGISTER => [bytes as u32; LANES],
            size => *warp.registers.get32(size),
        };
        check_alignment(mask, &to, bytes, Space::Shared, AccessKind::Write)?;
        let reads = lanes(mask)
            .filter(|&l| sizes[l] != 0)
            .fold(0, |all, l| all | 1 << l);
        let mut data: Data = [[0; 4]; LANES];
        let request = AccessRequest {
            space: Space::Global,
            bytes,
            ordering: Ordering::Weak,
            pc,
        };
        if reads != 0 {
            self.load(block, warp, reads, request, &mut from, &mut data)?;
        }
        for lane in lanes(mask) {
            let mut source = to_bytes(&data[lane]);
            // Bytes beyond the source's size are zero.
            source[(sizes[lane] as usize).min(16)..].fill(0);
            let agent = agent(block, warp, pc);
            let of = (Touch::Write, AccessKind::Write, lane);
            let releases = &self.global.releases;
            let range = block
                .shared
                .check_range(to[lane], bytes, &agent, of, releases)?;
            let copy = PendingCopy {
                lane,
                group: warp.copies.groups[lane],
                to: range.start,
                bytes,
                data: source,
            };
            block.shared.state[range].fill(PENDING);
            warp.copies.pending.push(copy);
        }
        Ok(())
    }

    /// Lands the copies of all but the last `pending` groups of each lane.
    pub(crate) fn wait_copies(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        mask: u32,
        pc: u32,
        pending: u32,
        includes_open: bool,
    ) -> MachineResult {
        let copies = std::mem::take(&mut warp.copies.pending);
        for copy in copies {
            let committed = warp.copies.groups[copy.lane];
            let is_done = includes_open || copy.group + pending < committed;
            if mask >> copy.lane & 1 == 0 || !is_done {
                warp.copies.pending.push(copy);
                continue;
            }
            let agent = agent(block, warp, pc);
            block.shared.write(copy.to, &copy.data[..copy.bytes]);
            let of = (Touch::Write, AccessKind::Write, copy.lane);
            let releases = &self.global.releases;
            block
                .shared
                .check_range(copy.to as u64, copy.bytes, &agent, of, releases)?;
        }
        Ok(())
    }

    /// Executes an instruction of an mbarrier. Returns false if a wait failed in all lanes.
    pub(crate) fn mbarrier(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        mask: u32,
        action: MbarrierAction,
    ) -> MachineResult<bool> {
        let MbarrierAction {
            op,
            space,
            d,
            address,
            a,
        } = action;
        let mut at = addresses(warp, address);
        let parts = split(space, mask, &mut at);
        if let Some(&(space, lanes)) = parts.iter().find(|p| p.0 != Space::Shared) {
            let lane = lanes.trailing_zeros() as usize % LANES;
            let reason = format!("an mbarrier in {space} memory");
            return Err(Trouble::new(lane, FaultKind::Unsupported(reason)));
        }
        check_alignment(mask, &at, 8, Space::Shared, AccessKind::Atomic)?;
        let mut states = [0; LANES];
        let mut passed = 0;
        for lane in lanes(mask) {
            let operand = |warp: &Warp| match (a, op) {
                (NO_REGISTER, _) => 1,
                (a, MbarrierOp::Test { by_parity: false }) => warp.registers.get64(a)[lane] as i64,
                (a, _) => i64::from(warp.registers.get32(a)[lane]),
            };
            let value = operand(warp);
            if op == MbarrierOp::Init {
                let range = range_of(block.shared.data.len(), at[lane], 8)
                    .ok_or_else(|| bounds(lane, Space::Shared, AccessKind::Write, at[lane], 8))?;
                // Its bytes are opaque.
                block.shared.state[range].fill(0);
                let barrier = Mbarrier {
                    count: value,
                    pending: value,
                    ..Mbarrier::default()
                };
                block.mbarriers.insert(at[lane], barrier);
                continue;
            }
            let barrier = block
                .mbarriers
                .get_mut(&at[lane])
                .ok_or_else(|| no_barrier(lane, at[lane]))?;
            match op {
                MbarrierOp::Invalidate => {
                    block.mbarriers.remove(&at[lane]);
                }
                MbarrierOp::ExpectBytes => barrier.bytes += value,
                MbarrierOp::Arrive { expects, .. } => {
                    states[lane] = barrier.phase;
                    join(&mut barrier.clock, &warp.clock);
                    barrier.bytes += if expects { value } else { 0 };
                    barrier.pending -= if expects { 1 } else { value };
                    if barrier.pending < 0 {
                        let reason = "more threads arrive at the mbarrier than it expects".into();
                        return Err(Trouble::new(lane, FaultKind::BadBarrier(reason)));
                    }
                    barrier.advance();
                }
                MbarrierOp::Test { by_parity } => {
                    let is_done = if by_parity {
                        barrier.phase & 1 != value as u64 & 1
                    } else {
                        barrier.phase != value as u64
                    };
                    if is_done {
                        passed |= 1 << lane;
                        let published = barrier.published;
                        join(&mut warp.clock, &published);
                    }
                }
                MbarrierOp::Init => {}
            }
        }
        match op {
            MbarrierOp::Arrive { .. } => {
                warp.tick();
                if d != NO_REGISTER {
                    warp.registers.set64(d, mask, &states);
                }
            }
            MbarrierOp::Test { .. } => {
                warp.registers.set_predicate(d, mask, passed);
                return Ok(passed != 0);
            }
            _ => {}
        }
        Ok(true)
    }

    /// Lets an mbarrier count a lane's arrival once its copies land. They land at once.
    pub(crate) fn signal_copies(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        mask: u32,
        pc: u32,
        (barrier, is_counted): (PtxAddress, bool),
    ) -> MachineResult {
        self.wait_copies(block, warp, mask, pc, 0, true)?;
        let at = addresses(warp, barrier);
        for lane in lanes(mask) {
            let address = at[lane];
            let barrier = block
                .mbarriers
                .get_mut(&address)
                .ok_or_else(|| no_barrier(lane, address))?;
            join(&mut barrier.clock, &warp.clock);
            // A counted arrival raises the pending count first.
            barrier.pending -= i64::from(!is_counted);
            barrier.advance();
        }
        warp.tick();
        Ok(())
    }

    /// Copies a block of bytes. It lands at once, but its target may only be read after the wait.
    pub(crate) fn bulk(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        mask: u32,
        pc: u32,
        copy: &BulkCopy,
    ) -> MachineResult {
        let (to, from, bytes) = match *copy {
            BulkCopy::Load {
                to, from, bytes, ..
            }
            | BulkCopy::Store { to, from, bytes } => (
                addresses(warp, to),
                addresses(warp, from),
                *warp.registers.get32(bytes),
            ),
        };
        for lane in lanes(mask) {
            let (to, from, bytes) = (to[lane], from[lane], bytes[lane] as usize);
            for (address, space) in [(to, Space::Global), (from, Space::Global)] {
                if address % 16 != 0 || bytes % 16 != 0 {
                    let access = AccessKind::Write;
                    let kind = FaultKind::Misaligned {
                        space,
                        access,
                        address,
                        bytes,
                    };
                    return Err(Trouble::new(lane, kind));
                }
            }
            let agent = agent(block, warp, pc);
            if let BulkCopy::Load { barrier, .. } = *copy {
                let read = (Touch::Read, AccessKind::Read, lane);
                self.global.range(from, bytes, &agent, read)?;
                let to = to.checked_sub(SHARED_WINDOW).unwrap_or(to);
                let of = (Touch::Write, AccessKind::Write, lane);
                let releases = &self.global.releases;
                let range = block.shared.check_range(to, bytes, &agent, of, releases)?;
                let fault = || bounds(lane, Space::Global, AccessKind::Read, from, bytes);
                let data = self.global.memory.slice(from, bytes).map_err(|_| fault())?;
                block.shared.write(range.start, data);
                let at = addresses(warp, barrier)[lane];
                let barrier = block
                    .mbarriers
                    .get_mut(&at)
                    .ok_or_else(|| no_barrier(lane, at))?;
                join(&mut barrier.clock, &warp.clock);
                barrier.bytes -= bytes as i64;
                barrier.advance();
            } else {
                let of = (Touch::Read, AccessKind::Read, lane);
                let releases = &self.global.releases;
                let range = block
                    .shared
                    .check_range(from, bytes, &agent, of, releases)?;
                self.global
                    .range(to, bytes, &agent, (Touch::Write, AccessKind::Write, lane))?;
                let data = &block.shared.data[range];
                let kind = FaultKind::ReadOnly { address: to };
                self.global
                    .memory
                    .write(to, data)
                    .map_err(|_| Trouble::new(lane, kind))?;
            }
        }
        warp.tick();
        Ok(())
    }
}
