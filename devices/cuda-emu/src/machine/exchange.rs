//! Exchanges between the lanes of a warp.

use super::fault::{FaultKind, MachineResult, Trouble};
use super::registers::{LANES, LaneValues, Registers, collect, lanes};
use super::warp::Warp;
use crate::ptx::instruction::{
    Action, AtomicOp, NO_REGISTER, Register, ShuffleMode, Type, VoteMode,
};

/// Members of an exchange that must arrive, and those that did.
pub(crate) enum Members {
    /// All have arrived; these lanes take part.
    Here(u32),
    /// Some are missing.
    Missing(u32),
}

/// Returns the lanes of an exchange. All active lanes must give the same mask, which includes them.
pub(crate) fn members(warp: &Warp, mask: u32, members: Register) -> MachineResult<Members> {
    let masks = warp.registers.get32(members);
    let first = mask.trailing_zeros() as usize % LANES;
    let named = masks[first];
    for lane in lanes(mask) {
        if masks[lane] >> lane & 1 == 0 || masks[lane] != named {
            // Lanes with another mask form another exchange, which this machine does not split.
            let missing = mask & !masks[lane];
            return Err(Trouble::new(lane, FaultKind::MissingLanes { missing }));
        }
    }
    let missing = named & warp.live & !mask;
    Ok(if missing == 0 {
        Members::Here(named & mask)
    } else {
        Members::Missing(missing)
    })
}

fn source_lane(mode: ShuffleMode, lane: u32, b: u32, c: u32) -> (u32, bool) {
    let (clamp, segment) = (c & 31, (c >> 8) & 31);
    let b = b & 31;
    let highest = (lane & segment) | (clamp & !segment);
    let lowest = lane & segment;
    let (source, is_inside) = match mode {
        ShuffleMode::Up => (
            lane.wrapping_sub(b),
            lane as i32 - b as i32 >= highest as i32,
        ),
        ShuffleMode::Down => (lane + b, lane + b <= highest),
        ShuffleMode::Butterfly => (lane ^ b, (lane ^ b) <= highest),
        ShuffleMode::Index => {
            let source = lowest | (b & !segment);
            (source, source <= highest)
        }
    };
    if is_inside {
        (source, true)
    } else {
        (lane, false)
    }
}

fn shuffle(
    warp: &mut Warp,
    mask: u32,
    mode: ShuffleMode,
    [d, p, a, b, c]: [Register; 5],
) -> MachineResult {
    let r = &warp.registers;
    let (values, b, c) = (r.get32(a), r.get32(b), r.get32(c));
    let mut out = [0; LANES];
    let mut inside = 0;
    for lane in lanes(mask) {
        let (source, is_inside) = source_lane(mode, lane as u32, b[lane], c[lane]);
        inside |= u32::from(is_inside) << lane;
        if mask >> source & 1 == 0 {
            return Err(Trouble::new(
                lane,
                FaultKind::MissingLanes {
                    missing: 1 << source,
                },
            ));
        }
        out[lane] = values[source as usize % LANES];
    }
    if d != NO_REGISTER {
        warp.registers.set32(d, mask, &out);
    }
    if p != NO_REGISTER {
        warp.registers.set_predicate(p, mask, inside);
    }
    Ok(())
}

fn vote(r: &mut Registers, mask: u32, mode: VoteMode, d: Register, p: u32) {
    let p = p & mask;
    let all = if p == mask { u32::MAX } else { 0 };
    match mode {
        VoteMode::Ballot => r.set32(d, mask, &[p; LANES]),
        VoteMode::All => r.set_predicate(d, mask, all),
        VoteMode::Any => r.set_predicate(d, mask, if p == 0 { 0 } else { u32::MAX }),
        VoteMode::Uniform => {
            r.set_predicate(d, mask, if p == 0 { u32::MAX } else { all });
        }
    }
}

fn matching(r: &mut Registers, mask: u32, (is_wide, all): (bool, bool), [d, p, a]: [Register; 3]) {
    let value = |lane: usize| {
        if is_wide {
            r.get64(a)[lane]
        } else {
            u64::from(r.get32(a)[lane])
        }
    };
    let mut out: LaneValues = [0; LANES];
    for lane in lanes(mask) {
        out[lane] = mask & collect(|other| value(other) == value(lane));
    }
    let is_same = lanes(mask).all(|lane| out[lane] == mask);
    if all {
        out = [if is_same { mask } else { 0 }; LANES];
    }
    if d != NO_REGISTER {
        r.set32(d, mask, &out);
    }
    if p != NO_REGISTER {
        r.set_predicate(p, mask, if is_same { u32::MAX } else { 0 });
    }
}

fn reduce(r: &mut Registers, mask: u32, (op, ty): (AtomicOp, Type), d: Register, a: Register) {
    let values = r.get32(a);
    let combined = lanes(mask)
        .map(|lane| values[lane])
        .reduce(|x, y| match (op, ty) {
            (AtomicOp::Add, _) => x.wrapping_add(y),
            (AtomicOp::Min, Type::S32) => (x as i32).min(y as i32) as u32,
            (AtomicOp::Max, Type::S32) => (x as i32).max(y as i32) as u32,
            (AtomicOp::Min, _) => x.min(y),
            (AtomicOp::Max, _) => x.max(y),
            (AtomicOp::And, _) => x & y,
            (AtomicOp::Or, _) => x | y,
            _ => x ^ y,
        });
    r.set32(d, mask, &[combined.unwrap_or(0); LANES]);
}

/// Executes an exchange whose members have arrived. Returns false for other instructions.
pub(crate) fn exchange(warp: &mut Warp, mask: u32, action: &Action) -> MachineResult<bool> {
    match *action {
        Action::Shuffle {
            mode,
            d,
            p,
            a,
            b,
            c,
            ..
        } => {
            shuffle(warp, mask, mode, [d, p, a, b, c])?;
        }
        Action::Vote {
            mode,
            d,
            p,
            negates,
            ..
        } => {
            let value = warp.registers.predicate(p);
            vote(
                &mut warp.registers,
                mask,
                mode,
                d,
                if negates { !value } else { value },
            );
        }
        Action::Match {
            is_wide,
            all,
            d,
            p,
            a,
            ..
        } => {
            matching(&mut warp.registers, mask, (is_wide, all), [d, p, a]);
        }
        Action::Reduce { op, ty, d, a, .. } => {
            reduce(&mut warp.registers, mask, (op, ty), d, a);
        }
        Action::Elect { d, p, .. } => {
            let leader = mask.trailing_zeros();
            if d != NO_REGISTER {
                warp.registers.set32(d, mask, &[leader; LANES]);
            }
            if p != NO_REGISTER {
                warp.registers.set_predicate(p, mask, 1 << (leader % 32));
            }
        }
        Action::WarpBarrier { .. } => {}
        _ => return Ok(false),
    }
    Ok(true)
}

/// Returns the register with the member mask of an exchange.
pub(crate) fn member_register(action: &Action) -> Option<Register> {
    match *action {
        Action::Shuffle { mask, .. }
        | Action::Vote { mask, .. }
        | Action::Match { mask, .. }
        | Action::Reduce { mask, .. }
        | Action::Elect { mask, .. }
        | Action::WarpBarrier { mask } => Some(mask),
        _ => None,
    }
}
