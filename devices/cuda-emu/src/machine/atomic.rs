//! Atomic accesses.

use super::Interpreter;
use super::block::BlockState;
use super::fault::{AccessKind, FaultKind, MachineResult, Space, Trouble};
use super::float::{add_odd, half_bits, half_value};
use super::memory_access::{AccessRequest, addresses, agent, check_alignment, split};
use super::race::Touch;
use super::registers::{LANES, lanes};
use super::support::is_half;
use super::warp::Warp;
use crate::ptx::instruction::{AtomicOp, Class, NO_REGISTER, PtxAddress, Register, Type};

/// Returns the new value of an atomic operation.
fn update(op: AtomicOp, ty: Type, old: u64, b: u64, c: u64) -> u64 {
    let (x, y) = (old as u32, b as u32);
    let narrow = |v: u32| u64::from(v);
    match (op, ty) {
        (AtomicOp::Add, Type::F32) => narrow((f32::from_bits(x) + f32::from_bits(y)).to_bits()),
        (AtomicOp::Add, Type::F64) => (f64::from_bits(old) + f64::from_bits(b)).to_bits(),
        (AtomicOp::Add, ty) if is_half(ty) => {
            let half = |shift: u32| {
                let value = |bits: u32| half_value((bits >> shift) as u16, ty);
                u32::from(half_bits(add_odd(value(x), value(y)), ty)) << shift
            };
            narrow(if ty.bytes() == 4 {
                half(0) | half(16)
            } else {
                half(0)
            })
        }
        (AtomicOp::Add, _) => old.wrapping_add(b),
        (AtomicOp::Min, Type::S32) => narrow((x as i32).min(y as i32) as u32),
        (AtomicOp::Max, Type::S32) => narrow((x as i32).max(y as i32) as u32),
        (AtomicOp::Min, Type::S64) => (old as i64).min(b as i64) as u64,
        (AtomicOp::Max, Type::S64) => (old as i64).max(b as i64) as u64,
        (AtomicOp::Min, _) => old.min(b),
        (AtomicOp::Max, _) => old.max(b),
        (AtomicOp::And, _) => old & b,
        (AtomicOp::Or, _) => old | b,
        (AtomicOp::Xor, _) => old ^ b,
        (AtomicOp::Exchange, _) => b,
        (AtomicOp::CompareExchange, _) => {
            if old == b {
                c
            } else {
                old
            }
        }
        (AtomicOp::Increment, _) => narrow(if x >= y { 0 } else { x + 1 }),
        (AtomicOp::Decrement, _) => narrow(if x == 0 || x > y { y } else { x - 1 }),
    }
}

/// Operands of an atomic access.
#[derive(Clone, Copy)]
pub(crate) struct Atomic {
    pub(crate) op: AtomicOp,
    pub(crate) ty: Type,
    pub(crate) d: Register,
    pub(crate) address: PtxAddress,
    pub(crate) b: Register,
    pub(crate) c: Register,
}

impl Interpreter<'_> {
    /// Executes an atomic access, lane by lane, in an order that depends on the seed.
    pub(crate) fn atomic(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        mask: u32,
        request: AccessRequest,
        atomic: Atomic,
    ) -> MachineResult {
        let Atomic {
            op,
            ty,
            d,
            address,
            b,
            c,
        } = atomic;
        let is_wide = ty.class() == Class::R64;
        let operand = |warp: &Warp, register: Register, lane: usize| match register {
            NO_REGISTER => 0,
            register if is_wide => warp.registers.get64(register)[lane],
            register => u64::from(warp.registers.get32(register)[lane]),
        };
        let mut at = addresses(warp, address);
        let bytes = request.bytes;
        self.synchronize(
            block,
            warp,
            request.ordering.releases(),
            request.ordering.acquires(),
        );
        let mut old = [0u64; LANES];
        for (space, mask) in split(request.space, mask, &mut at) {
            check_alignment(mask, &at, bytes, space, AccessKind::Atomic)?;
            let agent = agent(block, warp, request.pc);
            let touch = (Touch::Update, AccessKind::Atomic);
            for step in lanes(mask).collect::<Vec<_>>() {
                // Lanes have no order: rotate and reverse it.
                let lane = self.lane_order(mask, step);
                let of = (touch.0, touch.1, lane);
                let (b, c) = (operand(warp, b, lane), operand(warp, c, lane));
                let mut buffer = [0; 8];
                match space {
                    Space::Shared => {
                        let releases = &self.global.releases;
                        let range = block
                            .shared
                            .check_range(at[lane], bytes, &agent, of, releases)?;
                        buffer[..bytes].copy_from_slice(&block.shared.data[range.clone()]);
                        old[lane] = u64::from_le_bytes(buffer);
                        let new = update(op, ty, old[lane], b, c).to_le_bytes();
                        block.shared.write(range.start, &new[..bytes]);
                    }
                    Space::Global => {
                        self.global.range(at[lane], bytes, &agent, of)?;
                        let memory = &mut *self.global.memory;
                        let fault =
                            || Trouble::new(lane, FaultKind::ReadOnly { address: at[lane] });
                        let index = memory.find(at[lane]).ok_or_else(fault)?;
                        let (start, data) = memory.writable_allocation(index).ok_or_else(fault)?;
                        let data = &mut data[(at[lane] - start) as usize..][..bytes];
                        buffer[..bytes].copy_from_slice(data);
                        old[lane] = u64::from_le_bytes(buffer);
                        let new = update(op, ty, old[lane], b, c).to_le_bytes();
                        data.copy_from_slice(&new[..bytes]);
                    }
                    _ => {
                        let reason = format!("an atomic access of {space} memory");
                        return Err(Trouble::new(lane, FaultKind::Unsupported(reason)));
                    }
                }
            }
        }
        if d != NO_REGISTER && is_wide {
            warp.registers.set64(d, mask, &old);
        } else if d != NO_REGISTER {
            warp.registers.set32(d, mask, &old.map(|v| v as u32));
        }
        Ok(())
    }

    /// Publishes what precedes the warp's last fence, and acquires what others published.
    pub(crate) fn synchronize(
        &mut self,
        block: &BlockState,
        warp: &mut Warp,
        releases: bool,
        acquires: bool,
    ) {
        if releases {
            self.global.releases.publish(block.number, warp.clock, true);
            warp.tick();
        }
        let fenced = if let Some((clock, is_wide)) = &warp.fence {
            self.global.releases.publish(block.number, *clock, *is_wide);
            true
        } else {
            false
        };
        if fenced || acquires {
            warp.acquired = self.global.releases.last();
        }
    }
}
