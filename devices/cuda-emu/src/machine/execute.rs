//! Executes instructions of a warp.

mod bits;

use super::asynchronous::MbarrierAction;
use super::atomic::Atomic;
use super::barrier::Arrival;
use super::block::BlockState;
use super::convert::{NumberConversion, convert, convert_pair};
use super::exchange::{Members, exchange, member_register, members};
use super::fault::{AccessKind, FaultKind, MachineResult, Space, Trouble};
use super::memory_access::{
    AccessRequest, Data, addresses, bounds, gather, range_of, space_of, spread, window,
};
use super::registers::{LANES, Registers, collect, lanes};
use super::warp::{Warp, WarpState};
use super::{Interpreter, alu};
use crate::ptx::instruction::{
    Action, BarrierMode, Instruction, Logic, NO_REGISTER, NumberTest, Ordering, Register, Type,
};

/// Why a warp stops running for now.
#[derive(Clone, Copy)]
pub(crate) enum SliceEnd {
    /// Ran long enough, or waits for memory that other warps write.
    Yield,
    /// Waits for an mbarrier, in a loop.
    Poll,
    Barrier(Arrival),
    Done,
}

/// Effect of an instruction on the flow of control.
enum Flow {
    Next,
    /// The program counter is set.
    Jumped,
    Stop(SliceEnd),
}

