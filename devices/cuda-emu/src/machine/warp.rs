//! A warp: lanes that run together as long as they are at the same instruction.
//!
//! Lanes that diverge form groups. The group at the lowest instruction runs, so that groups meet
//! again at the end of a branch or loop, as compilers lay them out.

use super::asynchronous::Copies;
use super::race::VectorClock;
use super::registers::{LANES, Registers, lanes};

/// Backward branches of a group after which another one may run: it could be waited for.
const PATIENCE: u32 = 1 << 12;

/// Lanes that are not running.
#[derive(Clone, Copy, Debug)]
struct LaneGroup {
    pc: u32,
    mask: u32,
    /// The lanes wait for others at an instruction that includes them.
    is_waiting: bool,
    /// The others must not end before.
    is_strict: bool,
}

/// Why a warp does not run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum WarpState {
    #[default]
    Ready,
    /// Waits at a barrier.
    Barrier(usize),
    /// All lanes have ended.
    Done,
}

/// A warp of a resident block.
#[derive(Default)]
pub(crate) struct Warp {
    pub(crate) index: u32,
    pub(crate) registers: Registers,
    /// Local memory of all lanes, one after another.
    pub(crate) local: Vec<u8>,
    pub(crate) pc: u32,
    /// Lanes that run.
    pub(crate) active: u32,
    /// Lanes that have not ended.
    pub(crate) live: u32,
    groups: Vec<LaneGroup>,
    /// Instruction at which the running group meets another one.
    pub(crate) next_pc: u32,
    turns: u32,
    pub(crate) state: WarpState,
    pub(crate) clock: VectorClock,
    /// Last release that the warp has acquired.
    pub(crate) acquired: u32,
    /// Clock at the last fence, and true if it covers other blocks.
    pub(crate) fence: Option<(VectorClock, bool)>,
    pub(crate) copies: Copies,
    /// True if it waited for the kernels before this one.
    pub(crate) has_waited: bool,
}

impl Warp {
    /// Prepares the warp for a block's start with the lanes of `mask`.
    pub(crate) fn start(&mut self, index: u32, mask: u32, entry: u32) {
        self.index = index;
        self.pc = entry;
        self.active = mask;
        self.live = mask;
        self.groups.clear();
        self.next_pc = u32::MAX;
        self.turns = 0;
        self.state = WarpState::Ready;
        self.clock = [0; LANES];
        self.clock[index as usize % LANES] = 1;
        self.acquired = 0;
        self.fence = None;
        self.copies.clear();
        self.has_waited = false;
    }

    /// Advances the warp's own clock, after which its accesses are not published yet.
    pub(crate) fn tick(&mut self) {
        self.clock[self.index as usize % LANES] += 1;
    }

    fn add(&mut self, pc: u32, mask: u32) {
        if mask == 0 {
            return;
        }
        match self.groups.iter_mut().find(|g| g.pc == pc) {
            Some(group) => {
                group.mask |= mask;
                group.is_waiting = false;
            }
            None => self.groups.push(LaneGroup {
                pc,
                mask,
                is_waiting: false,
                is_strict: false,
            }),
        }
    }

    /// Chooses the group that runs. Returns false if all of them wait, or none is left.
    pub(crate) fn select(&mut self) -> bool {
        self.add(self.pc, self.active);
        self.active = 0;
        self.next_pc = u32::MAX;
        let runnable = self
            .groups
            .iter()
            .enumerate()
            .filter(|(_, g)| !g.is_waiting);
        let chosen = if self.turns >= PATIENCE {
            // A loop may wait for lanes that come later in the code.
            self.turns = 0;
            runnable.max_by_key(|(_, g)| g.pc)
        } else {
            runnable.min_by_key(|(_, g)| g.pc)
        };
        let Some((index, _)) = chosen else {
            return false;
        };
        let group = self.groups.swap_remove(index);
        (self.pc, self.active) = (group.pc, group.mask);
        let later = self.groups.iter().map(|g| g.pc).filter(|&pc| pc > group.pc);
        self.next_pc = later.min().unwrap_or(u32::MAX);
        true
    }

    /// Sends the lanes of `taken` to `target`, and the others to the next instruction.
    pub(crate) fn branch(&mut self, taken: u32, target: u32) {
        if taken == self.active && self.groups.is_empty() {
            self.pc = target;
            return;
        }
        if target <= self.pc {
            self.turns += 1;
        }
        self.add(target, taken);
        self.active &= !taken;
        self.pc += 1;
        self.select();
    }

    /// Sends each lane of `mask` to its own target.
    pub(crate) fn scatter(&mut self, mask: u32, targets: impl Fn(usize) -> u32) {
        for lane in lanes(mask) {
            self.add(targets(lane), 1 << lane);
        }
        self.active &= !mask;
        self.pc += 1;
        self.select();
    }

    /// Ends lanes. The warp is done if none is left. Fails if lanes wait for these at a barrier,
    /// which becomes the running instruction.
    pub(crate) fn exit(&mut self, mask: u32) -> Result<(), u32> {
        if let Some(group) = self.groups.iter().find(|g| g.is_waiting && g.is_strict) {
            (self.pc, self.active) = (group.pc, group.mask);
            return Err(mask);
        }
        self.live &= !mask;
        self.active &= !mask;
        self.pc += 1;
        if self.live == 0 {
            self.state = WarpState::Done;
            return Ok(());
        }
        // Groups that wait may have waited for these lanes only.
        for group in &mut self.groups {
            group.is_waiting = false;
        }
        self.select();
        Ok(())
    }

    /// Lets the running group wait for other lanes. Returns false if no group can run.
    pub(crate) fn park(&mut self, is_strict: bool) -> bool {
        let (pc, mask) = (self.pc, self.active);
        self.active = 0;
        self.groups.push(LaneGroup {
            pc,
            mask,
            is_waiting: true,
            is_strict,
        });
        if self.select() {
            return true;
        }
        // Faults belong to this instruction.
        self.active = mask;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_meet_at_the_end_of_a_branch() {
        let mut warp = Warp::default();
        warp.start(0, u32::MAX, 0);
        warp.branch(0xff, 5);
        assert_eq!((warp.pc, warp.active, warp.next_pc), (1, !0xff, 5));
        warp.branch(!0xff, 5);
        assert_eq!(
            (warp.pc, warp.active, warp.next_pc),
            (5, u32::MAX, u32::MAX)
        );
    }

    #[test]
    fn waiting_groups_run_when_lanes_arrive_or_end() {
        let mut warp = Warp::default();
        warp.start(0, 0xf, 0);
        warp.branch(0x3, 5);
        assert!(warp.park(false));
        assert_eq!((warp.pc, warp.active), (5, 0x3));
        warp.exit(0x3).unwrap();
        assert_eq!((warp.pc, warp.active), (1, 0xc));
        assert!(!warp.park(false));
    }

    #[test]
    fn lanes_may_not_end_while_others_wait_at_a_barrier() {
        let mut warp = Warp::default();
        warp.start(0, 0xf, 0);
        warp.branch(0x3, 5);
        assert!(warp.park(true));
        assert_eq!(warp.exit(0x3), Err(0x3));
        assert_eq!(warp.pc, 1);
    }
}
