//! Barriers of a block.

use super::block::{Barrier, BlockState, Verdict};
use super::fault::{FaultKind, MachineResult, Trouble};
use super::race::VectorClock;
use super::registers::{LANES, lanes};
use super::warp::{Warp, WarpState};
use crate::ptx::instruction::{BarrierMode, NO_REGISTER};

/// A warp's arrival at a barrier.
#[derive(Clone, Copy)]
pub(crate) struct Arrival {
    pub(crate) mode: BarrierMode,
    pub(crate) id: u32,
    /// Number of threads, or `None` for all.
    pub(crate) count: Option<u32>,
    pub(crate) register: u16,
    /// Lanes that arrive, and those whose predicate is true.
    pub(crate) mask: u32,
    pub(crate) trues: u32,
}

/// Raises `clock` to what `other` knows.
pub(crate) fn join(clock: &mut VectorClock, other: &VectorClock) {
    for i in 0..LANES {
        clock[i] = clock[i].max(other[i]);
    }
}

impl BlockState {
    /// Notes that a warp arrived, and wakes all that wait if it was the last.
    pub(crate) fn arrive(&mut self, warp: &mut Warp, arrival: Arrival) -> MachineResult {
        let lane = arrival.mask.trailing_zeros() as usize % LANES;
        let fault = |reason: String| Trouble::new(lane, FaultKind::BadBarrier(reason));
        let Some(barrier) = self.barriers.get_mut(arrival.id as usize) else {
            return Err(fault(format!("barrier {} does not exist", arrival.id)));
        };
        let expected = arrival.count.unwrap_or(0);
        if !expected.is_multiple_of(32) || (arrival.count == Some(0)) {
            return Err(fault(format!("{expected} threads are no multiple of 32")));
        }
        let is_first = barrier.waiting == 0 && barrier.passed == 0;
        if is_first {
            *barrier = Barrier {
                expected,
                ..Barrier::default()
            };
        } else if barrier.expected != expected {
            return Err(fault("warps expect different numbers of threads".into()));
        }
        let bit = 1 << warp.index;
        if (barrier.waiting | barrier.passed) & bit != 0 {
            return Err(fault("a warp arrives twice".into()));
        }
        barrier.arrived += 32;
        barrier.trues += arrival.trues.count_ones();
        barrier.votes += arrival.mask.count_ones();
        join(&mut barrier.clock, &warp.clock);
        barrier.acquired = barrier.acquired.max(warp.acquired);
        if arrival.mode == BarrierMode::Arrive {
            barrier.passed |= bit;
            warp.tick();
        } else {
            barrier.waiting |= bit;
            warp.state = WarpState::Barrier(arrival.id as usize);
        }
        if arrival.register != NO_REGISTER {
            let Arrival {
                register,
                mask,
                mode,
                ..
            } = arrival;
            self.verdicts.insert(
                warp.index,
                Verdict {
                    register,
                    mask,
                    mode,
                },
            );
        }
        if expected > 0 && barrier.arrived > expected {
            return Err(fault(format!("more than {expected} threads arrive")));
        }
        Ok(())
    }

    /// Wakes the warps of all barriers that are complete. Returns true if there were any.
    pub(crate) fn complete_barriers(&mut self) -> bool {
        let live = self.warps.iter().filter(|w| w.live != 0).count() as u32 * 32;
        let mut any = false;
        for id in 0..self.barriers.len() {
            let barrier = self.barriers[id];
            let expected = if barrier.expected == 0 {
                live
            } else {
                barrier.expected
            };
            if barrier.arrived == 0 || barrier.arrived < expected {
                continue;
            }
            any = true;
            self.barriers[id] = Barrier::default();
            let top = barrier.clock.iter().max().copied().unwrap_or(0);
            for index in lanes(barrier.waiting) {
                let verdict = self.verdicts.remove(&(index as u32));
                let Some(warp) = self.warps.get_mut(index) else {
                    continue;
                };
                warp.state = WarpState::Ready;
                join(&mut warp.clock, &barrier.clock);
                // Equal clocks let reads of several warps share one entry.
                warp.clock[index % LANES] = top + 1;
                warp.acquired = warp.acquired.max(barrier.acquired);
                if let Some(verdict) = verdict {
                    give_verdict(warp, verdict, &barrier);
                }
            }
        }
        any
    }
}

fn give_verdict(warp: &mut Warp, verdict: Verdict, barrier: &Barrier) {
    let Verdict {
        register,
        mask,
        mode,
    } = verdict;
    let is_true = match mode {
        BarrierMode::CountTrue => {
            warp.registers
                .set32(register, mask, &[barrier.trues; LANES]);
            return;
        }
        BarrierMode::AllTrue => barrier.trues == barrier.votes,
        _ => barrier.trues > 0,
    };
    warp.registers
        .set_predicate(register, mask, if is_true { u32::MAX } else { 0 });
}