impl Interpreter<'_> {
    /// Runs a warp for at most `quantum` instructions.
    pub(crate) fn run_slice(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        quantum: u32,
    ) -> MachineResult<SliceEnd> {
        let code = self.code;
        self.global.is_unordered = self.schedule.is_early && !warp.has_waited;
        for _ in 0..quantum {
            if warp.pc >= warp.next_pc {
                warp.select();
            }
            let Some(instruction) = code.instructions.get(warp.pc as usize) else {
                return Err(Trouble::new(
                    0,
                    FaultKind::Unsupported("the end of the code".into()),
                ));
            };
            self.statistics.instructions += 1;
            let guard = warp.registers.predicate(instruction.guard);
            let mask = warp.active & if instruction.negates { !guard } else { guard };
            if mask == 0 {
                warp.pc += 1;
                continue;
            }
            match self.execute(block, warp, instruction, mask)? {
                Flow::Next => warp.pc += 1,
                Flow::Jumped => {
                    if warp.state == WarpState::Done {
                        return Ok(SliceEnd::Done);
                    }
                }
                Flow::Stop(end) => {
                    warp.pc += 1;
                    return Ok(end);
                }
            }
        }
        Ok(SliceEnd::Yield)
    }

    fn execute(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        instruction: &Instruction,
        mask: u32,
    ) -> MachineResult<Flow> {
        let r = &mut warp.registers;
        let is_known = match instruction.action {
            Action::Binary {
                op,
                ty,
                flags,
                d,
                a,
                b,
            } => alu::binary(r, mask, (op, ty, flags), d, [a, b]),
            Action::Ternary {
                op,
                ty,
                flags,
                d,
                a,
                b,
                c,
            } => alu::ternary(r, mask, (op, ty, flags), d, [a, b, c]),
            Action::Unary {
                op,
                ty,
                flags,
                d,
                a,
            } => alu::unary(r, mask, (op, ty, flags), d, a),
            Action::Move32 { d, a } => {
                let value = *r.get32(a);
                r.set32(d, mask, &value);
                true
            }
            Action::Move64 { d, a } => {
                let value = *r.get64(a);
                r.set64(d, mask, &value);
                true
            }
            Action::Compare { .. } => compare(r, mask, &instruction.action),
            Action::Branch { target } => {
                warp.branch(mask, target);
                return Ok(Flow::Jumped);
            }
            Action::Load {
                ty,
                count,
                space,
                ordering,
                is_wide,
                d,
                address,
            } => {
                let bytes = ty.bytes() * usize::from(count);
                let request = AccessRequest {
                    space,
                    bytes,
                    ordering,
                    pc: warp.pc,
                };
                let mut at = addresses(warp, address);
                let mut data: Data = [[0; 4]; LANES];
                self.load(block, warp, mask, request, &mut at, &mut data)?;
                spread(warp, mask, ty, (&d[..usize::from(count)], is_wide), &data);
                return Ok(self.ordered(block, warp, ordering));
            }
            Action::Store {
                ty,
                count,
                space,
                ordering,
                is_wide,
                a,
                address,
            } => {
                let bytes = ty.bytes() * usize::from(count);
                let request = AccessRequest {
                    space,
                    bytes,
                    ordering,
                    pc: warp.pc,
                };
                let mut at = addresses(warp, address);
                let mut data: Data = [[0; 4]; LANES];
                gather(warp, ty, (&a[..usize::from(count)], is_wide), &mut data);
                if ordering.releases() {
                    self.synchronize(block, warp, true, false);
                }
                self.store(block, warp, mask, request, &mut at, &data)?;
                return Ok(self.ordered(block, warp, ordering));
            }
            ref action => return self.execute_rare(block, warp, action, mask),
        };
        if is_known {
            Ok(Flow::Next)
        } else {
            Err(unsupported(mask))
        }
    }

    /// Returns how the warp goes on after an ordered access: other warps may run in between.
    fn ordered(&mut self, block: &BlockState, warp: &mut Warp, ordering: Ordering) -> Flow {
        if ordering.acquires() {
            self.synchronize(block, warp, false, true);
        }
        match ordering {
            Ordering::Weak | Ordering::Constant => Flow::Next,
            _ if self.schedule.seed == 0 && ordering == Ordering::Relaxed => Flow::Next,
            _ => Flow::Stop(SliceEnd::Yield),
        }
    }

    fn execute_rare(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        action: &Action,
        mask: u32,
    ) -> MachineResult<Flow> {
        if let Some(register) = member_register(action) {
            return match members(warp, mask, register)? {
                Members::Here(here) => {
                    exchange(warp, here, action)?;
                    Ok(Flow::Next)
                }
                Members::Missing(missing) => {
                    wait_for(warp, mask, false, FaultKind::MissingLanes { missing })
                }
            };
        }
        match *action {
            Action::Return { addresses } => {
                let targets = *warp.registers.get32(addresses);
                warp.scatter(mask, |lane| targets[lane]);
                Ok(Flow::Jumped)
            }
            Action::BranchIndexed { index, table } => {
                let targets = self.code.branch_tables.get(table as usize);
                let targets = targets.map_or(&[][..], Vec::as_slice);
                let indices = *warp.registers.get32(index);
                if let Some(lane) = lanes(mask).find(|&l| indices[l] as usize >= targets.len()) {
                    let reason = format!("index {} is not in the table", indices[lane]);
                    return Err(Trouble::new(lane, FaultKind::Unsupported(reason)));
                }
                warp.scatter(mask, |lane| targets[indices[lane] as usize]);
                Ok(Flow::Jumped)
            }
            Action::Call { call } => {
                let call = &self.code.calls[call as usize];
                copy_local(warp, mask, &call.arguments);
                let next = [warp.pc + 1; LANES];
                warp.registers.set32(call.return_register, mask, &next);
                warp.branch(mask, call.target);
                Ok(Flow::Jumped)
            }
            Action::TakeResults { call } => {
                copy_local(warp, mask, &self.code.calls[call as usize].results);
                Ok(Flow::Next)
            }
            Action::Exit => match warp.exit(mask) {
                Ok(()) => Ok(Flow::Jumped),
                Err(missing) => {
                    let lane = warp.active.trailing_zeros() as usize % LANES;
                    Err(Trouble::new(lane, FaultKind::DivergentBarrier { missing }))
                }
            },
            Action::Trap => Err(Trouble::new(
                mask.trailing_zeros() as usize % LANES,
                FaultKind::Trap,
            )),
            Action::Barrier {
                mode,
                is_aligned,
                id,
                count,
                d,
                p,
                negates,
            } => self.barrier(warp, mask, (mode, is_aligned), [id, count, d, p], negates),
            Action::WaitForEarlier => {
                warp.has_waited = true;
                self.global.is_unordered = false;
                Ok(Flow::Next)
            }
            Action::Fence { is_wide } => {
                warp.fence = Some((warp.clock, is_wide));
                warp.tick();
                Ok(Flow::Next)
            }
            Action::Matrix { index } => {
                let missing = warp.live & !mask;
                if missing != 0 {
                    return wait_for(warp, mask, false, FaultKind::MissingLanes { missing });
                }
                let code = self.code;
                let matrix = &code.matrices[index as usize];
                self.matrix(block, warp, mask, warp.pc, matrix)?;
                Ok(Flow::Next)
            }
            _ => self.execute_memory(block, warp, action, mask),
        }
    }

    fn execute_memory(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        action: &Action,
        mask: u32,
    ) -> MachineResult<Flow> {
        let pc = warp.pc;
        match *action {
            Action::LoadParameter {
                ty,
                count,
                d,
                is_wide,
                offset,
            } => {
                let bytes = ty.bytes() * usize::from(count);
                let range = range_of(self.parameters.len(), u64::from(offset), bytes);
                let Some(range) = range else {
                    let at = u64::from(offset);
                    return Err(bounds(0, Space::Param, AccessKind::Read, at, bytes));
                };
                let mut all = [0; 16];
                all[..bytes].copy_from_slice(&self.parameters[range]);
                let mut words = [0; 4];
                for (word, bytes) in words.iter_mut().zip(all.chunks_exact(4)) {
                    *word = u32::from_le_bytes(bytes.try_into().unwrap_or_default());
                }
                spread(
                    warp,
                    mask,
                    ty,
                    (&d[..usize::from(count)], is_wide[0]),
                    &[words; LANES],
                );
            }
            Action::Atomic {
                op,
                ty,
                space,
                ordering,
                d,
                address,
                b,
                c,
            } => {
                let request = AccessRequest {
                    space,
                    bytes: ty.bytes(),
                    ordering,
                    pc,
                };
                self.atomic(
                    block,
                    warp,
                    mask,
                    request,
                    Atomic {
                        op,
                        ty,
                        d,
                        address,
                        b,
                        c,
                    },
                )?;
                if self.schedule.seed != 0 {
                    return Ok(Flow::Stop(SliceEnd::Yield));
                }
            }
            Action::CopyAsync {
                bytes,
                to,
                from,
                size,
            } => {
                self.copy_async(block, warp, mask, pc, (usize::from(bytes), to, from, size))?;
            }
            Action::CommitCopies => warp.copies.commit(mask),
            Action::WaitCopies { pending } => {
                self.wait_copies(block, warp, mask, pc, pending, false)?;
            }
            Action::SignalCopies {
                barrier,
                is_counted,
            } => {
                self.signal_copies(block, warp, mask, pc, (barrier, is_counted))?;
            }
            Action::Mbarrier {
                op,
                space,
                d,
                address,
                a,
            } => {
                let action = MbarrierAction {
                    op,
                    space,
                    d,
                    address,
                    a,
                };
                if !self.mbarrier(block, warp, mask, action)? {
                    return Ok(Flow::Stop(SliceEnd::Poll));
                }
            }
            Action::Bulk { copy } => {
                let code = self.code;
                self.bulk(block, warp, mask, pc, &code.bulk_copies[copy as usize])?;
            }
            _ => return self.execute_simple(warp, action, mask),
        }
        Ok(Flow::Next)
    }

    /// Executes rare operations on registers.
    fn execute_simple(
        &mut self,
        warp: &mut Warp,
        action: &Action,
        mask: u32,
    ) -> MachineResult<Flow> {
        let r = &mut warp.registers;
        match *action {
            Action::Nop | Action::CommitBulk | Action::WaitBulk => {}
            Action::Convert {
                to,
                from,
                rounding,
                to_integral,
                flags,
                d,
                a,
            } => {
                convert(
                    r,
                    mask,
                    NumberConversion {
                        to,
                        from,
                        rounding,
                        to_integral,
                        flags,
                    },
                    d,
                    a,
                );
            }
            Action::ConvertPair {
                to,
                rounding,
                flags,
                d,
                a,
                b,
            } => {
                convert_pair(r, mask, (to, rounding, flags), d, [a, b]);
            }
            Action::MovePredicate { d, a } => {
                let value = r.predicate(a);
                r.set_predicate(d, mask, value);
            }
            Action::PredicateNot { d, a } => {
                let value = !r.predicate(a);
                r.set_predicate(d, mask, value);
            }
            Action::PredicateLogic { op, d, a, b } => {
                let (a, b) = (r.predicate(a), r.predicate(b));
                let value = match op {
                    Logic::And => a & b,
                    Logic::Or => a | b,
                    Logic::Xor => a ^ b,
                };
                r.set_predicate(d, mask, value);
            }
            Action::Clock { d, is_wide } => {
                let time = self.statistics.instructions;
                if is_wide {
                    r.set64(d, mask, &[time; LANES]);
                } else {
                    r.set32(d, mask, &[time as u32; LANES]);
                }
            }
            Action::Count { op, ty, d, a } => alu::count(r, mask, (op, ty), d, a),
            Action::ActiveMask { d } => r.set32(d, mask, &[mask; LANES]),
            Action::ToGeneric {
                space,
                is_wide,
                d,
                a,
            } => {
                move_address(warp, mask, (d, a, is_wide), |x| {
                    x.wrapping_add(window(space))
                });
            }
            Action::FromGeneric {
                space,
                is_wide,
                d,
                a,
            } => {
                move_address(warp, mask, (d, a, is_wide), |x| {
                    x.wrapping_sub(window(space))
                });
            }
            Action::IsSpace { space, d, a } => {
                let space = if space == Space::Const {
                    Space::Global
                } else {
                    space
                };
                let at = *r.get64(a);
                let value = collect(|i| space_of(at[i]) == space);
                r.set_predicate(d, mask, value);
            }
            Action::TestNumber { ty, test, d, a } => {
                let is_wide = ty == Type::F64;
                let class = |i: usize| {
                    if is_wide {
                        f64::from_bits(r.get64(a)[i]).classify()
                    } else {
                        f32::from_bits(r.get32(a)[i]).classify()
                    }
                };
                let value = collect(|i| is_of(test, class(i)));
                r.set_predicate(d, mask, value);
            }
            _ => return bits::execute_bits(warp, action, mask),
        }
        Ok(Flow::Next)
    }

    fn barrier(
        &mut self,
        warp: &mut Warp,
        mask: u32,
        (mode, is_aligned): (BarrierMode, bool),
        [id, count, register, p]: [Register; 4],
        negates: bool,
    ) -> MachineResult<Flow> {
        let missing = warp.live & !mask;
        let lane = mask.trailing_zeros() as usize % LANES;
        if missing != 0 {
            // The lanes meet later if the code after a branch precedes one of its sides.
            return wait_for(
                warp,
                mask,
                is_aligned,
                FaultKind::DivergentBarrier { missing },
            );
        }
        let value = warp.registers.predicate(p);
        let trues = mask & if negates { !value } else { value };
        let id = warp.registers.get32(id)[lane];
        let count = match count {
            NO_REGISTER => None,
            count => Some(warp.registers.get32(count)[lane]),
        };
        let arrival = Arrival {
            mode,
            id,
            count,
            register,
            mask,
            trues,
        };
        Ok(Flow::Stop(SliceEnd::Barrier(arrival)))
    }
}

/// Executes `setp`. Returns false if it is unsupported.
fn compare(r: &mut Registers, mask: u32, action: &Action) -> bool {
    let Action::Compare {
        op,
        ty,
        flags,
        logic,
        negates_r,
        d,
        q,
        a,
        b,
        r: third,
    } = *action
    else {
        return false;
    };

    let Some(value) = alu::compare(r, (op, ty, flags), [a, b]) else {
        return false;
    };
    let third = r.predicate(third);
    let third = if negates_r { !third } else { third };
    let combine = |value: u32| match logic {
        Logic::And => value & third,
        Logic::Or => value | third,
        Logic::Xor => value ^ third,
    };
    if d != NO_REGISTER {
        r.set_predicate(d, mask, combine(value));
    }
    if q != NO_REGISTER {
        r.set_predicate(q, mask, combine(!value));
    }
    true
}

/// Lets a group wait for lanes that have to take part in its instruction.
fn wait_for(warp: &mut Warp, mask: u32, is_strict: bool, kind: FaultKind) -> MachineResult<Flow> {
    if warp.park(is_strict) {
        return Ok(Flow::Jumped);
    }
    Err(Trouble::new(mask.trailing_zeros() as usize % LANES, kind))
}

fn unsupported(mask: u32) -> Box<Trouble> {
    let lane = mask.trailing_zeros() as usize % LANES;
    Trouble::new(
        lane,
        FaultKind::Unsupported("the operation does not exist for this type".into()),
    )
}

/// Copies arguments or results of a call.
fn copy_local(warp: &mut Warp, mask: u32, copies: &[[u32; 3]]) {
    for lane in lanes(mask) {
        let memory = warp.local_of_mut(lane);
        for &[from, to, bytes] in copies {
            let (from, to, bytes) = (from as usize, to as usize, bytes as usize);
            if from.max(to) + bytes <= memory.len() {
                memory.copy_within(from..from + bytes, to);
            }
        }
    }
}

fn move_address(
    warp: &mut Warp,
    mask: u32,
    (d, a, is_wide): (Register, Register, bool),
    f: impl Fn(u64) -> u64,
) {
    let r = &mut warp.registers;
    if is_wide {
        let value = r.get64(a).map(f);
        r.set64(d, mask, &value);
    } else {
        let value = *r.get32(a);
        r.set32(d, mask, &value);
    }
}

fn is_of(test: NumberTest, class: std::num::FpCategory) -> bool {
    use std::num::FpCategory::{Infinite, Nan, Normal, Subnormal};
    match test {
        NumberTest::Finite => !matches!(class, Infinite | Nan),
        NumberTest::Infinite => class == Infinite,
        NumberTest::Number => class != Nan,
        NumberTest::NotNumber => class == Nan,
        NumberTest::Normal => class == Normal,
        NumberTest::Subnormal => class == Subnormal,
    }
}
